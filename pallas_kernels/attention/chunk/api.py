"""Paged attention of prefill chunks for Hopper: several chunks a step, at any offset of their sequences
(SARATHI §4.2).

A work item is one tile of 128 query rows of one chunk and one head. `chunk_work` lists the step's tiles,
the longest first. A persistent grid of `sms` CTAs takes items back and forth over the list, so that each
CTA gets long and short items. In a CTA one warpgroup copies, and two compute 64 rows each (`rows`). A page
of a head is one TMA box. The next item's queries are copied during the current item.
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
from pallas_kernels.attention.chunk.items import (
    clear_marks,
    item_at,
    visit_items,
    visit_marked,
    wait_for_all,
)
from pallas_kernels.attention.chunk.rows import (
    HALF,
    MARKS,
    MOST,
    WIDTH,
    RowConstants,
    attend_rows,
    fill_gaps,
    store_rows,
)
from pallas_kernels.attention.chunk.wide import WideForm, wide_chunk_attention
from pallas_kernels.attention.chunk.work_list import ChunkWork, block_of, chunk_work
from pallas_kernels.attention.paged import (
    LONGEST,
    PAGE,
    check_pages,
    check_scales,
    check_sink_logits,
    check_spans,
    check_unified_max,
    flat,
)
from pallas_kernels.attention.tiles import WIDEST, WIDTHS, ChunkTile, chunk_tile, int8_chunk_tile
from pallas_kernels.hopper.layouts import LANE, LOG2E, pad_rows, swizzled
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
    spans: jax.Array | None = None,
    sinks: int = 0,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    unified_max: jax.Array | None = None,
    sink_logits: jax.Array | None = None,
    sms: int | None = None,
    tile: ChunkTile | None = None,
    work: ChunkWork | None = None,
    interpret=None,
) -> jax.Array:
    """Return the causal attention of prefill chunks over their sequences' pages.

    The reference implementation is `pallas_kernels.attention.chunk.reference.chunk_attention`.

    Args:
      q: [T, N, H] bfloat16, H 64, 128, 256 or 512. With H = 512 the cache is bfloat16, without spans and sink
        logits, and rows always have the running maximum (`wide`).
      k_pages, v_pages: [P, K, 64, H] bfloat16, or float8_e4m3fn or int8 (H 64 or 128) [P, K, 64, H] and [P,
        K, H, 64]. The pages already hold the chunks' keys and values.
      page_table: [R, MP] int32; entries of pages without visible keys and past a sequence's last page are
        never read. With spans also [G, R, MP], as for `decode_attention`.
      chunks: [C, 4] int32, one row a chunk: first token in q, tokens (0: skipped), row of page_table,
        position of the first token. Chunks do not overlap in q.
      scale: scores are q·k · scale; scale may be 0 or negative.
      window: the number of last keys that a token sees. soft_cap: scores become cap · tanh(score / cap).
      spans: [K] or [T, K] int32, instead of a window: the number of last keys that a token sees in each KV
        head (FlashDecoding++Next §III). A span below 1 counts as 1. Tiles with most keys start first.
      sinks: the number of first keys that every token sees besides its span.
      k_scale, v_scale: float32 scales of 8-bit numbers: [K] for float8 (None: 1), [P, K, 64] for int8.
      unified_max: [2] float32, φ and bound: weights are exp(score - φ) (FlashDecoding++Next §3). A tile
        with a row whose sum of weights is outside exp(±bound) runs again with the running maximum. None:
        the maximum of a row's first block replaces φ. An e4m3 cache always uses the running maximum,
        because e4m3 weights have no room for another.
      sink_logits: as for `decode_attention`.
      sms: CTAs of the persistent grid, which is the number of SMs that the kernel may occupy, 1 to 132;
        None: all.
      work: `list_chunk_work(...)` for the same chunks, T, heads and window, if layers share one list.
    Returns:
      [T, N, H] bfloat16; 0 at tokens outside all chunks, and for rows with only -inf scores.
    Raises:
      ValueError: for a shape, dtype or sms outside the limits.
    """
    (t, n, h), held, e4m3 = q.shape, k_pages.shape[1], k_pages.dtype == jnp.float8_e4m3fn
    groups = page_table.shape[0] if page_table.ndim == 3 else 1
    kv, int8 = held * groups, k_pages.dtype == jnp.int8
    check_pages(q, k_pages, v_pages, (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8), groups, WIDTHS)
    check_scales(k_pages, k_scale, v_scale, groups)
    check_unified_max(unified_max)
    if int8 and h > 128:
        raise ValueError(f"head width {h} of a cache of int8: accepted are 64 or 128")
    tables = (2,) if spans is None else (2, 3)
    if page_table.ndim not in tables or chunks.ndim != 2 or chunks.shape[1] != 4:
        accepted = "[R, MP]" if spans is None else "[R, MP] or [G, R, MP]"
        raise ValueError(
            f"page_table {list(page_table.shape)}, chunks {list(chunks.shape)}: accepted are {accepted} and "
            "[C, 4]"
        )
    check_spans(spans, sinks, window, t, kv)
    check_sink_logits(sink_logits, n, k_pages)
    sms = sms_of(sms)
    tile = tile or (int8_chunk_tile(h) if int8 else chunk_tile(h, k_pages.dtype.itemsize))
    work = chunk_work(chunks, t, tile, window, spans, sinks) if work is None else work
    if h == WIDEST:
        if k_pages.dtype != jnp.bfloat16 or spans is not None or sink_logits is not None:
            raise ValueError(
                f"head width {h} with a cache of {k_pages.dtype}, spans or sink logits: accepted is bfloat16 "
                "without them"
            )
        form = WideForm(n, kv, sms, scale, window, soft_cap, interpret is not None)
        return wide_chunk_attention(q, k_pages, v_pages, page_table, work, form, interpret)
    rows = RowConstants(
        group=n // kv,
        tile=tile,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        e4m3=e4m3,
        int8=int8,
        unified_max=unified_max is not None,
        interpret=interpret is not None,
        spans=spans is not None,
        sinks=sinks,
        sink_logits=sink_logits is not None,
    )
    rounds = -(-work.tiles.shape[0] * (rows.group if rows.spans else n) // sms)
    one = np.ones((kv,), np.float32)  # a constant of the program; jnp.ones would run a kernel
    scalars = [(k_scale, one), (v_scale, one), (unified_max, np.asarray([0.0, MOST], np.float32))]
    of_rows = []
    if spans is not None:  # for the rows of every tile, which can reach past the last token
        of_rows = [jnp.broadcast_to(jnp.clip(spans, 1, LONGEST).astype(jnp.int32), (t, kv)).T]
        of_rows = [jnp.pad(of_rows[0], ((0, 0), (0, tile.rows)))]
    of_heads = [] if sink_logits is None else [sink_logits.astype(jnp.float32) * LOG2E]
    scalars = [
        default if x is None else x.reshape(-1, PAGE) if x.ndim == 3 else x.astype(jnp.float32)
        for x, default in scalars
    ]
    kernel = plgpu.kernel(
        functools.partial(_attend, sms=sms, kv=kv, held=held, rows=rows),
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
    table = page_table.astype(jnp.int32).reshape(-1, page_table.shape[-1])
    tables = table, work.tiles, work.count, work.gaps
    return kernel(pad_rows(q), flat(k_pages), flat(v_pages), *tables, *scalars, *of_rows, *of_heads).reshape(
        t, n, h
    )


def list_chunk_work(
    chunks: jax.Array,
    tokens: int,
    *,
    head_dim: int,
    itemsize: int,
    window: int | None = None,
    spans: jax.Array | None = None,
    sinks: int = 0,
) -> ChunkWork:
    """Return the work list of `chunk_attention` for chunks among `tokens` rows of q, for all layers with
    the same window, or the same spans and sinks.

    itemsize: bytes of a number in the cache.
    """
    return chunk_work(chunks, tokens, chunk_tile(head_dim, itemsize), window, spans, sinks)


def _scratch(rows: RowConstants, h: int, dtype, rounds: int) -> dict:
    """Return the kernel's shared memory and barriers."""
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
    arrivals = (
        1 if rows.int8 else pages
    )  # arrivals that fill a block: the copies of its pages, or one warpgroup that converted it
    return ring | {
        "q_s": plgpu.SMEM((tile.queries, 2, HALF, h), jnp.bfloat16, transforms=swizzled(jnp.bfloat16)),
        "o_s": plgpu.SMEM((2, 2, HALF, WIDTH), jnp.bfloat16),  # plain rows, to store a chunk's end row by row
        "again": plgpu.SMEM(
            (2, min(rounds, MARKS)), jnp.int32
        ),  # [warpgroup, round]: needs a running maximum
        "q_full": plgpu.Barrier(num_arrivals=2, num_barriers=tile.queries),
        "q_empty": plgpu.Barrier(num_arrivals=2, num_barriers=tile.queries),
        "k_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=tile.stages),
        "v_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=tile.stages),
        "k_empty": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        "v_empty": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        "blanked": plgpu.Barrier(num_arrivals=2),
        "decided": plgpu.Barrier(num_arrivals=2),
    }


