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

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged import LANE, LOWEST, PAGE, blank, capped, check_pages, flat, rows_of_eight, tiled
from pallas_kernels.tiles import DecodeTile, decode_tile

_BOX = 32  # rows of a page that one copy takes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeWork:
    """Which pages each worker reads; the same for all layers that share lengths and window. Made by `decode_work`.

    rows [B, 4] int32: first visible page, visible pages, length (0: skipped), next row that has pages.
    pieces [workers, 4] int32: first row, first KV head, first page counted from the row's first visible one, pages in the piece.
    chains [workers] int32: where this piece ends a (row, head) pair that began in an earlier one, how many earlier ones hold parts of it.
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
    ends_pair = (page > 0) & (count > 0) & (page + count >= row_pages)
    chains = jnp.where(ends_pair, worker[:-1] - holder, 0)
    return DecodeWork(
        rows=jnp.stack([first, pages, lengths, following], axis=1),
        pieces=jnp.stack([row, head, page, count], axis=1),
        chains=chains,
    )


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
    (b, n, h), kv = q.shape, k_pages.shape[1]
    check_pages(q, k_pages, v_pages)
    group, tile = n // kv, tile or decode_tile(h, n // kv)
    cols = 8 if group <= 8 else 16  # wgmma's N
    workers = sms * tile.workers
    work = decode_work(lengths, kv, workers, window) if work is None else work
    if work.pieces.shape[0] != workers:
        raise ValueError(f"work.pieces has {work.pieces.shape[0]} workers: {workers} for sms={sms} and {tile}")
    page_table = page_table.astype(jnp.int32)
    # A copy by tiles must begin at a whole tile of 8 rows, or end inside the one it begins in: groups are padded to 1, 2, 4, 8 or 16 rows.
    pitch = 1 << (group - 1).bit_length()
    grouped = q.reshape(b * kv, group, h)
    if pitch > group:
        grouped = lax.pad(grouped, jnp.zeros((), q.dtype), [(0, 0, 0), (0, pitch - group, 0), (0, 0, 0)])
    queries = rows_of_eight(grouped.reshape(b * kv * pitch, h))
    main = functools.partial(
        _attend, group=group, kv=kv, tile=tile, scale=scale, window=window, soft_cap=soft_cap, interpret=interpret is not None
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
        compiler_params=LANE,
        kernel_name=f"decode_attention_{sms}",
        interpret=interpret,
    )(queries, flat(k_pages), flat(v_pages), page_table, work.rows, work.pieces)
    return _join(out, parts, levels, work, group=group, cols=cols, kv=kv, interpret=interpret).reshape(b, n, h)


def _scratch(tile: DecodeTile, cols: int, h: int, dtype) -> dict:
    w = tile.workers
    return {
        "ring": plgpu.SMEM((w, tile.blocks, PAGE, h), dtype, transforms=tiled()),
        "q_s": plgpu.SMEM((w, 2, cols, h), dtype, transforms=tiled()),
        "p_s": plgpu.SMEM((w, 2, cols, PAGE), dtype, transforms=tiled()),
        "o_s": plgpu.SMEM((w, cols, h), dtype),
        "sums": plgpu.SMEM((w, 512), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=PAGE // _BOX, num_barriers=w * tile.blocks),
        "empty": plgpu.Barrier(num_barriers=w * tile.blocks),
        "q_full": plgpu.Barrier(num_barriers=w * 2),
        "q_empty": plgpu.Barrier(num_barriers=w * 2),
    }


def _walk(rows_ref, pieces_ref, worker, kv, visit, carry):
    """Calls visit(carry, row, head, first page, pages here, (first visible, pages, length)) for each pair of the worker's piece."""

    def facts(row):
        return tuple(rows_ref[row, i] for i in range(4))

    def step(state):
        row, head, page, left, (first, pages, length, following), carry = state
        here = jnp.minimum(pages - page, left)
        carry = visit(carry, row, head, page, here, (first, pages, length))
        left, done = left - here, head + 1 == kv
        row, head = jnp.where(done, following, row), jnp.where(done, 0, head + 1)
        here = lax.cond(done & (left > 0), lambda: facts(row), lambda: (first, pages, length, following))
        return row, head, jnp.int32(0), left, here, carry

    row, head, page, left = (pieces_ref[worker, i] for i in range(4))
    return lax.while_loop(lambda state: state[3] > 0, step, (row, head, page, left, facts(row), carry))[-1]


