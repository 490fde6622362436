"""Experts' weights of 4 bits in groups of 64 or 128 columns, and back."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gemm.int4.reference import nearest_levels, pack, unpack
from pallas_kernels.quantized import EXPERT_INT4_GROUPS, GROUP, ExpertInt4


def quantize_experts(x: Float[Array, "E N K"], group: int = GROUP) -> ExpertInt4:
    """Return the nearest of 16 levels between the minimum and the maximum of each `group` columns.

    Raises: ValueError if the group is neither 64 nor 128, or K is not a multiple of it.
    """
    experts, n, k = x.shape
    if group not in EXPERT_INT4_GROUPS or k % group:
        given = f"K={k}, group={group}"
        raise ValueError(f"{given}: accepted are groups of {EXPERT_INT4_GROUPS}, and K a multiple of it")
    nibbles, scale, zero = nearest_levels(x.reshape(experts, n, k // group, group))
    packed = pack(nibbles.reshape(experts, n, k // GROUP, GROUP)).reshape(experts, n, k // 2)
    return ExpertInt4(packed, jnp.stack([scale, zero], axis=-1).swapaxes(1, 2))


def dequantize_experts(w: ExpertInt4, dtype=jnp.bfloat16) -> Float[Array, "E N K"]:
    """Return nibble · scale + zero, computed in float32 and rounded to `dtype` once."""
    experts, n, k = w.shape
    nibbles = unpack(w.packed.reshape(experts, n, k // GROUP, GROUP // 2))
    scale, zero = (w.factors[..., i].swapaxes(1, 2).astype(jnp.float32)[..., None] for i in (0, 1))
    values = nibbles.reshape(experts, n, k // w.group, w.group).astype(jnp.float32) * scale + zero
    return values.reshape(w.shape).astype(dtype)
