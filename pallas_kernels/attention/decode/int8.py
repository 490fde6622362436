"""Products of decode attention over an int8 cache, which has a scale for each token and head.

The tensor core has no product of 8 and 16 bits. So keys and values become bfloat16, exactly, on the way
from shared memory to wgmma's first operand in registers. wgmma expects columns 2t, 2t + 1, 2t + 8 and 2t +
9 of each 16 columns in thread t of a row's four threads. The kernel loads contiguous bytes instead, 16t ..
16t + 15 of each 64. The product is the same if the other operand has the same order. For keys this is the
order of the queries (`put_queries`). For values it is the order of the weights, so the rows of the scores
are keys in this order too (`key_of`). A token's scale multiplies its row of the scores or of the weights.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.attention.paged import PAGE
from pallas_kernels.hopper import wgmma_registers as lanes
from pallas_kernels.hopper.layouts import swizzled
from pallas_kernels.hopper.wgmma_registers import const

_WGMMA = plgpu.Layout.WGMMA
_BLOCK = 64  # rows and columns of one operand


def key_of(row, interpret: bool):
    """Return the key of a page that a row of its scores belongs to: key 16t + 4j + 2e + f for row 16j + 8f
    + 2t + e.
    """
    if interpret:
        return row
    return ((row & 6) << 3) | ((row >> 2) & 12) | ((row & 1) << 1) | ((row >> 3) & 1)


def multiply(operands, shape, *, keys: bool, interpret: bool):
    """Return the sum of a @ b.T over pairs (a [M, K] int8, b [N, K] bfloat16) in shared memory, float32 [M,
    N].

    keys: rows are keys in the order of `key_of`; otherwise rows are in memory order. b has the order of
    `put_queries` or of the rows of the scores.
    """
    if interpret:
        return sum(jnp.dot(a[...].astype(jnp.float32), b[...].astype(jnp.float32).T) for a, b in operands)

    def scoped(acc):
        for a, b in operands:
            for column in range(0, a.shape[1], _BLOCK):
                other = b.at[:, pl.ds(column, _BLOCK)].transpose((1, 0))
                for row in range(0, shape[0], _BLOCK):
                    to = acc if shape[0] == _BLOCK else acc.at[pl.ds(row, _BLOCK)]
                    plgpu.wgmma(to, _operand(a, row, column, keys), other)
                    plgpu.wgmma_wait(1)
        return acc[...]

    return pl.run_scoped(scoped, plgpu.ACC(shape, jnp.float32))


def put_queries(source, target, interpret: bool) -> None:
    """Store source [cols, H] bfloat16 to the tiled target, with columns in the order in which threads hold
    keys. Commit.
    """
    if interpret:
        target[...] = source[...]
    else:
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(swizzled(jnp.bfloat16))))(
            lambda _, s, t: _put(s, t)
        )(source, target)
    plgpu.commit_smem()


def scales_of(place, interpret: bool) -> jax.Array:
    """Return the scales [64] of a page's keys from shared memory, in the order of the rows of the scores."""
    if interpret:
        return place[...]
    result = plgpu.ShapeDtypeStruct((PAGE,), jnp.float32, layout=_WGMMA.reduce(1))
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)(
        lambda _, place: _load_scales(place)
    )(place)  # pyright: ignore[reportCallIssue]


def _first_key(warp, row):
    """Return the first of the two adjacent keys in a thread's rows `row` and row + 8 of the warp."""
    tokens = arith.muli(arith.shrui(row, const(1)), const(16))
    return arith.addi(
        arith.addi(tokens, arith.muli(warp, const(4))), arith.muli(arith.andi(row, const(1)), const(2))
    )


