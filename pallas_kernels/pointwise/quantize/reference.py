"""Reference implementations of the conversion to e4m3 and back. A scale maps the largest number it covers
to e4m3's 448.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized import BLOCK, Quantized

E4M3_MAX = 448.0
_SMALLEST = 1e-12  # a row of zeros needs a nonzero scale


def to_e4m3(x: Float[Array, "..."], scale: Float[Array, "..."]) -> Array:
    """Return x / scale in e4m3, saturated, because a plain cast turns large numbers into NaN.

    scale broadcasts against x.
    """
    return jnp.clip(x.astype(jnp.float32) / scale, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)


def quantize_rows(
    x: Float[Array, "*M C"],
    top: Float[Array, "M C"] | None = None,
    top_rows: Int[Array, ""] | None = None,
    *,
    start: int = 0,
    sms: int | None = None,
) -> Quantized:
    """Return x in e4m3 with a scale [*M] for each row of the last axis: a token of an activation, an output
    channel of a weight.

    top, top_rows: both or none. x's row 0 is row `start` of a longer array, and the first `top_rows` rows
    of this longer array come from top instead of x. sms: number of SMs that a kernel may occupy; the result
    does not depend on it.
    """
    del sms
    if top is not None and top_rows is not None:
        x = jnp.where((start + jnp.arange(x.shape[0]) < top_rows)[:, None], top, x)
    # The scaling precedes the maximum, with equal bits, so that XLA needs no kernel after the reduction.
    scale = (jnp.maximum(jnp.abs(x.astype(jnp.float32)), _SMALLEST) * (1 / E4M3_MAX)).max(-1)
    return Quantized(to_e4m3(x, scale[..., None]), scale)


def quantize_blocks(x: Float[Array, "M C"]) -> Quantized:
    """Return x in e4m3 with a scale [M, ceil(C / 128)] for each 128 columns of a row."""
    m, c = x.shape
    blocks = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -c % BLOCK))).reshape(m, -1, BLOCK)
    values, scale = quantize_rows(blocks)
    return Quantized(values.reshape(m, -1)[:, :c], scale)


def dequantize(x: Quantized) -> Float[Array, "*M C"]:
    """Return values · scale in float32, for a scale of any of `Quantized`'s shapes."""
    return x.values.astype(jnp.float32) * _spread(x)


def _spread(x: Quantized) -> Array:
    """Return the scale in a shape that broadcasts against the values."""
    if x.scale.ndim == x.values.ndim:
        return jnp.repeat(x.scale, BLOCK, axis=-1)[..., : x.values.shape[-1]]
    return x.scale[..., None] if x.scale.ndim else x.scale
