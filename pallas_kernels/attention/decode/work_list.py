"""The work list of decode attention: all pages of a batch in one line, split into equal pieces.

The line holds the rows in order, the KV heads of a row in order, and the visible pages of a head in order.
`decode_work` splits the line into one equal piece for each worker. One row of 131,072 keys with 200 short
rows then fills the chip as well as equal rows do (FlashDecoding's split KV, by pages instead of by rows). A
worker leaves at most two (row, head) pairs unfinished: at the start and at the end of its piece.

`PairCuts` lets a batch with few pairs have pieces that end with a pair. Fewer parts are then added up.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

PAGE = 64  # tokens in a page
ALIGN = 32  # numbers of int32 in the 128 bytes at which XLA aligns arrays


@dataclasses.dataclass(frozen=True)
class PairCuts:
    """When each piece holds pages of one (row, head) pair only, in a batch with no more pieces than workers.

    Attributes:
      least: the pages of a piece, at most, if pieces of that size are no more than the workers; 0: never.
        Equal pieces would then have fewer pages, and more parts to add up.
      whole: the most pages of a pair that is one piece. All pairs are whole then, and no parts are added up.
        This needs a worker for each pair, and on average at least half as many pages a worker as the largest
        pair has; 0: never.
      short: the most pages of a pair if all pieces begin and end with pairs, several in a piece. No parts are
        added up then. This needs on average as many pages a worker as the largest pair has, and no piece with
        more than one page more than equal pieces; 0: never.
    """

    least: int = 0
    whole: int = 0
    short: int = 0


EQUAL_PIECES = PairCuts()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeWork:
    """The pages that each worker reads, from `decode_work`. Layers with equal lengths and window share one
    list.

    Attributes:
      rows: [B, 4] int32: first visible page, visible pages, length (0: skipped), next row that has pages.
        With spans: [B * K, 5], one entry for each (row, head) pair: skipped pages between the sinks and the
        span, visible pages, length, next entry that has pages, first key of the span. Below, `row` is then
        an entry, and its only KV head is 0.
      pieces: [workers, 4] int32: first row, first KV head, first page relative to the row's first visible
        page, pages.
      starts: [workers, 5 or 6] int32: the entry in `rows` of the piece's first row, and the first visible
        page of the next row. A worker's first copy then depends on two reads instead of four.
      chains: [workers] int32: if the piece ends a (row, head) pair that an earlier piece began, the number
        of earlier pieces with parts of the pair.
      enders: [workers] int32: if the piece leaves a pair unfinished, the worker that ends the pair.
      arrived: [2 * workers] int32: the number of written parts of the pair that a worker ends, then the
        number of written parts of the group whose last part a worker has. Zero before and after a call.
        Kernels count in this array, so calls that share a list must not run concurrently.
    """

    rows: jax.Array
    pieces: jax.Array
    starts: jax.Array
    chains: jax.Array
    enders: jax.Array
    arrived: jax.Array


def decode_work(
    lengths: jax.Array,
    kv_heads: int,
    workers: int,
    window: int | None = None,
    spans: jax.Array | None = None,
    sinks: int = 0,
    cuts: PairCuts = EQUAL_PIECES,
) -> DecodeWork:
    """Split the batch's pages into equal pieces, on the device, from lengths [B] int32 (0: no work for the
    row).

    spans, sinks: as for `decode_attention`, instead of a window. cuts: when pieces end with a pair instead.
    The function runs a few small XLA ops.
    Compute the list once a step and pass it to every layer's `decode_attention`.
    """
    lengths = lengths.astype(jnp.int32)
    heads = 1  # entries of a row
    seen: jax.Array | int | None = window
    if spans is not None:
        heads, kv_heads = kv_heads, 1
        seen = jnp.broadcast_to(jnp.maximum(spans, 1).astype(jnp.int32), (lengths.shape[0], heads)).reshape(
            -1
        )
    following = _following(lengths, heads)
    lengths = jnp.repeat(lengths, heads)
    b = lengths.shape[0]
    since = jnp.zeros_like(lengths) if seen is None else jnp.maximum(lengths - seen, 0)
    first = since // PAGE if sinks == 0 else jnp.maximum(since // PAGE - sink_pages(sinks), 0)
    pages = jnp.where(lengths > 0, (lengths + PAGE - 1) // PAGE - first, 0)
    ends = _ends(pages.reshape(-1, heads))
    total = ends[-1] * kv_heads
    worker = jnp.arange(workers + 1, dtype=jnp.int32)
    # This is total * worker // workers. The plain product overflows int32 at 2**22 pairs on 512 workers,
    # which rows with shared pages can reach.
    begins = total // workers * worker + total % workers * worker // workers
    begins = jnp.where(total >= workers, begins, jnp.minimum(worker, total))
    if cuts != EQUAL_PIECES:
        fit, of_pairs = _begins_in_pairs(pages.reshape(-1, heads), ends, kv_heads, worker, cuts)
        begins = jnp.where(fit, of_pairs, begins)

    def locate(place):
        """Return (row, KV head, page, pages of the row) of a position in the line of pages."""
        row = jnp.minimum(
            jnp.sum((ends[None, :] * kv_heads <= place[:, None]).astype(jnp.int32), axis=1), b - 1
        )
        row_pages = jnp.maximum(pages[row], 1)
        inside = place - (ends[row] - pages[row]) * kv_heads
        return row, inside // row_pages, inside % row_pages, row_pages

    def holder(place):
        """The worker that holds a place: the last one that begins at or before it."""
        return jnp.sum((begins[None, :-1] <= place[:, None]).astype(jnp.int32), axis=1) - 1

    if cuts.short:
        _, _, page, row_pages = locate(begins)
        near = begins - page + jnp.where(2 * page >= row_pages, row_pages, 0)
        near = jnp.where(worker < workers, jnp.minimum(near, total), total)
        most = jnp.max(pages)
        fit = (most <= cuts.short) & (most * workers <= total)
        fit &= jnp.max(near[1:] - near[:-1]) <= total // workers + 2
        begins = jnp.where(fit, near, begins)
    begin, count = begins[:-1], begins[1:] - begins[:-1]
    row, head, page, row_pages = locate(begin)
    ends_pair = (page > 0) & (count > 0) & (page + count >= row_pages)
    chains = jnp.where(ends_pair, worker[:-1] - holder(begin - page), 0)
    last = begin + count - 1
    _, _, last_page, last_pages = locate(last)
    next_row = following[row]
    rows = [first, pages, lengths, following, *([] if spans is None else [since])]
    return DecodeWork(
        rows=jnp.stack(rows, axis=1),
        pieces=jnp.stack([row, head, page, count], axis=1),
        starts=jnp.stack([*(x[row] for x in rows), first[jnp.minimum(next_row, b - 1)]], axis=1),
        chains=chains,
        enders=jnp.where(count > 0, holder(last + last_pages - 1 - last_page), 0),
        arrived=jnp.minimum(
            jnp.tile(count, 2), 0
        ),  # zeros that are not a constant, because XLA may share a constant
    )


def _begins_in_pairs(pages, ends, kv_heads: int, worker, cuts: PairCuts):
    """Return whether `cuts` allows pieces of one pair each, and where these pieces begin, [workers + 1].

    pages: [B, E]; ends: [B * E], their inclusive sums. worker: 0 to workers. Pieces of a pair
    differ by at most one page. Workers without a piece begin at the end of the line.
    """
    workers, most, total = worker.shape[0] - 1, jnp.max(pages), ends[-1] * kv_heads
    whole = (most <= cuts.whole) & ((most * workers + 1) // 2 <= total)
    few = jnp.bool_(False)
    if cuts.least:
        few = jnp.sum(-(-pages // cuts.least)) * kv_heads <= workers
    parts = -(-pages // jnp.where(few, cuts.least, jnp.maximum(most, 1)))
    part_ends = _ends(parts)
    pages, parts, count = pages.reshape(-1), parts.reshape(-1), part_ends[-1] * kv_heads
    row = jnp.sum((part_ends[None, :] * kv_heads <= worker[:, None]).astype(jnp.int32), axis=1)
    row = jnp.minimum(row, pages.shape[0] - 1)
    inside, of_pair = worker - (part_ends[row] - parts[row]) * kv_heads, jnp.maximum(parts[row], 1)
    begins = (ends[row] - pages[row]) * kv_heads + inside // of_pair * pages[row]
    begins = begins + inside % of_pair * pages[row] // of_pair
    return (few | whole) & (count <= workers), jnp.where(worker < count, begins, total)


def padded_workers(workers: int) -> int:
    """Return the workers of a list in a stack of lists: a multiple of 32, so that each list begins
    at a multiple of 128 bytes. XLA then hands a list of the stack to the kernel without a copy.
    The kernel never reads the rest.
    """
    return -(-workers // ALIGN) * ALIGN


def stacked_work(
    lengths: jax.Array,
    kv_heads: int,
    workers: int,
    spans: jax.Array,
    sinks: int = 0,
    cuts: PairCuts = EQUAL_PIECES,
) -> DecodeWork:
    """Return the lists of several choices of spans, [J, B, K], in one stack:
    each array has a leading axis [J].

    The same few XLA ops make all lists. Layers with other spans then cost no ops of their own.
    """
    listed = jax.vmap(lambda own: decode_work(lengths, kv_heads, workers, None, own, sinks, cuts))(spans)
    more = padded_workers(workers) - workers

    def pad(x: jax.Array, n: int = 1) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, n * more)] + [(0, 0)] * (x.ndim - 2))

    return DecodeWork(
        listed.rows,
        pad(listed.pieces),
        pad(listed.starts),
        pad(listed.chains),
        pad(listed.enders),
        pad(listed.arrived, 2),
    )


def sink_pages(sinks: int) -> int:
    """Return the pages that hold the first `sinks` tokens."""
    return -(-sinks // PAGE)


def page_of(place, skipped, sinks: int):
    """Return the page of a row at a place among the row's visible pages. Runs inside a kernel too."""
    return place + (skipped if sinks == 0 else jnp.where(place >= sink_pages(sinks), skipped, 0))


