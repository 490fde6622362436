"""Add up the (row, head) pairs of decode attention that are split between workers.

A worker increments a counter after it has written a part of a pair. The last worker adds up the parts in
the order of their keys, so the order of arrival does not matter and no worker waits. Most pairs are split
in two: the first part is an earlier worker's last work, and the rest is a later worker's first work, which
has long been written. So the worker of the first part looks at the counter first and keeps its part in
registers. This saves a store, a fence and a count, for which all workers would wait at the end of the
kernel. Pairs of a long row are split into dozens of parts. Neighboring parts form
groups: the last worker of a group adds up its parts, and the last group's worker adds up the groups, so
that many workers share the reads.
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


def is_last(arrived, place, others, one_fence: bool):
    """Increment arrived[place] after this warpgroup's writes. Return True for the last arrival, after
    `others`.

    The last warpgroup sees the writes of all others.

    one_fence: leave out the fences of all threads before and after the count. The barrier orders their writes
    before the count of thread 0, which releases them to the GPU and acquires those of other warpgroups.
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
        fence = "" if one_fence else "fence.acq_rel.gpu;"
        code = f"""{{
            .reg .pred p, q;
            .reg .b32 before;
            {fence}
            barrier.cta.sync $4, 128;
            setp.eq.u32 p, $2, 0;
            mov.b32 before, -1;
            @p atom.add.acq_rel.gpu.u32 before, [$1], 1;
            setp.eq.and.s32 p, before, $3, p;
            @p st.u32 [$1], 0;
            barrier.cta.red.or.pred q, $4, 128, p;
            {fence}
            selp.b32 $0, 1, 0, q;
            }}"""
        last = llvm.inline_asm(i32, operands, code, "=r,l,r,r,r,~{memory}", has_side_effects=True)
        return mgpu.FragmentedArray.splat(last, (), is_signed=True)

    return arrive(arrived.at[pl.ds(place, 1)], others) != 0  # pyright: ignore[reportCallIssue]


def peek(arrived, ender, requested):
    """Return, in thread 0 and if requested, the number of arrived parts of the pair that worker `ender` ends.

    The read does not stall before its first use.
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


def is_there(seen, arrived, ender, one_fence: bool):
    """Return True for the whole warpgroup if thread 0 saw, by `peek`, the one other part of the pair.

    Reset the counter then.

    one_fence: only thread 0 has a fence, before the barrier, and only if it saw the part.
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar)
    )
    def agree(_, counter, seen):
        i32 = ir.IntegerType.get_signless(32)
        before, after = ("@p fence.acq_rel.gpu;", "") if one_fence else ("", "fence.acq_rel.gpu;")
        code = f"""{{
            .reg .pred p, q;
            setp.eq.s32 p, $2, 1;
            @p st.u32 [$1], 0;
            {before}
            barrier.cta.red.or.pred q, $3, 128, p;
            {after}
            selp.b32 $0, 1, 0, q;
            }}"""
        operands = [
            mgpu.utils.memref_ptr(counter),
            seen.registers.item(),
            mgpu.utils.warpgroup_barrier_idx(sync=False),
        ]
        there = llvm.inline_asm(i32, operands, code, "=r,l,r,r,~{memory}", has_side_effects=True)
        return mgpu.FragmentedArray.splat(there, (), is_signed=True)

    return agree(arrived.at[pl.ds(ender, 1)], seen) != 0  # pyright: ignore[reportCallIssue]


def join(parts, levels, arrived, worker, ender, chain, finish, one_fence: bool = False):
    """Count the written part of a pair that `ender` ends after `chain` others, and add up parts for which
    it is the last.

    finish: called with the pair's output [H, cols] by the last worker. arrived: [2 * workers]; pairs count
    at their ender, groups count at workers + their last part.
    """
    first, size, groups = ender - chain, *_groups(chain + 1, *parts.shape[2:])
    begin = first + lax.div(worker - first, size) * size
    end = jnp.minimum(begin + size - 1, ender)

    def step(state):
        """Process the parts of the group. If this worker is last, process the groups of the pair."""
        start, stride, count, place, _ = state
        last, whole = is_last(arrived, place, count - 1, one_fence), place == ender

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
    """Return (parts of a group, groups).

    One worker reads few parts alone; many parts form groups of about sqrt(parts).
    """
    at_once = _together(h, cols)
    size = jnp.int32(at_once)
    for _ in range(6):  # up to 64 times as many, whose square exceeds the number of workers
        size = jnp.where(size * size < parts, 2 * size, size)
    size = jnp.where(parts > 5 * at_once, size, parts)
    return size, lax.div(parts + size - 1, size)


def _together(h, cols):
    """Return the parts in flight, for 48 registers of a thread."""
    return max(2, 48 * 128 // (h * cols))


def add_rest(level, out, parts, levels, ender):
    """Return the output of a pair of two parts, the first of which is (level, out) in registers, as
    `add_parts` adds.
    """
    state = _add(_add(_nothing(*out.shape), level, out), *_part(parts, levels, ender, 0))
    return _mean(state)


def add_parts(parts, levels, begin, stride, count, first, ender):
    """Return the sum (as in `_nothing`) of `count` parts of workers `first` to `ender`: of `begin` and
    every stride-th after it.

    Args:
      parts: [workers, 2, H, cols] float32: the normalized output of a part. Index 1 is the first part of a
        pair, which is some worker's last pair. Index 0 is any other part, which is a worker's first pair.
      levels: [workers, 2, cols]: log2 of the part's sum of weights, or LOWEST if all scores are -inf. Such
        a part has no weight next to others, and gives 0 without others.
    A group's sum replaces the group's last part.
    """
    h, cols = parts.shape[2:]
    together = _together(h, cols)

    def some(i, state):
        # Past the last part the ender's part is read again. A group is a multiple of the parts in flight, so
        # that no read reaches the next group, which may be unwritten.
        workers = [jnp.minimum(begin + (i * together + j) * stride, ender) for j in range(together)]
        read = [
            _part(parts, levels, worker, jnp.where(worker == first, jnp.int32(1), jnp.int32(0)))
            for worker in workers
        ]
        for j, (level, values) in enumerate(read):  # parts past the last one get the weight 0
            there = jnp.full(level.shape, i * together + j) < count
            state = _add(state, jnp.where(plgpu.layout_cast(there, _LEVEL), level, 2 * LOWEST), values)
        return state

    return lax.fori_loop(0, pl.cdiv(count, jnp.int32(together)), some, _nothing(h, cols))


def _put_group(parts, levels, end, state):
    """Write a group's sum in place of the group's last part, after other threads have read the part."""

    @plgpu.inline_mgpu()
    def wait(_):
        mgpu.warpgroup_barrier()

    wait()  # pyright: ignore[reportCallIssue]
    top, total, _ = state
    parts.at[end, 0][...] = _mean(state)
    levels.at[end, 0][...] = top + jnp.log2(total)


def _part(parts, levels, worker, begun):
    """Return (level, output) of a written part."""
    level = plgpu.load(levels.at[worker, begun], layout=_LEVEL, optimized=False)
    return level, plgpu.load(parts.at[worker, begun], layout=plgpu.Layout.WGMMA, optimized=False)


def _nothing(h, cols):
    """Return the state of no parts: (highest level, sum of weights, sum of weighted outputs)."""
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
    """Return a function that joins all pairs in a reference of the output, by a separate kernel.

    The interpreter cannot count arrivals and needs this.
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
