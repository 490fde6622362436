"""The copying side of decode attention: it fills the rings of queries and pages for a computing warpgroup."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.decode.variant import BOX, Form
from pallas_kernels.attention.decode.work_list import walk
from pallas_kernels.attention.paged import PAGE
from pallas_kernels.hopper.pdl import launch_next


def copy_pages(refs, form: Form, w, worker):
    """Copy the worker's queries and pages to its rings, in the order of their use."""
    kv, rounds_of = form.kv, form.tile.pages

    def ids(row, first, count):
        """Return `count` page numbers of the row from page `first` on; past the table's end any unused
        number.
        """
        row, last = jnp.minimum(row, refs.table.shape[0] - 1), refs.table.shape[1] - 1
        return tuple(refs.table[row, jnp.minimum(first + j, last)] for j in range(count))

    def visit(carry, row, head, page, here, visible, then):
        pair, index, page_ids = carry
        (first, _, length), q_place = visible, lax.rem(pair, jnp.int32(2))
        first = first + page
        after = ids(then[0], then[1], rounds_of)

        @pl.when(pair >= 2)
        def _():
            plgpu.barrier_wait(refs.q_empty.at[w * 2 + q_place])

        # Rows past the group are zeros or belong to the next KV head. Their columns are computed and dropped.
        queries = refs.q.at[pl.ds((row * kv + head) * form.pitch, refs.q_s.shape[2])]
        plgpu.copy_gmem_to_smem(queries, refs.q_s.at[w, q_place], refs.q_full.at[w * 2 + q_place])

        def copy(i, state, count):
            """Copy pages i .. i + count of the pair: the keys of all, then the values of all."""
            index, page_ids = state
            following = ids(row, first + i + count, count)

            def one(source, to, full, empty, j, page_id, boxes, scales=()):
                ring = to.shape[1]
                slot = lax.rem(index + j, jnp.int32(ring))
                at = w * ring + slot

                @pl.when(index + j >= ring)
                def _():
                    plgpu.barrier_wait(empty.at[at])

                size = to.shape[2] // boxes
                for box in range(0, to.shape[2], size):
                    # A box past the row's length reads the page's first box again, from the L2 instead of
                    # HBM.
                    start = (page_id * kv + head) * to.shape[2]
                    if boxes > 1:
                        start = start + jnp.where((first + i + j) * PAGE + box < length, box, 0)
                    place = to.at[w, slot, pl.ds(box, size)] if boxes > 1 else to.at[w, slot]
                    plgpu.copy_gmem_to_smem(source.at[pl.ds(start, size)], place, full.at[at])
                for n, scale in enumerate(scales):
                    plgpu.copy_gmem_to_smem(
                        scale.at[page_id * kv + head], refs.scales.at[w, slot, n], full.at[at]
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

    row, page = refs.pieces[worker, 0], refs.pieces[worker, 2]
    start = jnp.int32(0), jnp.int32(0), ids(row, refs.starts[worker, 0] + page, rounds_of)
    pairs_seen, copied, _unused = walk(refs.rows, refs.pieces, refs.starts, worker, kv, visit, start)

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
