"""A part of an int4 weight as wgmma's first operand: nibbles and factors from shared
memory to bfloat16 in registers.

`Int4`'s order of nibbles makes a thread's part of 64 columns of a row one load of 8 bytes. Each pair of
numbers takes a shift, a mask, an exact subtraction and a multiply-add or a product, as in
`pallas_kernels.gemm.int4.api`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.gemm.grouped.mxfp4_operand import COLUMNS, WIDTH
from pallas_kernels.gemm.int4.api import FOUR_PAIRS, FOUR_PAIRS_OF_ZERO_POINTS
from pallas_kernels.hopper.layouts import swizzled
from pallas_kernels.hopper.wgmma_registers import const, i32, place, read_words


def operand(packed, factors, first: int, group: int, zero_points: bool) -> jax.Array:
    """Return 64 columns of 64 rows of the weight, [64, 64] bfloat16 in WGMMA's layout.

    Args:
      packed: uint8 [64, depth / 2] in shared memory. first: the first of the columns in it.
      factors: bfloat16 [64 / block, groups, 2 · block] in shared memory: scale and zero
          of each row in blocks of rows.
      group: the columns' group in the factors.
      zero_points: the factors are in int16.
    """
    make = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(swizzled(jnp.uint8, WIDTH)), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((64, COLUMNS), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    unpack = lambda _, *refs: _unpack(*refs, first=first, group=group, zero_points=zero_points)
    return make(unpack)(packed, factors)


def _unpack(
    packed: ir.Value, factors: ir.Value, first: int, group: int, zero_points: bool
) -> mgpu.FragmentedArray:
    warp, row, quad = place()
    strides, _ = ir.MemRefType(packed.type).get_strides_and_offset()
    slab = first // COLUMNS * strides[1]
    _, groups, pairs = ir.MemRefType(factors.type).shape
    block, two = pairs // 2, ir.VectorType.get((2,), ir.BF16Type.get())
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((64, COLUMNS)), dtype=object)
    start = arith.addi(arith.muli(warp, const(2 * strides[0])), arith.muli(row, const(WIDTH)))
    # The swizzle places 16 bytes at their number xor row / 4.
    piece = arith.xori(arith.shrui(quad, const(1)), arith.shrui(row, const(2)))
    inside = arith.addi(arith.muli(piece, const(16)), arith.muli(arith.andi(quad, const(1)), const(8)))
    offset = arith.addi(start, inside)
    line = arith.addi(arith.muli(warp, const(16)), row)
    of_block = arith.muli(arith.divui(line, const(block)), const(4 * groups * block))
    of_row = arith.addi(of_block, arith.muli(arith.remui(line, const(block)), const(4)))
    for half in range(2):  # rows 0 .. 7 and 8 .. 15 of the warp
        words = read_words(packed, offset, 2, plus=half * strides[0] + slab)
        (factor,) = read_words(factors, of_row, 1, plus=4 * (8 * half + group * block))
        doubled = [
            mgpu.utils.inline_ptx(f"prmt.b32 $0, $1, $1, {which};", factor, result_types=i32())
            for which in (0x1010, 0x3232)
        ]
        for j, word in enumerate(words):
            ptx = FOUR_PAIRS_OF_ZERO_POINTS if zero_points else FOUR_PAIRS
            made = mgpu.utils.inline_ptx(ptx, word, *doubled, result_types=[i32()] * 4)
            for i, value in enumerate(made):
                registers[0, 4 * j + i, 0, 0, half, 0, 0, 0, 0] = mgpu.utils.bitcast(value, two)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
