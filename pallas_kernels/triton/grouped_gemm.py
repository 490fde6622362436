"""Grouped GEMM in Triton (a mixture's experts), for GPUs without TMA and wgmma.

Rows are sorted by expert without padding. A program multiplies a tile of rows of one expert with some rows of
its weight. The expert, the rows and the number of tiles are data: programs beyond the last tile end at once,
and no weight of an expert without rows is read. XLA would multiply every row with every expert's weight.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# The extra `triton` may be missing, and pyright cannot type-check Triton's language.

import dataclasses

import jax
import jax.numpy as jnp
import jax_triton as jt
import numpy as np
import triton
import triton.language as tl
from jax import lax

from pallas_kernels.gemm.grouped import groups as expert_groups
from pallas_kernels.gemm.grouped import reference
from pallas_kernels.gemm.grouped.groups import Groups, HeldExperts
from pallas_kernels.gemm.grouped.tiles import ExpertWeight, expected_tiles
from pallas_kernels.gemm.int4.reference import columns_by_nibble
from pallas_kernels.gemm.sorted_rows.reference import gather
from pallas_kernels.pointwise.quantize.reference import quantize_blocks, quantize_rows
from pallas_kernels.quantized import GROUP, ExpertInt4, Quantized

DTYPES = ("bfloat16", "float16", "float32")
_BITS = {"bfloat16": 0x4300, "float16": 0x6400}  # of the numbers whose last bits count by ones: 128 and 1024
_E4M3_BIAS = 2.0**16  # two numbers of e4m3 whose bits became those of float16 are each 2**8 too small


@dataclasses.dataclass(frozen=True)
class Tile:
    """A program's tile. columns: rows of the weight. step: bytes of K in a step, as 16-bit elements."""

    columns: int
    step: int
    warps: int = 4
    stages: int = 3


# rows of a tile -> the tile, of at most 61 KB of shared memory as in `flat_gemm`
TILES = {16: Tile(64, 128, 4, 4), 32: Tile(64, 64, 4, 4), 64: Tile(128, 64, 4, 3), 128: Tile(128, 32, 8, 4)}


def tile_rows(tokens: int, chosen: int, num_experts: int) -> int:
    """Return the rows of a tile for `tokens` tokens that choose `chosen` of `num_experts` experts.

    The height has the fewest bytes through the L2 if tokens choose experts evenly.
    """
    cost = {
        rows: expected_tiles(tokens, chosen, num_experts, rows) * (rows + tile.columns) / tile.columns
        for rows, tile in TILES.items()
    }
    return min(cost, key=lambda rows: cost[rows])


def list_groups(
    experts: jax.Array,
    num_experts: int,
    held: HeldExperts | None = None,
    used: jax.Array | None = None,
    rows: int | None = None,
) -> Groups:
    """Return the groups of a routing [T, e] in tiles of `rows` rows; None: by the mean rows of an expert.

    num_experts: of the model. held, used: as for `pallas_kernels.gemm.grouped.groups.list_groups`.
    """
    rows = rows or tile_rows(*experts.shape, num_experts)
    return expert_groups.list_groups(experts, num_experts, rows, 1, held, used)


def sort_rows(
    x: jax.Array,
    experts: jax.Array,
    num_experts: int,
    *,
    quantize: bool = False,
    blocks: bool = False,
    held: HeldExperts | None = None,
    used: jax.Array | None = None,
    sms: int | None = None,
) -> tuple[Groups, jax.Array | Quantized]:
    """Return `pallas_kernels.gemm.sorted_rows.reference.sort_rows` in this kernel's groups."""
    del sms
    groups = list_groups(experts, num_experts, held, used)
    return groups, gather(quantize_rows(x) if quantize else quantize_blocks(x) if blocks else x, groups)


@triton.jit
def _weight_rows(column, N: tl.constexpr, COLUMNS: tl.constexpr, GATES: tl.constexpr):
    """Return the rows of the weight of a program. With gates each gate is followed by its up."""
    at = column * COLUMNS + tl.arange(0, COLUMNS)
    if GATES > 0:
        pair = at // 2
        return pair // GATES * (2 * GATES) + at % 2 * GATES + pair % GATES, pair < N // 2
    return at, at < N


