"""The tiles of the grouped GEMM, and their choice by shape."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.limits import SMEM_BYTES

PART = 128  # rows of the weight of one warpgroup: with gates 64 gates and 64 ups
ACTIVATIONS = (None, "silu", "gelu_tanh", "relu")  # epilogues of the kernels
TALLEST = 144  # rows of the largest tile: 144 float32 sums a thread
ALIGN = 8  # rows of the smallest box of the result
_HEIGHTS = (8, 16, 32, 48, 64, 80, 96, 112, 128, TALLEST)
_FEW = 32  # up to so many rows one warpgroup multiplies, and a tile of the weight is 128 rows


@dataclasses.dataclass(frozen=True)
class GroupedTile:
    """A tile of the grouped GEMM.

    rows: rows of x, wgmma's N. warpgroups: multiplying warpgroups, each with `PART` rows of the weight, wgmma's M.
    depth: K of a stage. stages: stages of the ring.
    """

    rows: int
    warpgroups: int
    depth: int
    stages: int

    @property
    def columns(self) -> int:
        """Return the rows of the weight in a tile."""
        return self.warpgroups * PART

    @property
    def box(self) -> int:
        """Return the rows of x in one piece of the result on its way to memory."""
        return math.gcd(self.rows, 32)


def check_operands(x: jax.Array, w: jax.Array, activation: str | None) -> None:
    """Refuse operands that no kernel takes. Raises: ValueError."""
    if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16 or activation not in ACTIVATIONS:
        raise ValueError(
            f"dtypes {x.dtype}, {w.dtype}, {activation=}: accepted are bfloat16 twice, {ACTIVATIONS}"
        )


def tile_rows(tokens: int, chosen: int, num_experts: int) -> int:
    """Return the rows of a tile for `tokens` tokens that choose `chosen` of `num_experts` experts.

    The height has the fewest bytes through the L2 if tokens choose experts evenly: each tile reads its rows
    and its columns of the weight. Nearly every expert of few rows then has one tile.
    """
    share = chosen / num_experts
    mean, deviation = tokens * share, max(math.sqrt(tokens * share * (1 - share)), 1e-3)

    def cost(rows: int) -> float:
        """Return the expected sum of rows and columns over an expert's tiles."""
        past = (tile * rows + 0.5 for tile in range(int((mean + 6 * deviation) // rows) + 1))
        tiles = sum(math.erfc((edge - mean) / (deviation * math.sqrt(2))) / 2 for edge in past)
        return tiles * (rows + 2 * PART)

    return min(_HEIGHTS, key=cost)


def grouped_tile(rows: int) -> GroupedTile:
    """Return the tile of this many rows, with the stages that shared memory holds."""
    warpgroups, depth = (1, 128 if rows <= 16 else 64) if rows <= _FEW else (2, 64)
    one = GroupedTile(rows, warpgroups, depth, 1)
    outside = 2 * warpgroups * one.box * 64 * 2 + 2048  # two boxes of a warpgroup's result, and barriers
    stage = (one.columns + rows) * depth * 2
    return dataclasses.replace(one, stages=min(12, (SMEM_BYTES - outside) // stage))
