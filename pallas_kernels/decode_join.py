"""Adds up the (row, head) pairs of decode attention that were cut between workers.

Each worker counts itself in when it has written a part of a pair; whoever comes last adds the parts up, in the order of their keys,
whatever the order they came in. Nobody waits for anybody. Most pairs are cut in two: an earlier worker's last piece of work is the first
part, a later one's first is the rest, so the rest has long been written. Who comes to such a pair's first part looks before it writes,
and keeps its own part in registers: no store, no fence, no count, which all workers would wait for together, at the end of the kernel.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import decode_parts
from pallas_kernels.paged import LANE, LOWEST

_LEVEL = plgpu.Layout.WGMMA.reduce(0)


def is_last(arrived, ender, chain):
    """Counts the warpgroup in at arrived[ender], after what it wrote. True for the last of the chain + 1 parts, which sees all others'."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar))
    def arrive(_, counter, chain):
        i32 = ir.IntegerType.get_signless(32)
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, i32))
        operands = [mgpu.utils.memref_ptr(counter), thread, chain.registers.item(), mgpu.utils.warpgroup_barrier_idx(sync=False)]
        code = """{
            .reg .pred p, q;
            .reg .b32 before;
            fence.acq_rel.gpu;
            barrier.cta.sync $4, 128;
            setp.eq.u32 p, $2, 0;
            mov.b32 before, -1;
            @p atom.add.acq_rel.gpu.u32 before, [$1], 1;
            setp.eq.and.s32 p, before, $3, p;
            @p st.u32 [$1], 0;
            barrier.cta.red.or.pred q, $4, 128, p;
            fence.acq_rel.gpu;
            selp.b32 $0, 1, 0, q;
            }"""
        last = llvm.inline_asm(i32, operands, code, "=r,l,r,r,r,~{memory}", has_side_effects=True)
        return mgpu.FragmentedArray.splat(last, (), is_signed=True)

    return arrive(arrived.at[pl.ds(ender, 1)], chain) != 0  # pyright: ignore[reportCallIssue]


def peek(arrived, ender, asked):
    """In thread 0, if asked, how many parts of the pair that worker `ender` ends have arrived; nobody waits for it before it is used."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar))
    def read(_, counter, asked):
        i32 = ir.IntegerType.get_signless(32)
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, i32))
        code = """{
            .reg .pred p;
            setp.eq.u32 p, $2, 0;
            setp.ne.and.s32 p, $3, 0, p;
            mov.b32 $0, 0;
            @p ld.relaxed.gpu.u32 $0, [$1];
            }"""
        operands = [mgpu.utils.memref_ptr(counter), thread, asked.registers.item()]
        seen = llvm.inline_asm(i32, operands, code, "=&r,l,r,r,~{memory}", has_side_effects=True)
        return mgpu.FragmentedArray.splat(seen, (), is_signed=True)

    return read(arrived.at[pl.ds(ender, 1)], asked.astype(jnp.int32))  # pyright: ignore[reportCallIssue]


def is_there(seen, arrived, ender):
    """True for the whole warpgroup if thread 0 had `peek`ed that one other part has arrived, of two; then nobody counts any more."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar))
    def agree(_, counter, seen):
        i32 = ir.IntegerType.get_signless(32)
        code = """{
            .reg .pred p, q;
            setp.eq.s32 p, $2, 1;
            @p st.u32 [$1], 0;
            barrier.cta.red.or.pred q, $3, 128, p;
            fence.acq_rel.gpu;
            selp.b32 $0, 1, 0, q;
            }"""
        operands = [mgpu.utils.memref_ptr(counter), seen.registers.item(), mgpu.utils.warpgroup_barrier_idx(sync=False)]
        there = llvm.inline_asm(i32, operands, code, "=r,l,r,r,~{memory}", has_side_effects=True)
        return mgpu.FragmentedArray.splat(there, (), is_signed=True)

    return agree(arrived.at[pl.ds(ender, 1)], seen) != 0  # pyright: ignore[reportCallIssue]