def _ends(pages: jax.Array) -> jax.Array:
    """Return [B * E]: the inclusive sums of pages [B, E], over the rows in order and their entries in order.

    Sums over a comparison matrix are one small fusion. cumsum and searchsorted would be several kernels each.
    """
    b, e = pages.shape
    within = _sums(pages)
    rows = jnp.arange(b, dtype=jnp.int32)
    before = jnp.where(rows[None, :] < rows[:, None], within[None, :, -1], 0)
    return (within + jnp.sum(before, axis=1, dtype=jnp.int32)[:, None]).reshape(b * e)


def _sums(pages: jax.Array) -> jax.Array:
    """Return the inclusive sums of pages [B, E] over the entries of a row."""
    if pages.shape[1] == 1:
        return pages
    entry = jnp.arange(pages.shape[1], dtype=jnp.int32)
    upto = jnp.where(entry[None, :] <= entry[:, None], pages[:, None, :], 0)
    return jnp.sum(upto, axis=2, dtype=jnp.int32)


def _following(lengths: jax.Array, heads: int) -> jax.Array:
    """Return [B * heads]: the next entry that has pages, or B * heads.

    All entries of a row with keys have pages.
    """
    b = lengths.shape[0]
    index = jnp.arange(b, dtype=jnp.int32)
    later = (index[None, :] > index[:, None]) & (lengths[None, :] > 0)
    row = jnp.min(jnp.where(later, index[None, :], b), axis=1)
    entry = jnp.arange(b * heads, dtype=jnp.int32)
    return jnp.where(entry % heads == heads - 1, row[entry // heads] * heads, entry + 1)


def walk(rows, pieces, starts, worker, kv, visit, carry):
    """Call visit(carry, row, head, page, here, visible, (next row, its first)) for each pair of a piece.

    visible: (first, pages, length), and with spans also the first key of the span.

    Runs inside a kernel. The pair's `here` pages start at `page`, relative to the row's `first` visible
    page. The next row's entry is read one row ahead, so that no pair waits for memory.
    """

    def facts(row):
        return tuple(rows[jnp.minimum(row, rows.shape[0] - 1), i] for i in range(rows.shape[1]))

    def step(state):
        row, head, page, left, now, ahead, carry = state
        first, pages, length, following, *since = now
        here = jnp.minimum(pages - page, left)
        done = head + 1 == kv
        then = jnp.where(done, following, row), jnp.where(done, ahead[0], first)
        carry = visit(carry, row, head, page, here, (first, pages, length, *since), then)
        now, ahead = lax.cond(done, lambda: (ahead, facts(ahead[3])), lambda: (now, ahead))
        return then[0], jnp.where(done, 0, head + 1), jnp.int32(0), left - here, now, ahead, carry

    row, head, page, left = (pieces[worker, i] for i in range(4))
    *now, next_first = (starts[worker, i] for i in range(starts.shape[1]))
    ahead = (next_first, *facts(now[3])[1:])
    return lax.while_loop(
        lambda state: state[3] > 0, step, (row, head, page, left, tuple(now), ahead, carry)
    )[-1]