def _attend(
    q_ref, k_ref, v_ref, table_ref, tiles_ref, count_ref, gaps_ref, k_scale_ref, v_scale_ref, unified_ref,
    *last, sms, kv, held, rows, **scratch,
):  # fmt: skip
    *more_refs, o_ref = last
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    n = rows.group if rows.spans else kv * rows.group  # query heads of an entry of the tiles
    items = count_ref[0] * n
    rounds = lax.div(items + sms - 1, jnp.int32(sms))

    item_of = functools.partial(item_at, cta=cta, sms=sms)

    def tile_of(i):
        """Return (item, head, fields of its tile) of round i, or any tile if the round has no item."""
        which = item_of(i)
        index = jnp.minimum(lax.div(which, jnp.int32(n)), tiles_ref.shape[0] - 1)
        head = lax.rem(which, jnp.int32(n))
        if rows.spans:
            head = tiles_ref[index, 10] * rows.group + head
        return which, head, *(tiles_ref[index, j] for j in range(10 if rows.spans else 7))

    for_items = functools.partial(visit_items, rounds, items, item_of, tile_of)
    for_marked = functools.partial(visit_marked, rounds, items, item_of, tile_of, scratch["again"])

    @pl.when(wg == 2)
    def _copy():
        plgpu.set_max_registers(40, action="decrease")  # 40 + 2 · 232 = 3 · 168, what the CTA was given
        visit = functools.partial(
            _copy_item, q_ref, k_ref, v_ref, table_ref, (k_scale_ref, v_scale_ref), scratch, rows, kv, held
        )
        done, steps = for_items(visit, (jnp.int32(0), jnp.int32(0)))
        if not rows.e4m3:
            plgpu.barrier_wait(scratch["decided"])
            done, steps = for_marked(visit, (done, steps))
        wait_for_all(done, rows.tile.queries, scratch["q_empty"])
        wait_for_all(steps, rows.tile.stages, scratch["k_empty"], scratch["v_empty"])

    @pl.when(wg < 2)
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        scales = k_scale_ref, v_scale_ref, unified_ref, *more_refs

        def visit(carry, i, head, first, begin, end, _, position, block, block_end, *spanned, running):
            place = (first + wg * HALF, begin - wg * HALF, end - wg * HALF)
            at = (position, block, block_end, *spanned)
            out, _, carry = attend_rows(rows, scratch, scales, wg, i, head, at, place, carry, running)
            store_rows(out, scratch["o_s"].at[wg], o_ref, head, *place)
            return carry

        # Clear before the gaps, whose barrier ensures that no warp marks what another has yet to clear.
        if not rows.e4m3:
            clear_marks(scratch["again"], wg, jnp.minimum(rounds, MARKS))
        fill_gaps(gaps_ref, count_ref[1], scratch["o_s"].at[wg, 0], o_ref, cta * 2 + wg, sms * 2)
        carry = for_items(functools.partial(visit, running=rows.e4m3), (jnp.int32(0), jnp.int32(0)))
        if not rows.e4m3:
            plgpu.barrier_arrive(scratch["decided"])
            plgpu.barrier_wait(scratch["decided"])
            for_marked(functools.partial(visit, running=True), carry)
        plgpu.wait_smem_to_gmem(0)