@triton.jit
def _store(
    acc, out, rows, end, column,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATES: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Store the sums [COLUMNS, ROWS] after their epilogue."""
    if GATES > 0:
        gate, up = acc.reshape(COLUMNS // 2, 2, ROWS).permute(0, 2, 1).split()
        value = gate / (1.0 + tl.exp(-gate)) * up if SILU else gate * up
        width: tl.constexpr = COLUMNS // 2
        n: tl.constexpr = N // 2
    else:
        value = acc / (1.0 + tl.exp(-acc)) if SILU else acc
        width: tl.constexpr = COLUMNS
        n: tl.constexpr = N
    columns = column * width + tl.arange(0, width)
    tl.store(
        out + rows[None, :].to(tl.int64) * n + columns[:, None],
        value.to(out.dtype.element_ty),
        mask=(rows[None, :] < end) & (columns[:, None] < n),
    )


@triton.jit
def _multiply(
    x, w, experts, starts, ends, count, out,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    GATES: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    column, tile = tl.program_id(0), tl.program_id(1)
    if tile < tl.load(count):
        end = tl.load(ends + tile)
        rows = tl.load(starts + tile) + tl.arange(0, ROWS)
        of_weight, exists = _weight_rows(column, N, COLUMNS, GATES)
        of_weight = tl.load(experts + tile).to(tl.int64) * N + of_weight
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
        for at in range(0, K, STEP):
            along = at + tl.arange(0, STEP)
            weights = tl.load(
                w + of_weight[:, None] * K + along[None, :],
                mask=exists[:, None] & (along[None, :] < K),
                other=0.0,
            )
            values = tl.load(
                x + rows[None, :].to(tl.int64) * K + along[:, None],
                mask=(rows[None, :] < end) & (along[:, None] < K),
                other=0.0,
            )
            acc = tl.dot(weights, values, acc, input_precision="ieee")
        _store(acc, out, rows, end, column, N, ROWS, COLUMNS, GATES, SILU)


@triton.jit
def _as_float16(e4m3):
    """Return numbers of e4m3, given as bytes, over 2**8. Ampere has no instruction for e4m3."""
    bits = e4m3.to(tl.int16)
    return ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True)


@triton.jit
def _multiply_e4m3(
    x, x_scales, w, w_scales, experts, starts, ends, count, out,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    GATES: tl.constexpr, SILU: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    column, tile = tl.program_id(0), tl.program_id(1)
    if tile < tl.load(count):
        end = tl.load(ends + tile)
        rows = tl.load(starts + tile) + tl.arange(0, ROWS)
        of_weight, exists = _weight_rows(column, N, COLUMNS, GATES)
        of_weight = tl.load(experts + tile).to(tl.int64) * N + of_weight
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
        for at in range(0, K, STEP):
            along = at + tl.arange(0, STEP)
            weights = tl.load(
                w + of_weight[:, None] * K + along[None, :],
                mask=exists[:, None] & (along[None, :] < K),
                other=0,
            )
            values = tl.load(
                x + rows[None, :].to(tl.int64) * K + along[:, None],
                mask=(rows[None, :] < end) & (along[:, None] < K),
                other=0,
            )
            acc = tl.dot(_as_float16(weights), _as_float16(values), acc)
        of_rows = tl.load(x_scales + rows, mask=rows < end, other=0.0) * FACTOR
        of_columns = tl.load(w_scales + of_weight, mask=exists, other=0.0)
        acc = acc * of_columns[:, None] * of_rows[None, :]
        _store(acc, out, rows, end, column, N, ROWS, COLUMNS, GATES, SILU)


@triton.jit
def _numbers(nibbles, like, BITS: tl.constexpr):
    """Return 0 to 15 in like's dtype, plus the number with these bits if BITS are given."""
    if BITS > 0:
        return (nibbles.to(tl.int16) | BITS).to(like.dtype, bitcast=True)
    return nibbles.to(like.dtype)


@triton.jit
def _multiply_int4(
    x, x_sums, w, factors, experts, starts, ends, count, out,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    GATES: tl.constexpr, SILU: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    ZERO_POINTS: tl.constexpr,
):  # fmt: skip
    """The sums of a step are of whole numbers, and a step has one scale and one zero for each row of w."""
    column, tile = tl.program_id(0), tl.program_id(1)
    if tile < tl.load(count):
        end = tl.load(ends + tile)
        rows = tl.load(starts + tile) + tl.arange(0, ROWS)
        of_weight, exists = _weight_rows(column, N, COLUMNS, GATES)
        expert = tl.load(experts + tile).to(tl.int64)
        half = tl.arange(0, STEP // 2)
        packed = w + (expert * N + of_weight)[:, None] * (K // 2) + half[None, :]
        given = x + rows[None, :].to(tl.int64) * K + half[:, None]
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
        for step in range(0, K // STEP):
            nibbles = tl.load(packed + step * (STEP // 2), mask=exists[:, None], other=0)
            low = tl.load(given + step * STEP, mask=rows[None, :] < end, other=0.0)
            high = tl.load(given + step * STEP + STEP // 2, mask=rows[None, :] < end, other=0.0)
            total = tl.load(x_sums + rows.to(tl.int64) * (K // STEP) + step, mask=rows < end, other=0.0)
            at = ((expert * GROUPS + step * GROUPS // (K // STEP)) * N + of_weight) * 2
            scale = tl.load(factors + at, mask=exists, other=0)
            zero = tl.load(factors + at + 1, mask=exists, other=0).to(tl.float32)
            if ZERO_POINTS:
                scale = scale.to(tl.bfloat16, bitcast=True).to(tl.float32)
                zero = -zero * scale
            else:
                scale = scale.to(tl.float32)
            part = tl.dot(_numbers(nibbles & 15, low, BITS), low, input_precision="ieee")
            part = tl.dot(_numbers(nibbles >> 4, high, BITS), high, part, input_precision="ieee")
            acc += part * scale[:, None] + (zero - scale * OFFSET)[:, None] * total[None, :]
        _store(acc, out, rows, end, column, N, ROWS, COLUMNS, GATES, SILU)


def grouped_gemm(
    x: jax.Array | Quantized,
    w: ExpertWeight,
    groups: Groups,
    *,
    bias: jax.Array | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
    sms: int | None = None,
    tile: Tile | None = None,
    capability: int | None = None,
) -> jax.Array:
    """Return act(x @ w[expert of the row].T + bias[expert of the row]), summed in float32.

    The reference implementation is `pallas_kernels.gemm.grouped.reference.grouped_gemm`.

    Args:
      x: [M, K] bfloat16, float16 or float32, rows in the order of `groups`; or e4m3 with scales [M].
      w: [E, N, K] of x's dtype, e4m3 with scales [E, N], or `ExpertInt4`, whose numbers are not rounded. Any
        N and K. XLA computes the products of all other weights.
      groups: from `list_groups`.
      bias: [E, N], or None. XLA computes the epilogue with a bias, or with another activation than silu.
      sms: unused; the kernel occupies all SMs.
      tile: None: by the rows of the groups' tiles.
      capability: compute capability to compile for, for example 80; None: this device's.
    Returns:
      [M, N] of x's dtype, bfloat16 for quantized x; N / 2 columns with gates. Rows after the last group are
      not written.
    Raises:
      ValueError: for a shape or dtype outside the limits.
    """
    del sms
    plain = isinstance(x, jax.Array) and isinstance(w, jax.Array | ExpertInt4)
    scaled = isinstance(x, Quantized) and isinstance(w, Quantized) and x.scale.ndim == 1
    if not plain and not scaled:
        return reference.grouped_gemm(x, w, groups, bias=bias, activation=activation, gate_block=gate_block)
    own = bias is None and activation in (None, "silu")
    y = _product(x, w, groups, activation if own else None, gate_block if own else None, tile, capability)
    if own:
        return y
    return reference.finish_rows(y, groups, bias=bias, activation=activation, gate_block=gate_block)


def _product(x, w, groups: Groups, activation, gate_block, tile: Tile | None, capability) -> jax.Array:
    """Return the product of operands that the kernels take."""
    (m, k), (_, n, depth) = x.shape, w.shape
    if k != depth or m != groups.pairs.shape[0] or groups.rows not in TILES:
        given = f"x {list(x.shape)}, w {list(w.shape)}, tiles of {groups.rows} rows"
        raise ValueError(
            f"{given}: accepted are equal K and M, and tiles of {', '.join(map(str, TILES))} rows"
        )
    dtypes = [one.dtype for one in (x, w) if isinstance(one, jax.Array)]
    if dtypes and (dtypes[0] != dtypes[-1] or dtypes[0].name not in DTYPES):
        raise ValueError(
            f"dtypes {dtypes[0]} and {dtypes[-1]}: accepted are {', '.join(DTYPES)}, equal for both"
        )
    if gate_block and n % (2 * gate_block):
        raise ValueError(
            f"w {list(w.shape)}: accepted is N of a multiple of {2 * gate_block} with these gates"
        )
    tile = tile or TILES[groups.rows]
    kernel, given, dtype, own = _operands(x, w)
    own = {"STEP": max(16, 2 * tile.step // given[0].dtype.itemsize)} | own
    # int4 has steps of one group also in float32, so fewer of them fit the shared memory
    stages = 2 if kernel is _multiply_int4 and dtype == jnp.float32 else tile.stages
    listed = groups.experts, groups.starts, groups.ends, groups.count
    return jt.triton_call(
        *given, *listed,
        kernel=kernel,
        name="grouped_gemm",
        out_type=jax.ShapeDtypeStruct((m, n // 2 if gate_block else n), dtype),
        grid=(-(-n // tile.columns), groups.experts.shape[0]),
        compute_capability=capability,
        num_warps=tile.warps,
        num_stages=stages,
        N=n, K=k, ROWS=groups.rows, COLUMNS=tile.columns, GATES=gate_block or 0, SILU=activation == "silu",
        **own,
    )  # fmt: skip


def _operands(x, w):
    """Return the kernel of a product, its operands, the dtype of the result and the kernel's own settings."""
    if isinstance(w, ExpertInt4):
        (m, k), bits = x.shape, _BITS.get(x.dtype.name, 0)
        sums = jnp.sum(x.reshape(m, k // GROUP, GROUP), axis=2, dtype=jnp.float32)
        own = {
            "STEP": GROUP,
            "GROUPS": w.factors.shape[1],
            "BITS": bits,
            "OFFSET": float(np.array(bits, np.uint16).view(x.dtype)) if bits else 0.0,
            "ZERO_POINTS": w.factors.dtype == jnp.int16,
        }
        return _multiply_int4, (columns_by_nibble(x), sums, w.packed, w.factors), x.dtype, own
    if isinstance(w, Quantized):
        given = _bytes(x.values), x.scale, _bytes(w.values), w.scale
        return _multiply_e4m3, given, jnp.dtype("bfloat16"), {"FACTOR": _E4M3_BIAS}
    return _multiply, (x, w), x.dtype, {}


def _bytes(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.uint8)
