"""Paged decode attention for Hopper: every sequence's one query row against its pages, KV split over the whole chip.

The work of a step is one line of pages: rows in order, a row's KV heads in order, a head's visible pages in order. `decode_work`
cuts that line into equal pieces, one a worker (a compute warpgroup and the warpgroup that copies for it), so one row of 131,072 keys
beside 200 short ones fills the chip as well as equal rows do (FlashDecoding's split KV, cut by pages instead of by row). A worker
ends at most two (row, head) pairs unfinished: where its piece begins and where it ends. Those partial results go to a workspace, and a
second, small kernel adds them up in a fixed order, so the same batch gives the same bits.

Inside, the operands are swapped: 64 keys are wgmma's M and the (up to 16) query heads of one KV head its N, padded to 8 and not to 64.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tiles import DecodeTile, decode_tile

PAGE = 64
_LOG2E = math.log2(math.e)
_LOWEST = -1e30  # below any score: the running maximum starts here, so that a masked score (-inf) never meets another -inf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeWork:
    """Which pages each worker reads; the same for all layers that share lengths and window. Made by `decode_work`.

    rows [B, 4] int32: first visible page, visible pages, length (0: skipped), next row that has pages.
    pieces [workers, 4] int32: first row, first KV head, first page counted from the row's first visible one, pages in the piece.
    chains [workers] int32: how many workers before this one hold a part of the (row, head) pair that this piece begins with.
    """

    rows: jax.Array
    pieces: jax.Array
    chains: jax.Array


def decode_work(lengths: jax.Array, kv_heads: int, workers: int, window: int | None = None) -> DecodeWork:
    """Cuts the batch's pages into equal pieces, on the device, from lengths [B] int32 (0: no work for that row).

    A few small XLA ops; compute it once a step and pass it to every layer's `decode_attention`.
    """
    b = lengths.shape[0]
    lengths = lengths.astype(jnp.int32)
    first = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0) // PAGE
    pages = jnp.where(lengths > 0, (lengths + PAGE - 1) // PAGE - first, 0)
    index = jnp.arange(b, dtype=jnp.int32)
    # Sums over a comparison matrix: one small fusion, where cumsum and searchsorted would each be several kernels.
    ends = jnp.sum(jnp.where(index[None, :] <= index[:, None], pages[None, :], 0), axis=1, dtype=jnp.int32)
    following = jnp.min(jnp.where((index[None, :] > index[:, None]) & (pages[None, :] > 0), index[None, :], b), axis=1)
    total = ends[-1] * kv_heads
    worker = jnp.arange(workers + 1, dtype=jnp.int32)
    # total * worker stays below 2**31 for 2**22 (page, head) pairs on 512 workers.
    begins = jnp.where(total >= workers, total * worker // workers, jnp.minimum(worker, total))
    begin, count = begins[:-1], begins[1:] - begins[:-1]
    row = jnp.minimum(jnp.sum((ends[None, :] * kv_heads <= begin[:, None]).astype(jnp.int32), axis=1), b - 1)
    row_pages = jnp.maximum(pages[row], 1)
    inside = begin - (ends[row] - pages[row]) * kv_heads
    head, page = inside // row_pages, inside % row_pages
    # The worker that holds the pair's first page: the last one that begins at or before it.
    holder = jnp.sum((begins[None, :-1] <= (begin - page)[:, None]).astype(jnp.int32), axis=1) - 1
    chains = jnp.where((page > 0) & (count > 0), worker[:-1] - holder, 0)
    return DecodeWork(
        rows=jnp.stack([first, pages, lengths, following], axis=1),
        pieces=jnp.stack([row, head, page, count], axis=1),
        chains=chains,
    )


def _tiled(itemsize: int = 2):
    """The shared-memory form that TMA writes and wgmma reads: 128-byte swizzled tiles of 8 rows."""
    return (plgpu.TilingTransform((8, 128 // itemsize)), plgpu.SwizzleTransform(128))


def decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sms: int = 132,
    tile: DecodeTile | None = None,
    work: DecodeWork | None = None,
    interpret=None,
) -> jax.Array:
    """Attention of one new token a sequence over its pages (the twin: `reference.decode_attention`).

    Args:
      q: [B, N, H] bfloat16, H 64, 128 or 256; N / K from 1 to 16.
      k_pages, v_pages: [P, K, 64, H] bfloat16.
      page_table: [B, MP] int32; entries past a row's length are never read.
      lengths: [B] int32, keys of each row, its own included; 0 skips the row, whose output is 0.
      scale: the scores are q·k · scale. window: a row sees its last `window` keys only. soft_cap: scores become cap · tanh(score / cap).
      sms: CTAs of the persistent grid: how many SMs the kernel may take.
      work: `decode_work(lengths, K, sms * tile.workers, window)`, where the caller shares it between layers.
    Returns:
      [B, N, H] bfloat16.
    Raises:
      ValueError: for a shape or dtype that the kernel does not take.
    """
    (b, n, h), (p, kv, s, _) = q.shape, k_pages.shape
    _check(q, k_pages, v_pages)
    group, tile = n // kv, tile or decode_tile(h)
    cols = 8 if group <= 8 else 16  # wgmma's N
    workers = sms * tile.workers
    work = decode_work(lengths, kv, workers, window) if work is None else work
    if work.pieces.shape[0] != workers:
        raise ValueError(f"work.pieces has {work.pieces.shape[0]} workers: {workers} for sms={sms} and {tile}")
    page_table = page_table.astype(jnp.int32)
    queries = _rows_of_eight(q.reshape(b * n, h))
    main = functools.partial(
        _attend, group=group, cols=cols, kv=kv, tile=tile, scale=scale, window=window, soft_cap=soft_cap, interpret=interpret is not None
    )
    out, parts, levels = plgpu.kernel(
        main,
        out_type=(
            jax.ShapeDtypeStruct((b * n, h), q.dtype),
            jax.ShapeDtypeStruct((workers, 2, h, cols), jnp.float32),
            jax.ShapeDtypeStruct((workers, 2, cols), jnp.float32),
        ),
        grid=(sms,),
        grid_names=("cta",),
        num_threads=2 * tile.workers,
        thread_name="wg",
        scratch_types=_scratch(tile, cols, h, q.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name=f"decode_attention_{sms}",
        interpret=interpret,
    )(queries, k_pages.reshape(p * kv * s, h), v_pages.reshape(p * kv * s, h), page_table, work.rows, work.pieces)
    return _join(out, parts, levels, work, group=group, cols=cols, kv=kv, interpret=interpret).reshape(b, n, h)


def _rows_of_eight(x):
    """x with zero rows up to a multiple of 8, which a tiled copy wants (an engine's batches are multiples of 8 anyway)."""
    short = -x.shape[0] % 8
    return x if short == 0 else lax.pad(x, jnp.zeros((), x.dtype), [(0, short, 0)] + [(0, 0, 0)] * (x.ndim - 1))


def _check(q, k_pages, v_pages):
    (_, n, h), (_, kv, s, width) = q.shape, k_pages.shape
    if h not in (64, 128, 256) or width != h:
        raise ValueError(f"head width {h} (pages: {width}): 64, 128 or 256, the same in both")
    if s != PAGE or k_pages.shape != v_pages.shape:
        raise ValueError(f"pages {k_pages.shape} and {v_pages.shape}: [P, K, {PAGE}, H], the same for both")
    if n % kv or not 1 <= n // kv <= 16:
        raise ValueError(f"{n} query heads over {kv} KV heads: 1 to 16 a KV head")
    if any(x.dtype != jnp.bfloat16 for x in (q, k_pages, v_pages)):
        raise ValueError(f"dtypes {q.dtype}, {k_pages.dtype}, {v_pages.dtype}: bfloat16")


def _scratch(tile: DecodeTile, cols: int, h: int, dtype) -> dict:
    w = tile.workers
    return dict(
        ring=plgpu.SMEM((w, tile.blocks, PAGE, h), dtype, transforms=_tiled()),
        q_s=plgpu.SMEM((w, 2, cols, h), dtype, transforms=_tiled()),
        p_s=plgpu.SMEM((w, cols, PAGE), dtype, transforms=_tiled()),
        o_s=plgpu.SMEM((w, cols, h), dtype),
        sums=plgpu.SMEM((w, 512), jnp.float32),
        full=plgpu.Barrier(num_barriers=w * tile.blocks),
        empty=plgpu.Barrier(num_barriers=w * tile.blocks),
        q_full=plgpu.Barrier(num_barriers=w * 2),
        q_empty=plgpu.Barrier(num_barriers=w * 2),
    )


def _walk(rows_ref, pieces_ref, worker, kv, visit, carry):
    """Calls visit(carry, row, head, first page, pages here, (first visible, pages, length)) for each pair of the worker's piece."""
    row, head, page, left = (pieces_ref[worker, i] for i in range(4))

    def step(state):
        row, head, page, left, carry = state
        first, pages, length, following = (rows_ref[row, i] for i in range(4))
        here = jnp.minimum(pages - page, left)
        carry = visit(carry, row, head, page, here, (first, pages, length))
        done = head + 1 == kv
        return jnp.where(done, following, row), jnp.where(done, 0, head + 1), jnp.int32(0), left - here, carry

    return lax.while_loop(lambda state: state[3] > 0, step, (row, head, page, left, carry))[4]


def _attend(
    q_ref, k_ref, v_ref, table_ref, rows_ref, pieces_ref, o_ref, part_ref, level_ref,
    ring, q_s, p_s, o_s, sums, full, empty, q_full, q_empty,
    *, group, cols, kv, tile, scale, window, soft_cap, interpret,
):  # fmt: skip
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    w = lax.rem(wg, jnp.int32(tile.workers))
    worker = cta * tile.workers + w
    n, h, blocks = group * kv, q_ref.shape[1], jnp.int32(tile.blocks)

    @pl.when(wg >= tile.workers)
    def _copy():
        def visit(carry, row, head, page, here, visible):
            pair, block = carry
            first = visible[0] + page
            slot = w * 2 + lax.rem(pair, jnp.int32(2))

            @pl.when(pair >= 2)
            def _():
                plgpu.barrier_wait(q_empty.at[slot])

            # Rows past the group belong to the next KV head (past the end: zeros): their columns are computed and dropped.
            plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(row * n + head * group, cols)], q_s.at[w, lax.rem(pair, jnp.int32(2))], q_full.at[slot])

            def copy(i, state):
                block, page_id = state
                following = table_ref[row, jnp.minimum(first + i + 1, table_ref.shape[1] - 1)]
                at = pl.ds((page_id * kv + head) * PAGE, PAGE)
                for source in (k_ref, v_ref):
                    place = lax.rem(block, blocks)
                    slot = w * blocks + place

                    @pl.when(block >= blocks)
                    def _(slot=slot):
                        plgpu.barrier_wait(empty.at[slot])

                    plgpu.copy_gmem_to_smem(source.at[at], ring.at[w, place], full.at[slot])
                    block += 1
                return block, following

            block, _ = lax.fori_loop(0, here, copy, (block, table_ref[row, first]))
            return pair + 1, block

        pairs, copied = _walk(rows_ref, pieces_ref, worker, kv, visit, (jnp.int32(0), jnp.int32(0)))

        # Every arrival is waited for, also of the last blocks (a barrier that nobody watched is an error in the interpreter).
        @pl.loop(jnp.maximum(copied - blocks, 0), copied)
        def _(block):
            plgpu.barrier_wait(empty.at[w * blocks + lax.rem(block, blocks)])

        @pl.loop(jnp.maximum(pairs - 2, 0), pairs)
        def _(pair):
            plgpu.barrier_wait(q_empty.at[w * 2 + lax.rem(pair, jnp.int32(2))])

        @pl.loop(worker, rows_ref.shape[0], step=part_ref.shape[0])
        def _(row):
            @pl.when(rows_ref[row, 1] == 0)
            def _():
                o_ref.at[pl.ds(row * n, n)][...] = jnp.zeros((n, h), o_ref.dtype)

    @pl.when(wg < tile.workers)
    def _compute():
        across = functools.partial(_across_keys, scratch=sums.at[w], interpret=interpret)

        def visit(carry, row, head, page, here, visible):
            pair, block = carry
            first, pages, length = visible
            place = lax.rem(pair, jnp.int32(2))
            q = q_s.at[w, place]
            plgpu.barrier_wait(q_full.at[w * 2 + place])

            def step(i, state):
                *state, block = state
                k_place, v_place = lax.rem(block, blocks), lax.rem(block + 1, blocks)
                key = plgpu.broadcasted_iota(jnp.int32, (PAGE, cols), 0, layout=plgpu.Layout.WGMMA) + (first + page + i) * PAGE
                plgpu.barrier_wait(full.at[w * blocks + k_place])
                scores = _product(ring.at[w, k_place], q.transpose((1, 0)), (PAGE, cols))
                plgpu.barrier_arrive(empty.at[w * blocks + k_place])
                seen = key < length if window is None else (key < length) & (key >= length - window)
                top, total, out, weights = _soften(scores, seen, across, *state, scale=scale, soft_cap=soft_cap)
                p_s.at[w].transpose((1, 0))[...] = weights.astype(p_s.dtype)
                v = ring.at[w, v_place]
                plgpu.barrier_wait(full.at[w * blocks + v_place])
                _blank(v, length - (first + page + i) * PAGE)
                plgpu.commit_smem()
                out = out + _product(v.transpose((1, 0)), p_s.at[w].transpose((1, 0)), (h, cols))
                plgpu.barrier_arrive(empty.at[w * blocks + v_place])
                return top, total, out, block + 2

            top, total, out, block = lax.fori_loop(0, here, step, (*_start(h, cols), block))
            plgpu.barrier_arrive(q_empty.at[w * 2 + place])
            total = across(total, "add")
            out = out / lax.broadcast_in_dim(total, out.shape, [1])

            @pl.when(here == pages)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_s.at[w].transpose((1, 0))[...] = out.astype(o_s.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_s.at[w, pl.ds(0, group)], o_ref.at[pl.ds(row * n + head * group, group)])

            @pl.when(here < pages)
            def _():
                begun = jnp.where(page == 0, jnp.int32(1), jnp.int32(0))  # 0: continues an earlier worker's pair, 1: its first part
                part_ref.at[worker, begun][...] = out
                level_ref.at[worker, begun][...] = top + jnp.log2(total)

            return pair + 1, block

        _walk(rows_ref, pieces_ref, worker, kv, visit, (jnp.int32(0), jnp.int32(0)))
        plgpu.wait_smem_to_gmem(0)


