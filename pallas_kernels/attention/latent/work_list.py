"""The work list of latent decode attention: the pages of a batch in one line, split into equal pieces.

All heads read the same pages, so a row has one entry. The heads form tiles of 64. A worker is as many CTAs as
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
      rows: [B, 2] int32: length (0: skipped), next row that has keys, or B.
      pieces: [workers, 5] int32: first row, first page of the row, pages; the
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


def latent_work(lengths: jax.Array, workers: int) -> LatentWork:
    """Split the pages of rows with `lengths` [B] int32 into equal pieces, on the device.

    Sums over comparison matrices are small fusions. Sums along an axis and searches
    would be several kernels each.
    """
    lengths, b = lengths.astype(jnp.int32), lengths.shape[0]
    pages, index = (lengths + PAGE - 1) // PAGE, jnp.arange(b, dtype=jnp.int32)
    ends = jnp.sum(jnp.where(index[None, :] <= index[:, None], pages[None, :], 0), axis=1, dtype=jnp.int32)
    later = (index[None, :] > index[:, None]) & (lengths[None, :] > 0)
    following = jnp.min(jnp.where(later, index[None, :], b), axis=1)
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
    return LatentWork(
        rows=jnp.stack([lengths, following], axis=1),
        pieces=jnp.stack([row, begin - (ends - pages)[row], count, lengths[row], following[row]], axis=1),
        parts=jnp.stack([first, jnp.where(pages > 0, holder(ends - 1) - first + 1, 0)], axis=1),
    )


def walk(rows, pieces, worker, visit, carry):
    """Call visit(carry, row, page, here, pages, length) for each row of a worker's
    piece, and return the last carry.

    Runs inside a kernel. The worker has `here` of the row's `pages` pages, from `page` on. The entry of the
    next row is read before the call and used after it, so that no row waits for memory.
    """

    def step(state):
        row, page, left, length, following, carry = state
        then = jnp.minimum(following, rows.shape[0] - 1)
        ahead = rows[then, 0], rows[then, 1]
        pages = lax.div(length + (PAGE - 1), jnp.int32(PAGE))
        here = jnp.minimum(pages - page, left)
        carry = visit(carry, row, page, here, pages, length)
        return following, jnp.int32(0), left - here, *ahead, carry

    start = (*(pieces[worker, i] for i in range(5)), carry)
    return lax.while_loop(lambda state: state[2] > 0, step, start)[-1]
