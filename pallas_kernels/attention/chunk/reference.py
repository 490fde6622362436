"""The reference implementation of chunk attention over the paged cache."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.attention.reference import LOWEST, cap_scores, key_blocks, online_softmax, read_pages

ROWS_PER_TILE = 128  # query tokens of a chunk that one step computes


def chunk_attention(
    q: Float[Array, "T N H"],
    k_pages: Shaped[Array, "P K S H"],
    v_pages: Shaped[Array, "P K _ _"],
    page_table: Int[Array, "R MP"],
    chunks: Int[Array, "C 4"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    unified_max: Float[Array, " 2"] | None = None,
    sms: int | None = None,
    work: object = None,
) -> Float[Array, "T N H"]:
    """Return the causal attention of prefill chunks over their sequences' pages (SARATHI §4.2).

    Args:
      chunks: one row a chunk: first token in q, tokens, row of page_table, position of the first token. The
        pages already hold the chunk's keys and values. Chunks of 0 tokens are skipped.
      other arguments: as for `decode_attention`.
    Returns:
      The outputs at the chunks' tokens, and 0 at all others.
    """
    del unified_max, sms, work
    (t, n, h), (p, kv, s, _) = q.shape, k_pages.shape
    g, tile = n // kv, min(ROWS_PER_TILE, t)
    per_block, table = key_blocks(page_table, p, s)
    block = per_block * s
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))

    def attend(tile_q, pages_of_row, position):  # [tile, N, H] -> [tile, N, H]; position of its first token
        grouped = (
            tile_q.reshape(tile, kv, g, h).transpose(1, 2, 0, 3).reshape(kv, g * tile, h).astype(jnp.float32)
            * scale
        )
        row_position = jnp.tile(position + jnp.arange(tile), g)

        def step(i, state):
            ids = lax.dynamic_slice_in_dim(pages_of_row, i * per_block, per_block)

            scores = cap_scores(
                jnp.einsum("kqh,ksh->kqs", grouped, read_pages(k_pages, k_scale, ids)), soft_cap
            )
            key = i * block + jnp.arange(block)
            valid = key <= row_position[:, None]
            if window is not None:
                valid &= key > row_position[:, None] - window
            return online_softmax(scores, valid[None], read_pages(v_pages, v_scale, ids, values=True), state)

        lead = (kv, g * tile)
        state = (jnp.full(lead, LOWEST), jnp.zeros(lead), jnp.zeros((*lead, h)))
        first = 0 if window is None else jnp.maximum(position - window + 1, 0) // block
        last = jnp.minimum((position + tile - 1) // block + 1, table.shape[-1] // per_block)
        _, total, out = lax.fori_loop(first, last, step, state)
        out = out / jnp.maximum(total, 1e-30)[..., None]
        return out.reshape(kv, g, tile, h).transpose(2, 0, 1, 3).reshape(tile, n, h).astype(q.dtype)

    def one_chunk(c, out):
        first, tokens, row, position = chunks[c]

        def one_tile(j, out):
            start = first + j * tile
            new = attend(lax.dynamic_slice_in_dim(padded, start, tile), table[row], position + j * tile)
            old = lax.dynamic_slice_in_dim(out, start, tile)
            mine = jnp.arange(tile) < tokens - j * tile
            return lax.dynamic_update_slice_in_dim(
                out, jnp.where(mine[:, None, None], new, old), start, axis=0
            )

        return lax.fori_loop(0, -(-tokens // tile), one_tile, out)

    return lax.fori_loop(0, chunks.shape[0], one_chunk, jnp.zeros_like(padded))[:t]


def list_chunk_work(chunks: Int[Array, "C 4"], tokens: int, **settings: object) -> None:
    """Return None: the reference needs no work list."""
