"""Chunk attention of heads of 512 columns (Gemma 4), for a cache of bfloat16.

The output of 64 rows and 512 columns fills the registers of two warpgroups, so a tile has 64 query rows and
a CTA has four warpgroups:

    0     multiplies queries and keys, and computes the weights of a page
    1, 2  multiply the weights and the values, half of the columns each
    3     copies queries and pages

Queries, a page of keys and a page of values have 64 KiB each, which leaves no room for a second page. Keys
of the next page are copied while the values of this page are multiplied. A tile computes 8.4 MFLOP with the
128 KiB of a page. At the full rate of their tensor cores the SMs would read 15 TB/s from the L2, more than
it has. A tile of 128 rows would read half as much, but its output of 256 KiB fills all registers of an SM.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.chunk.registers import rescaled
from pallas_kernels.attention.chunk.rows import WIDTH, fill_gaps, store_rows
from pallas_kernels.attention.chunk.work_list import ChunkWork
from pallas_kernels.attention.paged import LEAST, LOWEST, PAGE, blank, capped, flat
from pallas_kernels.attention.tiles import WIDEST
from pallas_kernels.attention.two_halves import (
    REGISTERS,
    ROW,
    ROWS,
    WGMMA,
    add_products,
    by_row,
    column_blocks,
    full_rows,
    hidden_zero,
    no_sums,
    soften,
)
from pallas_kernels.hopper.layouts import LANE, pad_rows, swizzled

_HALF = WIDEST // 2  # columns of one warpgroup's values


@dataclasses.dataclass(frozen=True)
class WideForm:
    """The parameters that the kernel's code depends on.

    heads: query heads. kv: KV heads. window, soft_cap: as for `chunk_attention`.
    """

    heads: int
    kv: int
    sms: int
    scale: float
    window: int | None
    soft_cap: float | None
    interpret: bool


def wide_chunk_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    work: ChunkWork,
    form: WideForm,
    interpret,
) -> jax.Array:
    """Return the attention [T, N, 512] of the tiles of a work list of 64 rows and keys; 0 elsewhere."""
    t, n, h = q.shape
    kernel = plgpu.kernel(
        functools.partial(_attend, form=form),
        out_type=jax.ShapeDtypeStruct((t, n * h // WIDTH, WIDTH), q.dtype),
        grid=(form.sms,),
        grid_names=("cta",),
        num_threads=4,
        thread_name="wg",
        scratch_types=_scratch(),
        compiler_params=dataclasses.replace(LANE, reduction_scratch_bytes=0),
        kernel_name=f"wide_chunk_attention_{form.sms}",
        interpret=interpret,
    )
    tables = page_table.astype(jnp.int32), work.tiles, work.count, work.gaps
    return kernel(pad_rows(q), flat(k_pages), flat(v_pages), *tables).reshape(t, n, h)


def _scratch() -> dict:
    """Return the kernel's shared memory and barriers."""
    tiled = swizzled(jnp.bfloat16)
    return {
        "q_s": plgpu.SMEM((1, ROWS, WIDEST), jnp.bfloat16, transforms=tiled),
        "k_s": plgpu.SMEM((1, PAGE, WIDEST), jnp.bfloat16, transforms=tiled),
        "v_s": plgpu.SMEM((2, PAGE, _HALF), jnp.bfloat16, transforms=tiled),
        "weights_s": plgpu.SMEM((ROWS, PAGE), jnp.bfloat16, transforms=tiled),
        # The factors of the outputs before a page, and the sums of weights.
        "factors_s": plgpu.SMEM((2, ROWS), jnp.float32),
        "o_s": plgpu.SMEM((2, 1, ROWS, WIDTH), jnp.bfloat16),  # plain rows, to store a chunk's end row by row
        "q_full": plgpu.Barrier(),
        "q_empty": plgpu.Barrier(),
        "k_full": plgpu.Barrier(),
        "k_empty": plgpu.Barrier(),
        "v_full": plgpu.Barrier(num_arrivals=2),
        "v_empty": plgpu.Barrier(num_arrivals=2),
        "weights_full": plgpu.Barrier(),
        "weights_empty": plgpu.Barrier(num_arrivals=2),
    }


