"""Register operations of `chunk_attention` for which Pallas has no primitive, with equivalents for the
interpreter.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array as fragmented
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf, vector

_WGMMA, _WGMMA_8BIT = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_8BIT


def as_operand(x, interpret: bool):
    """Return x [64, n] of 8 bits, in the layout of an accumulator, in the layout of wgmma's first operand;
    n a multiple of 32.
    """
    if interpret:
        return x
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=_WGMMA_8BIT)
    return plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=result)(lambda _, x: _to_operand(x))(x)


def rescaled(x, factor, interpret: bool):
    """Return x [64, n] times factor [64] along the rows.

    A warp with only factors of 1, the usual case, skips the product.
    """
    if interpret:
        return x * lax.broadcast_in_dim(factor, x.shape, [0])
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=_WGMMA)
    return plgpu.inline_mgpu(arg_types=(_WGMMA, _WGMMA.reduce(1)), return_type=result)(
        lambda _, x, factor: _rescale(x, factor)
    )(x, factor)


def mark(rows, place, interpret: bool):
    """Set place [1] int32 in shared memory to 1 if any of rows [64] int32 is not 0."""
    if interpret:
        place[...] = jnp.maximum(place[...], jnp.max(rows, keepdims=True))
        return
    store = plgpu.inline_mgpu(arg_types=(_WGMMA.reduce(1), plgpu.RefType()))
    store(lambda _, rows, place: _mark(rows, place))(rows, place)


def _i32(x: int):
    return arith.constant(ir.IntegerType.get_signless(32), x)


def _to_operand(x):
    """Exchange columns between the four threads of a row.

    Thread t holds columns 2t, 2t + 1 of each 8 columns, and needs columns 4t .. 4t + 3 of each 16. With
    four columns of two groups of 16 (a, b) in one register each, two shuffles suffice. A thread sends its
    first 8 columns' pair of a and of b to a thread in the lower half, and its second 8 columns' pair to a
    thread in the upper half.
    """
    i32, four = ir.IntegerType.get_signless(32), ir.VectorType.get((4,), x.mlir_dtype)
    t = arith.remui(utils.thread_idx(), _i32(4))
    odd = arith.cmpi(arith.CmpIPredicate.ne, arith.remui(t, _i32(2)), _i32(0))
    upper = arith.cmpi(arith.CmpIPredicate.uge, t, _i32(2))
    first_8, last_8 = _i32(0x5410), _i32(0x7632)  # bytes 0, 1 or 2, 3 of each of two registers
    sent_first, sent_then = arith.select(odd, last_8, first_8), arith.select(odd, first_8, last_8)
    of_a, of_b = arith.select(upper, _i32(0x1054), first_8), arith.select(upper, _i32(0x3276), last_8)
    turned = arith.ori(arith.shli(arith.remui(t, _i32(2)), _i32(1)), arith.divui(t, _i32(2)))
    row = arith.subi(arith.remui(utils.thread_idx(), _i32(32)), t)
    from_first, from_then = arith.addi(row, turned), arith.addi(row, arith.xori(turned, _i32(1)))

    def shuffle(value, source):
        text = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
        return utils.inline_ptx(text, value, source, result_types=i32, has_side_effects=True, convergent=True)

    rows, columns = x.shape
    pairs = x.registers.reshape(columns // 8, 2)  # by 8 columns and by 8 rows
    quads = np.empty((columns // 16, 2), object)
    for group in range(0, columns // 16, 2):
        for half in range(2):
            a, b = (
                utils.bitcast(utils.vector_concat([pairs[2 * g, half], pairs[2 * g + 1, half]]), i32)
                for g in (group, group + 1)
            )
            one, two = (
                shuffle(utils.prmt(a, b, sent_first), from_first),
                shuffle(utils.prmt(a, b, sent_then), from_then),
            )
            quads[group, half] = utils.bitcast(utils.prmt(one, two, of_a), four)
            quads[group + 1, half] = utils.bitcast(utils.prmt(one, two, of_b), four)
    layout = fragmented.WGMMA_LAYOUT_8BIT
    return fragmented.FragmentedArray(
        _registers=quads.reshape(layout.registers_shape((rows, columns))), _layout=layout, _is_signed=None
    )


def _scalars(x):
    """Yield the values of an array with one value a register, as scalars."""
    for register in x.registers.flat:
        while isinstance(register.type, ir.VectorType):
            register = vector.extract(
                register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0])
            )
        yield register


def _block(block: ir.Block | None) -> ir.Block:
    assert block is not None
    return block


def _rescale(x, factor):
    i32, one = ir.IntegerType.get_signless(32), arith.constant(ir.F32Type.get(), 1.0)
    changed = [arith.extui(i32, arith.cmpf(arith.CmpFPredicate.UNE, f, one)) for f in _scalars(factor)]
    vote = (
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
    )
    any_changed = utils.inline_ptx(
        vote, arith.ori(*changed), result_types=i32, has_side_effects=True, convergent=True
    )
    registers = list(x.registers.flat)
    branch = scf.IfOp(
        arith.cmpi(arith.CmpIPredicate.ne, any_changed, _i32(0)), [r.type for r in registers], has_else=True
    )
    with ir.InsertionPoint(_block(branch.then_block)):
        scf.yield_(list((x * factor.broadcast_in_dim(x.shape, (0,), x.layout)).registers.flat))
    with ir.InsertionPoint(_block(branch.else_block)):
        scf.yield_(registers)
    registers = np.asarray(list(branch.results), dtype=object).reshape(x.registers.shape)
    return fragmented.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)


def _mark(rows, place):
    marked = arith.cmpi(arith.CmpIPredicate.ne, arith.ori(*_scalars(rows)), _i32(0))
    with ir.InsertionPoint(_block(scf.IfOp(marked).then_block)):
        memref.store(_i32(1), place, [arith.constant(ir.IndexType.get(), 0)])
        scf.yield_([])
