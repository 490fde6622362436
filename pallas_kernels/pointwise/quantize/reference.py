"""To e4m3 and back: a scale is what makes the largest number it covers 448, e4m3's largest."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized import BLOCK, Quantized

E4M3_MAX = 448.0
_SMALLEST = 1e-12  # a row of zeros needs a scale too


def to_e4m3(x: Float[Array, "..."], scale: Float[Array, "..."]) -> Array:
    """x / scale, saturated (a cast alone makes what is too large NaN). scale broadcasts against x."""
    return jnp.clip(x.astype(jnp.float32) / scale, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)


def quantize_rows(
    x: Float[Array, "*M C"],
    top: Float[Array, "M C"] | None = None,
    top_rows: Int[Array, ""] | None = None,
    *,
    start: int = 0,
    sms: int | None = None,
) -> Quantized:
    """A scale [*M] for each row of the last axis: an activation's token, a weight's output channel.

    top, top_rows: both or none. Of a longer array that x's row 0 is row `start` of, the first `top_rows` rows
    are top's, not x's. sms: how many SMs a kernel may occupy; it does not change what is computed.
    """
    del sms
    if top is not None and top_rows is not None:
        x = jnp.where((start + jnp.arange(x.shape[0]) < top_rows)[:, None], top, x)
    # Scaled before the maximum is taken, which changes no bit: nothing is left to do behind the reduction, so
    # XLA needs no kernel for it.
    scale = (jnp.maximum(jnp.abs(x.astype(jnp.float32)), _SMALLEST) * (1 / E4M3_MAX)).max(-1)
    return Quantized(to_e4m3(x, scale[..., None]), scale)


def quantize_blocks(x: Float[Array, "M C"]) -> Quantized:
    """A scale [M, ceil(C / 128)] for each 128 columns of a row."""
    m, c = x.shape
    blocks = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -c % BLOCK))).reshape(m, -1, BLOCK)
    values, scale = quantize_rows(blocks)
    return Quantized(values.reshape(m, -1)[:, :c], scale)


def dequantize(x: Quantized) -> Float[Array, "*M C"]:
    """values · scale in float32, for a scale of any of `Quantized`'s shapes."""
    return x.values.astype(jnp.float32) * _spread(x)


def _spread(x: Quantized) -> Array:
    """The scale, broadcastable against the values."""
    if x.scale.ndim == x.values.ndim:
        return jnp.repeat(x.scale, BLOCK, axis=-1)[..., : x.values.shape[-1]]
    return x.scale[..., None] if x.scale.ndim else x.scale