def _attend(*refs, form: WideForm, **shared):
    """Run the kernel.

    refs: queries [T, N, 512], keys and values [P * K * 64, 512], page table, the work list's tiles, count and
    gaps; then o [T, N * 8, 64].
    """
    names = ("q", "k", "v", "table", "tiles", "count", "gaps", "o")
    r = types.SimpleNamespace(**dict(zip(names, refs, strict=True)), **shared)
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")

    @pl.when(wg == 0)
    def _():
        plgpu.set_max_registers(REGISTERS["scores"], action="increase")
        _score_pages(r, form, cta)

    @pl.when((wg == 1) | (wg == 2))
    def _():
        plgpu.set_max_registers(REGISTERS["values"], action="increase")
        _sum_values(r, form, cta, wg - 1)

    @pl.when(wg == 3)
    def _():
        plgpu.set_max_registers(REGISTERS["copies"], action="decrease")
        _copy_pages(r, form, cta)


def _for_items(r, form: WideForm, cta, visit, carry):
    """Return the carry after visit(carry, head, *fields of the tile) for the items of a CTA.

    An item is a tile and a head. A CTA takes items back and forth over the list, whose first tiles are the
    longest.
    """
    items = r.count[0] * form.heads

    def round_(i, carry):
        place = jnp.where(lax.rem(i, jnp.int32(2)) == 0, cta, form.sms - 1 - cta)
        item = i * form.sms + place
        tile = jnp.minimum(lax.div(item, jnp.int32(form.heads)), r.tiles.shape[0] - 1)
        head = lax.rem(item, jnp.int32(form.heads))
        fields = tuple(r.tiles[tile, field] for field in range(7))
        return lax.cond(item < items, lambda carry: visit(carry, head, *fields), lambda carry: carry, carry)

    return lax.fori_loop(0, lax.div(items + form.sms - 1, jnp.int32(form.sms)), round_, carry)


