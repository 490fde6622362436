"""MXFP4 in the order of tensor cores: blocks of 16 rows and 64 columns, of 136 words each.

A lane of a warp multiplies rows lane / 4 and lane / 4 + 8 of a block, and the columns 2 · (lane mod 4) and
the next one of each 8. Words 4 · lane .. 4 · lane + 3 have these numbers: those of the first row's two groups
of 32 columns, then those of the second row's. The lanes of a row need the same four scales, one for each
word. They are the bytes of word 128 + lane / 4, in the order of the lane's words.

The 8 numbers of a word are four pairs of neighboring columns. `PLACES` says where a word has the bits of the
first number of each pair. The second number's bits are 16 places further, and go on at the other end. So a
pair becomes two bfloat16 by a rotation and a mask, and the last pair by a shift and two masks.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.gemm.grouped.mxfp4_format import dequantize_mxfp4
from pallas_kernels.quantized import MXFP4_BLOCK, Mxfp4, Mxfp4Blocks

ROWS, COLUMNS = MXFP4_BLOCK
NUMBERS = ROWS * COLUMNS // 8  # words of a block with numbers; the others have scales
# For each pair, the places of the mantissa, of the two bits of the exponent and of the sign.
PLACES = ((4, 5, 6, 13), (0, 1, 2, 9), (26, 27, 28, 3), (14, 7, 8, 15))
_BITS = [  # (pair, bit in a byte, bit in a word)
    (pair, 4 * odd + bit, (place + 16 * odd) % 32)
    for pair, places in enumerate(PLACES)
    for odd in (0, 1)
    for bit, place in enumerate(places)
]


def to_blocks(w: Mxfp4) -> Mxfp4Blocks:
    """Return the same numbers in blocks.

    Raises: ValueError if N is not a multiple of 16, or K not of 64.
    """
    *experts, n, k = w.shape
    if n % ROWS or k % COLUMNS:
        raise ValueError(f"N={n}, K={k}: accepted are multiples of {ROWS} and {COLUMNS}")
    # Axes: block of rows, half of it, row, block of columns, group of 32 columns, pair, lane of the row.
    split = w.packed.reshape(*experts, n // ROWS, 2, 8, k // COLUMNS, 2, 4, 4).astype(jnp.uint32)
    words = sum((split[..., pair, :] >> bit & 1) << place for pair, bit, place in _BITS)
    assert isinstance(words, jax.Array)
    words = jnp.einsum("...nhrkgq->...nkrqhg", words)
    scales = w.scale.reshape(*experts, n // ROWS, 2, 8, k // COLUMNS, 2).astype(jnp.uint32)
    scales = jnp.einsum("...nhrkg->...nkrhg", scales).reshape(*words.shape[:-4], 8, 4)
    of_lanes = sum(scales[..., which] << 8 * which for which in range(4))
    joined = jnp.concatenate([words.reshape(*words.shape[:-4], NUMBERS), of_lanes], axis=-1)
    return Mxfp4Blocks(lax.bitcast_convert_type(joined, jnp.int32))


def from_blocks(w: Mxfp4Blocks) -> Mxfp4:
    """Return the same numbers as a checkpoint has them."""
    *experts, n, k = w.shape
    blocks = (*experts, n // ROWS, k // COLUMNS)
    bits = lax.bitcast_convert_type(w.words, jnp.uint32)
    words = jnp.einsum("...nkrqhg->...nhrkgq", bits[..., :NUMBERS].reshape(*blocks, 8, 4, 2, 2))
    pairs = [sum((words >> to & 1) << bit for own, bit, to in _BITS if own == pair) for pair in range(4)]
    packed = jnp.stack(pairs, axis=-2).astype(jnp.uint8).reshape(*experts, n, k // 2)
    scales = jnp.stack([bits[..., NUMBERS:] >> 8 * which & 255 for which in range(4)], axis=-1)
    scales = jnp.einsum("...nkrhg->...nhrkg", scales.reshape(*blocks, 8, 2, 2))
    return Mxfp4(packed, scales.astype(jnp.uint8).reshape(*experts, n, k // 32))


def dequantize_blocks(w: Mxfp4Blocks, dtype=jnp.bfloat16) -> Float[Array, "*M K"]:
    """Return the numbers of `w`, as `dequantize_mxfp4` does."""
    return dequantize_mxfp4(from_blocks(w), dtype)