def _load_scales(place: ir.Value) -> mgpu.FragmentedArray:
    warp, row, _ = lanes.place()
    layout = mgpu.WGMMA_ROW_LAYOUT
    two = lanes.read_words(place, arith.muli(_first_key(warp, row), const(4)), 2)
    registers = np.empty(layout.registers_shape((PAGE,)), dtype=object)
    one = ir.VectorType.get((1,), ir.F32Type.get())
    registers.flat[:] = [mgpu.utils.bitcast(word, one) for word in two]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _operand(source, row: int, column: int, keys: bool) -> jax.Array:
    """Return 64 rows and columns of source [M, K] int8 in shared memory as bfloat16, as wgmma's first
    operand.
    """
    result = plgpu.ShapeDtypeStruct((_BLOCK, _BLOCK), jnp.bfloat16, layout=_WGMMA)
    take = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    return take(lambda _, source: _unpack(source, row, column, keys))(source)  # pyright: ignore[reportCallIssue]


def _unpack(source: ir.Value, first_row: int, column: int, keys: bool) -> mgpu.FragmentedArray:
    width = ir.MemRefType(source.type).shape[1]
    warp, row, quad = lanes.place()
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((_BLOCK, _BLOCK)), dtype=object)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    inside = arith.addi(arith.muli(quad, const(16)), const(column))
    for half in range(2):
        line = _first_key(warp, row) if keys else arith.addi(arith.muli(warp, const(16)), row)
        line = arith.addi(line, const(first_row + half * (1 if keys else 8)))
        for j, word in enumerate(
            lanes.read_words(source, arith.addi(arith.muli(line, const(width)), inside), 4)
        ):
            for f, value in enumerate(
                mgpu.utils.inline_ptx(_TWO_PAIRS, word, result_types=[lanes.i32()] * 2)
            ):
                registers[0, 2 * j + f, 0, 0, half, 0, 0, 0, 0] = mgpu.utils.bitcast(value, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


# Bytes 0 and 2 of a word, then bytes 1 and 3, as bfloat16. For a byte b, 0x4300 | (b & 127) is 128 + (b &
# 127). 0x4300 | (b & 128) is 128, or 256 for a negative b. The difference of the two is exactly b.
_TWO_PAIRS = (
    "{ .reg .b32 v, n, m; mov.b32 m, 0x43004300;\n"
    + "".join(
        f"shr.u32 v, $2, {8 * i}; and.b32 n, v, 0x00800080; and.b32 v, v, 0x007f007f; or.b32 n, n, m; or.b32 "
        "v, v, m; "
        f"sub.rn.bf16x2 ${i}, v, n;\n"
        for i in range(2)
    )
    + "}"
)


def _put(source: ir.Value, target: ir.Value) -> None:
    cols, h = ir.MemRefType(source.type).shape
    thread = arith.remui(mgpu.utils.thread_idx(), const(128))
    pieces, i16 = (
        h // 8,
        ir.IntegerType.get_signless(16),
    )  # 16 bytes of the target: t = 0 .. 3 and e = 0, 1 of a thread
    for first in range(0, cols * pieces, 128):
        # With fewer pieces than threads, two threads write the same piece.
        piece = arith.remui(arith.addi(thread, const(first)), const(cols * pieces))
        col, place = arith.divui(piece, const(pieces)), arith.remui(piece, const(pieces))
        group, inside = arith.divui(place, const(8)), arith.remui(place, const(8))
        j, f = arith.shrui(inside, const(1)), arith.andi(inside, const(1))
        start = arith.addi(
            arith.muli(col, const(h)),
            arith.addi(arith.muli(group, const(64)), arith.addi(arith.muli(j, const(4)), f)),
        )
        values = ir.VectorType.get((8,), i16)
        vector8 = llvm.mlir_undef(values)
        for t in range(4):
            for e in range(2):
                address = lanes.at(source, arith.muli(arith.addi(start, const(16 * t + 2 * e)), const(2)))
                vector8 = llvm.insertelement(vector8, llvm.load(i16, address, alignment=2), const(2 * t + e))
        row = arith.remui(col, const(8))
        tile = arith.addi(arith.muli(arith.divui(col, const(8)), const(h // 64)), group)
        offset = arith.addi(arith.muli(row, const(128)), arith.muli(arith.xori(inside, row), const(16)))
        llvm.store(vector8, lanes.at(target, arith.addi(arith.muli(tile, const(1024)), offset)), alignment=16)
