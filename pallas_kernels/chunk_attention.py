"""Paged attention of prefill chunks for Hopper: several chunks a step, each at any offset of its sequence (SARATHI §4.2).

A work item is one tile of 128 query rows of one chunk and one head. `chunk_work` lists the tiles of the step from the chunks array, on the
device, the longest first; a persistent grid of `sms` CTAs takes them back and forth, so that each CTA gets long and short ones. In a CTA
one warpgroup copies (a page and head is one TMA box) and two compute, each 64 rows; they take turns, so that one's softmax runs under the
other's matrix products (FlashAttention-3's ping-pong).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged import LANE, LOWEST, PAGE, blank, capped, check_pages, flat, rows_of_eight, tiled
from pallas_kernels.tiles import ChunkTile, chunk_tile

_HALF = 64  # query rows of one compute warpgroup
_WIDTH = 64  # columns that are stored together


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkWork:
    """The query tiles of a step; the same for all layers that share chunks and window. Made by `chunk_work`.

    tiles [M, 7] int32, the longest first: first row in q, a multiple of 8; the tile's rows before the chunk, and before the chunk's end;
    row of the page table; position of the first row; first block of keys that any row sees, end of the blocks.
    count [1] int32: how many of the M there are.
    """

    tiles: jax.Array
    count: jax.Array


def chunk_work(chunks: jax.Array, tokens: int, tile: ChunkTile, window: int | None = None) -> ChunkWork:
    """Cuts chunks [C, 4] int32 (first token in q, tokens, row of the page table, position) into tiles, on the device.

    `tokens` is the length of q, the most that all chunks together can have. Compute it once a step for all layers.
    """
    first, length, row, position = (chunks[:, i].astype(jnp.int32) for i in range(4))
    c = chunks.shape[0]
    most = (tokens + (tile.rows + 6) * c) // tile.rows  # each chunk may add 7 rows before it and a tile that is not full
    lead = first % 8  # a copy by tiles begins at a multiple of 8 rows: those before the chunk are computed and dropped
    per_chunk = jnp.where(length > 0, (lead + length + tile.rows - 1) // tile.rows, 0)
    index = jnp.arange(c, dtype=jnp.int32)
    ends = jnp.sum(jnp.where(index[None, :] <= index[:, None], per_chunk[None, :], 0), axis=1, dtype=jnp.int32)
    slot = jnp.arange(most, dtype=jnp.int32)
    chunk = jnp.minimum(jnp.sum((ends[None, :] <= slot[:, None]).astype(jnp.int32), axis=1), c - 1)
    skip = (slot - (ends - per_chunk)[chunk]) * tile.rows - lead[chunk]  # tokens of the chunk before the tile's first row
    begin, end = jnp.maximum(-skip, 0), jnp.clip(length[chunk] - skip, 0, tile.rows)
    at = position[chunk] + skip
    block_end = (at + end + tile.keys - 1) // tile.keys
    block = jnp.zeros_like(at) if window is None else jnp.maximum(at + begin - window + 1, 0) // tile.keys
    table = jnp.stack([first[chunk] + skip, begin, end, row[chunk], at, block, block_end], axis=1)
    cost = jnp.where(slot < ends[-1], block_end - block, 0)
    ahead = (cost[None, :] > cost[:, None]) | ((cost[None, :] == cost[:, None]) & (slot[None, :] < slot[:, None]))
    rank = jnp.sum(ahead.astype(jnp.int32), axis=1)
    tiles = jnp.sum(jnp.where((rank[None, :] == slot[:, None])[:, :, None], table[None], 0), axis=1)
    return ChunkWork(tiles=tiles.astype(jnp.int32), count=jnp.minimum(ends[-1:], most))


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
    sms: int = 132,
    tile: ChunkTile | None = None,
    work: ChunkWork | None = None,
    interpret=None,
) -> jax.Array:
    """Causal attention of prefill chunks over their sequences' pages (the twin: `reference.chunk_attention`).

    Args:
      q: [T, N, H] bfloat16, H 64, 128 or 256.
      k_pages, v_pages: [P, K, 64, H] bfloat16; the chunks' own keys and values are in them already.
      page_table: [R, MP] int32; entries past a sequence's last visible page are never read.
      chunks: [C, 4] int32, a row each: first token in q, tokens (0: skipped), row of page_table, position of the first token. Chunks
        do not overlap in q.
      scale: the scores are q·k · scale. window: a token sees its last `window` keys only. soft_cap: scores become cap · tanh(score / cap).
      sms: CTAs of the persistent grid: how many SMs the kernel may take.
      work: `chunk_work(chunks, T, tile, window)`, where the caller shares it between layers.
    Returns:
      [T, N, H] bfloat16; 0 at tokens that are in no chunk.
    Raises:
      ValueError: for a shape or dtype that the kernel does not take.
    """
    (t, _, h), kv = q.shape, k_pages.shape[1]
    check_pages(q, k_pages, v_pages)
    tile = tile or chunk_tile(h)
    work = chunk_work(chunks, t, tile, window) if work is None else work
    body = functools.partial(
        _attend, sms=sms, kv=kv, tile=tile, scale=scale, window=window, soft_cap=soft_cap, interpret=interpret is not None
    )
    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=(sms,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        scratch_types=_scratch(tile, h, q.dtype),
        compiler_params=LANE,
        kernel_name=f"chunk_attention_{sms}",
        interpret=interpret,
    )
    inputs = rows_of_eight(q), flat(k_pages), flat(v_pages), page_table.astype(jnp.int32), work.tiles, work.count
    return pl.run_state(lambda out: kernel(*inputs, out))(lax.full(q.shape, 0, q.dtype))


def _scratch(tile: ChunkTile, h: int, dtype) -> dict:
    return dict(  # noqa: C408
        q_s=plgpu.SMEM((2, _HALF, h), dtype, transforms=tiled()),
        o_s=plgpu.SMEM((2, 2, _HALF, _WIDTH), dtype),  # plain rows: the end of a chunk is stored row by row
        k_s=plgpu.SMEM((tile.stages, tile.keys, h), dtype, transforms=tiled()),
        v_s=plgpu.SMEM((tile.stages, tile.keys, h), dtype, transforms=tiled()),
        q_full=plgpu.Barrier(num_arrivals=2),
        q_empty=plgpu.Barrier(num_arrivals=2),
        k_full=plgpu.Barrier(num_arrivals=tile.keys // PAGE, num_barriers=tile.stages),
        v_full=plgpu.Barrier(num_arrivals=tile.keys // PAGE, num_barriers=tile.stages),
        k_empty=plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        v_empty=plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        turn=plgpu.Barrier(num_arrivals=2),
        blanked=plgpu.Barrier(num_arrivals=2),
    )


def _attend(
    q_ref, k_ref, v_ref, table_ref, tiles_ref, count_ref, o_ref,
    q_s, o_s, k_s, v_s, q_full, q_empty, k_full, v_full, k_empty, v_empty, turn, blanked,
    *, sms, kv, tile, scale, window, soft_cap, interpret,
):  # fmt: skip
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    n, h = q_ref.shape[1:]
    group, stages, keys = n // kv, jnp.int32(tile.stages), tile.keys
    items = count_ref[0] * n
    # Back and forth over the sorted items; an odd round may lack this CTA's item.
    rounds = lax.div(items + sms - 1, jnp.int32(sms))

    def item(i):
        place = jnp.where(lax.rem(i, jnp.int32(2)) == 0, cta, sms - 1 - cta)
        return i * sms + place

    def for_items(visit, carry):
        def round_(i, carry):
            which = item(i)

            def one(carry):
                index, head = lax.div(which, jnp.int32(n)), lax.rem(which, jnp.int32(n))
                return visit(carry, head, *(tiles_ref[index, j] for j in range(7)))

            return lax.cond(which < items, one, lambda carry: carry, carry)

        return lax.fori_loop(0, rounds, round_, carry)

    @pl.when(wg == 2)
    def _copy():
        plgpu.set_max_registers(24, action="decrease")  # 24 + 2 · 240 = 3 · 168, what the CTA was given

        def visit(carry, head, first, _, end, row, position, block, block_end):
            done, step = carry
            kv_head = lax.div(head, jnp.int32(group))
            last_page = lax.div(position + end - 1, jnp.int32(PAGE))

            @pl.when(done > 0)
            def _():
                plgpu.barrier_wait(q_empty)

            for half in range(2):
                plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(pl.multiple_of(first, 8) + half * _HALF, _HALF), head], q_s.at[half], q_full)

            def pages_of(block):
                # A block may reach past the sequence: its last page stands in for what is not there (those keys are masked).
                per = keys // PAGE
                return tuple(table_ref[row, jnp.minimum(block * per + j, last_page)] for j in range(per))

            def copy(i, state):
                step, ids = state
                following = pages_of(i + 1)
                slot = lax.rem(step, stages)
                for source, ring, full, empty in ((k_ref, k_s, k_full, k_empty), (v_ref, v_s, v_full, v_empty)):

                    @pl.when(step >= stages)
                    def _(empty=empty):
                        plgpu.barrier_wait(empty.at[slot])

                    for j, page_id in enumerate(ids):
                        at = pl.ds((page_id * kv + kv_head) * PAGE, PAGE)
                        plgpu.copy_gmem_to_smem(source.at[at], ring.at[slot, pl.ds(j * PAGE, PAGE)], full.at[slot])
                return step + 1, following

            step, _ = lax.fori_loop(block, block_end, copy, (step, pages_of(block)))
            return done + 1, step

        done, steps = for_items(visit, (jnp.int32(0), jnp.int32(0)))

        # Every arrival is waited for, also the last ones (a barrier that nobody watched is an error in the interpreter).
        @pl.loop(jnp.maximum(steps - stages, 0), steps)
        def _(step):
            plgpu.barrier_wait(k_empty.at[lax.rem(step, stages)])
            plgpu.barrier_wait(v_empty.at[lax.rem(step, stages)])

        @pl.when(done > 0)
        def _():
            plgpu.barrier_wait(q_empty)

    @pl.when(wg < 2)
    def _compute():
        plgpu.set_max_registers(240, action="increase")

        def take_turns():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def visit(step, head, first, begin, end, _, position, block, block_end):
            base = position + wg * _HALF  # position of this warpgroup's first row

            def attend(i, state, masked):
                *state, step = state
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(k_full.at[slot])

                def products(acc):
                    plgpu.wgmma(acc, q_s.at[wg], k_s.at[slot].transpose((1, 0)))
                    take_turns()
                    return acc[...]

                scores = pl.run_scoped(products, plgpu.ACC((_HALF, keys), jnp.float32))
                plgpu.barrier_arrive(k_empty.at[slot])
                seen = _seen(base, i * keys, keys, window) if masked else None
                top, total, out, weights = _soften(scores, seen, *state, scale=scale, soft_cap=soft_cap)
                top, total, out, weights = lax.optimization_barrier((top, total, out, weights))
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(v_full.at[slot])
                if masked:
                    _blank(v_s.at[slot], position + end - i * keys, wg, blanked)
                plgpu.barrier_wait(turn)
                out = _accumulate(out, weights, v_s.at[slot], interpret)
                plgpu.barrier_arrive(v_empty.at[slot])
                return top, total, out, step + 1

            plgpu.barrier_wait(q_full)
            pl.when(wg == 1)(take_turns)
            state = (*_start(h), step)
            # Blocks that all of this warpgroup's rows see whole need no mask.
            whole = block if window is not None else jnp.clip(lax.div(base + 1, jnp.int32(keys)), block, block_end - 1)
            state = lax.fori_loop(block, whole, functools.partial(attend, masked=False), state)
            _, total, out, step = lax.fori_loop(whole, block_end, functools.partial(attend, masked=True), state)
            pl.when(wg == 0)(take_turns)
            plgpu.barrier_arrive(q_empty)
            _store(
                out / lax.broadcast_in_dim(total, out.shape, [0]),
                o_s.at[wg],
                o_ref,
                first + wg * _HALF,
                head,
                begin - wg * _HALF,
                end - wg * _HALF,
            )
            return step

        for_items(visit, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _start(h):
    """The running maximum and the sum of weights of each row, and the output, before the first block."""
    top = plgpu.layout_cast(jnp.full((_HALF,), LOWEST, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
    total = plgpu.layout_cast(jnp.zeros((_HALF,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
    return top, total, plgpu.layout_cast(jnp.zeros((_HALF, h), jnp.float32), plgpu.Layout.WGMMA)


def _seen(base, first_key, keys, window):
    """[rows, keys] bool: which keys of the block a row at position base + row sees."""
    row = plgpu.broadcasted_iota(jnp.int32, (_HALF, keys), 0, layout=plgpu.Layout.WGMMA)
    key = plgpu.broadcasted_iota(jnp.int32, (_HALF, keys), 1, layout=plgpu.Layout.WGMMA)
    ahead = key - row  # key position <= row position, with the positions of the tile taken to one side
    seen = ahead <= base - first_key
    return seen if window is None else seen & (ahead > base - first_key - window)


def _soften(scores, seen, top, total, out, *, scale, soft_cap):
    """One block of the running-maximum softmax, in powers of two: new (top, total, out) and the block's weights, bfloat16."""
    scores, factor = capped(scores, scale, soft_cap)
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=1) * factor)
    weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    keep = jnp.exp2(top - new_top)
    total = total * keep + weights.sum(axis=1)
    return new_top, total, out * lax.broadcast_in_dim(keep, out.shape, [0]), weights.astype(jnp.bfloat16)


