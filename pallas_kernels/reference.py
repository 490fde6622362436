"""The jnp twin of every kernel: its definition, and the backend where no faster kernel exists.

Loops run to counts that are data, so the cost follows the tokens that are there and not the padded shapes.
Letters: T tokens, B and R sequences, N query heads, K key/value heads, H head width, P pages, S tokens a page,
MP pages a sequence at most, C prefill chunks. Softmax and norms are computed in float32 whatever the inputs are.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_LOWEST = -1e30  # stands for -inf where inf - inf would give NaN
_KEYS_PER_BLOCK = 256  # keys that one pass of the online softmax reads
_ROWS_PER_TILE = 128  # query tokens of a chunk that are taken together


def gemm(x: Float[Array, "M D"], w: Float[Array, "F D"], bias: Float[Array, " F"] | None = None, out_dtype=None) -> Float[Array, "M F"]:
    """x @ w.T (+ bias), accumulated in float32, returned in `out_dtype` (default: x's)."""
    y = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype or x.dtype)
    return y if bias is None else y + bias.astype(y.dtype)


def rms_norm(x: Float[Array, "*M D"], weight: Float[Array, " D"], *, eps: float, offset: float = 0.0) -> Float[Array, "*M D"]:
    """x / sqrt(mean(x²) + eps) · (offset + weight), over the last axis."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * (offset + weight.astype(jnp.float32))).astype(x.dtype)


def layer_norm(x: Float[Array, "*M D"], weight: Float[Array, " D"], bias: Float[Array, " D"], *, eps: float) -> Float[Array, "*M D"]:
    """(x - mean) / sqrt(var + eps) · weight + bias, over the last axis."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def rope(x: Float[Array, "T N H"], positions: Int[Array, " T"], inv_freq: Float[Array, " H2"]) -> Float[Array, "T N H"]:
    """Rotates the halves (x[..., :H/2], x[..., H/2:]) by position · inv_freq radians."""
    angle = positions.astype(jnp.float32)[:, None, None] * inv_freq
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def append(pages: Float[Array, "P K S H"], new: Float[Array, "T K H"], slots: Int[Array, " T"]) -> Float[Array, "P K S H"]:
    """Writes token t's heads at flat slot `slots[t]` (page · S + place in it); slots outside the cache are dropped."""
    p, k, s, h = pages.shape
    # One row of H an index, over a flat view: a scatter that indexes the two outer axes only would make XLA transpose the cache.
    page, place = slots // s, slots % s
    rows = (page[:, None] * k + jnp.arange(k)) * s + place[:, None]
    rows = jnp.where((slots < 0)[:, None] | (slots >= p * s)[:, None], p * k * s, rows)
    flat = pages.reshape(p * k * s, h)
    flat = flat.at[rows.reshape(-1)].set(
        new.reshape(-1, h).astype(pages.dtype), mode="drop", unique_indices=False, wrap_negative_indices=False
    )
    return flat.reshape(p, k, s, h)


