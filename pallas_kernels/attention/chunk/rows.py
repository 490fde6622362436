"""The work of one warpgroup of `chunk_attention` on 64 query rows: FlashAttention-3's pipeline without its
running maximum.

While the tensor cores multiply one block's weights with its values, the warpgroup computes the next block's
weights from scores that are ready. The other warpgroup's products fill the remaining time.

Weights are exp(score - m) with a constant m for each row: the largest score of the row's first block, or
the unified max value φ of FlashDecoding++Next §3. 16-bit weights have float32's range, so any m within 60
of the row's true maximum is as good as the maximum. The row's sum shows at the end whether m was close
enough; otherwise the item runs again with the running maximum. This saves the maximum of every score in
each block, and the wait for it.

An e4m3 cache is multiplied as e4m3. Queries are rounded to 8 bits, scaled by their row's largest number.
Weights are rounded to 8 bits, times 2^8, which puts them in e4m3's normal range. This range is too short
for any m except the running maximum.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.chunk.registers import as_operand, mark, rescaled
from pallas_kernels.attention.chunk.work_list import block_of
from pallas_kernels.attention.paged import LEAST, LOWEST, PAGE, blank, blank_8, capped, sink_term
from pallas_kernels.attention.tiles import ChunkTile
from pallas_kernels.attention.two_halves import hidden_zero
from pallas_kernels.hopper.layouts import LOG2E

HALF = 64  # query rows of one warpgroup
WIDTH = 64  # columns of one store
# 8-bit weights are scaled by 2^8: at most 256 of e4m3's 448, with 14 powers of two of normal numbers below.
_SHIFT = 8.0
MARKS = 256  # places for marks; later rounds of a worker share places
# Natural logarithm of a row's largest sum. Relevant weights then stay far from the ends of float32's range.
MOST = 60.0


@dataclasses.dataclass(frozen=True)
class RowConstants:
    """The constants of a kernel.

    e4m3: the cache is e4m3. int8: the cache is int8, and the rows see bfloat16. unified_max: the maximum is
    φ instead of the first block's. spans: each tile has the span of its KV head instead of the window.
    sinks: the first keys that every row sees besides its span. sink_logits: each query head has an attention
    sink. levels: also return log2 of each row's sum of weights.
    rotary: queries and keys have more columns, in memory of their own.
    """

    group: int
    tile: ChunkTile
    scale: float
    window: int | None
    soft_cap: float | None
    e4m3: bool
    int8: bool
    unified_max: bool
    interpret: bool
    spans: bool = False
    sinks: int = 0
    sink_logits: bool = False
    levels: bool = False
    rotary: bool = False


def attend_rows(r: RowConstants, m: dict, scales, wg, round_, head, at, place, carry, running):
    """Return (outputs [64, H] float32, levels, carry) of one item's 64 rows.

    The levels are log2 of each row's sum of exp2(scores), [64] float32, or None without `r.levels`.

    m: the kernel's shared memory and barriers. at: position of the item's first row, first block of keys,
    end of the blocks; with spans also the tile's next three fields. place: this warpgroup's first row in q,
    its rows before the chunk, and its rows before the chunk's end. carry: finished items and blocks. running:
    use the running maximum; otherwise rows whose sum is out of range mark the item in m["again"].
    """
    (position, block, block_end, *spanned), (done, step) = at, carry
    skipped = spanned[0] if r.spans else 0
    keys, stages, queries = r.tile.keys, jnp.int32(r.tile.stages), lax.rem(done, jnp.int32(r.tile.queries))
    k_scale_ref, v_scale_ref, unified_ref, *more_refs = scales  # the spans, then the logits of sinks
    kv_head = lax.div(head, jnp.int32(r.group))
    base = position + wg * HALF  # position of this warpgroup's first row
    h = m["v_s"].shape[2 if r.e4m3 or r.int8 else -1]  # columns of a value

    plgpu.barrier_wait(m["q_full"].at[queries])
    unit: Any = None
    if r.e4m3:
        unit = _quantize_queries(m["q_s"].at[queries, wg], m["q8_s"].at[wg], k_scale_ref[kv_head] * r.scale)
        if r.scale > 0:  # with zero keys or queries, 0 times a masked score (-inf) would be NaN
            unit = jnp.maximum(unit, LEAST)
        plgpu.barrier_arrive(m["q_empty"].at[queries])

    def score(acc, slot):
        k = m["k_s"].at[slot].transpose((1, 0))
        if not r.rotary:
            plgpu.wgmma(acc, m["q8_s"].at[wg] if r.e4m3 else m["q_s"].at[queries, wg], k)
            return
        place = queries + hidden_zero(r.interpret)
        plgpu.wgmma(acc, m["q_s"].at[place, wg], k)
        plgpu.wgmma(acc, m["q_rope_s"].at[place, wg], m["k_rope_s"].at[slot].transpose((1, 0)))

    def soften(scores, i, state, masked, update):
        seen, first_key = None, block_of(i, skipped, r.sinks, keys) * keys
        if masked and r.spans:  # read again in each of the few masked blocks, to save registers in the others
            own = more_refs[0].at[kv_head, pl.ds(place[0], HALF)]
            span = plgpu.load(own, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            seen = _in_span(base, first_key, keys, span, r.sinks)
        elif masked:
            seen = _seen(base, first_key, keys, r.window)
        return _soften(scores, seen, *state, scale=r.scale, soft_cap=r.soft_cap, unit=unit, update=update)

    def wait_for_keys(i, step):
        # The wait sits between a block's weights and the end of the concurrent product.
        @pl.when(i < block_end)  # without this branch the compiler would wait for the product first
        def _():
            plgpu.barrier_wait(m["k_full"].at[lax.rem(step, stages)])

    def first(slot):
        def scores(acc):
            score(acc, slot)
            return acc[...]

        scores = pl.run_scoped(scores, plgpu.ACC((HALF, keys), jnp.float32))
        plgpu.barrier_arrive(m["k_empty"].at[slot])
        if running or not r.unified_max:
            (top, total), _, weights = soften(scores, block, _start(LOWEST), True, True)
            # A row that sees no key of the first block (with a window) starts at 0, which is within 60 of
            # most models' scores.
            state = (top if running else jnp.where(top > 0.5 * LOWEST, top, 0.0), total)
        else:
            state, _, weights = soften(scores, block, _start(unified_ref[0] * LOG2E), True, False)
        wait_for_keys(block + 1, step + 1)
        return state, _operand(weights, r)

    def attend(i, loop, masked):
        """Compute block i's weights during the product of the previous block's weights with its values."""
        state, out, weights, step = loop
        before, slot = lax.rem(step, stages), lax.rem(step + 1, stages)

        def made(scores):
            plgpu.barrier_arrive(m["k_empty"].at[slot])
            new, keep, weights = soften(scores, i, state, masked, running)
            new, keep, weights = lax.optimization_barrier((new, keep, weights))
            wait_for_keys(i + 1, step + 2)
            return new, keep, weights

        start = functools.partial(score, slot=slot)
        state, keep, new, out = _overlapped(
            start, made, out, weights, m["v_s"].at[before], m["v_full"].at[before], r
        )
        plgpu.barrier_arrive(m["v_empty"].at[before])
        if running:
            out = rescaled(out, keep, r.interpret)
        return state, out, _operand(new, r), step + 1

    plgpu.barrier_wait(m["k_full"].at[lax.rem(step, stages)])
    state, weights = first(lax.rem(step, stages))
    # Blocks that all rows of this warpgroup see completely need no mask.
    seen_from, whole = block + 1, block + 1
    if r.spans:
        seen_from = jnp.clip(lax.div(spanned[2] + keys - 1, jnp.int32(keys)) - skipped, block + 1, block_end)
    if r.spans or r.window is None:
        whole = jnp.clip(lax.div(base + 1, jnp.int32(keys)) - skipped, seen_from, block_end)
    out = plgpu.layout_cast(jnp.zeros((HALF, h), jnp.float32), plgpu.Layout.WGMMA)
    loop = state, out, weights, step
    if r.spans:
        loop = lax.fori_loop(block + 1, seen_from, functools.partial(attend, masked=True), loop)
    loop = lax.fori_loop(seen_from, whole, functools.partial(attend, masked=False), loop)
    (top, total), out, weights, step = lax.fori_loop(
        whole, block_end, functools.partial(attend, masked=True), loop
    )
    if not r.e4m3:
        plgpu.barrier_arrive(m["q_empty"].at[queries])
    slot = lax.rem(step, stages)
    plgpu.barrier_wait(m["v_full"].at[slot])
    if not r.int8:  # converted int8 values are finite everywhere
        # From values that the loops keep, to save a register there.
        last = base - block_of(block_end - 1, skipped, r.sinks, keys) * keys
        # The first key that the item's first row sees. With sinks no page stands in for an unwritten one.
        if r.spans:
            seen = spanned[1] + last - base
        else:
            seen = None if r.window is None else last + place[1] - r.window + 1
        seen = None if r.sinks else seen
        _blank_block(m["v_s"].at[slot], seen, last + place[2], wg, m["blanked"], r)
    out = _product(out, weights, m["v_s"].at[slot], r)
    plgpu.barrier_arrive(m["v_empty"].at[slot])
    total = total.sum(axis=1)
    if not running:
        _mark_rows(
            total,
            unified_ref[1],
            place,
            m["again"].at[wg, pl.ds(lax.rem(round_, jnp.int32(MARKS)), 1)],
            r.interpret,
        )
    if r.sink_logits:
        total = total + sink_term(more_refs[-1][head], top)
    level = top + jnp.log2(jnp.maximum(total, LEAST)) if r.levels else None
    total = (v_scale_ref[kv_head] if r.e4m3 else 1.0) / jnp.maximum(total, LEAST)
    out, carry = out * lax.broadcast_in_dim(total, out.shape, [0]), (done + 1, step + 1)
    return out, level, carry


def _start(top):
    """Return the maximum of each row and the sums of weights (by column modulo 8) before the first block."""
    top = plgpu.layout_cast(lax.full((HALF,), top, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
    return top, plgpu.layout_cast(jnp.zeros((HALF, 8), jnp.float32), plgpu.Layout.WGMMA)


def _quantize_queries(q, q8, factor):
    """Write q [64, H] in 8 bits. Return the factor of each row of scores, `factor` included."""
    q = plgpu.load(q, (), layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    most = jnp.maximum(jnp.maximum(q.max(axis=1), (-q).max(axis=1)), 1e-30)
    q8[...] = (q * lax.broadcast_in_dim(448.0 / most, q.shape, [0])).astype(q8.dtype)
    plgpu.commit_smem()
    return most * (factor / 448.0)


def _seen(base, first_key, keys, window):
    """Return [rows, keys] bool: the keys of the block that a row at position base + row sees."""
    row = plgpu.broadcasted_iota(jnp.int32, (HALF, keys), 0, layout=plgpu.Layout.WGMMA)
    key = plgpu.broadcasted_iota(jnp.int32, (HALF, keys), 1, layout=plgpu.Layout.WGMMA)
    ahead = key - row  # key position <= row position, rearranged
    seen = ahead <= base - first_key
    return seen if window is None else seen & (ahead > base - first_key - window)


def _in_span(base, first_key, keys, span, sinks):
    """Return `_seen` for rows with their own spans [rows], besides the first `sinks` keys.

    The bounds of a row take few registers. A mask of each pair of row and key would take one for each.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (HALF,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    last = row + (base - first_key)
    wide = lambda x: lax.broadcast_in_dim(x, (HALF, keys), [0])
    key = plgpu.broadcasted_iota(jnp.int32, (HALF, keys), 1, layout=plgpu.Layout.WGMMA)
    near = key > wide(last - span)
    return (key <= wide(last)) & (near | (key < sinks - first_key) if sinks else near)


def _soften(scores, seen, top, total, *, scale, soft_cap, unit, update):
    """Return new (top, total), the factor [64] of the output, and the block's weights, in powers of two.

    unit: None, or [64], the factor of a row's scores from 8-bit queries; the weights are then 2^8 times as
    large. update: let `top` follow the scores.
    """
    shift = 0.0 if unit is None else _SHIFT

    def wide(x, like=scores):
        return lax.broadcast_in_dim(x, like.shape, [0])

    if unit is not None and (soft_cap is not None or scale <= 0):
        scores, unit, scale = scores * wide(unit), None, 1.0
    scores, factor = capped(scores, scale, soft_cap)
    if factor <= 0:  # before the mask, because the factor turns -inf into NaN or +inf
        scores, factor = scores * factor, 1.0
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    if not update:
        weights = jnp.exp2(scores * factor - wide(top))
        return (top, total + _by_column(weights)), top, weights
    row_factor = factor if unit is None else unit * LOG2E
    new_top = jnp.maximum(top, scores.max(axis=1) * row_factor)
    keep = jnp.exp2(top - new_top)
    below = new_top - shift if shift else new_top
    weights = jnp.exp2(scores * (factor if unit is None else wide(row_factor)) - wide(below))
    return (new_top, total * wide(keep, total) + _by_column(weights)), keep, weights


def _by_column(weights):
    """Return [64, 8]: sums of each row's weights by column modulo 8.

    Threads add their sums only at the end.
    """
    parts = [weights[:, i : i + 8] for i in range(0, weights.shape[1], 8)]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _operand(weights, r: RowConstants):
    return (
        as_operand(weights.astype(jnp.float8_e4m3fn), r.interpret) if r.e4m3 else weights.astype(jnp.bfloat16)
    )


def _multiply(acc, weights, v):
    """Start acc += weights @ v. A block of an 8-bit cache is [pages, H, 64] and needs one product a page."""
    if len(v.shape) == 2:
        plgpu.wgmma(acc, weights, v)
        return
    for page in range(v.shape[0]):
        plgpu.wgmma(acc, weights[:, page * PAGE : (page + 1) * PAGE], v.at[page].transpose((1, 0)))


def _product(out, weights, v, r: RowConstants) -> Any:
    """Return out + weights @ v, in place in out's registers; the interpreter has no such accumulator."""
    if not r.interpret:
        return pl.run_state(lambda acc: _multiply(acc, weights, v))(plgpu.ACC.init(out))
    v = jnp.concatenate([v[page].T for page in range(v.shape[0])]) if len(v.shape) == 3 else v[...]
    return out + jnp.dot(weights.astype(jnp.float32), v.astype(jnp.float32))


def _overlapped(score, made, out, weights, v, v_full, r: RowConstants):
    """Compute (state, keep, new) = made(scores) during out += weights @ v. Return all of them.

    score: a function that starts the product of the scores.
    """
    shape = (HALF, r.tile.keys)
    if r.interpret:

        def scores(acc):
            score(acc)
            return acc[...]

        state = made(pl.run_scoped(scores, plgpu.ACC(shape, jnp.float32)))
        plgpu.barrier_wait(v_full)
        return *state, _product(out, weights, v, r)

    def both(scores):
        score(scores)
        plgpu.barrier_wait(v_full)

        def rest(refs):
            acc, top, total, keep, new = refs
            _multiply(acc, weights, v)
            products = 1 if len(v.shape) == 2 else v.shape[0]
            (top[...], total[...]), keep[...], new[...] = made(
                plgpu.wgmma_accumulator_load(scores, wait_n=products)
            )

        top, total = _start(LOWEST)
        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        return pl.run_state(rest)((plgpu.ACC.init(out), top, total, top, zeros))

    out, top, total, keep, new = pl.run_scoped(both, plgpu.ACC(shape, jnp.float32))
    return (top, total), keep, new, out


def _mark_rows(total, bound, place, again, interpret):
    """Mark an item with a row whose sum is outside exp(±bound): a weight was too large, or all were too
    small.
    """
    _, begin, end = place
    row = plgpu.broadcasted_iota(jnp.int32, (HALF, 8), 0, layout=plgpu.Layout.WGMMA).max(axis=1)
    most = jnp.exp2(jnp.minimum(bound, MOST) * LOG2E)
    fine = (total >= 1.0 / most) & (total <= most) | (row < begin) | (row >= end)
    mark(jnp.where(fine, 0, 1), again, interpret)


def store_rows(out, o_s, o_ref, head, first, begin, end):
    """Write rows begin .. end of out [64, H] to o_ref from row first + begin on, through the slots of o_s,
    [slots, 64, 64].
    """
    whole = (begin <= 0) & (end >= HALF)
    columns, slots = out.shape[1] // WIDTH, o_s.shape[0]
    for i in range(columns):
        slot, column = o_s.at[i % slots], head * columns + i

        @pl.when(whole)
        def _():
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)

        @pl.when(jnp.logical_not(whole))
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        slot[...] = out[:, i * WIDTH : (i + 1) * WIDTH].astype(slot.dtype)
        plgpu.commit_smem()

        @pl.when(whole)
        def _(slot=slot, column=column):
            plgpu.copy_smem_to_gmem(slot, o_ref.at[pl.ds(first, HALF), column])

        @pl.when(jnp.logical_not(whole))
        def _(slot=slot, column=column):
            @pl.loop(jnp.maximum(begin, 0), jnp.clip(end, jnp.maximum(begin, 0), HALF))
            def _(row):
                plgpu.copy_smem_to_gmem(slot.at[pl.ds(row, 1)], o_ref.at[pl.ds(first + row, 1), column])


def fill_gaps(gaps_ref, gaps, zeros, o_ref, worker, workers):
    """Set rows outside all chunks to zero, one copy a row, divided among the workers."""
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


def _blank_block(v, first, keys, wg, blanked, r: RowConstants):
    """Set the values of a block past its `keys` to zero, one page for each warpgroup, because unwritten
    memory can hold NaN.

    first: the first seen key of the block, with a window. A page before it is a stand-in for a page outside
    the window, and is zeroed completely.
    """

    @pl.when(keys < r.tile.keys)
    def _():
        for page in range(r.tile.keys // PAGE):
            part = v.at[page] if r.e4m3 else v.at[pl.ds(page * PAGE, PAGE)]
            own = keys - page * PAGE
            own = own if first is None else jnp.where(first >= (page + 1) * PAGE, 0, own)
            pl.when(wg == page)(functools.partial(blank_8 if r.e4m3 else blank, part, own))
        plgpu.commit_smem()
        plgpu.barrier_arrive(blanked)
        plgpu.barrier_wait(blanked)
