"""The kernel of decode attention: a CTA's workers walk their pieces of the batch's pages.

The operands are swapped: 64 keys are wgmma's M and the (up to 16) query heads of one KV head its N, padded to 8 and not to 64. In a cache
of 8-bit numbers each query head takes a pair of columns (`pairs`), and values lie [P, K, H, S], since wgmma transposes operands of 16 bits
only.
"""

import dataclasses
import functools
import types
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import decode_parts, pairs
from pallas_kernels import decode_softmax as softmax
from pallas_kernels.decode_join import add_parts, is_last
from pallas_kernels.decode_work import walk
from pallas_kernels.paged import PAGE, blank, blank_8, tiled
from pallas_kernels.tiles import DecodeTile

_BOX = 32  # rows of a page that one copy takes


@dataclasses.dataclass(frozen=True)
class Form:
    """What the kernel's code depends on."""

    group: int
    kv: int
    h: int
    cols: int  # wgmma's N
    eight: bool  # 8-bit cache
    tile: DecodeTile
    scale: float
    window: int | None
    soft_cap: float | None
    unified: bool
    fill: bool  # whether rows without keys become 0
    interpret: bool

    @property
    def pitch(self) -> int:
        """Rows of q a KV head. A copy by tiles begins at a whole tile of 8 rows, or ends inside the one it begins in."""
        return 1 << (self.group - 1).bit_length()

    @property
    def value_boxes(self) -> int:
        return 1 if self.eight else PAGE // _BOX


