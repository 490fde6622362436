"""Experts' weights of 4 bits in groups of 64 or 128 columns, and back."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.gemm.int4.reference import nearest_levels, pack, true_values, unpack
from pallas_kernels.quantized import EXPERT_INT4_GROUPS, GROUP, ExpertInt4


def quantize_experts(
    x: Float[Array, "E N K"], group: int = GROUP, nearest: Callable[..., tuple] = nearest_levels
) -> ExpertInt4:
    """Return the nearest of 16 levels between the minimum and the maximum of each `group` columns.

    nearest: as for `quantize_int4`.

    Raises: ValueError if the group is neither 64 nor 128, or K is not a multiple of it.
    """
    experts, n, k = x.shape
    if group not in EXPERT_INT4_GROUPS or k % group:
        given = f"K={k}, group={group}"
        raise ValueError(f"{given}: accepted are groups of {EXPERT_INT4_GROUPS}, and K a multiple of it")
    nibbles, scale, zero = nearest(x.reshape(experts, n, k // group, group))
    packed = pack(nibbles.reshape(experts, n, k // GROUP, GROUP)).reshape(experts, n, k // 2)
    return ExpertInt4(packed, join_factors(scale, zero))


def join_factors(scale: Float[Array, "E N groups"], zero: Array) -> Array:
    """Return the factors of `ExpertInt4`. zero: in bfloat16, or zero points in int16."""
    if zero.dtype == jnp.int16:
        scale = lax.bitcast_convert_type(scale, jnp.int16)
    return jnp.stack([scale, zero], axis=-1).swapaxes(1, 2)


def dequantize_experts(w: ExpertInt4, dtype=jnp.bfloat16) -> Float[Array, "E N K"]:
    """Return the true values, computed in float32 and rounded to `dtype` once."""
    experts, n, k = w.shape
    nibbles = unpack(w.packed.reshape(experts, n, k // GROUP, GROUP // 2))
    scale, zero = (w.factors[..., i].swapaxes(1, 2) for i in (0, 1))
    if zero.dtype == jnp.int16:
        scale = lax.bitcast_convert_type(scale, jnp.bfloat16)
    values = true_values(nibbles.reshape(experts, n, k // w.group, w.group), scale, zero)
    return values.reshape(w.shape).astype(dtype)
