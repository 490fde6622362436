"""Products of few rows with a weight of 4 bits (`quantized.Int4`) for Hopper.

The pipeline is flat GEMM's. A warpgroup takes a group of 64 columns of its 64 rows out of shared memory as wgmma's first operand, in
registers: `Int4`'s order of nibbles makes that one 8-byte load a row and, for each pair of weights, a shift, a mask, an exact subtraction
and a multiply-add in bfloat16. So the weights that are multiplied are `reference.dequantize_int4`'s, bit for bit.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flat_gemm import Operand, multiply_flat, swizzled
from pallas_kernels.flat_tiles import FlatTile, int4_tile
from pallas_kernels.quantized import GROUP, Int4
from pallas_kernels.tiles import SMS

ir, arith, llvm = mgpu.utils.ir, mgpu.utils.arith, mgpu.utils.llvm

DEPTH = 512  # columns of a stage: 8 groups, whose scales are the 16 bytes a row that TMA copies at least


def int4_gemm(
    x: jax.Array,
    w: Int4,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
    out_dtype=None,
    sms: int | None = None,
    tile: FlatTile | None = None,
    early: bool = False,
) -> jax.Array:
    """act(x @ dequantized(w).T + bias) (+ residual) (the twin: `reference.gemm`).

    Args:
      x: [M, K] bfloat16, 1 to 64 rows. w: Int4 of [N, K]; K a multiple of 512, N of 8. All else as of `flat_gemm`.
    Raises:
      ValueError: for a shape, dtype or epilogue that the kernel does not take.
    """
    n, k = w.shape
    if x.shape[1] != k or k % DEPTH:
        raise ValueError(f"x {x.shape}, w {w.shape}: the same K, a multiple of {DEPTH}")
    tile = tile or int4_tile(x.shape[0], n, k, sms or SMS, gated=gate_block is not None)

    def product(acc, weight, x_s, own):
        for group in range(tile.depth // GROUP):
            for at in range(0, tile.rows, 64):
                rows = pl.ds(own.start + at, 64)
                parts, tokens = [part.at[rows] for part in weight], x_s.at[:, pl.ds(group * GROUP, GROUP)].transpose((1, 0))
                to = acc if tile.rows == 64 else acc.at[pl.ds(at, 64)]
                plgpu.wgmma(to, _operand(parts, group), tokens)
                plgpu.wgmma_wait(1)

    weight = [Operand(w.packed, 2, swizzled(jnp.uint8)), Operand(w.scale, GROUP), Operand(w.zero, GROUP)]
    return multiply_flat(
        x, weight, product, bias, residual=residual, activation=activation, gate_block=gate_block, out_dtype=out_dtype, sms=sms or SMS,
        tile=tile, early=early, name="int4_gemm", interpret=None,
    )  # fmt: skip


def _operand(parts, group: int) -> jax.Array:
    """Columns of one group, [64, 64] bfloat16, as wgmma's first operand, from a tile's packed [64, depth / 2], scale and zero
    [64, depth / 64] in shared memory."""
    layout = plgpu.Layout.WGMMA
    take = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(swizzled(jnp.uint8)), plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((64, GROUP), jnp.bfloat16, layout=layout),
    )
    return take(lambda _, packed, scale, zero: _unpack(packed, scale, zero, group))(*parts)


def _unpack(packed, scale, zero, group: int) -> mgpu.FragmentedArray:
    """The thread's part of wgmma's operand: rows lane / 4 and lane / 4 + 8 of its warp's 16, 16 nibbles of each."""
    i32 = ir.IntegerType.get_signless(32)
    const = lambda value: arith.constant(i32, ir.IntegerAttr.get(i32, value))  # noqa: E731
    thread = arith.remui(mgpu.utils.thread_idx(), const(128))
    warp, lane = arith.shrui(thread, const(5)), arith.andi(thread, const(31))
    row, quad = arith.shrui(lane, const(2)), arith.andi(lane, const(3))
    # Tiles of 8 rows of 128 bytes; the 16-byte pieces of a row lie at their place xor the row.
    tiles = ir.MemRefType(packed.type)
    strides, _ = tiles.get_strides_and_offset()
    slab, place = divmod(group, 4)
    piece = arith.xori(arith.xori(arith.shrui(quad, const(1)), const(2 * place)), row)
    inside = arith.addi(
        arith.muli(row, const(128)), arith.addi(arith.muli(piece, const(16)), arith.muli(arith.andi(quad, const(1)), const(8)))
    )
    ptr_type = mgpu.utils.memref_ptr(packed).type

    def load(base, offset, kind):
        at = llvm.getelementptr(ptr_type, base, [offset], [-(2**31)], ir.IntegerType.get_signless(8), 0)
        return llvm.load(kind, at)

    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((64, GROUP)), dtype=object)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    for half in range(2):  # rows 0 .. 7 and 8 .. 15 of the warp's
        block = arith.addi(arith.muli(warp, const(2)), const(half))
        offset = arith.addi(arith.addi(arith.muli(block, const(strides[0])), const(slab * strides[1])), inside)
        words = load(mgpu.utils.memref_ptr(packed), offset, ir.VectorType.get((2,), i32))
        line = arith.addi(
            arith.muli(arith.addi(arith.muli(block, const(8)), row), const(ir.MemRefType(scale.type).get_strides_and_offset()[0][0] * 2)),
            const(2 * group),
        )
        doubled = []
        for ref in (scale, zero):
            value = arith.extui(i32, load(mgpu.utils.memref_ptr(ref), line, ir.IntegerType.get_signless(16)))
            doubled.append(arith.muli(value, const(0x10001)))
        for j in range(2):
            word = llvm.extractelement(words, const(j))
            four = mgpu.utils.inline_ptx(_FOUR_PAIRS, word, *doubled, result_types=[i32] * 4)
            for i, value in enumerate(four):
                registers[0, 4 * j + i, 0, 0, half, 0, 0, 0, 0] = mgpu.utils.bitcast(value, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


# Of a word of 8 nibbles, pairs (i, i + 4) as nibble · scale + zero: 0x4300 | nibble is 128 + nibble in bfloat16, exactly.
_FOUR_PAIRS = (
    "{ .reg .b32 v, m; mov.b32 m, 0x43004300;\n"
    + "".join(
        f"shr.u32 v, $4, {4 * i}; lop3.b32 v, v, 0x000f000f, m, 0xea; sub.rn.bf16x2 v, v, m; fma.rn.bf16x2 ${i}, v, $5, $6;\n"
        for i in range(4)
    )
    + "}"
)