def add_rest(level, out, parts, levels, ender):
    """`add_parts` of two, the first of which is (level, out) in registers: the same sums in the same order."""
    state = _add(_add(_nothing(*out.shape), level, out), *_part(parts, levels, ender, 0))
    return _mean(state)


def add_parts(parts, levels, ender, chain):
    """The output [H, cols] of the pair that worker `ender` ends, of which `chain` earlier workers hold parts.

    parts [workers, 2, H, cols] float32: the output of a part alone. levels [workers, 2, cols]: log2 of its weights' sum, LOWEST where all
    its scores are -inf: such a part weighs nothing beside others, and where there are no others their mean is 0. 1 is a pair's first part,
    some worker's last pair; 0 all others, a worker's first one.
    """
    h, cols = parts.shape[2:]
    together = max(2, 48 * 128 // (h * cols))  # parts in flight: 48 registers of a thread

    def some(i, state):
        numbers = [jnp.minimum(i * together + j, chain) for j in range(together)]
        read = [_part(parts, levels, ender - chain + n, jnp.where(n == 0, jnp.int32(1), jnp.int32(0))) for n in numbers]
        for j, (level, values) in enumerate(read):  # a weight of 0 for those past the chain
            there = jnp.full(level.shape, i * together + j) <= chain
            state = _add(state, jnp.where(plgpu.layout_cast(there, _LEVEL), level, 2 * LOWEST), values)
        return state

    return _mean(lax.fori_loop(0, pl.cdiv(chain + 1, jnp.int32(together)), some, _nothing(h, cols)))


def _part(parts, levels, worker, begun):
    """(level, output) of a part that was written."""
    level = plgpu.load(levels.at[worker, begun], layout=_LEVEL, optimized=False)
    return level, plgpu.load(parts.at[worker, begun], layout=plgpu.Layout.WGMMA, optimized=False)


def _nothing(h, cols):
    """(the highest level, the sum of weights, of weighted outputs) of no parts."""
    by_head = lambda x: plgpu.layout_cast(jnp.full((cols,), x, jnp.float32), _LEVEL)  # noqa: E731
    return by_head(LOWEST), by_head(0.0), plgpu.layout_cast(jnp.zeros((h, cols), jnp.float32), plgpu.Layout.WGMMA)


def _add(state, level, part):
    top, total, out = state
    new_top = jnp.maximum(top, level)
    keep, weight = jnp.exp2(top - new_top), jnp.exp2(level - new_top)
    out = out * lax.broadcast_in_dim(keep, out.shape, [1]) + part * lax.broadcast_in_dim(weight, out.shape, [1])
    return new_top, total * keep + weight, out


def _mean(state):
    _, total, out = state
    return out / lax.broadcast_in_dim(total, out.shape, [1])


def join_afterwards(parts, levels, *, work, group, kv, eight, interpret):
    """A function that does the same to a reference of the output, by a kernel of its own: for the interpreter, which cannot count
    workers in."""
    workers, _, h, cols = parts.shape

    def body(parts_ref, levels_ref, pieces_ref, chains_ref, o_ref, o_s):
        worker = lax.axis_index("worker")
        chain, row, head = chains_ref[worker], pieces_ref[worker, 0], pieces_ref[worker, 1]

        @pl.when(chain > 0)
        def _():
            decode_parts.put(o_s, add_parts(parts_ref, levels_ref, worker, chain))
            decode_parts.copy_heads(o_s, o_ref, (row * kv + head) * group, group, eight)
            plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=(workers,),
        grid_names=("worker",),
        scratch_types={"o_s": plgpu.SMEM((cols, h), jnp.bfloat16)},
        compiler_params=LANE,
        kernel_name="decode_attention_join",
        interpret=interpret,
    )
    return lambda o: kernel(parts, levels, work.pieces, work.chains, o)
