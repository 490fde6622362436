"""A weight of MXFP4 in blocks from shared memory to bfloat16 in registers: products of few rows by `mma`, and
wgmma's first operand.

A warp multiplies 16 rows of the weight. `mma` is an ordinary instruction. So, unlike with wgmma, a warp makes
the next numbers of the weight while the tensor cores multiply.

A pair of numbers takes a rotation, a mask and a multiplication. The rotation puts a number's bits to their
places in bfloat16. They are then the number times 2 ** -126, also those of 0.5, which are subnormal. The
factor of the multiplication makes the number times its scale times 2 ** -SHIFT. Without the last factor,
large scales would overflow it. The sums are multiplied by 2 ** SHIFT at the end.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.gemm.grouped.mxfp4_blocks import COLUMNS, NUMBERS
from pallas_kernels.gemm.grouped.mxfp4_operand import SHIFT
from pallas_kernels.hopper.layouts import swizzled
from pallas_kernels.hopper.wgmma_registers import at, const, i32, place, read_words
from pallas_kernels.quantized import MXFP4_WORDS

_BLOCK_BYTES = 4 * MXFP4_WORDS


def load(blocks, pairs: bool = False) -> jax.Array:
    """Return a stage of the weight in registers: a value for `multiply_add`, of no use besides.

    blocks: int32 [4 · b, depth / 64, 136] in shared memory. pairs: the first 64 rows of the product have
    every other one of 8 blocks, and the last 64 rows have the others.
    """
    count = blocks.shape[0] // 4 * blocks.shape[1]
    shape = (64, 8 * (count + -(-count // 4)))  # 4 words of each block, then a word of each
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=plgpu.Layout.WGMMA),
    )
    return run(lambda _, blocks: _load(blocks, shape, pairs))(blocks)


def multiply_add(total: jax.Array, weight: jax.Array, tokens) -> jax.Array:
    """Return total [64 · b, M] float32, in wgmma's layout, plus a stage's product times 2 ** -SHIFT.

    weight: from `load`, of these rows. tokens: [M, depth] in shared memory.
    """
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, plgpu.RefType(swizzled(jnp.bfloat16))),
        return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    return run(lambda _, *given: _stage(*given))(total, weight, tokens)


def operand(blocks, chunk: int, of_pairs: int | None = None) -> jax.Array:
    """Return 64 columns of 64 rows of the weight, [64, 64] bfloat16 in WGMMA's layout, times 2 ** -SHIFT.

    blocks: int32 [4, depth / 64, 136] in shared memory. chunk: which 64 of the columns. of_pairs: of 8
    blocks, the operand has every other one from block 0 or block 1 on; None: all 4.
    """
    make = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((64, COLUMNS), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    return make(lambda _, blocks: _unpack(blocks, chunk, of_pairs))(blocks)


def _unpack(blocks: ir.Value, chunk: int, of_pairs: int | None = None) -> mgpu.FragmentedArray:
    _, chunks, _ = ir.MemRefType(blocks.type).shape
    apart, first = (1, 0) if of_pairs is None else (2, of_pairs)
    words, scales = _read(blocks, *_places(apart * chunks), (first * chunks + chunk) * _BLOCK_BYTES)
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((64, COLUMNS)), dtype=object)
    two = ir.VectorType.get((2,), ir.BF16Type.get())
    for step, part in enumerate(_weight(words, scales)):
        for i, value in enumerate(part):
            late, half = divmod(i, 2)
            registers[0, 2 * step + late, 0, 0, half, 0, 0, 0, 0] = mgpu.utils.bitcast(value, two)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _places(chunks: int) -> tuple[ir.Value, ir.Value]:
    """Return the offsets of the thread's words and scales in a stage of so many chunks."""
    warp, row, quad = place()
    own = arith.muli(warp, const(chunks * _BLOCK_BYTES))
    words = arith.addi(own, arith.addi(arith.muli(row, const(64)), arith.muli(quad, const(16))))
    return words, arith.addi(own, arith.muli(row, const(4)))


def _read(
    blocks: ir.Value, of_words: ir.Value, of_scales: ir.Value, plus: int
) -> tuple[list[ir.Value], ir.Value]:
    """Return the thread's words and scales of the block `plus` bytes after the first one."""
    words = read_words(blocks, of_words, 4, plus=plus)
    (scales,) = read_words(blocks, of_scales, 1, plus=plus + 4 * NUMBERS)
    return words, scales


def _load(blocks: ir.Value, shape: tuple[int, int], pairs: bool = False) -> mgpu.FragmentedArray:
    height, chunks, _ = ir.MemRefType(blocks.type).shape
    places, words, scales = _places(2 * chunks if pairs else chunks), [], []
    for block in (0, 1) if pairs else range(0, height, 4):
        for chunk in range(chunks):
            plus = (block * chunks + chunk) * _BLOCK_BYTES
            own = _read(blocks, *places, plus)
            words += own[0]
            scales.append(own[1])
    both = words + scales
    both += both[:1] * (shape[1] // 2 - len(both))
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
    for i in range(registers.size):
        registers.flat[i] = _pair(*both[2 * i : 2 * i + 2])
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=True)


