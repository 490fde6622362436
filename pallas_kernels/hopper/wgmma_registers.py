"""MLIR helpers for kernels that load wgmma's first operand from shared memory into registers themselves."""

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm


def i32() -> ir.Type:
    """Return the MLIR type i32."""
    return ir.IntegerType.get_signless(32)


def const(value: int) -> ir.Value:
    """Return an i32 constant."""
    return arith.constant(i32(), ir.IntegerAttr.get(i32(), value))


def place() -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return (warp of the warpgroup, row in a tile of 8, lane of 4 in this row) of the thread in wgmma's
    first operand.
    """
    thread = arith.remui(mgpu.utils.thread_idx(), const(128))
    lane = arith.andi(thread, const(31))
    return arith.shrui(thread, const(5)), arith.shrui(lane, const(2)), arith.andi(lane, const(3))


def in_tile(row: ir.Value, quad: ir.Value, part: int) -> ir.Value:
    """Return the byte offset of a thread's 8 bytes of an Int4 group in a tile of 8 rows of 128 bytes.

    part: which of the tile's four groups. The swizzle places a 16-byte piece at its number xor the row.
    """
    piece = arith.xori(arith.xori(arith.shrui(quad, const(1)), const(2 * part)), row)
    inside = arith.addi(arith.muli(row, const(128)), arith.muli(piece, const(16)))
    return arith.addi(inside, arith.muli(arith.andi(quad, const(1)), const(8)))


def read_words(ref: ir.Value, offset: ir.Value, count: int, plus: int = 0) -> list[ir.Value]:
    """Load `count` 32-bit words from a byte offset in shared memory that is a multiple of their size.

    plus: bytes added to the offset. They are a part of the instruction, and take no register.
    """
    loaded = llvm.load(ir.VectorType.get((count,), i32()), at(ref, offset, plus), alignment=4 * count)
    return [llvm.extractelement(loaded, const(i)) for i in range(count)]


def at(ref: ir.Value, offset: ir.Value, plus: int = 0) -> ir.Value:
    """Return the address of a byte offset in shared memory, `plus` bytes further."""
    base, byte = mgpu.utils.memref_ptr(ref), ir.IntegerType.get_signless(8)
    address = llvm.getelementptr(base.type, base, [offset], [-(2**31)], byte, 0)
    return llvm.getelementptr(base.type, address, [], [plus], byte, 0) if plus else address