def rope_append(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    positions: Int[Array, " T"],
    slots: Int[Array, " T"],
    *,
    inv_freq: Float[Array, " H2"] | None,
    q_norm: Float[Array, " H"] | None = None,
    k_norm: Float[Array, " H"] | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> tuple[Float[Array, "T N H"], Float[Array, "P K S H"], Float[Array, "P K S H"]]:
    """Norms (if any) and rotates queries and keys, and writes keys and values to their pages.

    Args:
      slots: flat place of each token in the pages, page · S + place; anything outside is not written (padding).
      inv_freq: radians a position of each of the H/2 planes; None: no rotation.
    Returns:
      the queries for attention, and both page arrays (aliasing the inputs where those are donated).
    """
    if q_norm is not None and k_norm is not None:
        q = rms_norm(q, q_norm, eps=eps, offset=norm_offset)
        k = rms_norm(k, k_norm, eps=eps, offset=norm_offset)
    if inv_freq is not None:
        q, k = rope(q, positions, inv_freq), rope(k, positions, inv_freq)
    return q, append(k_pages, k, slots), append(v_pages, v, slots)


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


def decode_attention(
    q: Float[Array, "B N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    page_table: Int[Array, "B MP"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B N H"]:
    """Attention of one new token a sequence over its pages.

    Args:
      lengths: keys of each row, its own included; 0 skips the row, whose output is 0.
      window: see only the last `window` keys. soft_cap: scores become soft_cap · tanh(score / soft_cap).
    """
    (b, n, h), (p, kv, s, _) = q.shape, k_pages.shape
    per_block, table = _key_blocks(page_table, p, s)
    block = per_block * s
    grouped = q.reshape(b, kv, n // kv, h).astype(jnp.float32) * scale
    first_key = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0)
    first_block = jnp.where(lengths > 0, first_key, jnp.max(lengths, initial=0)).min(initial=jnp.iinfo(jnp.int32).max) // block

    def step(i, state):
        ids = lax.dynamic_slice_in_dim(table, i * per_block, per_block, axis=1)

        def read(pages):  # -> [B, K, keys, H]
            return pages[ids].astype(jnp.float32).transpose(0, 2, 1, 3, 4).reshape(b, kv, block, h)

        scores = _cap(jnp.einsum("bkgh,bksh->bkgs", grouped, read(k_pages)), soft_cap)
        key = i * block + jnp.arange(block)
        valid = (key < lengths[:, None]) & (key >= first_key[:, None])
        return _online(scores, valid[:, None, None, :], read(v_pages), state)

    lead = (b, kv, n // kv)
    state = (jnp.full(lead, _LOWEST), jnp.zeros(lead), jnp.zeros((*lead, h)))
    _, total, out = lax.fori_loop(first_block, -(-jnp.max(lengths, initial=0) // block), step, state)
    return (out / jnp.maximum(total, 1e-30)[..., None]).reshape(b, n, h).astype(q.dtype)


def chunk_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    page_table: Int[Array, "R MP"],
    chunks: Int[Array, "C 4"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "T N H"]:
    """Causal attention of prefill chunks over their sequences' pages (SARATHI §4.2: the mask at any offset).

    Args:
      chunks: a row each (first token in q, tokens, row of page_table, position of the first token); the chunk's own
        keys are in the pages already. Chunks of 0 tokens are skipped.
    Returns:
      the outputs at the chunks' tokens, 0 at all others.
    """
    (t, n, h), (p, kv, s, _) = q.shape, k_pages.shape
    g, tile = n // kv, min(_ROWS_PER_TILE, t)
    per_block, table = _key_blocks(page_table, p, s)
    block = per_block * s
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))

    def attend(tile_q, pages_of_row, position):  # [tile, N, H] -> [tile, N, H]; position of its first token
        grouped = tile_q.reshape(tile, kv, g, h).transpose(1, 2, 0, 3).reshape(kv, g * tile, h).astype(jnp.float32) * scale
        row_position = jnp.tile(position + jnp.arange(tile), g)

        def step(i, state):
            ids = lax.dynamic_slice_in_dim(pages_of_row, i * per_block, per_block)

            def read(pages):  # -> [K, keys, H]
                return pages[ids].astype(jnp.float32).transpose(1, 0, 2, 3).reshape(kv, block, h)

            scores = _cap(jnp.einsum("kqh,ksh->kqs", grouped, read(k_pages)), soft_cap)
            key = i * block + jnp.arange(block)
            valid = key <= row_position[:, None]
            if window is not None:
                valid &= key > row_position[:, None] - window
            return _online(scores, valid[None], read(v_pages), state)

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
            return lax.dynamic_update_slice_in_dim(out, jnp.where(mine[:, None, None], new, old), start, axis=0)

        return lax.fori_loop(0, -(-tokens // tile), one_tile, out)

    return lax.fori_loop(0, chunks.shape[0], one_chunk, jnp.zeros_like(padded))[:t]


def gate_mul(y: Float[Array, "M F2"], block: int, activation: str) -> Float[Array, "M F"]:
    """act(gate) · up, of columns laid out as blocks of `block` gates then `block` ups, alternating."""
    pair = y.reshape(y.shape[0], -1, 2, block)
    return (activate(pair[:, :, 0], activation) * pair[:, :, 1]).reshape(y.shape[0], -1)


def activate(x: Float[Array, "*M"], activation: str) -> Float[Array, "*M"]:
    """silu, gelu_tanh or relu, in float32, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    if activation == "silu":
        y = x32 * lax.logistic(x32)
    elif activation == "gelu_tanh":
        y = 0.5 * x32 * (1.0 + jnp.tanh(0.7978845608028654 * (x32 + 0.044715 * x32**3)))
    elif activation == "relu":
        y = jnp.maximum(x32, 0.0)
    else:
        raise ValueError(f"activation={activation!r}: silu, gelu_tanh or relu")
    return y.astype(x.dtype)
