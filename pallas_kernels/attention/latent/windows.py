"""The windows of a step's chunks: the pages of all chunks in one line, cut into windows of equal size.

A chunk has a whole number of page pairs on the line, so that each of its blocks of 128 keys lies in one
window.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.attention.chunk.work_list import ChunkWork, chunk_work
from pallas_kernels.attention.paged import LOWEST, PAGE
from pallas_kernels.attention.tiles import ChunkTile

_MOST_PAIRS = 32  # of a window of many tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Windows:
    """The page pairs of each chunk on the line, [C] int32: the first one, and the end.

    count: int32, the number of windows. pairs: of a window.
    """

    begins: jax.Array
    ends: jax.Array
    count: jax.Array
    pairs: int = dataclasses.field(metadata={"static": True})


def pairs_of_window(tokens: int, chunks: int) -> int:
    """Return the page pairs of a window: enough for one or two chunks that begin their sequences, up to 4,096
    keys. A product with the whole window is computed however few keys the window holds.
    """
    return min(-(-tokens // (2 * PAGE)), _MOST_PAIRS) + min(chunks, 2)


def windows_of(chunks: jax.Array, pairs: int) -> Windows:
    """Return the windows of chunks [C, 4] int32 (first token, tokens, row of the page table, position)."""
    tokens, position = (chunks[:, i].astype(jnp.int32) for i in (1, 3))
    held = jnp.where(tokens > 0, (position + tokens + 2 * PAGE - 1) // (2 * PAGE), 0)
    index = jnp.arange(chunks.shape[0], dtype=jnp.int32)
    ends = jnp.sum(jnp.where(index[None, :] <= index[:, None], held[None, :], 0), axis=1, dtype=jnp.int32)
    return Windows(ends - held, ends, (ends[-1] + pairs - 1) // pairs, pairs)


def pages_of_window(windows: Windows, i: jax.Array, chunks: jax.Array, page_table: jax.Array) -> jax.Array:
    """Return the pages [2 * pairs] int32 of window i. The entries past a sequence's end are any numbers."""
    pair = i * windows.pairs + jnp.arange(windows.pairs, dtype=jnp.int32)
    own = (pair[:, None] >= windows.begins[None, :]) & (pair[:, None] < windows.ends[None, :])
    chunk = jnp.sum(jnp.where(own, jnp.arange(chunks.shape[0], dtype=jnp.int32), 0), axis=1)
    page = 2 * (pair - windows.begins[chunk])[:, None] + jnp.arange(2, dtype=jnp.int32)
    row = chunks[:, 2].astype(jnp.int32)[chunk][:, None]
    page = jnp.clip(page, 0, page_table.shape[1] - 1)
    return page_table[row, page].astype(jnp.int32).reshape(-1)


def work_of_window(
    windows: Windows, i: jax.Array, chunks: jax.Array, tokens: int, tile: ChunkTile
) -> ChunkWork:
    """Return the work list of `attend_window` for window i.

    The positions of a chunk are relative to its first key in the window. tokens: of q.
    """
    since = i * windows.pairs
    low = jnp.clip(since, windows.begins, windows.ends)
    high = jnp.clip(since + windows.pairs, windows.begins, windows.ends)
    moved = [
        chunks[:, 0],
        jnp.where(high > low, chunks[:, 1], 0),
        (low - since) * 2,  # the page of the window that holds the chunk's first key there
        chunks[:, 3] - (low - windows.begins) * 2 * PAGE,
    ]
    return chunk_work(jnp.stack(moved, axis=1), tokens, tile, keys=(high - low) * 2 * PAGE)


def levels_of_tokens(work: ChunkWork, levels: jax.Array, tokens: int) -> jax.Array:
    """Return the level of each token and head, [T, N] float32; below `LOWEST` for tokens of no tile.

    levels: [M, N, 128] of the tiles' rows.
    """
    place = jnp.arange(work.tiles.shape[0], dtype=jnp.int32)
    first, begin, end = (work.tiles[:, i] for i in range(3))
    inside = jnp.arange(tokens, dtype=jnp.int32)[:, None] - first[None, :]
    own = (inside >= begin[None, :]) & (inside < end[None, :]) & (place < work.count[0])[None, :]
    tile = jnp.sum(jnp.where(own, place[None, :], 0), axis=1)
    row = jnp.clip(jnp.arange(tokens, dtype=jnp.int32) - first[tile], 0, levels.shape[2] - 1)
    return jnp.where(jnp.any(own, axis=1)[:, None], levels[tile, :, row], 2 * LOWEST)