def _across_keys(x, op, *, scratch, interpret):
    """The sum or maximum of x [keys, heads] over keys. Warps meet in `scratch`: Pallas' own reduction has one for the whole CTA, in which
    warpgroups would overwrite each other."""
    if interpret:
        return x.sum(axis=0) if op == "add" else x.max(axis=0)
    layout = plgpu.Layout.WGMMA
    reduce = plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct((x.shape[1],), x.dtype, layout=layout.reduce(0))
    )
    return reduce(lambda _, x, scratch: x.reduce(op, 0, scratch))(x, scratch)


def _start(h, cols):
    """The running maximum, the weights' sum by key, and the output, all before the first page."""
    top = plgpu.layout_cast(jnp.full((cols,), _LOWEST, jnp.float32), plgpu.Layout.WGMMA.reduce(0))
    total = plgpu.layout_cast(jnp.zeros((PAGE, cols), jnp.float32), plgpu.Layout.WGMMA)
    out = plgpu.layout_cast(jnp.zeros((h, cols), jnp.float32), plgpu.Layout.WGMMA)
    return top, total, out


def _product(a, b, shape):
    def scoped(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(scoped, plgpu.ACC(shape, jnp.float32))


def _soften(scores, seen, across, top, total, out, *, scale, soft_cap):
    """One page of the running-maximum softmax, in powers of two: new (top, total, out) and the page's weights [keys, heads]."""
    if soft_cap is None:
        scores = scores * (scale * _LOG2E)
    else:  # tanh by exp2: the hardware's tanh is good to 11 bits only, which a cap of 50 turns into errors of 0.02
        scores = (soft_cap * _LOG2E) * (1.0 - 2.0 / (jnp.exp2(scores * (2.0 * _LOG2E * scale / soft_cap)) + 1.0))
    scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, across(scores, "max"))
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [1]))
    keep = jnp.exp2(top - new_top)
    total = total * lax.broadcast_in_dim(keep, total.shape, [1]) + weights
    out = out * lax.broadcast_in_dim(keep, out.shape, [1])
    return new_top, total, out, weights


