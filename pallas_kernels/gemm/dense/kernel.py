"""The dense GEMM kernel: one warpgroup copies the operands of every k step ahead, two multiply, item after
item.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.dense.epilogue import BOXES, Form, store
from pallas_kernels.gemm.tile_schedule import FIELDS
from pallas_kernels.hopper.layouts import swizzled


def scratch(form: Form, out_dtype) -> dict:
    """Return the kernel's shared memory and barriers."""
    tile, operand = form.tile, swizzled(jnp.bfloat16)
    arrays = dict(  # noqa: C408
        x_s=plgpu.SMEM((tile.stages, tile.rows, tile.depth), jnp.bfloat16, transforms=operand),
        w_s=plgpu.SMEM((tile.stages, tile.cols, tile.depth), jnp.bfloat16, transforms=operand),
        o_s=plgpu.SMEM((2, BOXES, 64, form.width), out_dtype, transforms=swizzled(out_dtype, form.width)),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        # A shared stage is overwritten when both CTAs of a pair have read it.
        empty=plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages)
        if tile.cluster == 1
        else plgpu.ClusterBarrier(collective_axes=("rank",), num_arrivals=2, num_barriers=tile.stages),
    )
    return arrays | ({"read": plgpu.Barrier(num_barriers=2 * BOXES)} if form.residual else {})


def multiply(
    items,
    x_ref,
    w_ref,
    o_ref,
    *,
    form: Form,
    x_s,
    w_s,
    o_s,
    full,
    empty,
    read=None,
    bias_ref=None,
    residual_ref=None,
    part_ref=None,
):
    """Run the kernel.

    items: (number of this worker's items, item(i) -> the fields of `FIELDS` and the first row of its
    weight's tile).
    """
    wg = lax.axis_index("wg")
    # The interpreter has no semaphores. It runs the CTAs in an order without waits.
    given = (
        pl.get_global(plgpu.SemaphoreType.REGULAR((2 * form.slots * form.tile.cluster,)))
        if form.slots and not form.interpret
        else None
    )

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(24, action="decrease")  # 24 + 2 · 240 = 3 · 168, the registers of the launch
        _copy(form.tile, items, x_ref, w_ref, x_s, w_s, full, empty)

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(240, action="increase")
        finish = functools.partial(store, form, wg, o_ref, o_s, part_ref, bias_ref, residual_ref, read)
        _compute(form, wg, items, x_s, w_s, full, empty, part_ref, given, finish)
        plgpu.wait_smem_to_gmem(0)


def table_items(work_ref, cols: int):
    """Return the items of a worker's row of a schedule's table."""
    worker, items = lax.axis_index("worker"), work_ref.shape[1]

    def item(i):
        row, column, *rest = (work_ref[worker, jnp.minimum(i, items - 1), field] for field in range(FIELDS))
        return row, column, *rest, column * cols

    return items, item


def _for_items(items, visit, step):
    """Return the step after visit(step, *item) for each item of this worker. The next item is read during
    the current one.
    """
    count, item = items

    def one(i, state):
        own, step = state
        following = item(i + 1)
        return following, lax.cond(own[3] > 0, lambda step: visit(step, *own), lambda step: step, step)

    return lax.fori_loop(0, count, one, (item(jnp.int32(0)), step))[1]


def _copy(tile, items, x_ref, w_ref, x_s, w_s, full, empty):
    """Copy the operands of every k step, ahead by the number of stages."""
    stages, depth = jnp.int32(tile.stages), tile.depth
    shared = None if tile.cluster == 1 else "rank"

    def visit(step, row, column, first, count, give, take, taken, weight):
        row = row * tile.cluster + lax.axis_index("rank")

        def copy(i, step):
            slot = lax.rem(step, stages)

            @pl.when(step >= stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            at = pl.ds((first + i) * depth, depth)
            plgpu.copy_gmem_to_smem(
                x_ref.at[pl.ds(row * tile.rows, tile.rows), at], x_s.at[slot], full.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                w_ref.at[pl.ds(weight, tile.cols), at], w_s.at[slot], full.at[slot], collective_axes=shared
            )
            return step + 1

        return lax.fori_loop(0, count, copy, step)

    steps = _for_items(items, visit, jnp.int32(0))

    # Wait for every arrival, because the interpreter reports a barrier that no thread waited for.
    @pl.loop(jnp.maximum(steps - stages, 0), steps)
    def _(step):
        plgpu.barrier_wait(empty.at[lax.rem(step, stages)])


def _compute(form, wg, items, x_s, w_s, full, empty, part_ref, given, finish):
    """Sum this warpgroup's half of every item, and pass the part on or store it."""
    half, stages, cluster = form.half, jnp.int32(form.tile.stages), form.tile.cluster
    rank = lax.axis_index("rank")

    def visit(step, row, column, first, count, give, take, taken, weight):
        def flag(part):
            return given.at[(part * cluster + rank) * 2 + wg]

        def product(acc):
            def multiply(i, step):
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, x_s.at[slot, pl.ds(wg * half, half)], w_s.at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(1)

                @pl.when(i > 0)
                def _():  # the step before this one is done
                    plgpu.barrier_arrive(empty.at[lax.rem(step + stages - 1, stages)])

                return step + 1

            end = lax.fori_loop(0, count, multiply, step)
            y = acc[...]
            plgpu.barrier_arrive(empty.at[lax.rem(end - 1, stages)])
            if not form.slots:
                finish(y, row * cluster + rank, column, 0, 0)
                return

            @pl.when(give >= 0)
            def _():
                part_ref[give * cluster + rank, wg] = y
                if given is not None:
                    plgpu.semaphore_signal(flag(give), memory_scope="gpu")

            @pl.when(give < 0)
            def _():
                if given is not None:

                    @pl.loop(take, take + taken)
                    def _(part):
                        plgpu.semaphore_wait(flag(part), memory_scope="gpu")

                finish(y, row * cluster + rank, column, take, taken)

        pl.run_scoped(product, plgpu.ACC((half, form.tile.cols), jnp.float32))
        return step + count

    _for_items(items, visit, jnp.int32(0))
