"""The work list of latent attention: the pages of all rows in one line, split into equal pieces.

A row is the token of a decode, or a token of a prefill chunk, which sees the keys up to its own. All heads
read the same pages, so a row has one entry. The heads form tiles of 64. A worker is as many CTAs as
there are tiles: its CTAs read the same pages at the same time, so that HBM is read once.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.paged import PAGE
from pallas_kernels.hopper.limits import sms_of

HEADS = 64  # heads of a tile, which are the rows of a wgmma


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentWork:
    """The pages that each worker reads. Layers with equal lengths share one list.

    Attributes:
      rows: [B, 3] int32: length (0: skipped), next row that has keys, or B, row of the page table.
      pieces: [workers, 6] int32: first row, first page of the row, pages; the
        entry in `rows` of the first row.
      parts: [B, 2] int32: the first worker with pages of a row, and the number of such workers; 0 for a row
        without keys.
    """

    rows: jax.Array
    pieces: jax.Array
    parts: jax.Array


def head_tiles(heads: int) -> int:
    """Return the tiles of 64 heads."""
    return -(-heads // HEADS)


def latent_workers(heads: int, sms: int | None) -> int:
    """Return the workers on `sms` SMs (None: all). Raises: ValueError for fewer SMs than tiles of heads."""
    sms, tiles = sms_of(sms), head_tiles(heads)
    if sms < tiles:
        raise ValueError(f"sms={sms} for {heads} heads: accepted are {tiles} and more, one for {HEADS} heads")
    return sms // tiles


def latent_work(lengths: jax.Array, workers: int, table_rows: jax.Array | None = None) -> LatentWork:
    """Split the pages of rows with `lengths` [B] int32 into equal pieces, on the device.

    table_rows: [B] int32, the row of the page table of each row; None: the row itself.

    Sums over comparison matrices are small fusions. Sums along an axis and searches
    would be several kernels each.
    """
    lengths, b = lengths.astype(jnp.int32), lengths.shape[0]
    pages, index = (lengths + PAGE - 1) // PAGE, jnp.arange(b, dtype=jnp.int32)
    ends = jnp.sum(jnp.where(index[None, :] <= index[:, None], pages[None, :], 0), axis=1, dtype=jnp.int32)
    later = (index[None, :] > index[:, None]) & (lengths[None, :] > 0)
    following = jnp.min(jnp.where(later, index[None, :], b), axis=1)
    own = index if table_rows is None else table_rows.astype(jnp.int32)
    total, worker = ends[-1], jnp.arange(workers + 1, dtype=jnp.int32)
    # This is total * worker // workers, without the overflow of the product.
    even = total // workers * worker + total % workers * worker // workers
    begins = jnp.where(total >= workers, even, jnp.minimum(worker, total))
    begin, count = begins[:-1], begins[1:] - begins[:-1]
    row = jnp.minimum(jnp.sum((ends[None, :] <= begin[:, None]).astype(jnp.int32), axis=1), b - 1)

    def holder(place: jax.Array) -> jax.Array:
        """Return the worker that holds each place of the line: the last one that begins at or before it."""
        return jnp.sum((begin[None, :] <= place[:, None]).astype(jnp.int32), axis=1) - 1

    first = holder(ends - pages)
    rows = jnp.stack([lengths, following, own], axis=1)
    begun = jnp.stack([row, begin - (ends - pages)[row], count], axis=1)
    return LatentWork(
        rows=rows,
        pieces=jnp.concatenate([begun, rows[row]], axis=1),
        parts=jnp.stack([first, jnp.where(pages > 0, holder(ends - 1) - first + 1, 0)], axis=1),
    )


def chunk_rows(chunks: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return (keys that each token of q sees, row of the page table of each token), both [tokens] int32.

    chunks: [C, 4] int32, as for `chunk_attention`. Tokens outside all chunks see 0 keys.
    """
    first, length, row, position = (chunks[:, i].astype(jnp.int32)[None, :] for i in range(4))
    inside = jnp.arange(tokens, dtype=jnp.int32)[:, None] - first
    own = (inside >= 0) & (inside < length)
    seen = jnp.sum(jnp.where(own, position + inside + 1, 0), axis=1, dtype=jnp.int32)
    return seen, jnp.sum(jnp.where(own, row, 0), axis=1, dtype=jnp.int32)


def walk(rows, pieces, worker, visit, carry):
    """Call visit(carry, row, page, here, pages, length, table_row) for each row of a worker's
    piece, and return the last carry.

    Runs inside a kernel. The worker has `here` of the row's `pages` pages, from `page` on. The entry of the
    next row is read before the call and used after it, so that no row waits for memory.
    """

    def step(state):
        row, page, left, length, following, own, carry = state
        then = jnp.minimum(following, rows.shape[0] - 1)
        ahead = tuple(rows[then, i] for i in range(3))
        pages = lax.div(length + (PAGE - 1), jnp.int32(PAGE))
        here = jnp.minimum(pages - page, left)
        carry = visit(carry, row, page, here, pages, length, own)
        return following, jnp.int32(0), left - here, *ahead, carry

    start = (*(pieces[worker, i] for i in range(6)), carry)
    return lax.while_loop(lambda state: state[2] > 0, step, start)[-1]