def _attend(
    q_ref, k_ref, v_ref, table_ref, rows_ref, pieces_ref, o_ref, part_ref, level_ref,
    ring, q_s, p_s, o_s, sums, full, empty, q_full, q_empty,
    *, group, kv, tile, scale, window, soft_cap, interpret,
):  # fmt: skip
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    w = lax.rem(wg, jnp.int32(tile.workers))
    worker = cta * tile.workers + w
    (cols, h), n, blocks = o_s.shape[1:], group * kv, tile.blocks
    pitch = 1 << (group - 1).bit_length()  # rows of q a KV head

    def place(block):
        return lax.rem(block, jnp.int32(blocks))

    @pl.when(wg >= tile.workers)
    def _copy():
        if tile.workers == 2:  # 128 registers a thread are not enough to compute at H 256; copying needs half of that
            plgpu.set_max_registers(56, action="decrease")

        def visit(carry, row, head, page, here, visible):
            pair, block = carry
            (first, _, length), q_place = visible, lax.rem(pair, jnp.int32(2))
            first = first + page
            ids = functools.partial(_page_ids, table_ref, row)

            @pl.when(pair >= 2)
            def _():
                plgpu.barrier_wait(q_empty.at[w * 2 + q_place])

            # Rows past the group are zeros or of the next KV head: their columns are computed and dropped.
            plgpu.copy_gmem_to_smem(q_ref.at[pl.ds((row * kv + head) * pitch, cols)], q_s.at[w, q_place], q_full.at[w * 2 + q_place])

            def copy(i, state, count):
                """Pages i .. i + count of the pair: their keys, then their values."""
                block, page_ids = state
                following = ids(first + i + count, count)
                for source in (k_ref, v_ref):
                    for j, page_id in enumerate(page_ids):
                        slot = w * blocks + place(block)

                        @pl.when(block >= blocks)
                        def _(slot=slot):
                            plgpu.barrier_wait(empty.at[slot])

                        for box in range(0, PAGE, _BOX):
                            # A box past the row's length reads the page's first one again: from the L2 and not from HBM.
                            at = jnp.where((first + i + j) * PAGE + box < length, box, 0) + (page_id * kv + head) * PAGE
                            to = ring.at[w, place(block), pl.ds(box, _BOX)]
                            plgpu.copy_gmem_to_smem(source.at[pl.ds(pl.multiple_of(at, _BOX), _BOX)], to, full.at[slot])
                        block += 1
                return block, following

            twos = lax.div(here, jnp.int32(2))
            block, following = lax.fori_loop(0, twos, lambda i, s: copy(2 * i, s, 2), (block, ids(first, 2)))
            block, _ = lax.fori_loop(2 * twos, here, lambda i, s: copy(i, s, 1), (block, following[:1]))
            return pair + 1, block

        pairs, copied = _walk(rows_ref, pieces_ref, worker, kv, visit, (jnp.int32(0), jnp.int32(0)))

        # Every arrival is waited for, also of the last blocks (a barrier that nobody watched is an error in the interpreter).
        @pl.loop(jnp.maximum(copied - blocks, 0), copied)
        def _(block):
            plgpu.barrier_wait(empty.at[w * blocks + place(block)])

        @pl.loop(jnp.maximum(pairs - 2, 0), pairs)
        def _(pair):
            plgpu.barrier_wait(q_empty.at[w * 2 + lax.rem(pair, jnp.int32(2))])

    @pl.when(wg < tile.workers)
    def _compute():
        if tile.workers == 2:
            plgpu.set_max_registers(192, action="increase")
        across = functools.partial(_across_keys, scratch=sums.at[w], interpret=interpret)

        def store(row, head):
            plgpu.copy_smem_to_gmem(o_s.at[w, pl.ds(0, group)], o_ref.at[pl.ds(row * n + head * group, group)])

        def visit(carry, row, head, page, here, visible):
            pair, block = carry
            first, pages, length = visible
            q_place = lax.rem(pair, jnp.int32(2))
            q = q_s.at[w, q_place]
            plgpu.barrier_wait(q_full.at[w * 2 + q_place])

            def step(i, state, count):
                """Pages i .. i + count of the pair, in one round of the softmax."""
                *state, block = state
                scores, seen = [], []
                for j in range(count):
                    plgpu.barrier_wait(full.at[w * blocks + place(block + j)])
                    scores.append(_product([(ring.at[w, place(block + j)], q.transpose((1, 0)))], (PAGE, cols)))
                    plgpu.barrier_arrive(empty.at[w * blocks + place(block + j)])
                    key = plgpu.broadcasted_iota(jnp.int32, (PAGE, cols), 0, layout=plgpu.Layout.WGMMA) + (first + page + i + j) * PAGE
                    seen.append(key < length if window is None else (key < length) & (key >= length - window))
                top, total, out, weights = _soften(scores, seen, across, *state, scale=scale, soft_cap=soft_cap)
                products = []
                for j in range(count):
                    p, v, slot = p_s.at[w, j], ring.at[w, place(block + count + j)], w * blocks + place(block + count + j)
                    p.transpose((1, 0))[...] = weights[j].astype(p_s.dtype)
                    plgpu.barrier_wait(full.at[slot])
                    keys = length - (first + page + i + j) * PAGE
                    pl.when(keys < PAGE)(functools.partial(blank, v, keys))
                    products.append((v.transpose((1, 0)), p.transpose((1, 0))))
                plgpu.commit_smem()
                out = out + _product(products, (h, cols))
                for j in range(count):
                    plgpu.barrier_arrive(empty.at[w * blocks + place(block + count + j)])
                return top, total, out, block + 2 * count

            twos = lax.div(here, jnp.int32(2))
            state = lax.fori_loop(0, twos, lambda i, s: step(2 * i, s, 2), (*_start(h, cols), block))
            top, total, out, block = lax.fori_loop(2 * twos, here, lambda i, s: step(i, s, 1), state)
            plgpu.barrier_arrive(q_empty.at[w * 2 + q_place])
            total = across(total, "add")
            out = out / lax.broadcast_in_dim(total, out.shape, [1])

            @pl.when(here == pages)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_s.at[w].transpose((1, 0))[...] = out.astype(o_s.dtype)
                plgpu.commit_smem()
                store(row, head)

            @pl.when(here < pages)
            def _():
                begun = jnp.where(page == 0, jnp.int32(1), jnp.int32(0))  # 0: continues an earlier worker's pair, 1: its first part
                part_ref.at[worker, begun][...] = out
                level_ref.at[worker, begun][...] = top + jnp.log2(total)

            return pair + 1, block

        _walk(rows_ref, pieces_ref, worker, kv, visit, (jnp.int32(0), jnp.int32(0)))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_s.at[w].transpose((1, 0))[...] = _start(h, cols)[2].astype(o_s.dtype)
        plgpu.commit_smem()

        @pl.loop(worker, rows_ref.shape[0], step=part_ref.shape[0])
        def _(row):
            @pl.when(rows_ref[row, 1] == 0)
            def _():
                for head in range(kv):
                    store(row, head)

        plgpu.wait_smem_to_gmem(0)