def _accumulate(out, weights, v, interpret):
    """out + weights @ v, in place in out's registers, which the interpreter has no accumulator for."""
    if not interpret:
        return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, v))(plgpu.ACC.init(out))
    return out + jnp.dot(weights, v[...], preferred_element_type=jnp.float32)


def _store(out, o_s, o_ref, first, head, begin, end):
    """Writes rows begin .. end of out [64, H] to o_ref from row first + begin on, through two slots of 64 columns."""
    whole = (begin <= 0) & (end >= _HALF)
    for i in range(out.shape[1] // _WIDTH):
        slot, columns = o_s.at[i % 2], pl.ds(i * _WIDTH, _WIDTH)

        @pl.when(whole)
        def _():
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        @pl.when(jnp.logical_not(whole))
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        slot[...] = out[:, i * _WIDTH : (i + 1) * _WIDTH].astype(slot.dtype)
        plgpu.commit_smem()

        @pl.when(whole)
        def _(slot=slot, columns=columns):
            plgpu.copy_smem_to_gmem(slot, o_ref.at[pl.ds(first, _HALF), head, columns])

        @pl.when(jnp.logical_not(whole))
        def _(slot=slot, columns=columns):
            @pl.loop(jnp.maximum(begin, 0), jnp.clip(end, jnp.maximum(begin, 0), _HALF))
            def _(r):
                plgpu.copy_smem_to_gmem(slot.at[pl.ds(r, 1)], o_ref.at[pl.ds(first + r, 1), head, columns])


def _blank(v, keys, wg, blanked):
    """Zeroes the rows of a value block past its `keys`, a page a warpgroup: what was never written may be NaN, and 0 · NaN is NaN."""

    @pl.when(keys < v.shape[0])
    def _():
        for page in range(v.shape[0] // PAGE):
            pl.when(wg == page)(functools.partial(blank, v.at[pl.ds(page * PAGE, PAGE)], keys - page * PAGE))
        plgpu.commit_smem()
        plgpu.barrier_arrive(blanked)
        plgpu.barrier_wait(blanked)
