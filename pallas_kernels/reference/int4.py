"""Weights of 4 bits in groups of 64 columns: how they are made and read back.

A group's 64 values lie between a minimum and a maximum; 16 levels, evenly spaced, stand for them (FlexGen §5's group quantisation).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.quantized import GROUP, Int4

# A group's column is (j, half, eight, lane, odd) in base (2, 2, 2, 4, 2). Lane first makes 8 bytes of what one thread of a Hopper tensor
# core's operand needs; the two bits of a pair of columns, odd, 16 bits apart let one mask take both out of a word.
_COLUMNS = (2, 2, 2, 4, 2)
_TO_BYTES = (3, 0, 4, 1, 2)  # (lane, j, odd, half, eight): the eights of a byte are its low and its high nibble
_TO_COLUMNS = (1, 3, 4, 0, 2)


def quantize_int4(w: Float[Array, "N K"]) -> Int4:
    """The nearest of 16 levels between each group's minimum and maximum.

    Raises:
      ValueError: if K is not a multiple of 64.
    """
    n, k = w.shape
    if k % GROUP:
        raise ValueError(f"K={k}: a multiple of {GROUP}")
    groups = w.astype(jnp.float32).reshape(n, k // GROUP, GROUP)
    zero = groups.min(-1).astype(jnp.bfloat16)
    # Levels reach the maximum from the rounded minimum; a group of equal values needs any scale but 0.
    scale = jnp.maximum((groups.max(-1) - zero.astype(jnp.float32)) / 15.0, 1e-30).astype(jnp.bfloat16)
    levels = (groups - zero.astype(jnp.float32)[..., None]) / scale.astype(jnp.float32)[..., None]
    nibbles = jnp.clip(jnp.round(levels), 0, 15).astype(jnp.uint8)
    nibbles = nibbles.reshape(n, k // GROUP, *_COLUMNS).transpose(0, 1, *(2 + axis for axis in _TO_BYTES)).reshape(n, k // 2, 2)
    return Int4(nibbles[..., 0] | (nibbles[..., 1] << 4), scale, zero)


def dequantize_int4(w: Int4, dtype=jnp.bfloat16) -> Float[Array, "N K"]:
    """nibble · scale + zero, computed in float32 and rounded to `dtype` once."""
    n, half = w.packed.shape
    nibbles = jnp.stack([w.packed & 15, w.packed >> 4], axis=-1)
    nibbles = nibbles.reshape(n, 2 * half // GROUP, *(_COLUMNS[axis] for axis in _TO_BYTES))
    nibbles = nibbles.transpose(0, 1, *(2 + axis for axis in _TO_COLUMNS)).reshape(n, 2 * half // GROUP, GROUP)
    values = nibbles.astype(jnp.float32) * w.scale.astype(jnp.float32)[..., None] + w.zero.astype(jnp.float32)[..., None]
    return values.reshape(n, 2 * half).astype(dtype)