def _copy_item(
    q_ref, k_ref, v_ref, table_ref, scales, scratch, rows, kv, held, carry, _,
    head, first, begin, end, row, position, block, block_end, *spanned,
):  # fmt: skip
    """Copy queries, then blocks of keys and values, each as soon as its slot is free."""
    done, step = carry
    tile, h, per = rows.tile, q_ref.shape[2], rows.tile.keys // PAGE
    kv_head, last_page = lax.div(head, jnp.int32(rows.group)), lax.div(position + end - 1, jnp.int32(PAGE))
    skipped, first_page = 0, 0
    if rows.spans:
        skipped, first_page = spanned[0], lax.div(spanned[1], jnp.int32(PAGE))
    elif rows.window is not None:
        first_page = lax.div(jnp.maximum(position + begin - rows.window + 1, 0), jnp.int32(PAGE))
    of_sinks = -(-rows.sinks // PAGE)
    if held < kv:
        tables = table_ref.shape[0] // (kv // held)
        row, kv_head = row + lax.div(kv_head, jnp.int32(held)) * tables, lax.rem(kv_head, jnp.int32(held))
    place = lax.rem(done, jnp.int32(tile.queries))
    k_s, v_s, q_s = scratch["k_s"], scratch["v_s"], scratch["q_s"]

    @pl.when(done >= tile.queries)
    def _():
        plgpu.barrier_wait(scratch["q_empty"].at[place])

    for half in range(2):
        at = pl.ds(pl.multiple_of(first, 8) + half * HALF, HALF)
        plgpu.copy_gmem_to_smem(q_ref.at[at, head], q_s.at[place, half], scratch["q_full"].at[place])

    def pages_of(block):
        # A block can reach past the sequence or start before its window. Pages there can belong to another
        # sequence, or hold NaN, which a weight of 0 does not cancel. The nearest visible page is read
        # instead. Its keys are masked, and `_blank_block` zeroes its values where the page is not full.
        # Between the sinks and the span this is the last page of the sinks, which is full there.
        pages = [block_of(block, skipped, rows.sinks, tile.keys) * per + j for j in range(per)]
        near = [jnp.clip(page, first_page, last_page) for page in pages]
        if rows.sinks:
            outside = [(page < first_page) for page in pages]
            near = [
                jnp.where(out, jnp.minimum(page, of_sinks - 1), other)
                for out, page, other in zip(outside, pages, near, strict=True)
            ]
        return tuple(table_ref[row, page] for page in near)

    def bring(source, ring, full, empty, height, step, ids):
        slot = lax.rem(step, jnp.int32(ring.shape[0]))

        @pl.when(step >= ring.shape[0])
        def _():
            plgpu.barrier_wait(empty.at[slot])

        for j, page_id in enumerate(ids):
            to = ring.at[slot, pl.ds(j * PAGE, PAGE)] if len(ring.shape) == 3 else ring.at[slot, j]
            plgpu.copy_gmem_to_smem(
                source.at[pl.ds((page_id * held + kv_head) * height, height)], to, full.at[slot]
            )

    def copy(i, state):
        # Copy the next block's keys, then this block's values, in the order in which slots become free. In
        # the other order each block took the full latency of the L2, because keys waited for a slot of
        # values, and the warpgroups waited for the keys before they freed this slot.
        step, ids, following = state
        then = pages_of(i + 2)

        @pl.when(i + 1 < block_end)
        def _():
            bring(k_ref, k_s, scratch["k_full"], scratch["k_empty"], PAGE, step + 1, following)

        bring(v_ref, v_s, scratch["v_full"], scratch["v_empty"], h if rows.e4m3 else PAGE, step, ids)
        return step + 1, following, then

    if rows.int8:
        how = {"kv": held, "kv_head": kv_head, "stages": tile.stages, "interpret": rows.interpret}
        return done + 1, chunk_int8.copy_blocks(
            k_ref, v_ref, scales, scratch, block, block_end, step, pages_of, **how
        )
    ids = pages_of(block)
    bring(k_ref, k_s, scratch["k_full"], scratch["k_empty"], PAGE, step, ids)
    step, *_unused = lax.fori_loop(block, block_end, copy, (step, ids, pages_of(block + 1)))
    return done + 1, step
