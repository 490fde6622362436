"""int4 products of up to 8 tokens without wgmma: a warp multiplies 16 rows of the weight with `mma`, from
registers.

With wgmma a warpgroup would wait for its operand's registers each time. `mma` is an ordinary instruction,
so one group is unpacked during the product of the previous group. Nibbles are not scaled first: 128 +
nibble in bfloat16 takes a shift, a mask and an or for two nibbles, and is exact. A group's sums over 64
columns are Σ (128 + nibble) · x. `mma` also computes the sums Σ x of the tokens, with a first operand of
ones. The result in float32 is scale · Σ (128 + nibble) · x + (zero - 128 · scale) · Σ x. With zero points
it is scale · Σ (128 + nibble) · x - (128 + zero) · scale · Σ x.
"""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxlib.mlir.dialects import math as mlir_math

from pallas_kernels.hopper.layouts import swizzled
from pallas_kernels.hopper.wgmma_registers import at, const, i32, in_tile, place, read_words

ROWS = 8  # maximum number of tokens; wgmma is as fast with 16
_ONES = 0x3F803F80  # a pair of bfloat16


def multiply_add(total: jax.Array, packed, scale, zero, tokens, zero_points: bool) -> jax.Array:
    """Return total [rows, M] float32, in wgmma's layout, plus a stage's product.

    In shared memory: packed [rows, depth / 2], scale and zero [rows, depth / 64] of the warpgroup's rows,
    tokens [M, depth]. zero_points: the zeros are in int16.
    """
    run = plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA,
            plgpu.RefType(swizzled(jnp.uint8)),
            plgpu.RefType(),
            plgpu.RefType(),
            plgpu.RefType(swizzled(jnp.bfloat16)),
        ),
        return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    return run(lambda _, *refs: _stage(*refs, zero_points=zero_points))(total, packed, scale, zero, tokens)


