"""Attention over the paged cache. Softmax is computed in float32 whatever the inputs are."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

_LOWEST = -1e30  # stands for -inf where inf - inf would give NaN
_KEYS_PER_BLOCK = 256  # keys that one pass of the online softmax reads
_ROWS_PER_TILE = 128  # query tokens of a chunk that are taken together


def _online(scores, valid, v, state):
    """One block of the running-maximum softmax. scores, valid: [..., G, keys]; v: [..., keys, H]."""
    top, total, out = state
    scores = jnp.where(valid, scores, _LOWEST)
    new_top = jnp.maximum(top, scores.max(-1))
    weight = jnp.where(valid, jnp.exp(scores - new_top[..., None]), 0.0)
    keep = jnp.exp(top - new_top)
    out = out * keep[..., None] + jnp.einsum("...gs,...sh->...gh", weight, v)
    return new_top, total * keep + weight.sum(-1), out


def _cap(scores, soft_cap):
    return scores if soft_cap is None else jnp.tanh(scores / soft_cap) * soft_cap


def _key_blocks(page_table, pages, page_size):
    """Pages a block, and the page table widened to whole blocks with entries that are safe to read."""
    per_block = max(1, min(_KEYS_PER_BLOCK // page_size, page_table.shape[-1]))
    short = -page_table.shape[-1] % per_block
    table = jnp.pad(page_table, [(0, 0)] * (page_table.ndim - 1) + [(0, short)])
    return per_block, jnp.clip(table, 0, pages - 1)


def read_pages(pages: Array, scale: Array | None, ids: Array, values: bool = False) -> Array:
    """float32 [..., K, n * S, H] of the pages `ids` [..., n] of a cache.

    scale: None, float32 [K] (one a head) or [P, K, S] (one a token and head); true values are the cache's
    times it. values: of 8 bits they lie [P, K, H, S], all else [P, K, S, H].
    """
    x = pages[ids].astype(jnp.float32)
    if values and pages.dtype.itemsize == 1:
        x = jnp.swapaxes(x, -1, -2)
    if scale is not None:
        x = x * (scale[:, None, None] if scale.ndim == 1 else scale[ids][..., None])
    x = jnp.moveaxis(x, -4, -3)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def decode_attention(
    q: Float[Array, "T N H"],
    k_pages: Shaped[Array, "P K S H"],
    v_pages: Shaped[Array, "P K _ _"],
    page_table: Int[Array, "B MP"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    unified: Float[Array, " 2"] | None = None,
    sms: int | None = None,
    work: object = None,
    into: Float[Array, "T N H"] | None = None,
) -> Float[Array, "T N H"]:
    """Attention of one new token a sequence over its pages.

    Args:
      q: the first B rows are the sequences'.
      k_pages, v_pages: [P, K, S, H]; values of 8 bits (e4m3, int8) are [P, K, H, S].
      lengths: keys of each row, its own included; 0 skips the row.
      into: the results of rows without keys, and from B on; None: 0.
      window: see only the last `window` keys. soft_cap: scores become soft_cap · tanh(score / soft_cap).
      k_scale, v_scale: what the cache's numbers are multiplied with, one a head [K] or one a token and head
      [P, K, S]. unified, sms, work: how a kernel is to do it (`pallas_kernels.attention.decode.api`); they do not
      change what it computes.
    """
    del unified, sms, work
    (t, n, h), b, (p, kv, s, _) = q.shape, lengths.shape[0], k_pages.shape
    per_block, table = _key_blocks(page_table, p, s)
    block = per_block * s
    grouped = q[:b].reshape(b, kv, n // kv, h).astype(jnp.float32) * scale
    first_key = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0)
    first_block = (
        jnp.where(lengths > 0, first_key, jnp.max(lengths, initial=0)).min(initial=jnp.iinfo(jnp.int32).max)
        // block
    )

    def step(i, state):
        ids = lax.dynamic_slice_in_dim(table, i * per_block, per_block, axis=1)

        scores = _cap(jnp.einsum("bkgh,bksh->bkgs", grouped, read_pages(k_pages, k_scale, ids)), soft_cap)
        key = i * block + jnp.arange(block)
        valid = (key < lengths[:, None]) & (key >= first_key[:, None])
        return _online(scores, valid[:, None, None, :], read_pages(v_pages, v_scale, ids, values=True), state)

    lead = (b, kv, n // kv)
    state = (jnp.full(lead, _LOWEST), jnp.zeros(lead), jnp.zeros((*lead, h)))
    _, total, out = lax.fori_loop(first_block, -(-jnp.max(lengths, initial=0) // block), step, state)
    out = (out / jnp.maximum(total, 1e-30)[..., None]).reshape(b, n, h).astype(q.dtype)
    if into is None:
        return jnp.pad(out, ((0, t - b), (0, 0), (0, 0)))
    # Not by `.at[:b].set`: two such scatters under shard_map crash XLA's CPU compiler (jaxlib 0.11.2).
    return lax.dynamic_update_slice_in_dim(
        into, jnp.where((lengths > 0)[:, None, None], out, into[:b]), 0, axis=0
    )


def list_decode_work(lengths: Int[Array, " B"], **settings: object) -> None:
    """Nothing: the twin needs no list of its work."""


def list_chunk_work(chunks: Int[Array, "C 4"], tokens: int, **settings: object) -> None:
    """Nothing, likewise."""


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
    unified: Float[Array, " 2"] | None = None,
    sms: int | None = None,
    work: object = None,
) -> Float[Array, "T N H"]:
    """Causal attention of prefill chunks over their sequences' pages (SARATHI §4.2: the mask at any offset).

    Args:
      chunks: a row each (first token in q, tokens, row of page_table, position of the first token); the
      chunk's own
        keys are in the pages already. Chunks of 0 tokens are skipped.
      all others: as `decode_attention`'s.
    Returns:
      the outputs at the chunks' tokens, 0 at all others.
    """
    del unified, sms, work
    (t, n, h), (p, kv, s, _) = q.shape, k_pages.shape
    g, tile = n // kv, min(_ROWS_PER_TILE, t)
    per_block, table = _key_blocks(page_table, p, s)
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

            scores = _cap(jnp.einsum("kqh,ksh->kqs", grouped, read_pages(k_pages, k_scale, ids)), soft_cap)
            key = i * block + jnp.arange(block)
            valid = key <= row_position[:, None]
            if window is not None:
                valid &= key > row_position[:, None] - window
            return _online(scores, valid[None], read_pages(v_pages, v_scale, ids, values=True), state)

        lead = (kv, g * tile)
        state = (jnp.full(lead, _LOWEST), jnp.zeros(lead), jnp.zeros((*lead, h)))
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
