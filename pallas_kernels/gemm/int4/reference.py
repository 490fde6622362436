"""Quantization of weights to 4 bits in groups of 64 columns, and back.

A group's values lie between its minimum and its maximum, which 16 evenly spaced levels cover (FlexGen §5).
With a zero point one of the levels is 0.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized import GROUP, Int4

# A group's column is (j, half, eight, lane, odd) in base (2, 2, 2, 4, 2). With lane first, the nibbles of one
# thread of a Hopper tensor core's operand form 8 bytes. The nibbles of a pair of columns (odd) are 16 bits
# apart, so that one mask extracts both.
_COLUMNS = (2, 2, 2, 4, 2)
_TO_BYTES = (3, 0, 4, 1, 2)  # (lane, j, odd, half, eight): eight selects the low or the high nibble
_TO_COLUMNS = (1, 3, 4, 0, 2)


def nearest_levels(
    groups: Float[Array, "*M group"],
) -> tuple[Int[Array, "*M group"], Float[Array, "*M"], Float[Array, "*M"]]:
    """Return the nibbles of each group, uint8, its scale and its zero, bfloat16."""
    groups = groups.astype(jnp.float32)
    zero = groups.min(-1).astype(jnp.bfloat16)
    # Levels start at the rounded minimum. A group of equal values needs a nonzero scale.
    scale = jnp.maximum((groups.max(-1) - zero.astype(jnp.float32)) / 15.0, 1e-30).astype(jnp.bfloat16)
    levels = (groups - zero.astype(jnp.float32)[..., None]) / scale.astype(jnp.float32)[..., None]
    return jnp.clip(jnp.round(levels), 0, 15).astype(jnp.uint8), scale, zero


def nearest_to_zero_point(
    groups: Float[Array, "*M group"],
) -> tuple[Int[Array, "*M group"], Float[Array, "*M"], Int[Array, "*M"]]:
    """Return the nibbles of each group, uint8, its scale, bfloat16, and its zero point, int16."""
    groups = groups.astype(jnp.float32)
    low, high = jnp.minimum(groups.min(-1), 0.0), jnp.maximum(groups.max(-1), 0.0)
    scale = jnp.maximum((high - low) / 15.0, 1e-30).astype(jnp.bfloat16)
    steps = scale.astype(jnp.float32)
    zero = jnp.clip(jnp.round(-low / steps), 0, 15)
    levels = jnp.round(groups / steps[..., None]) + zero[..., None]
    return jnp.clip(levels, 0, 15).astype(jnp.uint8), scale, zero.astype(jnp.int16)


def quantize_int4(
    x: Float[Array, "*M K"], group: int = GROUP, nearest: Callable[..., tuple] = nearest_levels
) -> Int4:
    """Return the nearest of 16 levels between the minimum and the maximum of each `group` columns.

    nearest: `nearest_levels`, or `nearest_to_zero_point` for a level that is 0.

    Raises: ValueError if K is not a multiple of `group`, or `group` is odd.
    """
    *rows, k = x.shape
    if k % group or group % 2:
        raise ValueError(f"K={k}, group={group}: accepted are an even group, and K a multiple of it")
    nibbles, scale, zero = nearest(x.reshape(*rows, k // group, group))
    return Int4(pack(nibbles).reshape(*rows, k // 2), scale, zero)


def pack(nibbles: Int[Array, "*M group"]) -> Int[Array, "*M bytes"]:
    """Return the bytes of groups of nibbles, in the order of `Int4`."""
    pairs = _in_order(nibbles, packed=True)
    pairs = pairs.reshape(*pairs.shape[:-1], pairs.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(packed: Int[Array, "*M bytes"]) -> Int[Array, "*M group"]:
    """Return the groups of nibbles that `pack` made bytes of."""
    pairs = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return _in_order(pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1]), packed=False)


def columns_by_nibble(x: Float[Array, "*M K"]) -> Float[Array, "*M K"]:
    """Return each 64 columns of x in the order of `Int4`'s bytes: those of low nibbles before the others."""
    *outer, k = x.shape
    pairs = _in_order(x.reshape(*outer, k // GROUP, GROUP), packed=True)
    return pairs.reshape(*outer, k // GROUP, GROUP // 2, 2).swapaxes(-1, -2).reshape(x.shape)


def dequantize_int4(w: Int4, dtype=jnp.bfloat16) -> Float[Array, "*M K"]:
    """Return the true values, computed in float32 and rounded to `dtype` once."""
    groups = w.scale.shape[-1]
    nibbles = unpack(w.packed.reshape(*w.scale.shape, w.packed.shape[-1] // groups))
    return true_values(nibbles, w.scale, w.zero).reshape(w.shape).astype(dtype)


def true_values(nibbles: Int[Array, "*M group"], scale: Array, zero: Array) -> Float[Array, "*M group"]:
    """Return nibble · scale + zero in float32, or (nibble - zero) · scale with zero points of int16."""
    numbers, step, shift = (a.astype(jnp.float32) for a in (nibbles, scale[..., None], zero[..., None]))
    return (numbers - shift) * step if zero.dtype == jnp.int16 else numbers * step + shift


def _in_order(nibbles: Array, *, packed: bool) -> Array:
    """Return the nibbles [..., group] of a group in packed order (the two nibbles of a byte adjacent), or
    in the order of columns.

    A tensor core reads only groups of 64. In other groups, a byte holds a column and the column half a
    group after it.
    """
    *outer, group = nibbles.shape
    columns, to_bytes, to_columns = (
        (_COLUMNS, _TO_BYTES, _TO_COLUMNS) if group == GROUP else ((2, group // 2), (1, 0), (1, 0))
    )
    split, order = (columns, to_bytes) if packed else (tuple(columns[axis] for axis in to_bytes), to_columns)
    permuted = nibbles.reshape(*outer, *split).transpose(
        *range(len(outer)), *(len(outer) + axis for axis in order)
    )
    return permuted.reshape(*outer, group)