def scratch(form: Form, dtype) -> dict:
    w, keys, values, cols, h = form.tile.workers, form.tile.key_pages, form.tile.value_pages, form.cols, form.h
    if form.eight:
        by_width, by_key = pairs.tiles(min(h, 128)), pairs.tiles(PAGE)
        operands = {
            "k_ring": plgpu.SMEM((w, keys, PAGE, h), pairs.E4M3, transforms=by_width),
            "v_ring": plgpu.SMEM((w, values, h, PAGE), pairs.E4M3, transforms=by_key),
            "q_s": plgpu.SMEM((w, 2, form.pitch, h), dtype),
            "q_8": plgpu.SMEM((w, cols, h), pairs.E4M3, transforms=by_width),
            "p_s": plgpu.SMEM((w, form.tile.pages, cols, PAGE), pairs.E4M3, transforms=by_key),
        }
    else:
        operands = {
            "k_ring": plgpu.SMEM((w, keys, PAGE, h), dtype, transforms=tiled()),
            "v_ring": plgpu.SMEM((w, values, PAGE, h), dtype, transforms=tiled()),
            "q_s": plgpu.SMEM((w, 2, cols, h), dtype, transforms=tiled()),
            "p_s": plgpu.SMEM((w, form.tile.pages, cols, PAGE), dtype, transforms=tiled()),
        }
    return operands | {
        "o_s": plgpu.SMEM((w, cols, h), dtype),
        "sums": plgpu.SMEM((w, 512), jnp.float32),
        "k_full": plgpu.Barrier(num_arrivals=PAGE // _BOX, num_barriers=w * keys),
        "v_full": plgpu.Barrier(num_arrivals=form.value_boxes, num_barriers=w * values),
        "k_empty": plgpu.Barrier(num_barriers=w * keys),
        "v_empty": plgpu.Barrier(num_barriers=w * values),
        "q_full": plgpu.Barrier(num_barriers=w * 2),
        "q_empty": plgpu.Barrier(num_barriers=w * 2),
    }


def attend(*refs, form: Form, **shared):
    extra = (*(("k_scale", "v_scale") if form.eight else ()), *(("unified",) if form.unified else ()))
    inputs = ("q", "k", "v", "table", "rows", "pieces", "chains", "enders", "arrived", *extra, "o", "part", "level")
    refs = types.SimpleNamespace(**dict(zip(inputs, refs, strict=True)), **shared)
    cta, wg, workers = lax.axis_index("cta"), lax.axis_index("wg"), form.tile.workers
    of_all = lambda w: cta * workers + w  # noqa: E731

    @pl.when(wg >= workers)
    def _copy():
        if workers == 1:
            _copy_pages(refs, form, jnp.int32(0), of_all(0))
        elif workers == 2:
            plgpu.set_max_registers(form.tile.copy_registers, action="decrease")
            _copy_pages(refs, form, wg - workers, of_all(wg - workers))
        else:
            plgpu.set_max_registers(form.tile.copy_registers, action="decrease")

            @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
            def _():
                warp = lax.axis_index("warp")
                pl.when(warp < workers)(lambda: _copy_pages(refs, form, warp, of_all(warp)))

    @pl.when(wg < workers)
    def _compute():
        if workers >= 2:
            plgpu.set_max_registers(form.tile.registers, action="increase")
        _compute_pages(refs, form, wg, of_all(wg))


def _copy_pages(refs, form: Form, w, worker):
    """Brings the worker's queries and pages to its rings, in the order in which they are needed."""
    kv, rounds_of = form.kv, form.tile.pages

    def ids(row, first, count):
        """Pages first .. first + count of the row; past the table's end any, which nobody then uses."""
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

        # Rows past the group are zeros or of the next KV head: their columns are computed and dropped.
        queries = refs.q.at[pl.ds((row * kv + head) * form.pitch, refs.q_s.shape[2])]
        plgpu.copy_gmem_to_smem(queries, refs.q_s.at[w, q_place], refs.q_full.at[w * 2 + q_place])

        def copy(i, state, count):
            """Pages i .. i + count of the pair: their keys, then their values."""
            index, page_ids = state
            following = ids(row, first + i + count, count)

            def one(source, to, full, empty, j, page_id, boxes):
                ring = to.shape[1]
                slot = lax.rem(index + j, jnp.int32(ring))
                at = w * ring + slot

                @pl.when(index + j >= ring)
                def _():
                    plgpu.barrier_wait(empty.at[at])

                size = to.shape[2] // boxes
                for box in range(0, to.shape[2], size):
                    # A box past the row's length reads the page's first one again: from the L2 and not from HBM.
                    start = (page_id * kv + head) * to.shape[2]
                    if boxes > 1:
                        start = start + jnp.where((first + i + j) * PAGE + box < length, box, 0)
                    place = to.at[w, slot, pl.ds(box, size)] if boxes > 1 else to.at[w, slot]
                    plgpu.copy_gmem_to_smem(source.at[pl.ds(start, size)], place, full.at[at])

            for j, page_id in enumerate(page_ids):
                one(refs.k, refs.k_ring, refs.k_full, refs.k_empty, j, page_id, PAGE // _BOX)
            for j, page_id in enumerate(page_ids):
                one(refs.v, refs.v_ring, refs.v_full, refs.v_empty, j, page_id, form.value_boxes)
            return index + count, following

        rounds = lax.div(here, jnp.int32(rounds_of))
        index, page_ids = lax.fori_loop(0, rounds, lambda i, s: copy(i * rounds_of, s, rounds_of), (index, page_ids))
        index, _ = lax.fori_loop(rounds * rounds_of, here, lambda i, s: copy(i, s, 1), (index, page_ids[:1]))
        return pair + 1, index, after

    row, page = refs.pieces[worker, 0], refs.pieces[worker, 2]
    start = jnp.int32(0), jnp.int32(0), ids(row, refs.rows[row, 0] + page, rounds_of)
    pairs_seen, copied, _unused = walk(refs.rows, refs.pieces, worker, kv, visit, start)

    # Every arrival is waited for, also of the last blocks (a barrier that nobody watched is an error in the interpreter).
    for ring, empty in ((form.tile.key_pages, refs.k_empty), (form.tile.value_pages, refs.v_empty)):

        @pl.loop(jnp.maximum(copied - ring, 0), copied)
        def _(index, ring=ring, empty=empty):
            plgpu.barrier_wait(empty.at[w * ring + lax.rem(index, jnp.int32(ring))])

    @pl.loop(jnp.maximum(pairs_seen - 2, 0), pairs_seen)
    def _(pair):
        plgpu.barrier_wait(refs.q_empty.at[w * 2 + lax.rem(pair, jnp.int32(2))])


def _blank_last(values, keys, eight):
    (blank_8 if eight else blank)(values, keys)
    plgpu.commit_smem()


def _compute_pages(refs, form: Form, w, worker):
    """Attends the worker's pages; whole pairs to `o`, parts of pairs to `part` and `level`."""
    cols, h, rounds_of = form.cols, form.h, form.tile.pages
    group, kv = form.group, form.kv
    across = functools.partial(softmax.across_keys, scratch=refs.sums.at[w], interpret=form.interpret)

    unified = None if form.unified is False else (refs.unified[0], refs.unified[1])
    bounds = softmax.score_range(unified, 2 * group if form.eight else group, cols, form.eight)
    soften = functools.partial(softmax.soften, scale=form.scale, soft_cap=form.soft_cap, interpret=form.interpret)

    def slot(ring, index):
        place = lax.rem(index, jnp.int32(ring.shape[1]))
        return ring.at[w, place], w * ring.shape[1] + place  # a page, and its barriers' number

    def store(row, head):
        decode_parts.copy_heads(refs.o_s.at[w], refs.o, row * group * kv + head * group, group, form.eight)

    def visit(carry, row, head, page, here, visible, _):
        pair, index = carry
        first, pages, length = visible
        q_place = lax.rem(pair, jnp.int32(2))
        plgpu.barrier_wait(refs.q_full.at[w * 2 + q_place])
        q: Any = refs.q_s.at[w, q_place]
        unit: Any = None
        v_scale: Any = None
        if form.eight:
            rows, q = q, refs.q_8.at[w]
            unit = decode_parts.split_queries(rows, q, group, across, form.interpret) * refs.k_scale[head]
            v_scale = refs.v_scale[head]
            plgpu.barrier_arrive(refs.q_empty.at[w * 2 + q_place])

        def step(i, state, count):
            """Pages i .. i + count of the pair, in one round of the softmax."""
            *state, index = state
            scores, seen = [], []
            for j in range(count):
                keys, at = slot(refs.k_ring, index + j)
                plgpu.barrier_wait(refs.k_full.at[at])
                scores.append(decode_parts.product([(keys, q.transpose((1, 0)))], (PAGE, cols)))
                plgpu.barrier_arrive(refs.k_empty.at[at])
                key = plgpu.broadcasted_iota(jnp.int32, (PAGE, cols), 0, layout=plgpu.Layout.WGMMA) + (first + page + i + j) * PAGE
                seen.append(key < length if form.window is None else (key < length) & (key >= length - form.window))
            if form.eight:
                scores = [pairs.joined(x, form.interpret) * lax.broadcast_in_dim(unit, x.shape, [1]) for x in scores]

            def put(page, weights):
                p = refs.p_s.at[w, page]
                if form.eight:
                    pairs.store_transposed(pairs.split(weights), p, form.interpret)
                else:
                    decode_parts.put_weights(p, weights, page == 0, form.interpret)

            top, total, out = soften(scores, seen, bounds, i > 0, put, across, *state)
            operands = []
            for j in range(count):
                p, (v, at) = refs.p_s.at[w, j], slot(refs.v_ring, index + j)
                plgpu.barrier_wait(refs.v_full.at[at])
                keys = length - (first + page + i + j) * PAGE
                pl.when(keys < PAGE)(functools.partial(_blank_last, v, keys, form.eight))
                operands.append((v if form.eight else v.transpose((1, 0)), p.transpose((1, 0))))
            out = out + decode_parts.product(operands, (h, cols))
            for j in range(count):
                plgpu.barrier_arrive(refs.v_empty.at[slot(refs.v_ring, index + j)[1]])
            return top, total, out, index + count

        rounds = lax.div(here, jnp.int32(rounds_of))
        state = lax.fori_loop(0, rounds, lambda i, s: step(i * rounds_of, s, rounds_of), (bounds.top, *softmax.start(h, cols), index))
        top, total, out, index = lax.fori_loop(rounds * rounds_of, here, lambda i, s: step(i, s, 1), state)
        if not form.eight:
            plgpu.barrier_arrive(refs.q_empty.at[w * 2 + q_place])
        total = across(total, "add")
        if form.eight:
            out = pairs.joined(out, form.interpret) * v_scale
        out = out / lax.broadcast_in_dim(total, out.shape, [1])

        def finish(out):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            decode_parts.put(refs.o_s.at[w], out)
            store(row, head)

        pl.when(here == pages)(lambda: finish(out))

        @pl.when(here < pages)
        def _():
            begun = jnp.where(page == 0, jnp.int32(1), jnp.int32(0))  # 0: continues an earlier worker's pair, 1: its first part
            refs.part.at[worker, begun][...] = out
            refs.level.at[worker, begun][...] = top + jnp.log2(total)
            if not form.interpret:
                ender = jnp.where(page + here == pages, worker, refs.enders[worker])
                chain = refs.chains[ender]
                last = is_last(refs.arrived, ender, chain)
                pl.when(last)(lambda: finish(add_parts(refs.part, refs.level, ender, chain)))

        return pair + 1, index

    walk(refs.rows, refs.pieces, worker, kv, visit, (jnp.int32(0), jnp.int32(0)))
    if form.fill:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        decode_parts.put(refs.o_s.at[w], softmax.start(h, cols)[1])
        rows = refs.rows.shape[0]

        @pl.loop(worker, refs.o.shape[0] // (group * kv), step=refs.part.shape[0])
        def _(row):
            @pl.when((row >= rows) | (refs.rows[jnp.minimum(row, rows - 1), 1] == 0))
            def _():
                for head in range(kv):
                    store(row, head)

    plgpu.wait_smem_to_gmem(0)
