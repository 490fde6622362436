"""Adds up the (row, head) pairs of decode attention that were cut between workers.

Each worker counts itself in when it has written a part of a pair; whoever comes last adds the parts up, in
the order of their keys, whatever the order they came in. Nobody waits for anybody. Most pairs are cut in two:
an earlier worker's last piece of work is the first part, a later one's first is the rest, so the rest has
long been written. Who comes to such a pair's first part looks before it writes, and keeps its own part in
registers: no store, no fence, no count, which all workers would wait for together, at the end of the kernel.
A long row's pairs are cut in dozens. Their neighbours make groups: the last of a group adds up its parts, the
last of the groups the groups, so that the parts are read by many and not by one.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.attention.decode import products as decode_parts
from pallas_kernels.attention.paged import LOWEST
from pallas_kernels.hopper.layouts import LANE

_LEVEL = plgpu.Layout.WGMMA.reduce(0)


def is_last(arrived, place, others):
    """Counts the warpgroup in at arrived[place], after what it wrote. True for the last one, behind `others`,
    which sees what all wrote.
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar)
    )
    def arrive(_, counter, others):
        i32 = ir.IntegerType.get_signless(32)
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, i32))
        operands = [
            mgpu.utils.memref_ptr(counter),
            thread,
            others.registers.item(),
            mgpu.utils.warpgroup_barrier_idx(sync=False),
        ]
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

    return arrive(arrived.at[pl.ds(place, 1)], others) != 0  # pyright: ignore[reportCallIssue]


def peek(arrived, ender, requested):
    """In thread 0, if requested, how many parts of the pair that worker `ender` ends have arrived; nobody waits
    for it before it is used.
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar)
    )
    def read(_, counter, requested):
        i32 = ir.IntegerType.get_signless(32)
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, i32))
        code = """{
            .reg .pred p;
            setp.eq.u32 p, $2, 0;
            setp.ne.and.s32 p, $3, 0, p;
            mov.b32 $0, 0;
            @p ld.relaxed.gpu.u32 $0, [$1];
            }"""
        operands = [mgpu.utils.memref_ptr(counter), thread, requested.registers.item()]
        seen = llvm.inline_asm(i32, operands, code, "=&r,l,r,r,~{memory}", has_side_effects=True)
        return mgpu.FragmentedArray.splat(seen, (), is_signed=True)

    return read(arrived.at[pl.ds(ender, 1)], requested.astype(jnp.int32))  # pyright: ignore[reportCallIssue]


def is_there(seen, arrived, ender):
    """True for the whole warpgroup if thread 0 had `peek`ed that one other part has arrived, of two; then
    nobody counts any more.
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar)
    )
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
        operands = [
            mgpu.utils.memref_ptr(counter),
            seen.registers.item(),
            mgpu.utils.warpgroup_barrier_idx(sync=False),
        ]
        there = llvm.inline_asm(i32, operands, code, "=r,l,r,r,~{memory}", has_side_effects=True)
        return mgpu.FragmentedArray.splat(there, (), is_signed=True)

    return agree(arrived.at[pl.ds(ender, 1)], seen) != 0  # pyright: ignore[reportCallIssue]


def join(parts, levels, arrived, worker, ender, chain, finish):
    """Counts the part in that the worker has written, of a pair that `ender` ends after `chain` others; adds
    up what it is the last of.

    finish: called with the pair's output [H, cols], by the last of all. arrived [2 * workers]: of whole pairs
    at their ender, and behind all of these of groups at their last part.
    """
    first, size, groups = ender - chain, *_groups(chain + 1, *parts.shape[2:])
    begin = first + lax.div(worker - first, size) * size
    end = jnp.minimum(begin + size - 1, ender)

    def step(state):
        """Of the group's parts; then, if the last of them was this worker's, of the pair's groups."""
        start, stride, count, place, _ = state
        last, whole = is_last(arrived, place, count - 1), place == ender

        @pl.when(last)
        def _():
            state = add_parts(parts, levels, start, stride, count, first, ender)
            pl.when(whole)(lambda: finish(_mean(state)))
            pl.when(~whole)(lambda: _put_group(parts, levels, end, state))

        return first + size - 1, size, groups, ender, jnp.where(last & ~whole, jnp.int32(1), jnp.int32(0))

    of_parts = (
        begin,
        jnp.int32(1),
        end - begin + 1,
        jnp.where(groups == 1, ender, parts.shape[0] + end),
        jnp.int32(1),
    )
    lax.while_loop(lambda state: state[-1] != 0, step, of_parts)


def _groups(parts, h, cols):
    """(parts of a group, groups): one group, or where one worker would read for long about as many as a group
    has parts.
    """
    at_once = _together(h, cols)
    size = jnp.int32(at_once)
    for _ in range(6):  # 64 times as many, whose square is more than the workers of a GPU
        size = jnp.where(size * size < parts, 2 * size, size)
    size = jnp.where(parts > 5 * at_once, size, parts)
    return size, lax.div(parts + size - 1, size)


