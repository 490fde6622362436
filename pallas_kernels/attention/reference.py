"""Shared parts of the reference implementations of attention. Softmax is computed in float32."""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

_MOST_OVER = 80.0  # e^80 times a weight of 1 is finite
LOWEST = -1e30  # finite stand-in for -inf, because inf - inf is NaN
KEYS_PER_BLOCK = 256  # keys in one step of the online softmax
_SLICED = 8  # so few pages are read by slices: XLA's gather on a CPU computes an address for every number


def online_softmax(scores, valid, v, state, einsum: Callable[..., Array] = jnp.einsum):
    """Return the state (maximum, sum, output) after one block of the online softmax.

    scores, valid: [..., G, keys]. valid: None if all keys are. v: [..., keys, H]. einsum: multiplies the
    weights, rounded to v's dtype, by v.
    """
    top, total, out = state
    if valid is not None:
        scores = jnp.where(valid, scores, LOWEST)
    new_top = jnp.maximum(top, scores.max(-1))
    weight = jnp.exp(scores - new_top[..., None])
    if valid is not None:
        weight = jnp.where(valid, weight, 0.0)
    keep = jnp.exp(top - new_top)
    out = out * keep[..., None] + einsum(
        "...gs,...sh->...gh", weight.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return new_top, total * keep + weight.sum(-1), out


def add_sink_logits(total, top, sink_logits):
    """Return the softmax's denominator [..., rows] with the term of each row's attention sink.

    top: the maximum of each row's scores, which `total` is relative to. The exponent is bounded: the output
    of a row whose sink is so far above its scores is 0 in float32 either way.
    """
    return total + jnp.exp(jnp.minimum(sink_logits.astype(jnp.float32) - top, _MOST_OVER))


def cap_scores(scores, soft_cap):
    """Return soft_cap · tanh(scores / soft_cap), or the scores for None."""
    return scores if soft_cap is None else jnp.tanh(scores / soft_cap) * soft_cap


def first_keys(lengths: Array, window: int | None, spans: Array | None) -> Array:
    """Return [rows, 1] or [rows, K]: the first key of the window, or of each KV head's span.

    lengths: [rows, 1], the keys of each row. spans: [K] or [rows, K]; a span below 1 counts as 1.
    """
    if spans is not None:
        return jnp.maximum(lengths - jnp.maximum(spans, 1), 0)
    return jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0)


def block_at(i: Array, skipped: Array, sink_blocks: int) -> Array:
    """Return the block of step i of a loop that begins at `skipped`: the blocks of
    the sinks, then the last blocks.
    """
    return i if sink_blocks == 0 else jnp.where(i - skipped < sink_blocks, i - skipped, i)


def key_blocks(page_table, pages, page_size, keys: int = KEYS_PER_BLOCK):
    """Return (pages in a block, the page table padded to full blocks with valid page numbers).

    keys: of a block, at least those of one page.
    """
    per_block = max(1, min(keys // page_size, page_table.shape[-1]))
    short = -page_table.shape[-1] % per_block
    table = jnp.pad(page_table, [(0, 0)] * (page_table.ndim - 1) + [(0, short)])
    return per_block, jnp.clip(table, 0, pages - 1)


def read_pages(
    pages: Array, scale: Array | None, ids: Array, values: bool = False, dtype: DTypeLike = jnp.float32
) -> Array:
    """Return [..., K, n * S, H] of the pages `ids` [..., n] of a cache, times their scales, in `dtype`.

    scale: None, float32 [K] (one a head) or [P, K, S] (one a token and head). values: read values, which are
    [P, K, H, S] for 8 bits; all other pages are [P, K, S, H].
    """
    if math.prod(ids.shape[:-1]) == 1 and ids.shape[-1] <= _SLICED:
        parts = [_read_page(pages, scale, page, values, dtype) for page in ids.reshape(-1)]
        return jnp.concatenate(parts, axis=1).reshape(*ids.shape[:-1], pages.shape[1], -1, parts[0].shape[-1])
    (p, kv), rest = pages.shape[:2], pages.shape[2:]
    # One gather of (page, head) pairs gives the heads first. A gather of pages needs a transposed copy.
    pairs = ids[..., None, :] * kv + jnp.arange(kv, dtype=ids.dtype)[:, None]
    x = pages.reshape(p * kv, *rest)[pairs].astype(dtype)
    if values and pages.dtype.itemsize == 1:
        x = jnp.swapaxes(x, -1, -2)
    if scale is not None:
        by_head = (
            scale[:, None, None, None] if scale.ndim == 1 else scale.reshape(p * kv, -1)[pairs][..., None]
        )
        x = x * by_head
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def read_groups(
    pages: Array,
    scale: Array | None,
    ids: Array,
    groups: bool,
    values: bool = False,
    dtype: DTypeLike = jnp.float32,
) -> Array:
    """Return `read_pages` for ids [..., n], or with `groups` for ids [G, ..., n] of G groups of heads.

    Each group has its own pages of K / G heads. The result has all heads: [..., K, n * S, H]. scale: [K] or
    [P, K / G, S].
    """
    if not groups:
        return read_pages(pages, scale, ids, values, dtype)
    x = read_pages(pages, None if scale is None or scale.ndim == 1 else scale, ids, values, dtype)
    x = jnp.moveaxis(x, 0, -4)
    x = x.reshape(*x.shape[:-4], -1, *x.shape[-2:])
    return x if scale is None or scale.ndim > 1 else x * scale[:, None, None]


def _read_page(pages: Array, scale: Array | None, page: Array, values: bool, dtype: DTypeLike) -> Array:
    """Return [K, S, H], one page of `read_pages`."""
    x = lax.dynamic_index_in_dim(pages, page, keepdims=False).astype(dtype)
    if values and pages.dtype.itemsize == 1:
        x = jnp.swapaxes(x, -1, -2)
    if scale is None:
        return x
    one = scale[:, None] if scale.ndim == 1 else lax.dynamic_index_in_dim(scale, page, keepdims=False)
    return x * one[..., None]
