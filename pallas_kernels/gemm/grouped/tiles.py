"""The tiles of the grouped GEMM, and their choice by shape."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.limits import SMEM_BYTES
from pallas_kernels.quantized import (
    BLOCK,
    BLOCK_ROWS,
    EXPERT_INT4_GROUPS,
    GROUP,
    MXFP4_GROUP,
    BlockFp8,
    ExpertInt4,
    Mxfp4,
    Mxfp4Blocks,
    Quantized,
)

ExpertWeight = jax.Array | Quantized | Mxfp4 | Mxfp4Blocks | ExpertInt4 | BlockFp8
PART = 128  # rows of the weight of one warpgroup: with gates 64 gates and 64 ups
ACTIVATIONS = (None, "silu", "gelu_tanh", "relu")  # epilogues of the kernels
TALLEST = 144  # rows of the largest tile: 144 float32 sums a thread
GATE_PAIRS = 8  # rows of a block of gates, before a block of their ups
ALIGN = 8  # rows of the smallest box of the result
_HEIGHTS = (8, 16, 32, 48, 64, 80, 96, 112, 128, TALLEST)
_FEW = 32  # up to so many rows one warpgroup multiplies, and a tile of the weight is 128 rows


@dataclasses.dataclass(frozen=True)
class GroupedTile:
    """A tile of the grouped GEMM.

    rows: rows of x, wgmma's N. warpgroups: multiplying warpgroups, each with `PART`
        rows of the weight, wgmma's M.
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