def _together(h, cols):
    """Parts in flight: 48 registers of a thread."""
    return max(2, 48 * 128 // (h * cols))


def add_rest(level, out, parts, levels, ender):
    """The output of a pair of two parts, the first of which is (level, out) in registers: the sums of
    `add_parts`, in its order.
    """
    state = _add(_add(_nothing(*out.shape), level, out), *_part(parts, levels, ender, 0))
    return _mean(state)


def add_parts(parts, levels, begin, stride, count, first, ender):
    """The sum, as `_nothing` has it, of `count` parts of a pair of workers `first` to `ender`: those of
    `begin` and every stride-th after.

    parts [workers, 2, H, cols] float32: the output of a part alone. levels [workers, 2, cols]: log2 of its
    weights' sum, LOWEST where all its scores are -inf: such a part weighs nothing beside others, and where
    there are no others their mean is 0. 1 is a pair's first part, some worker's last pair; 0 all others, a
    worker's first one. That of a group takes the place of its last part.
    """
    h, cols = parts.shape[2:]
    together = _together(h, cols)

    def some(i, state):
        # Behind the last is the ender's, again. Groups are whole reads: none holds a part of the next, which
        # may not be written yet.
        workers = [jnp.minimum(begin + (i * together + j) * stride, ender) for j in range(together)]
        read = [
            _part(parts, levels, worker, jnp.where(worker == first, jnp.int32(1), jnp.int32(0)))
            for worker in workers
        ]
        for j, (level, values) in enumerate(read):  # a weight of 0 for those past the last
            there = jnp.full(level.shape, i * together + j) < count
            state = _add(state, jnp.where(plgpu.layout_cast(there, _LEVEL), level, 2 * LOWEST), values)
        return state

    return lax.fori_loop(0, pl.cdiv(count, jnp.int32(together)), some, _nothing(h, cols))


def _put_group(parts, levels, end, state):
    """Writes a group's sum in the place of its last part, which other threads may still be reading."""

    @plgpu.inline_mgpu()
    def wait(_):
        mgpu.warpgroup_barrier()

    wait()  # pyright: ignore[reportCallIssue]
    top, total, _ = state
    parts.at[end, 0][...] = _mean(state)
    levels.at[end, 0][...] = top + jnp.log2(total)


def _part(parts, levels, worker, begun):
    """(level, output) of a part that was written."""
    level = plgpu.load(levels.at[worker, begun], layout=_LEVEL, optimized=False)
    return level, plgpu.load(parts.at[worker, begun], layout=plgpu.Layout.WGMMA, optimized=False)


def _nothing(h, cols):
    """(the highest level, the sum of weights, of weighted outputs) of no parts."""
    by_head = lambda x: plgpu.layout_cast(jnp.full((cols,), x, jnp.float32), _LEVEL)
    return (
        by_head(LOWEST),
        by_head(0.0),
        plgpu.layout_cast(jnp.zeros((h, cols), jnp.float32), plgpu.Layout.WGMMA),
    )


def _add(state, level, part):
    top, total, out = state
    new_top = jnp.maximum(top, level)
    keep, weight = jnp.exp2(top - new_top), jnp.exp2(level - new_top)
    out = out * lax.broadcast_in_dim(keep, out.shape, [1]) + part * lax.broadcast_in_dim(
        weight, out.shape, [1]
    )
    return new_top, total * keep + weight, out


def _mean(state):
    _, total, out = state
    return out / lax.broadcast_in_dim(total, out.shape, [1])


def join_afterwards(parts, levels, *, work, group, kv, e4m3, interpret):
    """A function that does the same to a reference of the output, by a kernel of its own: for the
    interpreter, which cannot count workers in.
    """
    workers, _, h, cols = parts.shape

    def body(parts_ref, levels_ref, pieces_ref, chains_ref, o_ref, o_s):
        worker = lax.axis_index("worker")
        chain, row, head = chains_ref[worker], pieces_ref[worker, 0], pieces_ref[worker, 1]

        @pl.when(chain > 0)
        def _():
            first, size, groups = worker - chain, *_groups(chain + 1, h, cols)

            def add_group(i, state):
                begin = first + i * size
                end = jnp.minimum(begin + size - 1, worker)
                top, total, out = add_parts(
                    parts_ref, levels_ref, begin, jnp.int32(1), end - begin + 1, first, worker
                )
                return _add(state, top + jnp.log2(total), _mean((top, total, out)))

            decode_parts.put(o_s, _mean(lax.fori_loop(0, groups, add_group, _nothing(h, cols))))
            decode_parts.copy_heads(o_s, o_ref, (row * kv + head) * group, group, e4m3)
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
