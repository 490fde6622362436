"""The sums of a tile whose operands are e4m3 with scales for each 128 columns, in Hopper's registers.

The tensor core sums 128 columns. Their product is multiplied with the scale of the weight's 64 rows times the
scale of each token, and added to float32 registers (DeepSeek-V3, arXiv:2412.19437, §3.3.2). The scales of the
tokens come with the stage of the operands. Those of the weight are two numbers for each 128 columns, which
every thread reads from memory one step ahead.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.fp8.epilogue import BY_COLUMN, load
from pallas_kernels.gemm.grouped.tiles import GroupedTile
from pallas_kernels.quantized import BLOCK, BLOCK_ROWS

OVERLAPPED = 96  # Tiles of more rows start a product after the additions of the previous product.
UNCUT = 112  # Tiles of more rows have two products.
LINE = 32  # float32 numbers in 128 bytes, the alignment of a copy to shared memory


@dataclasses.dataclass(frozen=True)
class BlockScales:
    """The scales of the tokens [K / 128, M] and of the weight [E · N / 64, K / 128] in memory.

    stages: the tokens' scales of each stage in shared memory.
    """

    tokens: Any
    weight: Any
    stages: Any

    def copy_tokens(self, start, step, slot, full) -> None:
        """Copy the scales of the tokens of a step's columns, and of tokens after them to full lines.

        Where no scale exists, the copy writes 0.
        """
        _, lines, width = self.stages.shape
        rows, columns = pl.ds(step * lines, lines), pl.ds(start, width)
        plgpu.copy_gmem_to_smem(self.tokens.at[rows, columns], self.stages.at[slot], full.at[slot])

    def of_weight(self, row, step) -> list:
        """Return the scales of two times 64 rows of the weight from `row` on, for each 128 columns of a step.

        Rows past the last expert and columns past K have any scale: their products are zeros or not stored.
        """
        _, lines, _ = self.stages.shape
        rows, columns = self.weight.shape
        first = lax.div(row, jnp.int32(BLOCK_ROWS))
        return [
            self.weight[jnp.minimum(first + half, rows - 1), jnp.minimum(step * lines + line, columns - 1)]
            for line in range(lines)
            for half in (0, 1)
        ]


def scratch(tile: GroupedTile) -> dict:
    """Return the shared memory of the tokens' scales."""
    return {"t_s": plgpu.SMEM((tile.stages, tile.depth // BLOCK, padded(tile.rows)), jnp.float32)}


def padded(rows: int) -> int:
    """Return the tokens whose scales are copied for a tile of so many rows."""
    return -(-rows // LINE) * LINE


def pieces(tile: GroupedTile) -> list[tuple[int, int]]:
    """Return (first row, rows) of the parts of a tile's rows that have a product of their own.

    The registers of a thread hold `rows` float32 sums, and half as many sums of the running product. Boxes
    of the result lie in one piece.
    """
    if tile.rows <= UNCUT:
        return [(0, tile.rows)]
    first = -(-tile.rows // (2 * tile.box)) * tile.box
    return [(0, first), (first, tile.rows - first)]


def sums(
    tile: GroupedTile, steps, before, row, w_s, x_s, scales: BlockScales, full, empty, *, interpret: bool
) -> Callable:
    """Return sums_of(half, token, count): sums of 64 of a warpgroup's 128 rows of
    the weight, for some rows of x.

    before: the steps of this worker before this tile. row: the first row of the weight. w_s: the stages of
    this warpgroup's rows of the weight.
    """
    stages, lines = jnp.int32(tile.stages), tile.depth // BLOCK
    parts = [(half, *piece) for piece in pieces(tile) for half in (0, 1)]
    # ptxas spills registers where a product of a tall tile runs during the additions of the previous product.
    # The interpreter cannot start an accumulator with a value.
    ordered = tile.rows > OVERLAPPED and not interpret
    nothing = row >> 31  # 0, but unknown to the compiler

    def one(step, state):
        of_weight, found = state[: 2 * lines], list(state[2 * lines :])
        following = scales.of_weight(row, step + 1)
        slot = lax.rem(before + step, stages)
        plgpu.barrier_wait(full.at[slot])
        for line in range(lines):
            columns = pl.ds(line * BLOCK, BLOCK)
            for at, (half, first, count) in enumerate(parts):
                own, tokens = pl.ds(half * BLOCK_ROWS, BLOCK_ROWS), pl.ds(first, count)

                def product(acc, own=own, tokens=tokens, columns=columns):
                    plgpu.wgmma(
                        acc, w_s.at[slot, own, columns], x_s.at[slot, tokens, columns].transpose((1, 0))
                    )

                of_tokens = load(scales.stages.at[slot, line, tokens], BY_COLUMN)
                if at and ordered:
                    # The start depends on the sums before, so the product starts
                    # after them, in their registers.
                    bits = lax.bitcast_convert_type(found[at - 1][:, :count], jnp.int32) & nothing
                    part: Any = pl.run_state(product)(
                        plgpu.ACC.init(lax.bitcast_convert_type(bits, jnp.float32))
                    )
                else:
                    part = pl.run_scoped(
                        lambda acc, product=product: (product(acc), acc[...])[1],
                        plgpu.ACC((BLOCK_ROWS, count), jnp.float32),
                    )
                if line == lines - 1 and at == len(parts) - 1:
                    plgpu.barrier_arrive(empty.at[slot])
                factor = of_tokens * of_weight[2 * line + half]
                found[at] += part * lax.broadcast_in_dim(factor, part.shape, [1])
        return *following, *found

    zeros = [jnp.zeros((BLOCK_ROWS, count), jnp.float32) for _, _, count in parts]
    start = (*scales.of_weight(row, 0), *[plgpu.layout_cast(zero, plgpu.Layout.WGMMA) for zero in zeros])
    found = lax.fori_loop(0, steps, one, start)[2 * lines :]

    def sums_of(half: int, token: int, count: int):
        at, first = max(
            (at, first) for at, (of, first, _) in enumerate(parts) if of == half and first <= token
        )
        return found[at][:, token - first : token - first + count]

    return sums_of