def _page_ids(table_ref, row, first, count):
    """Pages first .. first + count of the row; past the table's end its last entry, which nobody then uses."""
    return tuple(table_ref[row, jnp.minimum(first + j, table_ref.shape[1] - 1)] for j in range(count))


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
    top = plgpu.layout_cast(jnp.full((cols,), LOWEST, jnp.float32), plgpu.Layout.WGMMA.reduce(0))
    total = plgpu.layout_cast(jnp.zeros((PAGE, cols), jnp.float32), plgpu.Layout.WGMMA)
    out = plgpu.layout_cast(jnp.zeros((h, cols), jnp.float32), plgpu.Layout.WGMMA)
    return top, total, out


def _product(pairs, shape):
    """The sum of a @ b over the pairs (a, b) of shared-memory operands, float32."""

    def scoped(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(scoped, plgpu.ACC(shape, jnp.float32))


def _soften(scores, seen, across, top, total, out, *, scale, soft_cap):
    """One round of the running-maximum softmax, in powers of two, over a list of pages [keys, heads].

    Returns: new (top, total, out) and the pages' weights.
    """
    scores = [x * factor for x, factor in (capped(x, scale, soft_cap) for x in scores)]
    scores = [jnp.where(mask, x, -jnp.inf) for x, mask in zip(scores, seen, strict=True)]
    new_top = jnp.maximum(top, across(functools.reduce(jnp.maximum, scores), "max"))
    weights = [jnp.exp2(x - lax.broadcast_in_dim(new_top, x.shape, [1])) for x in scores]
    keep = jnp.exp2(top - new_top)
    total = total * lax.broadcast_in_dim(keep, total.shape, [1]) + functools.reduce(jnp.add, weights)
    out = out * lax.broadcast_in_dim(keep, out.shape, [1])
    return new_top, total, out, weights


_TOGETHER = 4  # parts that `_join` has in flight


def _join(out, parts, levels, work, *, group, cols, kv, interpret):
    """Adds up the pairs that were cut, each by the worker that ends it, in the order of their keys; in place in `out`."""
    workers, _, h, _ = parts.shape
    n = group * kv

    def body(parts_ref, levels_ref, pieces_ref, chains_ref, o_ref, o_s):
        worker = lax.axis_index("worker")
        chain, row, head = chains_ref[worker], pieces_ref[worker, 0], pieces_ref[worker, 1]

        def part(i):
            """Part i of the pair: the first is some worker's last pair, all others are a worker's first one."""
            at = (worker - chain + i, jnp.where(i == 0, jnp.int32(1), jnp.int32(0)))
            level = plgpu.load(levels_ref, at, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            return level, plgpu.load(parts_ref, at, layout=plgpu.Layout.WGMMA, optimized=False)

        def add(state, level, part):
            top, total, out = state
            new_top = jnp.maximum(top, level)
            keep, weight = jnp.exp2(top - new_top), jnp.exp2(level - new_top)
            out = out * lax.broadcast_in_dim(keep, out.shape, [1]) + part * lax.broadcast_in_dim(weight, out.shape, [1])
            return new_top, total * keep + weight, out

        @pl.when(chain > 0)
        def _():
            own = part(chain)

            def some(i, state):
                read = [part(jnp.minimum(i * _TOGETHER + j, chain)) for j in range(_TOGETHER)]
                for j, (level, values) in enumerate(read):  # a weight of 0 for those past the chain
                    there = jnp.full(level.shape, i * _TOGETHER + j) < chain
                    state = add(state, jnp.where(plgpu.layout_cast(there, plgpu.Layout.WGMMA.reduce(0)), level, 2 * LOWEST), values)
                return state

            top, _, out = _start(h, cols)
            state = (top, plgpu.layout_cast(jnp.zeros((cols,), jnp.float32), plgpu.Layout.WGMMA.reduce(0)), out)
            _, total, out = add(lax.fori_loop(0, pl.cdiv(chain, jnp.int32(_TOGETHER)), some, state), *own)
            o_s.transpose((1, 0))[...] = (out / lax.broadcast_in_dim(total, out.shape, [1])).astype(o_s.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_s.at[pl.ds(0, group)], o_ref.at[pl.ds(row * n + head * group, group)])
            plgpu.wait_smem_to_gmem(0)

    join = plgpu.kernel(
        body,
        out_type=(),
        grid=(workers,),
        grid_names=("worker",),
        scratch_types={"o_s": plgpu.SMEM((cols, h), out.dtype)},
        compiler_params=LANE,
        kernel_name="decode_attention_join",
        interpret=interpret,
    )
    return pl.run_state(lambda o: join(parts, levels, work.pieces, work.chains, o))(out)
