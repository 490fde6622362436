"""The decode attention kernel: the workers of a CTA process their pieces of the batch's pages.

The operands are swapped: 64 keys are wgmma's M, and the up to 16 query heads of a KV head are its N, padded
to 8 instead of 64. 8-bit values have the layout [P, K, H, S], because wgmma transposes only 16-bit
operands. With an e4m3 cache each query head has a pair of columns (`operand_pairs`). An int8 cache becomes
bfloat16 in registers (`int8`).
"""

import functools
import types
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import operand_pairs as pairs
from pallas_kernels.attention.decode import int8 as decode_int8
from pallas_kernels.attention.decode import products as decode_parts
from pallas_kernels.attention.decode import softmax
from pallas_kernels.attention.decode.join import add_rest, is_there, join, peek
from pallas_kernels.attention.decode.page_copy import copy_pages
from pallas_kernels.attention.decode.variant import Form
from pallas_kernels.attention.decode.work_list import page_of, walk
from pallas_kernels.attention.paged import LEAST, PAGE, blank, blank_8
from pallas_kernels.hopper.layouts import store_transposed
from pallas_kernels.hopper.pdl import wait_for_last


def attend(*refs, form: Form, **shared):
    """Run the kernel: copying warps fill the rings, computing warpgroups attend their pages."""
    extra = (
        *(("k_scale", "v_scale") if form.e4m3 or form.int8 else ()),
        *(("unified_max",) if form.unified_max else ()),
        *(("sink_logits",) if form.sink_logits else ()),
    )
    inputs = (
        "q",
        "k",
        "v",
        "table",
        "rows",
        "pieces",
        "starts",
        "chains",
        "enders",
        "arrived",
        *extra,
        "o",
        "part",
        "level",
    )
    refs = types.SimpleNamespace(**dict(zip(inputs, refs, strict=True)), **shared)
    wait_for_last(form.pdl)
    cta, wg, workers = lax.axis_index("cta"), lax.axis_index("wg"), form.tile.workers
    sms = refs.part.shape[0] // workers
    # A short list gives work to its first workers only, and an SM takes in about 100 GB/s.
    of_all = lambda w: w * sms + cta if form.spread else cta * workers + w

    @pl.when(wg >= workers)
    def _copy():
        if workers == 1:
            copy_pages(refs, form, jnp.int32(0), of_all(0))
        elif workers == 2:
            plgpu.set_max_registers(form.tile.copy_registers, action="decrease")
            copy_pages(refs, form, wg - workers, of_all(wg - workers))
        else:
            plgpu.set_max_registers(form.tile.copy_registers, action="decrease")

            @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
            def _():
                warp = lax.axis_index("warp")
                pl.when(warp < workers)(lambda: copy_pages(refs, form, warp, of_all(warp)))

    @pl.when(wg < workers)
    def _compute():
        if workers >= 2:
            plgpu.set_max_registers(form.tile.registers, action="increase")
        _compute_pages(refs, form, wg, of_all(wg))


def _blank_last(values, keys, e4m3):
    (blank_8 if e4m3 else blank)(values, keys)
    plgpu.commit_smem()


