"""The reference implementation of chunk attention over the paged cache."""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.attention.reference import (
    KEYS_PER_BLOCK,
    LOWEST,
    add_sink_logits,
    block_at,
    cap_scores,
    first_keys,
    key_blocks,
    online_softmax,
    read_groups,
)

ROWS_PER_TILE = 128  # query tokens of a chunk that one step computes


def chunk_attention(
    q: Float[Array, "T N H"],
    k_pages: Shaped[Array, "P K S H"],
    v_pages: Shaped[Array, "P K _ _"],
    page_table: Int[Array, "... R MP"],
    chunks: Int[Array, "C 4"],
    *,
    scale: float,
    window: int | None = None,
    spans: Int[Array, "..."] | None = None,
    sinks: int = 0,
    soft_cap: float | None = None,
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    unified_max: Float[Array, " 2"] | None = None,
    sink_logits: Float[Array, " N"] | None = None,
    sms: int | None = None,
    work: object = None,
    rows_per_tile: int = ROWS_PER_TILE,
    keys_per_block: int = KEYS_PER_BLOCK,
    skip_masks: bool = False,
    operands: DTypeLike = jnp.float32,
) -> Float[Array, "T N H"]:
    """Return the causal attention of prefill chunks over their sequences' pages (SARATHI §4.2).

    Args:
      chunks: one row a chunk: first token in q, tokens, row of page_table, position of the first token. The
        pages already hold the chunk's keys and values. Chunks of 0 tokens are skipped.
      page_table: [R, MP], or [G, R, MP] for G groups of heads, whose pages hold K / G heads.
      spans: [K] or [T, K], instead of a window: the number of last keys that each KV head of a query sees.
      rows_per_tile, keys_per_block: query tokens of a chunk and keys that one step computes.
      skip_masks: branch to a form without a mask where every row of a tile sees all keys of a block. A CPU
        runs most steps faster so. On a GPU each branch waits for the host.
      operands: dtype of the factors of both products, whose sums are in float32.
      other arguments: as for `decode_attention`.
    Returns:
      The outputs at the chunks' tokens, and 0 at all others.
    """
    del unified_max, sms, work
    (t, n, h), (p, held, s, _) = q.shape, k_pages.shape
    groups = page_table.ndim == 3
    kv = held * (page_table.shape[0] if groups else 1)
    g, tile = n // kv, min(rows_per_tile, t)
    per_block, table = key_blocks(page_table, p, s, keys_per_block)
    block = per_block * s
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))
    if spans is not None:
        spans = jnp.pad(jnp.broadcast_to(spans, (t, kv)), ((0, tile), (0, 0)))
    sink_blocks = -(-sinks // block)

    def attend(tile_q, tile_spans, pages_of_row, position):
        """Return [tile, N, H]. tile_q: [tile, N, H]. position: of its first token."""
        grouped = tile_q.reshape(tile, kv, g, h).transpose(1, 2, 0, 3).reshape(kv, g * tile, h)
        grouped = (grouped.astype(jnp.float32) * scale).astype(operands)
        ends = position + 1 + jnp.arange(tile)  # the keys of each query, its own included
        since = first_keys(ends[:, None], window, tile_spans)  # [tile, K or 1]
        row_end, row_since = jnp.tile(ends, g), jnp.tile(since.T, g)
        skipped = jnp.maximum(since.min() // block - sink_blocks, 0)

        def step(i, state):
            at = block_at(i, skipped, sink_blocks)
            ids = lax.dynamic_slice_in_dim(pages_of_row, at * per_block, per_block, axis=-1)

            k = read_groups(k_pages, k_scale, ids, groups, dtype=operands)
            scores = jnp.einsum("kqh,ksh->kqs", grouped, k, preferred_element_type=jnp.float32)
            scores = cap_scores(scores, soft_cap)
            v = read_groups(v_pages, v_scale, ids, groups, values=True, dtype=operands)

            def masked():
                key = at * block + jnp.arange(block)
                valid = (key < row_end[:, None]) & ((key >= row_since[:, :, None]) | (key < sinks))
                return online_softmax(scores, valid, v, state)

            if not skip_masks:
                return masked()
            whole = ((at + 1) * block <= position + 1) & (at * block >= since.max())
            return lax.cond(whole, lambda: online_softmax(scores, None, v, state), masked)

        lead = (kv, g * tile)
        state = (jnp.full(lead, LOWEST), jnp.zeros(lead), jnp.zeros((*lead, h)))
        last = jnp.minimum((position + tile - 1) // block + 1, table.shape[-1] // per_block)
        top, total, out = lax.fori_loop(skipped, last, step, state)
        if sink_logits is not None:
            total = add_sink_logits(total, top, jnp.repeat(sink_logits.reshape(kv, g), tile, axis=1))
        out = out / jnp.maximum(total, 1e-30)[..., None]
        return out.reshape(kv, g, tile, h).transpose(2, 0, 1, 3).reshape(tile, n, h).astype(q.dtype)

    def one_chunk(c, out):
        first, tokens, row, position = chunks[c]

        def one_tile(j, out):
            start = first + j * tile
            own = None if spans is None else lax.dynamic_slice_in_dim(spans, start, tile)
            new = attend(
                lax.dynamic_slice_in_dim(padded, start, tile), own, table[..., row, :], position + j * tile
            )
            old = lax.dynamic_slice_in_dim(out, start, tile)
            mine = jnp.arange(tile) < tokens - j * tile
            return lax.dynamic_update_slice_in_dim(
                out, jnp.where(mine[:, None, None], new, old), start, axis=0
            )

        return lax.fori_loop(0, -(-tokens // tile), one_tile, out)

    return lax.fori_loop(0, chunks.shape[0], one_chunk, jnp.zeros_like(padded))[:t]


def list_chunk_work(chunks: Int[Array, "C 4"], tokens: int, **settings: object) -> None:
    """Return None: the reference needs no work list."""
