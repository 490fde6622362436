"""The reference implementation of decode attention over the paged cache."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
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


def decode_attention(
    q: Float[Array, "T N H"],
    k_pages: Shaped[Array, "P K S H"],
    v_pages: Shaped[Array, "P K _ _"],
    page_table: Int[Array, "... B MP"],
    lengths: Int[Array, " B"],
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
    into: Float[Array, "T N H"] | None = None,
    einsum: Callable[..., Array] = jnp.einsum,
    keys_per_block: int = KEYS_PER_BLOCK,
) -> Float[Array, "T N H"]:
    """Return the attention of one new token a sequence over its pages.

    Args:
      q: the first B rows belong to the sequences.
      k_pages, v_pages: [P, K, S, H]; 8-bit values (e4m3, int8) are [P, K, H, S].
      page_table: [B, MP], or [G, B, MP] for G groups of heads, whose pages hold K / G heads.
      lengths: keys of each row, the new token included; 0 skips the row.
      into: results of rows without keys and of rows from B on; None: 0.
      window: the number of last keys that a row sees. soft_cap: scores become soft_cap · tanh(score /
        soft_cap).
      spans: [K] or [B, K], instead of a window: the number of last keys that each KV head sees.
      sinks: the number of first keys that every head sees besides its span.
      k_scale, v_scale: scales of the cache's numbers, [K] (one a head) or [P, K, S] (one a token and head).
      sink_logits: the logit of each query head's attention sink. The softmax's denominator has a term for it.
      unified_max, sms, work: settings of the kernel (`pallas_kernels.attention.decode.api`), which do not
        change the result.
      einsum: multiplies the queries by the keys, and the weights by the values. The axis `g`
        counts the queries of a KV head.
      keys_per_block: keys of a step of the online softmax, at least those of one page.
    """
    del unified_max, sms, work
    (t, n, h), b, (p, held, s, _) = q.shape, lengths.shape[0], k_pages.shape
    groups = page_table.ndim == 3
    kv = held * (page_table.shape[0] if groups else 1)
    per_block, table = key_blocks(page_table, p, s, keys_per_block)
    block = per_block * s
    grouped = q[:b].reshape(b, kv, n // kv, h).astype(jnp.float32) * scale
    since = first_keys(lengths[:, None], window, spans)  # [B, K or 1]
    longest = jnp.max(lengths, initial=0)
    first_block = (
        jnp.where(lengths[:, None] > 0, since, longest).min(initial=jnp.iinfo(jnp.int32).max) // block
    )
    sink_blocks = -(-sinks // block)
    skipped = jnp.maximum(first_block - sink_blocks, 0)

    def step(i, state):
        at = block_at(i, skipped, sink_blocks)
        ids = lax.dynamic_slice_in_dim(table, at * per_block, per_block, axis=table.ndim - 1)

        scores = cap_scores(
            einsum("bkgh,bksh->bkgs", grouped, read_groups(k_pages, k_scale, ids, groups)), soft_cap
        )
        key = at * block + jnp.arange(block)
        valid = (key < lengths[:, None, None]) & ((key >= since[:, :, None]) | (key < sinks))
        v = read_groups(v_pages, v_scale, ids, groups, values=True)
        return online_softmax(scores, valid[:, :, None, :], v, state, einsum)

    lead = (b, kv, n // kv)
    state = (jnp.full(lead, LOWEST), jnp.zeros(lead), jnp.zeros((*lead, h)))
    top, total, out = lax.fori_loop(skipped, -(-longest // block), step, state)
    if sink_logits is not None:
        total = add_sink_logits(total, top, sink_logits.reshape(kv, n // kv))
    out = (out / jnp.maximum(total, 1e-30)[..., None]).reshape(b, n, h).astype(q.dtype)
    if into is None:
        return jnp.pad(out, ((0, t - b), (0, 0), (0, 0)))
    # Not by `.at[:b].set`: two such scatters under shard_map crash XLA's CPU compiler (jaxlib 0.11.2).
    return lax.dynamic_update_slice_in_dim(
        into, jnp.where((lengths > 0)[:, None, None], out, into[:b]), 0, axis=0
    )


def list_decode_work(lengths: Int[Array, " B"], **settings: object) -> None:
    """Return None: the reference needs no work list."""
