"""The sums of a tile whose operands are e4m3 with scales for each 128 columns, in Hopper's registers.

The tensor core sums 128 columns. Their product is multiplied with the scale of the weight's 64 rows times the scale of
each token, and added to float32 registers (DeepSeek-V3, arXiv:2412.19437, §3.3.2). The scales of the tokens come with
the stage of the operands. Those of the weight are two numbers for each 128 columns, which every thread reads from
memory one step ahead.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.fp8.epilogue import BY_COLUMN, load
from pallas_kernels.gemm.grouped.tiles import GroupedTile
from pallas_kernels.quantized import BLOCK, BLOCK_ROWS

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
        """Copy the scales of the tokens of a step's columns."""
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


def sums(tile: GroupedTile, steps, before, row, w_s, x_s, scales: BlockScales, full, empty) -> list:
    """Return both halves [64, rows] of a warpgroup's sums.

    before: the steps of this worker before this tile. row: the first row of the weight. w_s: the stages of this
    warpgroup's 128 rows.
    """
    stages, lines = jnp.int32(tile.stages), tile.depth // BLOCK

    def one(step, state):
        of_weight, halves = state[: 2 * lines], list(state[2 * lines :])
        following = scales.of_weight(row, step + 1)
        slot = lax.rem(before + step, stages)
        plgpu.barrier_wait(full.at[slot])
        for line in range(lines):
            of_tokens = load(scales.stages.at[slot, line, pl.ds(0, tile.rows)], BY_COLUMN)
            columns = pl.ds(line * BLOCK, BLOCK)
            for half in (0, 1):

                def product(acc, half=half, columns=columns):
                    own = w_s.at[slot, pl.ds(half * BLOCK_ROWS, BLOCK_ROWS), columns]
                    plgpu.wgmma(acc, own, x_s.at[slot, :, columns].transpose((1, 0)))
                    return acc[...]

                part = pl.run_scoped(product, plgpu.ACC((BLOCK_ROWS, tile.rows), jnp.float32))
                if (line, half) == (lines - 1, 1):
                    plgpu.barrier_arrive(empty.at[slot])
                factor = of_tokens * of_weight[2 * line + half]
                halves[half] += part * lax.broadcast_in_dim(factor, part.shape, [1])
        return *following, *halves

    zero = plgpu.layout_cast(jnp.zeros((BLOCK_ROWS, tile.rows), jnp.float32), plgpu.Layout.WGMMA)
    return list(lax.fori_loop(0, steps, one, (*scales.of_weight(row, 0), zero, zero))[2 * lines :])