def check_operands(x: jax.Array | Quantized, w: ExpertWeight, activation: str | None) -> None:
    """Refuse operands that no kernel takes. Raises: ValueError."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{activation=}: accepted are {ACTIVATIONS}")
    if isinstance(w, Mxfp4):
        *rows, k = w.shape
        wanted = (*rows, k // MXFP4_GROUP)
        if w.scale.shape != wanted:
            raise ValueError(f"scales {list(w.scale.shape)}: accepted are {list(wanted)}, one for 32 columns")
        if any(part.dtype != jnp.uint8 for part in w) or getattr(x, "dtype", None) != jnp.bfloat16:
            given = [str(getattr(one, "dtype", "Quantized")) for one in (x, *w)]
            raise ValueError(f"dtypes {given}: accepted are bfloat16, and bytes and scales in uint8")
        return
    if isinstance(w, Mxfp4Blocks):
        if w.words.dtype != jnp.int32 or getattr(x, "dtype", None) != jnp.bfloat16:
            given = [str(getattr(one, "dtype", "Quantized")) for one in (x, w.words)]
            raise ValueError(f"dtypes {given}: accepted are bfloat16 and words in int32")
        return
    if isinstance(w, ExpertInt4):
        _check_int4(x, w)
        return
    if isinstance(w, BlockFp8):
        _check_blocks(x, w)
        return
    if isinstance(x, Quantized) and isinstance(w, Quantized):
        given, stored = (x.values.dtype, w.values.dtype), jnp.float8_e4m3fn
        if (x.scale.shape, w.scale.shape) != (x.shape[:1], w.shape[:2]):
            raise ValueError(
                f"scales {x.scale.shape}, {w.scale.shape}: accepted is one for each row, {x.shape[:1]} and "
                f"{w.shape[:2]}"
            )
    else:
        given, stored = tuple(getattr(one, "dtype", "Quantized") for one in (x, w)), jnp.bfloat16
    if given != (stored, stored):
        raise ValueError(f"dtypes {given}: accepted are bfloat16 twice, or float8_e4m3fn with scales twice")


def _check_int4(x: jax.Array | Quantized, w: ExpertInt4) -> None:
    """Refuse operands that no kernel takes. Raises: ValueError."""
    experts, n, k = w.shape
    wanted = [(experts, k // group, n, 2) for group in EXPERT_INT4_GROUPS if k % group == 0]
    if w.factors.shape not in wanted:
        raise ValueError(
            f"factors {list(w.factors.shape)}: accepted are {wanted}, groups of 64 or 128 columns"
        )
    given = [str(getattr(one, "dtype", "Quantized")) for one in (x, *w)]
    if given[:2] != ["bfloat16", "uint8"] or given[2] not in ("bfloat16", "int16"):
        accepted = "bfloat16, bytes in uint8, and factors in bfloat16 or int16"
        raise ValueError(f"dtypes {given}: accepted are {accepted}")


def _check_blocks(x: jax.Array | Quantized, w: BlockFp8) -> None:
    """Refuse operands that no kernel takes. Raises: ValueError."""
    experts, n, k = w.shape
    wanted = [(x.shape[0], k // BLOCK), (experts, n // BLOCK_ROWS, k // BLOCK)]
    given = [getattr(getattr(one, "scale", None), "shape", None) for one in (x, w)]
    if given != wanted:
        raise ValueError(
            f"scales {given}: accepted are {wanted}, one for each row or 64 rows, and 128 columns"
        )
    dtypes = [str(one.dtype) for part in (x, w) if not isinstance(part, jax.Array) for one in part]
    if dtypes != ["float8_e4m3fn", "float32"] * 2:
        raise ValueError(f"dtypes {dtypes}: accepted are float8_e4m3fn with scales in float32, twice")


def tile_rows(tokens: int, chosen: int, num_experts: int) -> int:
    """Return the rows of a tile for `tokens` tokens that choose `chosen` of `num_experts` experts.

    The height has the fewest bytes through the L2 if tokens choose experts evenly: each tile reads its rows
    and its columns of the weight. Nearly every expert of few rows then has one tile.
    """
    return min(
        _HEIGHTS, key=lambda rows: expected_tiles(tokens, chosen, num_experts, rows) * (rows + 2 * PART)
    )


def expected_tiles(tokens: int, chosen: int, num_experts: int, rows: int) -> float:
    """Return the expected number of tiles of `rows` rows of one expert, if tokens choose experts evenly."""
    share = chosen / num_experts
    mean, deviation = tokens * share, max(math.sqrt(tokens * share * (1 - share)), 1e-3)
    past = (tile * rows + 0.5 for tile in range(int((mean + 6 * deviation) // rows) + 1))
    return sum(math.erfc((edge - mean) / (deviation * math.sqrt(2))) / 2 for edge in past)


def grouped_tile(rows: int, itemsize: int = 2) -> GroupedTile:
    """Return the tile of this many rows, with the stages that shared memory holds.

    itemsize: bytes of an element of the operands.
    """
    warpgroups, lines = (1, 2 if rows <= 16 else 1) if rows <= _FEW else (2, 1)
    one = GroupedTile(
        rows, warpgroups, lines * 128 // itemsize, 1
    )  # a row of a stage is so many lines of 128 bytes
    outside = 2 * warpgroups * one.box * 64 * 2 + 2048  # two boxes of a warpgroup's result, and barriers
    stage = (one.columns + rows) * lines * 128
    return dataclasses.replace(one, stages=min(12, (SMEM_BYTES - outside) // stage))


def mxfp4_tile(rows: int, k: int, warpgroups: int = 2) -> GroupedTile:
    """Return the tile of this many rows for a weight of K columns in MXFP4, with the
    stages that shared memory holds.

    Two warpgroups, because the numbers go through registers: one converts while the other multiplies.
    """
    one = GroupedTile(rows, warpgroups, 128, 1)
    outside = 2 * warpgroups * one.box * 64 * 2 + 2048 + 2 * one.columns * k // MXFP4_GROUP
    stage = one.columns * one.depth // 2 + rows * one.depth * 2
    return dataclasses.replace(one, stages=min(12, (SMEM_BYTES - outside) // stage))


def supports_mxfp4(n: int, k: int, gate_block: int | None, rows: int = TALLEST) -> bool:
    """Return whether the kernel takes a weight [n, k] in MXFP4 with tiles of so many rows.

    A copy of a block's scales fills lines of 128 bytes, and has at most 256 elements along each axis.
    """
    gates = _has_gates(n, gate_block, (16, 32, 64))
    lines = (64 if gate_block in (None, GATE_PAIRS) else gate_block) * k % (128 * MXFP4_GROUP) == 0
    full = min(n, k) > 0 and n % 64 == 0 and k % 64 == 0 and k <= 64 * 256
    return full and gates and lines and mxfp4_tile(rows, k).stages >= 2


def _has_gates(n: int, gate_block: int | None, sizes: tuple[int, ...]) -> bool:
    """Return whether gates and ups alternate in blocks of one of these sizes or of `GATE_PAIRS`, or None."""
    if gate_block == GATE_PAIRS:
        return n % PART == 0
    return gate_block is None or (gate_block in sizes and n % (2 * gate_block) == 0)


def supports_bfloat16(m: int, n: int, k: int, gate_block: int | None) -> bool:
    """Return whether the kernel takes rows [m, k] and a weight [n, k] in bfloat16."""
    return min(m, n, k) > 0 and n % 64 == 0 and k % 64 == 0 and _has_gates(n, gate_block, (16, 32, 64))


def adds_bias(w: ExpertWeight, gate_block: int | None) -> bool:
    """Return whether the kernel adds a bias to a product with this weight, and clamps its gates and ups.

    A warpgroup's rows of the bias are contiguous, and all exist where gates alternate with ups.
    """
    n, k = w.shape[1:]
    if isinstance(w, Quantized | BlockFp8) or (gate_block is not None and n % PART):
        return False
    if isinstance(w, Mxfp4):
        return supports_mxfp4(n, k, gate_block)
    if isinstance(w, Mxfp4Blocks):
        return supports_mxfp4_blocks(n, k, gate_block)
    if isinstance(w, ExpertInt4):
        return supports_int4(n, k, gate_block)
    return supports_bfloat16(1, n, k, gate_block)


def blocks_tile(rows: int, warpgroups: int = 2, depth: int = 128) -> GroupedTile:
    """Return the tile of this many rows for a weight of MXFP4 in blocks, with the stages that shared memory
    holds.
    """
    one = GroupedTile(rows, warpgroups, depth, 1)
    outside = 2 * warpgroups * one.box * 64 * 2 + 2048
    stage = one.columns * depth // 2 * 17 // 16 + rows * depth * 2
    return dataclasses.replace(one, stages=min(12, (SMEM_BYTES - outside) // stage))


def supports_mxfp4_blocks(n: int, k: int, gate_block: int | None) -> bool:
    """Return whether the kernel takes a weight [n, k] of MXFP4 in blocks."""
    return min(n, k) > 0 and n % 64 == 0 and k % 64 == 0 and _has_gates(n, gate_block, (32, 64))


def int4_tile(rows: int, group: int = GROUP, warpgroups: int = 2) -> GroupedTile:
    """Return the tile of this many rows for a weight in int4, with the stages that shared memory holds.

    A stage has the factors of its columns, 4 bytes for each row and group.
    """
    one = GroupedTile(rows, warpgroups, 128, 1)
    outside = 2 * warpgroups * one.box * 64 * 2 + 2048
    stage = one.columns * (one.depth // 2 + 4 * one.depth // group) + rows * one.depth * 2
    return dataclasses.replace(one, stages=min(12, (SMEM_BYTES - outside) // stage))


def supports_int4(n: int, k: int, gate_block: int | None) -> bool:
    """Return whether the kernel takes a weight [n, k] in int4."""
    return min(n, k) > 0 and n % 64 == 0 and k % GROUP == 0 and _has_gates(n, gate_block, (16, 32, 64))


def block_tile(rows: int) -> GroupedTile:
    """Return the tile of this many rows for a weight in e4m3 blocks, with the
    stages that shared memory holds.

    A stage has the scales of the rows in lines of 128 bytes.
    """
    one = grouped_tile(rows, 1)
    outside = 2 * one.warpgroups * one.box * 64 * 2 + 2048
    stage = one.depth // BLOCK * (BLOCK * (one.columns + rows) + -(-rows // 32) * 128)
    return dataclasses.replace(one, stages=min(12, (SMEM_BYTES - outside) // stage))


def supports_blocks(n: int, k: int, gate_block: int | None) -> bool:
    """Return whether the kernel takes a weight [n, k] in e4m3 blocks."""
    gates = gate_block is None or (gate_block in (16, 32, 64) and n % (2 * BLOCK_ROWS) == 0)
    return min(n, k) > 0 and n % BLOCK_ROWS == 0 and k % BLOCK == 0 and gates