def _blank(v, keys):
    """Zeroes the rows of a value page past its `keys`: what was never written may be NaN, and 0 · NaN is NaN."""

    @pl.when(keys < PAGE)
    def _():
        for column in range(0, v.shape[1], 64):
            part = v.at[:, pl.ds(column, 64)]
            value = plgpu.load(part, (), layout=plgpu.Layout.WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where(row < keys, value, jnp.zeros_like(value))


def _join(out, parts, levels, work, *, group, cols, kv, interpret):
    """Adds up the pairs that were cut, each by the worker that ends it, in the order of their keys; in place in `out`."""
    workers, _, h, _ = parts.shape
    n = group * kv

    def body(parts_ref, levels_ref, rows_ref, pieces_ref, chains_ref, o_ref, o_s):
        worker = lax.axis_index("worker")
        chain, row, head = chains_ref[worker], pieces_ref[worker, 0], pieces_ref[worker, 1]
        ends = pieces_ref[worker, 2] + pieces_ref[worker, 3] >= rows_ref[row, 1]

        @pl.when((chain > 0) & ends)
        def _():
            def add(i, state):
                top, total, out = state
                at = (worker - chain + i, jnp.where(i == 0, jnp.int32(1), jnp.int32(0)))
                part = plgpu.load(parts_ref, at, layout=plgpu.Layout.WGMMA, optimized=False)
                level = plgpu.load(levels_ref, at, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
                new_top = jnp.maximum(top, level)
                keep, weight = jnp.exp2(top - new_top), jnp.exp2(level - new_top)
                out = out * lax.broadcast_in_dim(keep, out.shape, [1]) + part * lax.broadcast_in_dim(weight, out.shape, [1])
                return new_top, total * keep + weight, out

            top, _, out = _start(h, cols)
            total = plgpu.layout_cast(jnp.zeros((cols,), jnp.float32), plgpu.Layout.WGMMA.reduce(0))
            _, total, out = lax.fori_loop(0, chain + 1, add, (top, total, out))
            o_s.transpose((1, 0))[...] = (out / lax.broadcast_in_dim(total, out.shape, [1])).astype(o_s.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_s.at[pl.ds(0, group)], o_ref.at[pl.ds(row * n + head * group, group)])
            plgpu.wait_smem_to_gmem(0)

    ref = jax.new_ref(out)
    plgpu.kernel(
        lambda parts, levels, rows, pieces, chains, o, o_s: body(parts, levels, rows, pieces, chains, o, o_s),
        out_type=(),
        grid=(workers,),
        grid_names=("worker",),
        scratch_types=dict(o_s=plgpu.SMEM((cols, h), out.dtype)),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="decode_attention_join",
        interpret=interpret,
    )(parts, levels, work.rows, work.pieces, work.chains, ref)
    return jax.freeze(ref)
