"""Memory layouts of the Hopper kernels: padding to TMA's tiles, swizzled tiles for wgmma, transposed
stores.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

LOG2E = math.log2(math.e)  # the hardware has exp2 only, so the kernels compute exp(x) as exp2(LOG2E * x)
LANE = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


def pad_rows(x: jax.Array) -> jax.Array:
    """Return x with zero rows up to a multiple of 8 rows, which a copy of whole TMA tiles needs."""
    short = -x.shape[0] % 8
    if short == 0:
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, short, 0)] + [(0, 0, 0)] * (x.ndim - 1))


def pad_rows_above_8(x: jax.Array) -> jax.Array:
    """Return x padded as by `pad_rows`, or x itself if it has fewer than 8 rows.

    TMA fills a single incomplete tile with zeros, and stores only the rows of the result that exist.
    """
    return x if x.shape[0] < 8 else pad_rows(x)


def swizzled(dtype, columns: int | None = None) -> tuple:
    """Return the transforms of a shared-memory matrix that TMA copies and wgmma reads: tiles of 8 rows.

    columns: elements of a row in one tile, which is also the width of the swizzle; None: 128 bytes.
    """
    itemsize = jnp.dtype(dtype).itemsize
    columns = columns or 128 // itemsize
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * itemsize))  # pyright: ignore[reportAbstractUsage]


def store_transposed(value, ref, interpret: bool) -> None:
    """Store ref[...] = value.T for a value [M, N] of 8 bits in WGMMA's layout and a swizzled ref [N, M] in
    shared memory.

    Pallas stores 8-bit values along a row only. Here each thread writes its bytes to their swizzled
    addresses.
    """
    if interpret:
        ref.transpose((1, 0))[...] = value
        return
    swizzle = min(value.shape[0], 128)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(swizzled(value.dtype, swizzle))))
    def store(_, value, ref):
        i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        base = mgpu.utils.memref_ptr(ref)
        number = lambda x: arith.constant(i32, ir.IntegerAttr.get(i32, x))

        def put(byte, at):
            m, n = (arith.index_cast(i32, x) for x in at)
            # A tile has 8 rows of `swizzle` bytes. The swizzle permutes 16-byte chunks by the number of
            # their 128-byte line.
            width = value.shape[0]
            inside, tile = arith.remui(m, number(swizzle)), arith.divui(m, number(swizzle))
            row, line = arith.remui(n, number(8)), arith.divui(n, number(8))
            offset = arith.addi(arith.muli(row, number(swizzle)), inside)
            chunk = arith.andi(arith.shrui(offset, number(7)), number(swizzle // 16 - 1))
            offset = arith.xori(offset, arith.shli(chunk, number(4)))
            offset = arith.addi(offset, arith.muli(tile, number(8 * swizzle)))
            offset = arith.addi(offset, arith.muli(line, number(8 * width)))
            at = llvm.getelementptr(base.type, base, [offset], [-2147483648], i8, llvm.GEPNoWrapFlags.none)
            llvm.store(byte, at)

        bits = mgpu.FragmentedArray(
            _registers=_as_bytes(value.registers), _layout=value.layout, _is_signed=False
        )
        bits.foreach(put)

    store(value, ref)  # pyright: ignore[reportCallIssue]


def _as_bytes(registers):
    """Return the registers as vectors of 8-bit integers."""
    new = registers.copy()
    for at in range(new.size):
        (length,) = ir.VectorType(new.flat[at].type).shape
        new.flat[at] = vector.bitcast(
            ir.VectorType.get((length,), ir.IntegerType.get_signless(8)), new.flat[at]
        )
    return new
