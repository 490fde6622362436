"""int4 GEMM for Hopper: products of small batches with a weight of 4 bits (`quantized.Int4`).

The pipeline is flat GEMM's. Up to 8 tokens, `mma` computes the product. Above, a warpgroup reads a group of
64 columns of its 64 rows from shared memory into registers as wgmma's first operand. `Int4`'s order of
nibbles makes this one 8-byte load a row. Each pair of weights takes a shift, a mask, an exact subtraction
and a multiply-add in bfloat16. With zero points the subtraction takes them off, exactly, and a product
follows. So the multiplied weights are those of `pallas_kernels.gemm.int4.reference.dequantize_int4`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.gemm.flat.api import multiply_flat
from pallas_kernels.gemm.flat.kernel import Operand
from pallas_kernels.gemm.flat.tiles import FlatTile, int4_tile
from pallas_kernels.gemm.int4 import mma as int4_mma
from pallas_kernels.hopper.layouts import swizzled
from pallas_kernels.hopper.limits import sms_of
from pallas_kernels.hopper.wgmma_registers import const, i32, in_tile, place, read_words
from pallas_kernels.quantized import GROUP, Int4

DEPTH = 512  # columns of a stage: 8 groups, because TMA copies at least 16 bytes a row, which are 8 scales


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
) -> jax.Array:
    """Return act(x @ dequantized(w).T + bias) (+ residual).

    The reference implementation is `pallas_kernels.gemm.reference.gemm`.

    Args:
      x: [M, K] bfloat16, 1 to 64 rows. w: Int4 of [N, K] in groups of 64; K a multiple of 512, N of 8.
        Other arguments: as for `flat_gemm`.
    Raises:
      ValueError: for a shape, dtype, epilogue or sms outside the limits.
    """
    (n, k), sms = w.shape, sms_of(sms)
    if x.shape[1] != k or k % DEPTH:
        raise ValueError(f"x {x.shape}, w {w.shape}: accepted are equal K, a multiple of {DEPTH}")
    factors, dtypes = (w.scale, w.zero), (w.scale.dtype, w.zero.dtype)
    if any(factor.shape != (n, k // GROUP) for factor in factors) or dtypes not in _DTYPES:
        given = [f"{factor.dtype}{list(factor.shape)}" for factor in factors]
        accepted = f"bfloat16{[n, k // GROUP]} for both, or zero points in int16"
        raise ValueError(f"w's scale and zero are {given}: accepted is {accepted}")
    tile = tile or int4_tile(x.shape[0], n, k, sms, gated=gate_block is not None)

    zero_points = w.zero.dtype == jnp.int16

    def product(acc, weight, x_s, own):
        blocks = [[part.at[pl.ds(own.start + at, 64)] for part in weight] for at in range(0, tile.rows, 64)]
        factors = [_factors(scale, zero) for _, scale, zero in blocks]
        for group in range(tile.depth // GROUP):
            tokens = x_s.at[:, pl.ds(group * GROUP, GROUP)].transpose((1, 0))
            for i, (packed, _, _) in enumerate(blocks):
                to = acc if tile.rows == 64 else acc.at[pl.ds(i * 64, 64)]
                plgpu.wgmma(to, _operand(packed, factors[i], group, zero_points), tokens)
                plgpu.wgmma_wait(1)

    def product_in_registers(total, weight, x_s, own):
        packed, scale, zero = (part.at[own] for part in weight)
        return int4_mma.multiply_add(total, packed, scale, zero, x_s, zero_points)

    small = x.shape[0] <= int4_mma.ROWS
    weight = [Operand(w.packed, 2, swizzled(jnp.uint8)), Operand(w.scale, GROUP), Operand(w.zero, GROUP)]
    return multiply_flat(
        x, weight, product_in_registers if small else product, bias, residual=residual, activation=activation,
        gate_block=gate_block, out_dtype=out_dtype, sms=sms, tile=tile, name="int4_gemm", in_registers=small,
        interpret=None,
    )  # fmt: skip


_DTYPES = [(jnp.bfloat16, jnp.bfloat16), (jnp.bfloat16, jnp.int16)]  # of the scale and the zero

# A shape with 16 32-bit words a thread: for each of its two rows, 4 words of scales and 4 of zeros.
_WORDS = (64, 32)


def _factors(scale, zero) -> jax.Array:
    """Return the scales and zeros of the thread's rows in a stage, [64, 8] each in shared memory, in
    registers.
    """
    load = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(_WORDS, jnp.int32, layout=plgpu.Layout.WGMMA),
    )
    return load(lambda _, scale, zero: _load_factors(scale, zero))(scale, zero)


def _operand(packed, factors: jax.Array, group: int, zero_points: bool) -> jax.Array:
    """Return one group of columns of a tile's packed [64, depth / 2] in shared memory: [64, 64] bfloat16,
    as wgmma's first operand.

    zero_points: the zeros are in int16.
    """
    take = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(swizzled(jnp.uint8)), plgpu.Layout.WGMMA),
        return_type=plgpu.ShapeDtypeStruct((64, GROUP), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    return take(lambda _, packed, factors: _unpack(packed, factors, group, zero_points))(packed, factors)


def _load_factors(scale: ir.Value, zero: ir.Value) -> mgpu.FragmentedArray:
    warp, row, _ = place()
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(_WORDS), dtype=object)
    pair = ir.VectorType.get((2,), i32())
    for half in range(2):  # rows 0 .. 7 and 8 .. 15 of the warp
        line = arith.addi(arith.muli(warp, const(16)), arith.addi(row, const(8 * half)))
        for i, ref in enumerate((scale, zero)):
            words = read_words(ref, arith.muli(line, const(DEPTH // GROUP * 2)), 4)
            for j in range(2):
                two = llvm.mlir_undef(pair)
                for k in range(2):
                    two = llvm.insertelement(two, words[2 * j + k], const(k))
                registers[0, 2 * i + j, 0, 0, half, 0, 0, 0, 0] = two
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=True)


def _unpack(
    packed: ir.Value, factors: mgpu.FragmentedArray, group: int, zero_points: bool
) -> mgpu.FragmentedArray:
    """Return the thread's part of wgmma's operand: rows lane / 4 and lane / 4 + 8 of its warp's 16 rows, 16
    nibbles each.
    """
    warp, row, quad = place()
    strides, _ = ir.MemRefType(packed.type).get_strides_and_offset()
    slab, part = divmod(group, 4)
    inside = in_tile(row, quad, part)
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((64, GROUP)), dtype=object)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    which, high = divmod(group, 2)
    for half in range(2):
        block = arith.addi(arith.muli(warp, const(2)), const(half))
        words = read_words(
            packed,
            arith.addi(arith.addi(arith.muli(block, const(strides[0])), const(slab * strides[1])), inside),
            2,
        )
        doubled = []
        for i in range(2):
            word = llvm.extractelement(
                factors.registers[0, 2 * i + which // 2, 0, 0, half, 0, 0, 0, 0], const(which % 2)
            )
            doubled.append(
                mgpu.utils.inline_ptx(
                    f"prmt.b32 $0, $1, $1, {0x3232 if high else 0x1010};", word, result_types=i32()
                )
            )
        for j, word in enumerate(words):
            ptx = FOUR_PAIRS_OF_ZERO_POINTS if zero_points else FOUR_PAIRS
            for i, value in enumerate(mgpu.utils.inline_ptx(ptx, word, *doubled, result_types=[i32()] * 4)):
                registers[0, 4 * j + i, 0, 0, half, 0, 0, 0, 0] = mgpu.utils.bitcast(value, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


# The pairs (i, i + 4) of a word of 8 nibbles as nibble · scale + zero. 0x4300 | nibble is exactly 128 +
# nibble in bfloat16.
FOUR_PAIRS = (
    "{ .reg .b32 v, m; mov.b32 m, 0x43004300;\n"
    + "".join(
        (
            f"shr.u32 v, $4, {4 * i}; lop3.b32 v, v, 0x000f000f, m, 0xea; sub.rn.bf16x2 v, v, m; "
            f"fma.rn.bf16x2 ${i}, v, $5, $6;\n"
        )
        for i in range(4)
    )
    + "}"
)

# The same pairs as (nibble - zero point) · scale. Whole numbers up to 256 are exact in bfloat16. So is the
# difference, and the product is rounded once.
FOUR_PAIRS_OF_ZERO_POINTS = (
    "{ .reg .b32 v, m, z; mov.b32 m, 0x43004300; or.b32 z, $6, m;\n"
    + "".join(
        (
            f"shr.u32 v, $4, {4 * i}; lop3.b32 v, v, 0x000f000f, m, 0xea; sub.rn.bf16x2 v, v, z; "
            f"mul.rn.bf16x2 ${i}, v, $5;\n"
        )
        for i in range(4)
    )
    + "}"
)
