"""Shared parts of the reference implementations of attention. Softmax is computed in float32."""

import jax.numpy as jnp
from jaxtyping import Array

LOWEST = -1e30  # finite stand-in for -inf, because inf - inf is NaN
_KEYS_PER_BLOCK = 256  # keys in one step of the online softmax


def online_softmax(scores, valid, v, state):
    """Return the state (maximum, sum, output) after one block of the online softmax.

    scores, valid: [..., G, keys]. v: [..., keys, H].
    """
    top, total, out = state
    scores = jnp.where(valid, scores, LOWEST)
    new_top = jnp.maximum(top, scores.max(-1))
    weight = jnp.where(valid, jnp.exp(scores - new_top[..., None]), 0.0)
    keep = jnp.exp(top - new_top)
    out = out * keep[..., None] + jnp.einsum("...gs,...sh->...gh", weight, v)
    return new_top, total * keep + weight.sum(-1), out


def cap_scores(scores, soft_cap):
    """Return soft_cap · tanh(scores / soft_cap), or the scores for None."""
    return scores if soft_cap is None else jnp.tanh(scores / soft_cap) * soft_cap


def key_blocks(page_table, pages, page_size):
    """Return (pages in a block, the page table padded to full blocks with valid page numbers)."""
    per_block = max(1, min(_KEYS_PER_BLOCK // page_size, page_table.shape[-1]))
    short = -page_table.shape[-1] % per_block
    table = jnp.pad(page_table, [(0, 0)] * (page_table.ndim - 1) + [(0, short)])
    return per_block, jnp.clip(table, 0, pages - 1)


def read_pages(pages: Array, scale: Array | None, ids: Array, values: bool = False) -> Array:
    """Return float32 [..., K, n * S, H] of the pages `ids` [..., n] of a cache, times their scales.

    scale: None, float32 [K] (one a head) or [P, K, S] (one a token and head). values: read values, which are
    [P, K, H, S] for 8 bits; all other pages are [P, K, S, H].
    """
    x = pages[ids].astype(jnp.float32)
    if values and pages.dtype.itemsize == 1:
        x = jnp.swapaxes(x, -1, -2)
    if scale is not None:
        x = x * (scale[:, None, None] if scale.ndim == 1 else scale[ids][..., None])
    x = jnp.moveaxis(x, -4, -3)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])
