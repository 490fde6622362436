"""The copying side of decode attention: it fills the rings of queries and pages for a computing warpgroup."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.decode.variant import BOX, Form
from pallas_kernels.attention.decode.work_list import page_of, walk
from pallas_kernels.attention.paged import PAGE
from pallas_kernels.hopper.pdl import launch_next


def copy_pages(refs, form: Form, w, worker):
    """Copy the worker's queries and pages to its rings, in the order of their use."""
    kv, rounds_of = form.kv, form.tile.pages

    def ids(entry, skipped, place, count):
        """Return `count` page numbers of the entry from its visible page `place` on; past the table's end any
        unused number.
        """
        entry, last = jnp.minimum(entry, refs.rows.shape[0] - 1), refs.table.shape[1] - 1
        row, head = form.pair(entry, jnp.int32(0))
        if form.page_heads < kv:
            row = row + lax.div(head, jnp.int32(form.page_heads)) * (refs.rows.shape[0] // kv)
        pages = [page_of(place + j, skipped, form.sinks) for j in range(count)]
        return tuple(refs.table[row, jnp.minimum(page, last)] for page in pages)

    def visit(carry, entry, head, page, here, visible, then):
        pair, index, page_ids = carry
        (skipped, _, length, *since), q_place = visible, lax.rem(pair, jnp.int32(2))
        after = ids(then[0], then[1], jnp.int32(0), rounds_of)
        row, head = form.pair(entry, head)
        held = head if form.page_heads == kv else lax.rem(head, jnp.int32(form.page_heads))

        @pl.when(pair >= 2)
        def _():
            plgpu.barrier_wait(refs.q_empty.at[w * 2 + q_place])

        # Rows past the group are zeros or belong to the next KV head. Their columns are computed and dropped.
        queries = refs.q.at[pl.ds((row * kv + head) * form.pitch, refs.q_s.shape[2])]
        plgpu.copy_gmem_to_smem(queries, refs.q_s.at[w, q_place], refs.q_full.at[w * 2 + q_place])

        def box_of(first_key, box, values):
            """Return the first row of box `box`, or of the page's other box if no key of `box` is visible.

            A weight of 0 does not cancel NaN in unwritten values, and only values past the length become 0.
            So the second box of values stands in for the first box only in a full page. Scores are masked,
            so either box of keys can stand in for the other.
            """
            key = first_key + box
            if not form.spans:
                return jnp.where(key < length, box, 0)
            seen = key + BOX > since[0]
            if form.sinks:
                seen |= key < form.sinks
            if values and box == 0:
                seen |= first_key + PAGE > length
            return jnp.where((key < length) & seen, box, PAGE - BOX - box)

        def copy(i, state, count):
            """Copy pages i .. i + count of the pair: the keys of all, then the values of all."""
            index, page_ids = state
            following = ids(entry, skipped, page + i + count, count)

            def one(source, to, full, empty, j, page_id, boxes, scales=()):
                ring = to.shape[1]
                slot = lax.rem(index + j, jnp.int32(ring))
                at = w * ring + slot

                @pl.when(index + j >= ring)
                def _():
                    plgpu.barrier_wait(empty.at[at])

                size = to.shape[2] // boxes
                for box in range(0, to.shape[2], size):
                    # A box without visible keys reads the other box again, from the L2 instead of HBM.
                    start = (page_id * form.page_heads + held) * to.shape[2]
                    if boxes > 1:
                        first_key = page_of(page + i + j, skipped, form.sinks) * PAGE
                        start = start + box_of(first_key, box, to is refs.v_ring)
                    place = to.at[w, slot, pl.ds(box, size)] if boxes > 1 else to.at[w, slot]
                    plgpu.copy_gmem_to_smem(source.at[pl.ds(start, size)], place, full.at[at])
                for n, scale in enumerate(scales):
                    plgpu.copy_gmem_to_smem(
                        scale.at[page_id * form.page_heads + held], refs.scales.at[w, slot, n], full.at[at]
                    )

            for j, page_id in enumerate(page_ids):
                scales = (refs.k_scale, refs.v_scale) if form.int8 else ()
                one(refs.k, refs.k_ring, refs.k_full, refs.k_empty, j, page_id, PAGE // BOX, scales)
            for j, page_id in enumerate(page_ids):
                one(refs.v, refs.v_ring, refs.v_full, refs.v_empty, j, page_id, form.value_boxes)
            return index + count, following

        rounds = lax.div(here, jnp.int32(rounds_of))
        index, page_ids = lax.fori_loop(
            0, rounds, lambda i, s: copy(i * rounds_of, s, rounds_of), (index, page_ids)
        )
        index, _ = lax.fori_loop(rounds * rounds_of, here, lambda i, s: copy(i, s, 1), (index, page_ids[:1]))
        return pair + 1, index, after

    entry, page = refs.pieces[worker, 0], refs.pieces[worker, 2]
    start = jnp.int32(0), jnp.int32(0), ids(entry, refs.starts[worker, 0], page, rounds_of)
    pairs_seen, copied, _unused = walk(
        refs.rows, refs.pieces, refs.starts, worker, form.entry_heads, visit, start
    )

    # Not earlier: the next GEMM's copies of its weight would compete with the copies of pages.
    launch_next(form.pdl)

    # Wait for every arrival, because the interpreter reports a barrier that no thread waited for.
    for ring, empty in ((form.tile.key_pages, refs.k_empty), (form.tile.value_pages, refs.v_empty)):

        @pl.loop(jnp.maximum(copied - ring, 0), copied)
        def _(index, ring=ring, empty=empty):
            plgpu.barrier_wait(empty.at[w * ring + lax.rem(index, jnp.int32(ring))])

    @pl.loop(jnp.maximum(pairs_seen - 2, 0), pairs_seen)
    def _(pair):
        plgpu.barrier_wait(refs.q_empty.at[w * 2 + lax.rem(pair, jnp.int32(2))])