def _stage(total: mgpu.FragmentedArray, weight: mgpu.FragmentedArray, tokens: ir.Value):
    rows, m = total.shape
    octets, height = m // 8, rows // 64
    chunks = ir.MemRefType(tokens.type).shape[1]
    strides, _ = ir.MemRefType(tokens.type).get_strides_and_offset()
    _, row, quad = place()
    of_tokens = _lines(arith.addi(arith.muli(row, const(4)), quad))
    given = [llvm.extractelement(two, const(i)) for two in weight.registers.flat for i in range(2)]
    scales = given[4 * height * chunks :]
    sums: dict = {}
    for block, octet in itertools.product(range(height), range(octets)):
        halves = [total.registers[block, octet, 0, 0, half, 0, 0, 0, 0] for half in range(2)]
        sums[block, octet] = [llvm.extractelement(two, const(i)) for two in halves for i in range(2)]
    for chunk in range(chunks):
        columns = [
            _tokens(tokens, of_tokens, 2 * (octet * strides[0] + chunk * strides[1]))
            for octet in range(octets)
        ]
        for block in range(height):
            which = block * chunks + chunk
            for step, part in enumerate(_weight(given[4 * which : 4 * which + 4], scales[which])):
                for octet in range(octets):
                    operands = *part, *columns[octet][step], *sums[block, octet]
                    sums[block, octet] = mgpu.utils.inline_ptx(
                        _MMA, *operands, result_types=[ir.F32Type.get()] * 4
                    )
    registers = total.registers.copy()
    for (block, octet), four in sums.items():
        for half in range(2):
            registers[block, octet, 0, 0, half, 0, 0, 0, 0] = _pair(*four[2 * half : 2 * half + 2])
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _pair(first: ir.Value, second: ir.Value) -> ir.Value:
    two = llvm.mlir_undef(ir.VectorType.get((2,), first.type))
    return llvm.insertelement(llvm.insertelement(two, first, const(0)), second, const(1))


def _lines(lane: ir.Value) -> list[ir.Value]:
    """Return the lane's offsets in a tile of 8 tokens and 64 columns, for the first and last 32 columns.

    The tile has 8 rows of 128 bytes, and the swizzle places a 16-byte piece at its number xor the row.
    """
    token, matrix = arith.andi(lane, const(7)), arith.shrui(lane, const(3))
    line = arith.muli(token, const(128))
    pieces = [arith.xori(arith.addi(matrix, const(4 * half)), token) for half in range(2)]
    return [arith.addi(line, arith.muli(piece, const(16))) for piece in pieces]


def _tokens(tokens: ir.Value, lines: list[ir.Value], plus: int) -> list[list[ir.Value]]:
    """Return mma's second operand for each 16 of 64 columns and 8 tokens, two registers each."""
    registers = []
    for line in lines:
        address = llvm.ptrtoint(i32(), at(tokens, line, plus))
        ptx = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
        four = mgpu.utils.inline_ptx(ptx, address, result_types=[i32()] * 4, has_side_effects=True)
        registers += [list(four[:2]), list(four[2:])]
    return registers


def _weight(words: list[ir.Value], scales: ir.Value) -> list[list[ir.Value]]:
    """Return 16 rows of the weight as mma's first operand for each 16 of 64 columns, four registers each."""
    made = [
        mgpu.utils.inline_ptx(EIGHT_NUMBERS, word, _factor(scales, which), result_types=[i32()] * 4)
        for which, word in enumerate(words)
    ]
    # A word has four pairs of 8 columns each: two steps of 16 columns.
    return [
        [made[2 * half + group][2 * step + late] for late in range(2) for half in range(2)]
        for group in range(2)
        for step in range(2)
    ]


def _factor(scales: ir.Value, which: int) -> ir.Value:
    """Return the factor of one of four scales, twice in 32 bits."""
    return mgpu.utils.inline_ptx(FACTOR.format(0x4040 + 0x0101 * which), scales, result_types=i32())


# 126 - SHIFT is added to the scale, which then is a bfloat16's exponent.
_ADDED = 0x00800080 * (126 - SHIFT)
FACTOR = "{{ .reg .b32 t; prmt.b32 t, $1, 0, {}; mad.lo.u32 $0, t, 128, " + f"{_ADDED}; }}}}"
# A word and its factor to four pairs of numbers.
EIGHT_NUMBERS = (
    "{ .reg .b32 t, u; "
    + "".join(
        f"{rotated}; and.b32 t, t, 0x81c081c0; mul.rn.bf16x2 ${pair}, t, $5; "
        for pair, rotated in enumerate(
            ("shl.b32 t, $4, 2", "shl.b32 t, $4, 6", "shf.l.wrap.b32 t, $4, $4, 12"),
        )
    )
    + "and.b32 t, $4, 0x81808180; shr.u32 u, $4, 8; lop3.b32 t, u, 0x00400040, t, 0xea; "
    + "mul.rn.bf16x2 $3, t, $5; }"
)
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
    "{$10, $11, $12, $13};"
)
