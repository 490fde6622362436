"""A part of an MXFP4 weight as wgmma's first operand: bytes and scales from shared
memory to bfloat16 in registers.

A thread needs two columns of each 8, which are one byte of each 32-bit word of its row. It loads all words,
since a warp's loads of 16 bytes read each bank once. Each pair of bytes takes shifts and masks that put a
number's bits to their places in bfloat16, and a multiplication. A number's bits are then the number times 2
** -126, also those of 0.5, which are subnormal. The factor of the multiplication makes the number times its
scale times 2 ** -SHIFT. Without the last factor, large scales would overflow it. The product's epilogue
multiplies by 2 ** SHIFT.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.hopper.layouts import swizzled
from pallas_kernels.hopper.wgmma_registers import at, const, i32, place, read_words

SHIFT = 32
COLUMNS = 64  # The columns of a part have two scales of each row.
# Bytes of a row in a tile of shared memory, and of the swizzle. TMA copies whole tiles, and K is 45 · 64.
WIDTH = 32
_EXPONENT = 126 - SHIFT  # added to a scale's bits, for the exponent's bits of the factor


def operand(packed, scales, first: int, pair: jax.Array, of_pairs: int | None = None) -> jax.Array:
    """Return 64 columns of 64 rows of the weight, [64, 64] bfloat16 in WGMMA's layout, times 2 ** -SHIFT.

    Args:
      packed: uint8 [64, depth / 2] in shared memory. first: the first of the columns in it.
      scales: uint8 [8, K / 64, 16] in shared memory: the scales of all columns of the rows, row after row.
      pair: int32, the number of the columns' two scales in a row.
      of_pairs: of 128 packed rows, the operand has every other 16 from block 0 or block 1 on; None: all 64.
    """
    make = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(swizzled(jnp.uint8, WIDTH)), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((64, COLUMNS), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    unpack = lambda _, packed, scales, pair: _unpack(packed, scales, pair, first, of_pairs)
    return make(unpack)(packed, scales, pair)


def _unpack(
    packed: ir.Value, scales: ir.Value, pair: mgpu.FragmentedArray, first: int, of_pairs: int | None = None
):
    warp, row, quad = place()
    strides, _ = ir.MemRefType(packed.type).get_strides_and_offset()
    slab = first // COLUMNS * strides[1]
    line = 2 * ir.MemRefType(scales.type).shape[1]  # scales of a row
    selector = arith.addi(arith.muli(quad, const(0x1111)), const(0x0404))
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((64, COLUMNS)), dtype=object)
    two = ir.VectorType.get((2,), ir.BF16Type.get())
    block = arith.muli(warp, const(2))  # of 8 rows
    if of_pairs is not None:
        block = arith.addi(arith.muli(warp, const(4)), const(2 * of_pairs))
    start = arith.addi(arith.muli(block, const(strides[0])), arith.muli(row, const(WIDTH)))
    pieces = []
    for piece in range(2):  # the swizzle places 16 bytes at their number xor row / 4
        placed = arith.xori(arith.shrui(row, const(2)), const(piece))
        pieces.append(arith.addi(start, arith.muli(placed, const(16))))
    of_row = arith.muli(arith.addi(arith.muli(block, const(8)), row), const(line))
    of_pair = arith.addi(of_row, arith.muli(pair.registers.item(), const(2)))
    for half in range(2):  # rows 0 .. 7 and 8 .. 15 of the warp
        words = []
        for offset in pieces:
            words += read_words(packed, offset, 4, plus=half * strides[0] + slab)
        bits = _read_two(scales, of_pair, plus=half * 8 * line)
        factors = [_factor(bits, group) for group in range(2)]
        for word in range(0, 8, 2):
            made = mgpu.utils.inline_ptx(
                TWO_WORDS, *words[word : word + 2], selector, factors[word // 4], result_types=[i32()] * 2
            )
            for i, value in enumerate(made):
                registers[0, word + i, 0, 0, half, 0, 0, 0, 0] = mgpu.utils.bitcast(value, two)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _read_two(ref: ir.Value, offset: ir.Value, plus: int) -> ir.Value:
    """Return two bytes from an even offset in shared memory and `plus` bytes further, as i32."""
    loaded = llvm.load(ir.IntegerType.get_signless(16), at(ref, offset, plus), alignment=2)
    return arith.extui(i32(), loaded)


def _factor(bits: ir.Value, group: int) -> ir.Value:
    """Return the factor of one of two scales, twice in 32 bits."""
    scale = arith.shrui(bits, const(8)) if group else arith.andi(bits, const(255))
    once = arith.shli(arith.addi(scale, const(_EXPONENT)), const(7))
    return arith.ori(once, arith.shli(once, const(16)))


def _placed(bits: str, shifted: str) -> str:
    """Return PTX for the product of a register's numbers with the factor.

    bits: a register with the numbers of both halves of 32 bits at their high ends. shifted: puts the same
    register, shifted right by 6 bits, into u.
    """
    return f"{shifted}; and.b32 u, u, 0x01c001c0; lop3.b32 u, {bits}, 0x80008000, u, 0xea; "


# Two words, the byte's selector and the factor, to the two numbers of each word's byte. t has the first
# number of each byte in its low half and the second number in its high half, first word first.
TWO_WORDS = (
    "{ .reg .b32 t, u, v; prmt.b32 t, $2, $3, $4; shl.b32 u, t, 4; lop3.b32 t, t, u, 0xffff0000, 0xe4; "
    + _placed("t", "shr.u32 u, t, 6")
    + "mul.rn.bf16x2 $0, u, $5; shl.b32 v, t, 8; "
    + _placed("v", "shl.b32 u, t, 2")
    + "mul.rn.bf16x2 $1, u, $5; }"
)