def _compute_pages(refs, form: Form, w, worker):
    """Attend the worker's pages. Write complete pairs to `o`, and parts of pairs to `part` and `level`."""
    cols, h, rounds_of = form.cols, form.h, form.tile.pages
    group, kv = form.group, form.kv
    across = functools.partial(softmax.across_keys, scratch=refs.sums.at[w], interpret=form.interpret)

    unified_max = None if form.unified_max is False else (refs.unified_max[0], refs.unified_max[1])
    converted = form.e4m3 or form.int8  # queries are converted at once, so their slot is free again
    by_key = lambda x: lax.broadcast_in_dim(x, (PAGE, cols), [0])
    looks = not (form.int8 or form.interpret)  # the int8 variant has no free registers
    other: Any = None
    if looks:  # read early, because a read at the end of a part would stall
        other = refs.enders[worker]
        # The worker with the rest of the last pair, if exactly one worker has the rest.
        other = jnp.where(refs.chains[other] == 1, other, -1)
    bounds = softmax.score_range(unified_max, 2 * group if form.e4m3 else group, cols, form.e4m3)
    soften = functools.partial(
        softmax.soften, scale=form.scale, soft_cap=form.soft_cap, interpret=form.interpret
    )

    def slot(ring, index):
        place = lax.rem(index, jnp.int32(ring.shape[1]))
        return ring.at[w, place], w * ring.shape[1] + place  # a page, and the index of its barriers

    def store(row, head):
        decode_parts.copy_heads(refs.o_s.at[w], refs.o, row * group * kv + head * group, group, form.e4m3)

    def visit(carry, entry, head, page, here, visible, _):
        pair, index = carry
        row, head = form.pair(entry, head)
        skipped, pages, length, *since = visible
        q_place = lax.rem(pair, jnp.int32(2))
        plgpu.barrier_wait(refs.q_full.at[w * 2 + q_place])
        q: Any = refs.q_s.at[w, q_place]
        unit: Any = None
        v_scale: Any = None
        if form.e4m3:
            rows, q = q, refs.q_8.at[w]
            unit = decode_parts.split_queries(rows, q, group, across, form.interpret) * refs.k_scale[head]
            v_scale = refs.v_scale[head]
        if form.int8:
            rows, q = q, refs.q_16.at[w]
            decode_int8.put_queries(rows, q, form.interpret)
        if converted:
            plgpu.barrier_arrive(refs.q_empty.at[w * 2 + q_place])

        def step(i, state, count):
            """Process pages i .. i + count of the pair in one round of the softmax."""
            *state, index = state
            scores, seen, value_scales = [], [], []
            for j in range(count):
                keys, at = slot(refs.k_ring, index + j)
                plgpu.barrier_wait(refs.k_full.at[at])
                key = plgpu.broadcasted_iota(jnp.int32, (PAGE, cols), 0, layout=plgpu.Layout.WGMMA)
                if form.int8:
                    key = decode_int8.key_of(key, form.interpret)
                    place = refs.scales.at[w, lax.rem(index + j, jnp.int32(refs.k_ring.shape[1]))]
                    key_scale, value_scale = (
                        by_key(decode_int8.scales_of(place.at[n], form.interpret)) for n in range(2)
                    )
                    product = decode_int8.multiply(
                        [(keys, q)], (PAGE, cols), keys=True, interpret=form.interpret
                    )
                    scores.append(product * key_scale)
                    value_scales.append(value_scale)
                else:
                    scores.append(decode_parts.product([(keys, q.transpose((1, 0)))], (PAGE, cols)))
                plgpu.barrier_arrive(refs.k_empty.at[at])
                key = key + page_of(page + i + j, skipped, form.sinks) * PAGE
                last = key < length
                if form.spans:
                    seen.append(last & form.in_span(key, since[0]))
                else:
                    seen.append(last if form.window is None else last & (key >= length - form.window))
            if form.e4m3:
                scores = [
                    pairs.joined(x, form.interpret) * lax.broadcast_in_dim(unit, x.shape, [1]) for x in scores
                ]

            def put(page, weights):
                p = refs.p_s.at[w, page]
                if form.e4m3:
                    store_transposed(pairs.split(weights), p, form.interpret)
                    return
                if form.int8:  # scales of unseen keys are unwritten
                    weights = jnp.where(seen[page], weights * value_scales[page], 0.0)
                decode_parts.put_weights(p, weights, page == 0, form.interpret)

            top, total, out = soften(scores, seen, bounds, i > 0, put, across, *state)
            operands = []
            for j in range(count):
                p, (v, at) = refs.p_s.at[w, j], slot(refs.v_ring, index + j)
                plgpu.barrier_wait(refs.v_full.at[at])
                keys = length - page_of(page + i + j, skipped, form.sinks) * PAGE
                if form.int8:  # unwritten int8 memory is finite
                    operands.append((v, p))
                    continue
                pl.when(keys < PAGE)(functools.partial(_blank_last, v, keys, form.e4m3))
                operands.append((v if form.e4m3 else v.transpose((1, 0)), p.transpose((1, 0))))
            if form.int8:
                out = out + decode_int8.multiply(operands, (h, cols), keys=False, interpret=form.interpret)
            else:
                out = out + decode_parts.product(operands, (h, cols))
            for j in range(count):
                plgpu.barrier_arrive(refs.v_empty.at[slot(refs.v_ring, index + j)[1]])
            return top, total, out, index + count

        rounds = lax.div(here, jnp.int32(rounds_of))
        state = lax.fori_loop(
            0,
            rounds,
            lambda i, s: step(i * rounds_of, s, rounds_of),
            (bounds.top, *softmax.start(h, cols), index),
        )
        top, total, out, index = lax.fori_loop(rounds * rounds_of, here, lambda i, s: step(i, s, 1), state)
        if not converted:
            plgpu.barrier_arrive(refs.q_empty.at[w * 2 + q_place])
        seen = None if not looks else peek(refs.arrived, other, (here < pages) & (page == 0) & (other >= 0))
        total = jnp.maximum(across(total, "add"), LEAST)
        if form.sink_logits:
            total = softmax.with_sinks(total, top, refs.sink_logits.at[head], page == 0, form.raw_sinks)
        if form.e4m3:
            out = pairs.joined(out, form.interpret) * v_scale
        out = out / lax.broadcast_in_dim(total, out.shape, [1])

        def finish(out):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            decode_parts.put(refs.o_s.at[w], out)
            store(row, head)

        pl.when(here == pages)(lambda: finish(out))

        def write(level):
            # 0: continues an earlier worker's pair, 1: the first part of a pair.
            begun = jnp.where(page == 0, jnp.int32(1), jnp.int32(0))
            refs.part.at[worker, begun][...] = out
            refs.level.at[worker, begun][...] = level
            if not form.interpret:
                ender = jnp.where(page + here == pages, worker, refs.enders[worker])
                chain = refs.chains[ender]
                join(refs.part, refs.level, refs.arrived, worker, ender, chain, finish, form.one_fence)

        @pl.when(here < pages)
        def _():
            level = top + jnp.log2(total)
            if not looks:
                write(level)
                return
            there = is_there(seen, refs.arrived, other, form.one_fence)
            pl.when(there)(lambda: finish(add_rest(level, out, refs.part, refs.level, other)))
            pl.when(~there)(lambda: write(level))

        return pair + 1, index

    # Before the pages, because an address that is live across their loop costs a register there.
    if form.fill:
        decode_parts.put(refs.o_s.at[w], softmax.start(h, cols)[1])
        entries = kv // form.entry_heads  # of a row
        rows = refs.rows.shape[0] // entries

        workers = refs.part.shape[0]
        # The first workers of a short list have pages, and the last ones have none.
        first = workers - 1 - worker if form.spread else worker

        @pl.loop(first, refs.o.shape[0] // (group * kv), step=workers)
        def _(row):
            @pl.when((row >= rows) | (refs.rows[jnp.minimum(row, rows - 1) * entries, 1] == 0))
            def _():
                for head in range(kv):
                    store(row, head)

    walk(refs.rows, refs.pieces, refs.starts, worker, form.entry_heads, visit, (jnp.int32(0), jnp.int32(0)))
    plgpu.wait_smem_to_gmem(0)
