"""The windows of a step's chunks: the pages of all chunks in one line, cut into windows of equal size.

A chunk has a whole number of page pairs on the line.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.attention.chunk.work_list import ChunkWork, chunk_work
from pallas_kernels.attention.tiles import ChunkTile

PAGE = 64  # tokens in a page
# With 128 keys a step the kernel spills registers, and is no faster.
TILE = ChunkTile(keys=64, stages=3, queries=1)
MOST_WINDOWS = 32  # of a step
_MOST_PAIRS = 32  # of a window of many tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowWork:
    """The windows of a step, W of them, of which the first `count` have pages. All layers share them.

    Attributes:
      count: int32.
      chunks: the work list of each window, with the positions of a chunk relative to its first key there.
        Field 3 of a tile is the page of the window that holds this key.
      rows, places: [W, 2 * pairs] int32: the row of the page table of each page of a window, and the place
        in this row. Pages past a sequence's end have any place.
      tiles, inside: [W, T] int32: the tile of each token, or -1, and the row of the tile.
    """

    count: jax.Array
    chunks: ChunkWork
    rows: jax.Array
    places: jax.Array
    tiles: jax.Array
    inside: jax.Array


def pairs_of_window(tokens: int, chunks: int) -> int:
    """Return the page pairs of a window: enough for one or two chunks that begin their sequences, up to 4,096
    keys. A product with the whole window is computed however few keys the window holds.
    """
    return min(-(-tokens // (2 * PAGE)), _MOST_PAIRS) + min(chunks, 2)


def windows_of(chunks: jax.Array, pairs: int) -> tuple[jax.Array, int]:
    """Return the number of windows of chunks [C, 4], int32, and the keys of a window.

    pairs: page pairs of a window.
    """
    return (_ends(chunks)[-1] + pairs - 1) // pairs, pairs * 2 * PAGE


def _held(chunks: jax.Array) -> jax.Array:
    """Return the page pairs of each chunk, [C] int32."""
    new, position = chunks[:, 1].astype(jnp.int32), chunks[:, 3].astype(jnp.int32)
    return jnp.where(new > 0, (position + new + 2 * PAGE - 1) // (2 * PAGE), 0)


def _ends(chunks: jax.Array) -> jax.Array:
    """Return the end of each chunk's page pairs on the line, [C] int32."""
    index = jnp.arange(chunks.shape[0], dtype=jnp.int32)
    before = jnp.where(index[None, :] <= index[:, None], _held(chunks)[None, :], 0)
    return jnp.sum(before, axis=1, dtype=jnp.int32)


def window_work(chunks: jax.Array, tokens: int, pairs: int, windows: int = MOST_WINDOWS) -> WindowWork:
    """Return the windows of chunks [C, 4] int32 (first token, tokens, row of the page table, position).

    tokens: of q. pairs: page pairs of a window. windows: W, at least those that the chunks need.
    """
    chunks = chunks.astype(jnp.int32)
    new, position = chunks[:, 1], chunks[:, 3]
    index, ends = jnp.arange(chunks.shape[0], dtype=jnp.int32), _ends(chunks)
    begins = ends - _held(chunks)

    def one(since: jax.Array) -> tuple[ChunkWork, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Return the parts of the window that begins at a pair of the line."""
        pair = since + jnp.arange(pairs, dtype=jnp.int32)
        own = (pair[:, None] >= begins[None, :]) & (pair[:, None] < ends[None, :])
        chunk = jnp.sum(jnp.where(own, index, 0), axis=1)
        place = 2 * (pair - begins[chunk])[:, None] + jnp.arange(2, dtype=jnp.int32)
        row = jnp.broadcast_to(chunks[:, 2][chunk][:, None], place.shape)
        low, high = (jnp.clip(at, begins, ends) for at in (since, since + pairs))
        moved = [
            chunks[:, 0],
            jnp.where(high > low, new, 0),
            (low - since) * 2,
            position - (low - begins) * 2 * PAGE,
        ]
        work = chunk_work(jnp.stack(moved, axis=1), tokens, TILE, keys=(high - low) * 2 * PAGE)
        return work, row.reshape(-1), place.reshape(-1), *_tiles_of_tokens(work, tokens)

    count, _ = windows_of(chunks, pairs)
    return WindowWork(count, *jax.vmap(one)(pairs * jnp.arange(windows, dtype=jnp.int32)))


def _tiles_of_tokens(work: ChunkWork, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return the tile of each token, or -1, and the row of the tile."""
    place, token = jnp.arange(work.tiles.shape[0], dtype=jnp.int32), jnp.arange(tokens, dtype=jnp.int32)
    first, begin, end = (work.tiles[:, i] for i in range(3))
    inside = token[:, None] - first[None, :]
    own = (inside >= begin[None, :]) & (inside < end[None, :]) & (place < work.count[0])[None, :]
    tile = jnp.max(jnp.where(own, place[None, :], -1), axis=1)
    return tile, jnp.max(jnp.where(own, inside, 0), axis=1)
