"""The work list of `chunk_attention`: tiles of query rows, and rows outside all chunks, computed on the
device.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.attention.tiles import ChunkTile


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkWork:
    """The query tiles of a step, from `chunk_work`. Layers with equal chunks and window share one list.

    Attributes:
      tiles: [M, 7] int32, the longest first: first row in q (a multiple of 8); the tile's rows before the
        chunk; the tile's rows before the chunk's end; row of the page table; position of the first row;
        first block of keys that any row sees; end of the blocks.
      count: [2] int32: number of tiles, number of gaps.
      gaps: [C + 1, 2] int32: runs of rows outside all chunks: first row, rows.
    """

    tiles: jax.Array
    count: jax.Array
    gaps: jax.Array


def chunk_work(chunks: jax.Array, tokens: int, tile: ChunkTile, window: int | None = None) -> ChunkWork:
    """Split chunks [C, 4] int32 (first token in q, tokens, row of the page table, position) into tiles, on
    the device.

    tokens: the length of q, an upper bound of all chunks together. Compute the list once a step for all
    layers.
    """
    first, length, row, position = (chunks[:, i].astype(jnp.int32) for i in range(4))
    c = chunks.shape[0]
    most = (
        tokens + (tile.rows + 6) * c
    ) // tile.rows  # a chunk can add 7 rows before it and an incomplete tile
    # TMA copies start at a multiple of 8 rows. Rows before the chunk are computed and dropped.
    lead = first % 8
    per_chunk = jnp.where(length > 0, (lead + length + tile.rows - 1) // tile.rows, 0)
    index = jnp.arange(c, dtype=jnp.int32)
    ends = jnp.sum(
        jnp.where(index[None, :] <= index[:, None], per_chunk[None, :], 0), axis=1, dtype=jnp.int32
    )
    slot = jnp.arange(most, dtype=jnp.int32)
    chunk = jnp.minimum(jnp.sum((ends[None, :] <= slot[:, None]).astype(jnp.int32), axis=1), c - 1)
    # Tokens of the chunk before the tile's first row.
    skip = (slot - (ends - per_chunk)[chunk]) * tile.rows - lead[chunk]
    begin, end = jnp.maximum(-skip, 0), jnp.clip(length[chunk] - skip, 0, tile.rows)
    at = position[chunk] + skip
    block_end = (at + end + tile.keys - 1) // tile.keys
    block = jnp.zeros_like(at) if window is None else jnp.maximum(at + begin - window + 1, 0) // tile.keys
    table = jnp.stack([first[chunk] + skip, begin, end, row[chunk], at, block, block_end], axis=1)
    cost = jnp.where(slot < ends[-1], block_end - block, 0)
    ahead = (cost[None, :] > cost[:, None]) | (
        (cost[None, :] == cost[:, None]) & (slot[None, :] < slot[:, None])
    )
    gaps, gap_count = _gaps(first, length, tokens)
    return ChunkWork(
        tiles=_ranked(table, ahead), count=jnp.stack([jnp.minimum(ends[-1], most), gap_count]), gaps=gaps
    )


def _ranked(rows: jax.Array, ahead: jax.Array) -> jax.Array:
    """Return rows [M, ...] sorted by ahead [M, M]: the rank of a row is the number of rows ahead of it."""
    rank = jnp.sum(ahead.astype(jnp.int32), axis=1)
    place = jnp.arange(rows.shape[0], dtype=jnp.int32)
    return jnp.sum(
        jnp.where((rank[None, :] == place[:, None])[:, :, None], rows[None], 0), axis=1, dtype=jnp.int32
    )


def _gaps(first: jax.Array, length: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return the runs of rows before, between and after the chunks, and the number of nonempty runs."""
    zero = jnp.zeros((1,), jnp.int32)
    begin = jnp.concatenate([zero, first + length])
    real = jnp.concatenate([zero + 1, length]) > 0
    later = (length[None, :] > 0) & (first[None, :] >= begin[:, None])
    following = jnp.min(jnp.where(later, first[None, :], tokens), axis=1)
    rows = jnp.where(real, following - begin, 0)
    index, there = jnp.arange(rows.shape[0]), rows > 0
    ahead = (there[None, :] & ~there[:, None]) | (
        (there[None, :] == there[:, None]) & (index[None, :] < index[:, None])
    )
    return _ranked(jnp.stack([begin, rows], axis=1), ahead), jnp.sum(there.astype(jnp.int32))
