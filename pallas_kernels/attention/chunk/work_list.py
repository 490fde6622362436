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
        first block of keys that any row sees; end of the blocks. With spans [M * K, 11], one entry for each
        tile and KV head: the blocks are counted without the skipped blocks, which lie between the sinks and
        the spans; then the skipped blocks, the first key that the span of any row has, the first key that
        the spans of all rows have, the KV head.
      count: [2] int32: number of tiles, number of gaps.
      gaps: [C + 1, 2] int32: runs of rows outside all chunks: first row, rows.
    """

    tiles: jax.Array
    count: jax.Array
    gaps: jax.Array


def chunk_work(
    chunks: jax.Array,
    tokens: int,
    tile: ChunkTile,
    window: int | None = None,
    spans: jax.Array | None = None,
    sinks: int = 0,
    keys: jax.Array | None = None,
) -> ChunkWork:
    """Split chunks [C, 4] int32 (first token in q, tokens, row of the page table, position) into tiles, on
    the device.

    tokens: the length of q, an upper bound of all chunks together. spans, sinks: as for `chunk_attention`,
    instead of a window. keys: [C] int32, the number of first keys of each chunk that its tiles may read, a
    multiple of the tile's keys; tiles without any are left out; None: all keys. Then positions may be
    negative, and windows and spans are not accepted. Compute the list once a step for all layers.
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
    if keys is not None:
        block_end = jnp.clip(block_end, 0, keys[chunk].astype(jnp.int32) // tile.keys)
    columns = [first[chunk] + skip, begin, end, row[chunk], at]
    if spans is None:
        block = jnp.zeros_like(at) if window is None else jnp.maximum(at + begin - window + 1, 0) // tile.keys
        table = jnp.stack([*columns, block, block_end], axis=1)
        count = jnp.minimum(ends[-1], most)
    else:
        table = _by_head(columns, block_end, spans, sinks, tile)
        block, block_end = table[:, 5], table[:, 6]
        kv = spans.shape[-1]
        slot, count = jnp.arange(most * kv, dtype=jnp.int32), jnp.minimum(ends[-1], most) * kv
    cost = jnp.where(slot < count, block_end - block, 0)
    ahead = (cost[None, :] > cost[:, None]) | (
        (cost[None, :] == cost[:, None]) & (slot[None, :] < slot[:, None])
    )
    if keys is not None:
        count = jnp.sum((cost > 0).astype(jnp.int32))
    gaps, gap_count = _gaps(first, length, tokens)
    return ChunkWork(tiles=_ranked(table, ahead), count=jnp.stack([count, gap_count]), gaps=gaps)


def _by_head(columns, block_end, spans, sinks: int, tile: ChunkTile) -> jax.Array:
    """Return the tiles [M * K, 11] for each KV head, from the first five columns of the tiles."""
    first_row, begin, end, _, at = columns
    inside = jnp.arange(tile.rows, dtype=jnp.int32)[None, :]  # [M, rows]
    token = first_row[:, None] + inside
    span = spans if spans.ndim == 1 else spans[jnp.clip(token, 0, spans.shape[0] - 1)]
    since = jnp.maximum((at[:, None] + inside + 1)[:, :, None] - jnp.maximum(span, 1), 0)  # [M, rows, K]
    real = (inside >= begin[:, None]) & (inside < end[:, None])
    settled = jnp.max(jnp.where(real[:, :, None], since, 0), axis=1)
    since = jnp.min(jnp.where(real[:, :, None], since, at[:, None, None] + tile.rows), axis=1)
    first, keys = since // tile.keys, tile.keys
    skipped = jnp.maximum(first - -(-sinks // keys), 0) if sinks else jnp.zeros_like(first)
    block = jnp.zeros_like(first) if sinks else first
    head = jnp.arange(since.shape[1], dtype=jnp.int32)[None, :]
    fields = [
        *(x[:, None] for x in columns),
        block,
        block_end[:, None] - skipped,
        skipped,
        since,
        settled,
        head,
    ]
    fields = [jnp.broadcast_to(x, since.shape).astype(jnp.int32) for x in fields]
    return jnp.stack(fields, axis=2).reshape(-1, len(fields))


def block_of(place, skipped, sinks: int, keys: int):
    """Return the block of keys at a place among a tile's visible blocks. Runs inside a kernel."""
    return place if sinks == 0 else place + jnp.where(place >= -(-sinks // keys), skipped, 0)


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