def _copy_pages(r, form: WideForm, cta):
    """Copy the queries of the CTA's items and their pages, in the order of their use."""

    def visit(carry, head, first, begin, end, row, position, block, block_end):
        done, step = carry
        kv_head = lax.div(head, jnp.int32(form.heads // form.kv))

        def copy(i, state):
            step, page = state
            following = r.table[row, jnp.minimum(i + 1, block_end - 1)]  # read ahead, to hide the latency
            keys = pl.ds((page * form.kv + kv_head) * PAGE, PAGE)

            @pl.when(step > 0)
            def _():
                plgpu.barrier_wait(r.k_empty)

            plgpu.copy_gmem_to_smem(r.k.at[keys], r.k_s.at[0], r.k_full)

            @pl.when(i == block)
            def _():
                pl.when(done > 0)(lambda: plgpu.barrier_wait(r.q_empty))
                tokens = pl.ds(pl.multiple_of(first, 8), ROWS)
                plgpu.copy_gmem_to_smem(r.q.at[tokens, head], r.q_s.at[0], r.q_full)

            @pl.when(step > 0)
            def _():
                plgpu.barrier_wait(r.v_empty)

            for half in range(2):
                columns = pl.ds(half * _HALF, _HALF)
                plgpu.copy_gmem_to_smem(r.v.at[keys, columns], r.v_s.at[half], r.v_full)
            return step + 1, following

        step, _unused = lax.fori_loop(block, block_end, copy, (step, r.table[row, block]))
        return done + 1, step

    done, step = _for_items(r, form, cta, visit, (jnp.int32(0), jnp.int32(0)))
    # Wait for every arrival, because the interpreter reports a barrier that no thread waited for.
    for count, barriers in ((done, (r.q_empty,)), (step, (r.k_empty, r.v_empty))):

        @pl.when(count > 0)
        def _(barriers=barriers):
            for barrier in barriers:
                plgpu.barrier_wait(barrier)


def _seen(ahead, window):
    """Return [64, 64] bool: the keys of a page that each row sees. ahead: the first row's place in the page.

    The bounds of a row take few registers. A mask of each pair of row and key would take one for each.
    """
    last = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) + ahead
    key = plgpu.broadcasted_iota(jnp.int32, (ROWS, PAGE), 1, layout=WGMMA)
    seen = key <= by_row(last, key.shape)
    return seen if window is None else seen & (key > by_row(last - window, key.shape))


def _score_pages(r, form: WideForm, cta):
    """Compute the weights of the pages of the CTA's items."""

    def scores_of():
        nothing = hidden_zero(form.interpret)

        def product(acc):
            plgpu.wgmma(acc, r.q_s.at[nothing], r.k_s.at[nothing].transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(product, plgpu.ACC((ROWS, PAGE), jnp.float32))

    def visit(steps, head, first, begin, end, row, position, block, block_end):
        plgpu.barrier_wait(r.q_full)

        def step(i, state):
            top, total, steps = state
            plgpu.barrier_wait(r.k_full)
            scores, factor = capped(scores_of(), form.scale, form.soft_cap)
            plgpu.barrier_arrive(r.k_empty)
            scores = jnp.where(_seen(position - i * PAGE, form.window), scores * factor, -jnp.inf)
            top, total, keep, weights = soften(scores, top, total)
            weights = weights.astype(jnp.bfloat16)

            @pl.when(steps > 0)
            def _():
                plgpu.barrier_wait(r.weights_empty)

            r.weights_s[...] = weights
            r.factors_s.at[0][...] = keep

            @pl.when(i + 1 == block_end)
            def _():
                r.factors_s.at[1][...] = total.sum(axis=1)

            plgpu.commit_smem()
            plgpu.barrier_arrive(r.weights_full)
            return top, total, steps + 1

        _top, _total, steps = lax.fori_loop(block, block_end, step, (full_rows(LOWEST), no_sums(), steps))
        plgpu.barrier_arrive(r.q_empty)
        return steps

    steps = _for_items(r, form, cta, visit, jnp.int32(0))

    @pl.when(steps > 0)
    def _():
        plgpu.barrier_wait(r.weights_empty)


def _sum_values(r, form: WideForm, cta, half):
    """Sum the weighted values of half of the columns, and write them."""
    fill_gaps(r.gaps, r.count[1], r.o_s.at[half, 0], r.o, cta * 2 + half, form.sms * 2)

    def visit(carry, head, first, begin, end, row, position, block, block_end):
        def step(i, state):
            out, _ = state
            plgpu.barrier_wait(r.v_full)
            plgpu.barrier_wait(r.weights_full)
            keep, total = (plgpu.load(r.factors_s.at[n], layout=ROW, optimized=False) for n in range(2))
            out = [rescaled(x, keep, form.interpret) for x in out]
            keys = position + end - i * PAGE  # that the chunk has written

            @pl.when(keys < PAGE)
            def _():
                blank(r.v_s.at[half], keys)
                plgpu.commit_smem()

            out = add_products(out, r.weights_s, r.v_s.at[half], form.interpret)
            plgpu.barrier_arrive(r.v_empty)
            plgpu.barrier_arrive(r.weights_empty)
            return out, total

        blocks = column_blocks(_HALF)
        zeros = [plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), WGMMA) for _, width in blocks]
        out, total = lax.fori_loop(block, block_end, step, (zeros, full_rows(0.0)))
        total = jnp.maximum(total, LEAST)
        for i, x in enumerate(out):
            part = (head * 2 + half) * len(out) + i
            store_rows(x / by_row(total, x.shape), r.o_s.at[half], r.o, part, first, begin, end)
        return carry

    _for_items(r, form, cta, visit, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)