def _stage(total, packed, scale, zero, tokens, zero_points: bool) -> mgpu.FragmentedArray:
    rows, m = total.shape
    sums, blocks, octets, words = total.registers.copy(), rows // 64, m // 8, []
    strides, _ = ir.MemRefType(tokens.type).get_strides_and_offset()
    for group in range(ir.MemRefType(tokens.type).shape[1]):
        if group % 4 == 0:  # four groups at a time, to save registers
            words = [
                [_words(scale, zero, block, half, group) for half in range(2)] for block in range(blocks)
            ]
        columns = [_tokens(tokens, [2 * s for s in strides[:2]], tokens8, group) for tokens8 in range(octets)]
        of_tokens = [_chain([[const(_ONES)] * 4] * 4, column)[:2] for column in columns]
        for block in range(blocks):
            weight = _weight(packed, block, group)
            for tokens8, column in enumerate(columns):
                y = _chain(weight, column)
                for half in range(2):
                    s, z = _factors(words[block][half], group % 4, zero_points)
                    where = (block, tokens8, 0, 0, half, 0, 0, 0, 0)
                    old = [llvm.extractelement(sums[where], const(i)) for i in range(2)]
                    new = [_fma(s, y[2 * half + i], _fma(z, of_tokens[tokens8][i], old[i])) for i in range(2)]
                    sums[where] = _vector(new)
    return mgpu.FragmentedArray(_registers=sums, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _fma(a, b, c):
    return mlir_math.fma(a, b, c)


def _vector(values) -> ir.Value:
    result = llvm.mlir_undef(ir.VectorType.get((len(values),), values[0].type))
    for i, value in enumerate(values):
        result = llvm.insertelement(result, value, const(i))
    return result


def _words(
    scale: ir.Value, zero: ir.Value, block: int, half: int, group: int
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Return scales and zeros of four groups for the thread's row in a block of 64, two groups a register."""
    warp, row, _ = place()
    line = arith.addi(arith.muli(warp, const(16)), arith.addi(row, const(64 * block + 8 * half)))
    offset = arith.addi(arith.muli(line, const(2 * ir.MemRefType(scale.type).shape[1])), const(2 * group))
    scales, zeros = (read_words(ref, offset, 2) for ref in (scale, zero))
    return scales, zeros


def _factors(
    words: tuple[list[ir.Value], list[ir.Value]], group: int, zero_points: bool
) -> tuple[ir.Value, ir.Value]:
    """Return a group's scale and the factor of its sum of tokens, float32."""
    scales, zeros = (of[group // 2] for of in words)
    s = _wide(scales, group % 2)
    offset = arith.constant(s.type, ir.FloatAttr.get(s.type, -128.0))
    if not zero_points:
        return s, _fma(s, offset, _wide(zeros, group % 2))
    whole = arith.shrui(zeros, const(16)) if group % 2 else arith.andi(zeros, const(0xFFFF))
    return s, arith.mulf(s, arith.subf(offset, arith.sitofp(s.type, whole)))


def _wide(word: ir.Value, high: int) -> ir.Value:
    """Return the low or high bfloat16 of a word as float32."""
    return mgpu.utils.bitcast(
        arith.andi(word, const(-65536)) if high else arith.shli(word, const(16)), ir.F32Type.get()
    )


def _tokens(tokens: ir.Value, strides, tokens8: int, group: int) -> list[list[ir.Value]]:
    """Return mma's second operand for each 16 of a group's 64 columns and 8 tokens, two registers each."""
    lane = arith.andi(mgpu.utils.thread_idx(), const(31))
    token, matrix = arith.andi(lane, const(7)), arith.shrui(lane, const(3))
    line = arith.addi(arith.muli(token, const(128)), const(tokens8 * strides[0] + group * strides[1]))
    registers = []
    for half in range(2):  # 8 rows of 128 bytes; a 16-byte piece is at its number xor the row
        piece = arith.xori(arith.addi(matrix, const(4 * half)), token)
        address = llvm.ptrtoint(i32(), at(tokens, arith.addi(line, arith.muli(piece, const(16)))))
        ptx = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
        four = mgpu.utils.inline_ptx(ptx, address, result_types=[i32()] * 4, has_side_effects=True)
        registers += [list(four[:2]), list(four[2:])]
    return registers


def _weight(packed: ir.Value, block: int, group: int) -> list[list[ir.Value]]:
    """Return 128 + nibble of 16 rows of a block of 64, as mma's first operand for each 16 of a group's
    columns, four registers each.
    """
    warp, row, quad = place()
    strides, _ = ir.MemRefType(packed.type).get_strides_and_offset()
    slab, part = divmod(group, 4)
    inside = in_tile(row, quad, part)
    halves = []
    for half in range(2):
        tokens8 = arith.addi(arith.muli(warp, const(2)), const(8 * block + half))
        words = read_words(
            packed,
            arith.addi(arith.addi(arith.muli(tokens8, const(strides[0])), const(slab * strides[1])), inside),
            2,
        )
        halves.append([mgpu.utils.inline_ptx(_FOUR_PAIRS, word, result_types=[i32()] * 4) for word in words])
    # A word has the pairs 2 · quad and 2 · quad + 8 of the first 16 columns, then those of the other 16.
    return [
        [halves[half][word][2 * step + late] for late in range(2) for half in range(2)]
        for word in range(2)
        for step in range(2)
    ]


def _chain(first, second) -> list[ir.Value]:
    """Return the sums of the products of 16 columns each: four float32, for rows lane / 4 and lane / 4 + 8,
    two tokens each.
    """
    f32 = ir.F32Type.get()
    total = [arith.constant(f32, ir.FloatAttr.get(f32, 0.0))] * 4
    for a, b in zip(first, second, strict=True):
        total = list(mgpu.utils.inline_ptx(_MMA, *a, *b, *total, result_types=[f32] * 4))
    return total


_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
    "{$10, $11, $12, $13};"
)

# The pairs (i, i + 4) of a word of 8 nibbles as 128 + nibble in bfloat16, which is 0x4300 | nibble.
_FOUR_PAIRS = (
    "{ .reg .b32 v, m; mov.b32 m, 0x43004300;\n"
    + "lop3.b32 $0, $4, 0x000f000f, m, 0xea;\n"
    + "".join(f"shr.u32 v, $4, {4 * i}; lop3.b32 ${i}, v, 0x000f000f, m, 0xea;\n" for i in range(1, 4))
    + "}"
)
