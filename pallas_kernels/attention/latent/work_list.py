"""The work list of latent attention: the pages of all rows in one line, split into equal pieces.

A row is the token of a decode, or consecutive tokens of a prefill chunk, as many as fill the rows of a wgmma
with their heads. All heads read the same pages, so a row has one entry. The heads of a token form tiles of
64. A worker is as many CTAs as there are tiles: its CTAs read the same pages at the same time, so that HBM
is read once.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.decode.work_list import PAGE
from pallas_kernels.hopper.limits import sms_of

HEADS = 64  # heads of a tile, which are the rows of a wgmma


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentWork:
    """The pages that each worker reads. Layers with equal lengths share one list.

    Attributes:
      rows: [B, 5] int32: keys that the last token sees (0: skipped), next row that has keys, or B, row of the
        page table, first token in q, tokens.
      pieces: [workers, 8] int32: first row, first page of the row, pages; the
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of each row, [B] int32: row of the page table, first token in q, number of tokens."""

    table_rows: jax.Array
    firsts: jax.Array
    counts: jax.Array


def latent_work(lengths: jax.Array, workers: int, tokens: Tokens | None = None) -> LatentWork:
    """Split the pages of rows with `lengths` [B] int32 into equal pieces, on the device.

    lengths: the keys that a row's last token sees. tokens: None: row i is token i, and row i of the page
    table.

    Sums over comparison matrices are small fusions. Sums along an axis and searches
    would be several kernels each.
    """
    lengths, b = lengths.astype(jnp.int32), lengths.shape[0]
    pages, index = (lengths + PAGE - 1) // PAGE, jnp.arange(b, dtype=jnp.int32)
    ends = jnp.sum(jnp.where(index[None, :] <= index[:, None], pages[None, :], 0), axis=1, dtype=jnp.int32)
    later = (index[None, :] > index[:, None]) & (lengths[None, :] > 0)
    following = jnp.min(jnp.where(later, index[None, :], b), axis=1)
    tokens = Tokens(index, index, jnp.ones_like(index)) if tokens is None else tokens
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
    rows = jnp.stack([lengths, following, tokens.table_rows, tokens.firsts, tokens.counts], axis=1)
    begun = jnp.stack([row, begin - (ends - pages)[row], count], axis=1)
    return LatentWork(
        rows=rows,
        pieces=jnp.concatenate([begun, rows[row]], axis=1),
        parts=jnp.stack([first, jnp.where(pages > 0, holder(ends - 1) - first + 1, 0)], axis=1),
    )


def tokens_together(heads: int) -> int:
    """Return the tokens of a chunk that fill a tile of 64 rows with their heads."""
    return max(1, HEADS // heads)


def chunk_rows(chunks: jax.Array, tokens: int, together: int) -> tuple[jax.Array, Tokens]:
    """Return (lengths, tokens) of `latent_work` for the rows of prefill chunks.

    chunks: [C, 4] int32, as for `chunk_attention`. tokens: of q. together: tokens of a row; with 1 row i is
    token i.
    """
    first, length, table_row, position = (chunks[:, i].astype(jnp.int32) for i in range(4))
    if together == 1:
        inside = jnp.arange(tokens, dtype=jnp.int32)[:, None] - first[None, :]
        own = (inside >= 0) & (inside < length[None, :])
        chunk = jnp.sum(jnp.where(own, jnp.arange(chunks.shape[0], dtype=jnp.int32), 0), axis=1)
        skipped = jnp.arange(tokens, dtype=jnp.int32) - first[chunk]
        count = jnp.any(own, axis=1).astype(jnp.int32)
    else:
        per_chunk, index = -(-length // together), jnp.arange(chunks.shape[0], dtype=jnp.int32)
        before = jnp.where(index[None, :] <= index[:, None], per_chunk[None, :], 0)
        ends = jnp.sum(before, axis=1, dtype=jnp.int32)
        row = jnp.arange(tokens // together + chunks.shape[0], dtype=jnp.int32)
        chunk = jnp.sum((ends[None, :] <= row[:, None]).astype(jnp.int32), axis=1)
        chunk = jnp.minimum(chunk, chunks.shape[0] - 1)
        skipped = (row - (ends - per_chunk)[chunk]) * together
        count = jnp.clip(length[chunk] - skipped, 0, together)
    lengths = jnp.where(count > 0, position[chunk] + skipped + count, 0)
    return lengths, Tokens(table_row[chunk], first[chunk] + skipped, count)


def walk(rows, pieces, worker, visit, carry):
    """Call visit(carry, page, here, pages, length, tokens) for each row of a worker's piece, and return the
    last carry.

    Runs inside a kernel. tokens: row of the page table, first token, and number of tokens. The worker has
    `here` of the row's `pages` pages, from `page` on. The entry of the next row is read before the call and
    used after it, so that no row waits for memory.
    """

    def step(state):
        page, left, length, following, *tokens, carry = state
        then = jnp.minimum(following, rows.shape[0] - 1)
        ahead = tuple(rows[then, i] for i in range(5))
        pages = lax.div(length + (PAGE - 1), jnp.int32(PAGE))
        here = jnp.minimum(pages - page, left)
        carry = visit(carry, page, here, pages, length, tokens)
        return jnp.int32(0), left - here, *ahead, carry

    start = (*(pieces[worker, i] for i in range(1, 8)), carry)
    return lax.while_loop(lambda state: state[1] > 0, step, start)[-1]
