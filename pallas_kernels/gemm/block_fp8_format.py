"""Weights in e4m3 with a scale for each block of 64 rows and 128 columns, and back.

Published checkpoints have a scale for 128 rows and 128 columns (DeepSeek-V3, arXiv:2412.19437, §3.3), which
is two equal scales here. Half of the rows, because a tile of the kernel has 64 gates and their 64 ups: scale
row 2 i is of the gates 64 i to 64 i + 63, and scale row 2 i + 1 of their ups, in whatever blocks gates and
ups alternate.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.pointwise.quantize.reference import E4M3_MAX, to_e4m3
from pallas_kernels.quantized import BLOCK, BLOCK_ROWS, BlockFp8

_SMALLEST = 1e-12  # a block of zeros needs a nonzero scale


def quantize_block_fp8(x: Float[Array, "*E N K"], gate_block: int | None = None) -> BlockFp8:
    """Return x in e4m3, where the largest number of each block becomes 448.

    x: one matrix, or those of E experts. gate_block: gates and ups alternate in blocks of so many rows, or
    None.

    Raises: ValueError for partial blocks.
    """
    *experts, n, k = x.shape
    check_blocks(n, k, gate_block)
    blocks = x.astype(jnp.float32).reshape(_split(math.prod(experts), n, k, gate_block))
    scale = jnp.maximum(jnp.abs(blocks).max((2, 4, 6)), _SMALLEST) / E4M3_MAX
    values = to_e4m3(blocks, _spread(scale)).reshape(x.shape)
    return BlockFp8(values, scale.reshape(*experts, n // BLOCK_ROWS, k // BLOCK))


def dequantize_block_fp8(
    w: BlockFp8, gate_block: int | None = None, dtype=jnp.float32
) -> Float[Array, "*E N K"]:
    """Return values · scale, computed in float32 and rounded to `dtype` once."""
    *experts, n, k = w.shape
    split = _split(math.prod(experts), n, k, gate_block)
    scale = w.scale.reshape(*split[:2], split[3], split[5])
    values = w.values.astype(jnp.float32).reshape(split) * _spread(scale)
    return values.reshape(w.shape).astype(dtype)


def row_scales(w: BlockFp8, gate_block: int | None = None) -> Float[Array, "E N K_BLOCKS"]:
    """Return the scales of each row, one for each 128 columns."""
    experts, n, k = w.shape
    split = _split(experts, n, k, gate_block)
    scale = w.scale.reshape(split[0], split[1], 1, split[3], 1, split[5])
    return jnp.broadcast_to(scale, split[:6]).reshape(experts, n, k // BLOCK)


def check_blocks(n: int, k: int, gate_block: int | None) -> None:
    """Refuse a weight with partial blocks. Raises: ValueError."""
    rows = BLOCK_ROWS if gate_block is None else 2 * BLOCK_ROWS
    if n % rows or k % BLOCK or (gate_block is not None and BLOCK_ROWS % gate_block):
        raise ValueError(
            f"N={n}, K={k}, gate_block={gate_block}: accepted are N a multiple of {rows}, K of {BLOCK}, "
            f"and gate_block None or a divisor of {BLOCK_ROWS}"
        )


def _split(experts: int, n: int, k: int, gate_block: int | None) -> tuple[int, ...]:
    """Return the shape (expert, block, part of it, gate or up, row, block of columns, column) of a weight."""
    if gate_block is None:
        return experts, n // BLOCK_ROWS, 1, 1, BLOCK_ROWS, k // BLOCK, BLOCK
    parts = BLOCK_ROWS // gate_block
    return experts, n // (2 * BLOCK_ROWS), parts, 2, gate_block, k // BLOCK, BLOCK


def _spread(scale: Float[Array, "E B two C"]) -> Float[Array, "E B 1 two 1 C 1"]:
    """Return scales of blocks in a shape that broadcasts against `_split`."""
    return scale[:, :, None, :, None, :, None]
