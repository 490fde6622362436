"""Paged attention of prefill chunks for Hopper: several chunks a step, each at any offset of its sequence
(SARATHI §4.2).

A work item is one tile of 128 query rows of one chunk and one head. `chunk_work` lists the tiles of the step,
the longest first; a persistent grid of `sms` CTAs takes them back and forth, so that each CTA gets long and
short ones. In a CTA one warpgroup copies (a page and head is one TMA box, the next item's while this one's is
computed) and two compute, each 64 rows (`chunk_rows`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.chunk import int8 as chunk_int8
from pallas_kernels.attention.chunk.rows import HALF, MARKS, MOST, WIDTH, Rows, attend_rows, store_rows
from pallas_kernels.attention.chunk.work_list import ChunkWork, chunk_work
from pallas_kernels.attention.paged import PAGE, check_pages, check_scales, check_unified_max, flat
from pallas_kernels.attention.tiles import ChunkTile, chunk_tile, int8_chunk_tile
from pallas_kernels.hopper.layouts import LANE, pad_rows, swizzled
from pallas_kernels.hopper.limits import sms_of


def chunk_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    chunks: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    unified_max: jax.Array | None = None,
    sms: int | None = None,
    tile: ChunkTile | None = None,
    work: ChunkWork | None = None,
    interpret=None,
) -> jax.Array:
    """Causal attention of prefill chunks over their sequences' pages (the twin: `reference.chunk_attention`).

    Args:
      q: [T, N, H] bfloat16, H 64, 128 or 256.
      k_pages, v_pages: [P, K, 64, H] bfloat16, or float8_e4m3fn or int8 (H 64 or 128) [P, K, 64, H] and [P,
      K, H, 64]; the chunks' own
        keys and values are in them already.
      page_table: [R, MP] int32; entries before a sequence's first visible page and past its last one are
      never read. chunks: [C, 4] int32, a row each: first token in q, tokens (0: skipped), row of page_table,
      position of the first token. Chunks
        do not overlap in q.
      scale: the scores are q·k · scale, which may be 0 or negative.
      window: a token sees its last `window` keys only. soft_cap: scores become cap · tanh(score / cap).
      k_scale, v_scale: float32, what keys and values of 8 bits are multiplied with: of float8 [K], one a
      head, or None, 1; of int8
        [P, K, 64], one a token and head.
      unified_max: [2] float32, φ and bound: weights are exp(score - φ) (FlashDecoding++Next §3), and a tile with
      a row whose weights' sum is
        not within exp(±bound) begins anew with the running maximum. None: each row's maximum over its first
        block stands for φ. A cache of e4m3 always uses the running maximum, since its weights are e4m3, which
        has no room for any other.
      sms: CTAs of the persistent grid: how many SMs the kernel may take, 1 to 132; None: all.
      work: `list_chunk_work(...)` of the same chunks, T, heads and window, where the caller shares it between
      layers.
    Returns:
      [T, N, H] bfloat16; 0 at tokens that are in no chunk, and where all of a row's scores are -inf.
    Raises:
      ValueError: for a shape, dtype or sms that the kernel does not take.
    """
    (t, n, h), kv, e4m3 = q.shape, k_pages.shape[1], k_pages.dtype == jnp.float8_e4m3fn
    int8 = k_pages.dtype == jnp.int8
    check_pages(q, k_pages, v_pages, (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8))
    check_scales(k_pages, k_scale, v_scale)
    check_unified_max(unified_max)
    if int8 and h > 128:
        raise ValueError(f"head width {h} of a cache of int8: 64 or 128")
    if page_table.ndim != 2 or chunks.ndim != 2 or chunks.shape[1] != 4:
        raise ValueError(
            f"page_table {list(page_table.shape)}, chunks {list(chunks.shape)}: [R, MP] and [C, 4]"
        )
    sms = sms_of(sms)
    tile = tile or (int8_chunk_tile(h) if int8 else chunk_tile(h, k_pages.dtype.itemsize))
    work = chunk_work(chunks, t, tile, window) if work is None else work
    rows = Rows(
        group=n // kv,
        tile=tile,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        e4m3=e4m3,
        int8=int8,
        unified_max=unified_max is not None,
        interpret=interpret is not None,
    )
    rounds = -(-work.tiles.shape[0] * n // sms)
    one = np.ones((kv,), np.float32)  # constants of the program; jnp's would be kernels
    scalars = [(k_scale, one), (v_scale, one), (unified_max, np.asarray([0.0, MOST], np.float32))]
    scalars = [
        default if x is None else x.reshape(-1, PAGE) if x.ndim == 3 else x.astype(jnp.float32)
        for x, default in scalars
    ]
    kernel = plgpu.kernel(
        functools.partial(_attend, sms=sms, kv=kv, rows=rows),
        out_type=jax.ShapeDtypeStruct((t, n * h // WIDTH, WIDTH), q.dtype),
        grid=(sms,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        scratch_types=_scratch(rows, h, k_pages.dtype, rounds),
        compiler_params=dataclasses.replace(
            LANE, reduction_scratch_bytes=0
        ),  # rows' sums and maxima stay in a warp
        kernel_name=f"chunk_attention_{sms}",
        interpret=interpret,
    )
    tables = page_table.astype(jnp.int32), work.tiles, work.count, work.gaps
    return kernel(pad_rows(q), flat(k_pages), flat(v_pages), *tables, *scalars).reshape(t, n, h)


def list_chunk_work(
    chunks: jax.Array, tokens: int, *, head_dim: int, itemsize: int, window: int | None = None
) -> ChunkWork:
    """What `chunk_attention` is to do for these chunks among `tokens` rows of q and a cache of `itemsize`
    bytes a number, for all layers of one window.
    """
    return chunk_work(chunks, tokens, chunk_tile(head_dim, itemsize), window)


def _scratch(rows: Rows, h: int, dtype, rounds: int) -> dict:
    tile, pages = rows.tile, rows.tile.keys // PAGE
    if rows.e4m3:
        wide, turned = swizzled(dtype, min(h, 128)), swizzled(dtype, PAGE)
        ring = {
            "k_s": plgpu.SMEM((tile.stages, tile.keys, h), dtype, transforms=wide),
            "v_s": plgpu.SMEM((tile.stages, pages, h, PAGE), dtype, transforms=turned),
            "q8_s": plgpu.SMEM((2, HALF, h), dtype, transforms=wide),
        }
    else:
        keys = plgpu.SMEM((tile.stages, tile.keys, h), jnp.bfloat16, transforms=swizzled(jnp.bfloat16))
        by_page = plgpu.SMEM((tile.stages, pages, h, PAGE), jnp.bfloat16, transforms=swizzled(jnp.bfloat16))
        ring = {"k_s": keys, "v_s": by_page if rows.int8 else keys}
        ring |= chunk_int8.scratch(tile, h) if rows.int8 else {}
    come = 1 if rows.int8 else pages  # what fills a block: its pages' copies, or the warpgroup that made it
    return ring | {
        "q_s": plgpu.SMEM((tile.queries, 2, HALF, h), jnp.bfloat16, transforms=swizzled(jnp.bfloat16)),
        "o_s": plgpu.SMEM(
            (2, 2, HALF, WIDTH), jnp.bfloat16
        ),  # plain rows: the end of a chunk is stored row by row
        "again": plgpu.SMEM(
            (2, min(rounds, MARKS)), jnp.int32
        ),  # by warpgroup and round: whether the running maximum is needed
        "q_full": plgpu.Barrier(num_arrivals=2, num_barriers=tile.queries),
        "q_empty": plgpu.Barrier(num_arrivals=2, num_barriers=tile.queries),
        "k_full": plgpu.Barrier(num_arrivals=come, num_barriers=tile.stages),
        "v_full": plgpu.Barrier(num_arrivals=come, num_barriers=tile.stages),
        "k_empty": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        "v_empty": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        "blanked": plgpu.Barrier(num_arrivals=2),
        "decided": plgpu.Barrier(num_arrivals=2),
    }


def _attend(
    q_ref, k_ref, v_ref, table_ref, tiles_ref, count_ref, gaps_ref, k_scale_ref, v_scale_ref, unified_ref, o_ref,
    *, sms, kv, rows, **scratch,
):  # fmt: skip
    cta, wg, n = lax.axis_index("cta"), lax.axis_index("wg"), kv * rows.group
    items = count_ref[0] * n
    rounds = lax.div(items + sms - 1, jnp.int32(sms))

    def item_of(i):
        """The item of round i: back and forth over the sorted items; there is none from `items` on, as in the
        last round it may be.
        """
        return i * sms + jnp.where(lax.rem(i, jnp.int32(2)) == 0, cta, sms - 1 - cta)

    def tile_of(i):
        """(item, head, its tile's facts) of round i; where there is no item, of any tile."""
        which = item_of(i)
        index = jnp.minimum(lax.div(which, jnp.int32(n)), tiles_ref.shape[0] - 1)
        return which, lax.rem(which, jnp.int32(n)), *(tiles_ref[index, j] for j in range(7))

    def for_items(visit, carry):
        """carry = visit(carry, round, head, *tile) for this CTA's items."""

        def round_(i, state):
            (which, *facts), carry = state
            following = tile_of(i + 1)  # read here, it is there when it is needed
            return following, lax.cond(
                which < items, lambda carry: visit(carry, i, *facts), lambda carry: carry, carry
            )

        return lax.fori_loop(0, rounds, round_, (tile_of(jnp.int32(0)), carry))[1]

    def for_marked(visit, carry):
        """The same for the rounds that are marked. Marks may be shared: then some are done again without
        need, and the last round may have a mark but no item, so no block that anybody could wait for.
        """
        again = scratch["again"]

        def round_(i, carry):
            at = lax.rem(i, jnp.int32(MARKS))
            marked = (again[0, at] + again[1, at] > 0) & (item_of(i) < items)
            return lax.cond(
                marked, lambda carry: visit(carry, i, *tile_of(i)[1:]), lambda carry: carry, carry
            )

        return lax.fori_loop(0, rounds, round_, carry)

    @pl.when(wg == 2)
    def _copy():
        plgpu.set_max_registers(40, action="decrease")  # 40 + 2 · 232 = 3 · 168, what the CTA was given
        visit = functools.partial(
            _copy_item, q_ref, k_ref, v_ref, table_ref, (k_scale_ref, v_scale_ref), scratch, rows, kv
        )
        done, steps = for_items(visit, (jnp.int32(0), jnp.int32(0)))
        if not rows.e4m3:
            plgpu.barrier_wait(scratch["decided"])
            done, steps = for_marked(visit, (done, steps))
        _wait_for_all(done, rows.tile.queries, scratch["q_empty"])
        _wait_for_all(steps, rows.tile.stages, scratch["k_empty"], scratch["v_empty"])

    @pl.when(wg < 2)
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        scales = k_scale_ref, v_scale_ref, unified_ref

        def visit(carry, i, head, first, begin, end, _, position, block, block_end, running):
            place = (first + wg * HALF, begin - wg * HALF, end - wg * HALF)
            at = (position, block, block_end)
            out, carry = attend_rows(rows, scratch, scales, wg, i, head, at, place, carry, running)
            store_rows(out, scratch["o_s"].at[wg], o_ref, head, *place)
            return carry

        # before the gaps, in which a warpgroup waits for all its warps: none may mark what another has yet to
        # clear
        if not rows.e4m3:
            _clear_marks(scratch["again"], wg, jnp.minimum(rounds, MARKS))
        _fill_gaps(gaps_ref, count_ref[1], scratch["o_s"].at[wg, 0], o_ref, cta * 2 + wg, sms * 2)
        carry = for_items(functools.partial(visit, running=rows.e4m3), (jnp.int32(0), jnp.int32(0)))
        if not rows.e4m3:
            plgpu.barrier_arrive(scratch["decided"])
            plgpu.barrier_wait(scratch["decided"])
            for_marked(functools.partial(visit, running=True), carry)
        plgpu.wait_smem_to_gmem(0)


def _copy_item(
    q_ref, k_ref, v_ref, table_ref, scales, scratch, rows, kv, carry, _,
    head, first, begin, end, row, position, block, block_end,
):  # fmt: skip
    """Queries, then blocks of keys and values, each as soon as its place is free."""
    done, step = carry
    tile, h, per = rows.tile, q_ref.shape[2], rows.tile.keys // PAGE
    kv_head, last_page = lax.div(head, jnp.int32(rows.group)), lax.div(position + end - 1, jnp.int32(PAGE))
    first_page = (
        0
        if rows.window is None
        else lax.div(jnp.maximum(position + begin - rows.window + 1, 0), jnp.int32(PAGE))
    )
    place = lax.rem(done, jnp.int32(tile.queries))
    k_s, v_s, q_s = scratch["k_s"], scratch["v_s"], scratch["q_s"]

    @pl.when(done >= tile.queries)
    def _():
        plgpu.barrier_wait(scratch["q_empty"].at[place])

    for half in range(2):
        at = pl.ds(pl.multiple_of(first, 8) + half * HALF, HALF)
        plgpu.copy_gmem_to_smem(q_ref.at[at, head], q_s.at[place, half], scratch["q_full"].at[place])

    def pages_of(block):
        # A block may reach past the sequence, or begin before its window, whose pages may be another's by
        # now, or hold NaN that no weight of 0 would cancel: the nearest page that is seen stands in for what
        # is not there (those keys are masked, and `_blank_block` zeroes the values where that page itself is
        # not full).
        return tuple(table_ref[row, jnp.clip(block * per + j, first_page, last_page)] for j in range(per))

    def bring(source, ring, full, empty, height, step, ids):
        slot = lax.rem(step, jnp.int32(ring.shape[0]))

        @pl.when(step >= ring.shape[0])
        def _():
            plgpu.barrier_wait(empty.at[slot])

        for j, page_id in enumerate(ids):
            to = ring.at[slot, pl.ds(j * PAGE, PAGE)] if len(ring.shape) == 3 else ring.at[slot, j]
            plgpu.copy_gmem_to_smem(
                source.at[pl.ds((page_id * kv + kv_head) * height, height)], to, full.at[slot]
            )

    def copy(i, state):
        # The next block's keys, then this one's values: so their places become free, and so they are wanted.
        # The other way round keys waited for the place of values, the warpgroups for keys before they gave
        # that place back: each block took the L2's whole latency.
        step, ids, following = state
        then = pages_of(i + 2)

        @pl.when(i + 1 < block_end)
        def _():
            bring(k_ref, k_s, scratch["k_full"], scratch["k_empty"], PAGE, step + 1, following)

        bring(v_ref, v_s, scratch["v_full"], scratch["v_empty"], h if rows.e4m3 else PAGE, step, ids)
        return step + 1, following, then

    if rows.int8:
        how = {"kv": kv, "kv_head": kv_head, "stages": tile.stages, "interpret": rows.interpret}
        return done + 1, chunk_int8.copy_blocks(
            k_ref, v_ref, scales, scratch, block, block_end, step, pages_of, **how
        )
    ids = pages_of(block)
    bring(k_ref, k_s, scratch["k_full"], scratch["k_empty"], PAGE, step, ids)
    step, *_unused = lax.fori_loop(block, block_end, copy, (step, ids, pages_of(block + 1)))
    return done + 1, step


def _wait_for_all(count, places, *empty):
    """Every arrival is waited for, also the last ones (a barrier that nobody watched is an error in the
    interpreter).
    """

    @pl.loop(jnp.maximum(count - places, 0), count)
    def _(i):
        for barrier in empty:
            plgpu.barrier_wait(barrier.at[lax.rem(i, jnp.int32(places))])


def _clear_marks(again, wg, rounds):
    @pl.loop(0, rounds)
    def _(i):
        again[wg, i] = jnp.int32(0)


def _fill_gaps(gaps_ref, gaps, zeros, o_ref, worker, workers):
    """Zeroes the rows that are in no chunk, a row a copy, divided among the workers."""
    zeros[...] = plgpu.layout_cast(jnp.zeros(zeros.shape, zeros.dtype), plgpu.Layout.WGMMA)
    plgpu.commit_smem()

    @pl.loop(0, gaps)
    def _(gap):
        first, rows = gaps_ref[gap, 0], gaps_ref[gap, 1]

        @pl.loop(worker, rows, step=workers)
        def _(row):
            for at in range(0, o_ref.shape[1], HALF):
                part = min(HALF, o_ref.shape[1] - at)
                plgpu.copy_smem_to_gmem(zeros.at[pl.ds(0, part)], o_ref.at[first + row, pl.ds(at, part)])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
