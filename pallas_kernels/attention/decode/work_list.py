"""Decode attention's work list: one line of pages, cut into equal pieces.

The work of a step is one line: rows in order, a row's KV heads in order, a head's visible pages in order.
`decode_work` cuts it into equal pieces, one a worker, so one row of 131,072 keys beside 200 short ones fills
the chip as well as equal rows do (FlashDecoding's split KV, cut by pages instead of by row). A worker ends at
most two (row, head) pairs unfinished: where its piece begins and where it ends.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

PAGE = 64  # tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeWork:
    """Which pages each worker reads; the same for all layers that share lengths and window. Made by
    `decode_work`.

    rows [B, 4] int32: first visible page, visible pages, length (0: skipped), next row that has pages.
    pieces [workers, 4] int32: first row, first KV head, first page counted from the row's first visible one,
    pages in the piece. starts [workers, 5] int32: of the piece's first row what `rows` says, and the first
    visible page of the row after it: a worker's first
      copy waits for two reads instead of four.
    chains [workers] int32: where this piece ends a (row, head) pair that began in an earlier one, how many
    earlier ones hold parts of it. enders [workers] int32: where this piece leaves a pair unfinished, the
    worker that ends it. arrived [2 * workers] int32: the parts written so far of the pair that a worker ends,
    and behind those of the group of such parts that
      it is the last of. Zero before a call and after it: kernels count in it, so calls that share a list must
      not run at the same time.
    """

    rows: jax.Array
    pieces: jax.Array
    starts: jax.Array
    chains: jax.Array
    enders: jax.Array
    arrived: jax.Array


def decode_work(lengths: jax.Array, kv_heads: int, workers: int, window: int | None = None) -> DecodeWork:
    """Cuts the batch's pages into equal pieces, on the device, from lengths [B] int32 (0: no work for that
    row).

    A few small XLA ops; compute it once a step and pass it to every layer's `decode_attention`.
    """
    b = lengths.shape[0]
    lengths = lengths.astype(jnp.int32)
    first = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0) // PAGE
    pages = jnp.where(lengths > 0, (lengths + PAGE - 1) // PAGE - first, 0)
    index = jnp.arange(b, dtype=jnp.int32)
    # Sums over a comparison matrix: one small fusion, where cumsum and searchsorted would each be several
    # kernels.
    ends = jnp.sum(jnp.where(index[None, :] <= index[:, None], pages[None, :], 0), axis=1, dtype=jnp.int32)
    following = jnp.min(
        jnp.where((index[None, :] > index[:, None]) & (pages[None, :] > 0), index[None, :], b), axis=1
    )
    total = ends[-1] * kv_heads
    worker = jnp.arange(workers + 1, dtype=jnp.int32)
    # total * worker // workers, whose product would leave int32 at 2**22 (page, head) pairs on 512 workers:
    # rows may share their pages.
    begins = total // workers * worker + total % workers * worker // workers
    begins = jnp.where(total >= workers, begins, jnp.minimum(worker, total))
    begin, count = begins[:-1], begins[1:] - begins[:-1]

    def locate(place):
        """(row, KV head, page, pages of the row) of a place in the line of pages."""
        row = jnp.minimum(
            jnp.sum((ends[None, :] * kv_heads <= place[:, None]).astype(jnp.int32), axis=1), b - 1
        )
        row_pages = jnp.maximum(pages[row], 1)
        inside = place - (ends[row] - pages[row]) * kv_heads
        return row, inside // row_pages, inside % row_pages, row_pages

    def holder(place):
        """The worker that holds a place: the last one that begins at or before it."""
        return jnp.sum((begins[None, :-1] <= place[:, None]).astype(jnp.int32), axis=1) - 1

    row, head, page, row_pages = locate(begin)
    ends_pair = (page > 0) & (count > 0) & (page + count >= row_pages)
    chains = jnp.where(ends_pair, worker[:-1] - holder(begin - page), 0)
    last = begin + count - 1
    _, _, last_page, last_pages = locate(last)
    next_row = following[row]
    return DecodeWork(
        rows=jnp.stack([first, pages, lengths, following], axis=1),
        pieces=jnp.stack([row, head, page, count], axis=1),
        starts=jnp.stack(
            [first[row], pages[row], lengths[row], next_row, first[jnp.minimum(next_row, b - 1)]], axis=1
        ),
        chains=chains,
        enders=jnp.where(count > 0, holder(last + last_pages - 1 - last_page), 0),
        arrived=jnp.minimum(jnp.tile(count, 2), 0),  # not a constant, which XLA might share with others
    )


def walk(rows, pieces, starts, worker, kv, visit, carry):
    """In a kernel: calls visit(carry, row, head, page, here, (first, pages, length), (next row, its first))
    for each pair of the piece.

    The pair's `here` pages begin at `page`, counted from the row's `first` visible one. What comes next is
    read a row ahead, so that nothing waits for memory between pairs.
    """

    def facts(row):
        return tuple(rows[jnp.minimum(row, rows.shape[0] - 1), i] for i in range(4))

    def step(state):
        row, head, page, left, now, ahead, carry = state
        first, pages, length, following = now
        here = jnp.minimum(pages - page, left)
        done = head + 1 == kv
        then = jnp.where(done, following, row), jnp.where(done, ahead[0], first)
        carry = visit(carry, row, head, page, here, (first, pages, length), then)
        now, ahead = lax.cond(done, lambda: (ahead, facts(ahead[3])), lambda: (now, ahead))
        return then[0], jnp.where(done, 0, head + 1), jnp.int32(0), left - here, now, ahead, carry

    row, head, page, left = (pieces[worker, i] for i in range(4))
    *now, next_first = (starts[worker, i] for i in range(5))
    ahead = (next_first, *facts(now[3])[1:])
    return lax.while_loop(
        lambda state: state[3] > 0, step, (row, head, page, left, tuple(now), ahead, carry)
    )[-1]
