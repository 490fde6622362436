"""The work of a step's prefill chunks, listed on the device for `chunk_attention`: tiles of query rows, and
the rows that no chunk has.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.attention.tiles import ChunkTile


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkWork:
    """The query tiles of a step; the same for all layers that share chunks and window. Made by `chunk_work`.

    tiles [M, 7] int32, the longest first: first row in q, a multiple of 8; the tile's rows before the chunk,
    and before the chunk's end; row of the page table; position of the first row; first block of keys that any
    row sees, end of the blocks. count [2] int32: how many of the M there are, and of the gaps. gaps [C + 1,
    2] int32: runs of rows in no chunk: first row, rows.
    """

    tiles: jax.Array
    count: jax.Array
    gaps: jax.Array


def chunk_work(chunks: jax.Array, tokens: int, tile: ChunkTile, window: int | None = None) -> ChunkWork:
    """Cuts chunks [C, 4] int32 (first token in q, tokens, row of the page table, position) into tiles, on the
    device.

    `tokens` is the length of q, the most that all chunks together can have. Compute it once a step for all
    layers.
    """
    first, length, row, position = (chunks[:, i].astype(jnp.int32) for i in range(4))
    c = chunks.shape[0]
    most = (
        tokens + (tile.rows + 6) * c
    ) // tile.rows  # each chunk may add 7 rows before it and a tile that is not full
    lead = (
        first % 8
    )  # a copy by tiles begins at a multiple of 8 rows: those before the chunk are computed and dropped
    per_chunk = jnp.where(length > 0, (lead + length + tile.rows - 1) // tile.rows, 0)
    index = jnp.arange(c, dtype=jnp.int32)
    ends = jnp.sum(
        jnp.where(index[None, :] <= index[:, None], per_chunk[None, :], 0), axis=1, dtype=jnp.int32
    )
    slot = jnp.arange(most, dtype=jnp.int32)
    chunk = jnp.minimum(jnp.sum((ends[None, :] <= slot[:, None]).astype(jnp.int32), axis=1), c - 1)
    skip = (slot - (ends - per_chunk)[chunk]) * tile.rows - lead[
        chunk
    ]  # tokens of the chunk before the tile's first row
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
    """The rows [M, ...] in the order in which ahead [M, M] has them: by how many others are ahead of each."""
    rank = jnp.sum(ahead.astype(jnp.int32), axis=1)
    place = jnp.arange(rows.shape[0], dtype=jnp.int32)
    return jnp.sum(
        jnp.where((rank[None, :] == place[:, None])[:, :, None], rows[None], 0), axis=1, dtype=jnp.int32
    )


def _gaps(first: jax.Array, length: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """The runs of rows before the first chunk and between each chunk and the next one or the end, and how
    many of those are not empty.
    """
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
