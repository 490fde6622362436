"""The reference implementation of decode attention over the paged cache."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.attention.reference import LOWEST, cap_scores, key_blocks, online_softmax, read_pages


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
    unified_max: Float[Array, " 2"] | None = None,
    sms: int | None = None,
    work: object = None,
    into: Float[Array, "T N H"] | None = None,
) -> Float[Array, "T N H"]:
    """Return the attention of one new token a sequence over its pages.

    Args:
      q: the first B rows belong to the sequences.
      k_pages, v_pages: [P, K, S, H]; 8-bit values (e4m3, int8) are [P, K, H, S].
      lengths: keys of each row, the new token included; 0 skips the row.
      into: results of rows without keys and of rows from B on; None: 0.
      window: the number of last keys that a row sees. soft_cap: scores become soft_cap · tanh(score /
        soft_cap).
      k_scale, v_scale: scales of the cache's numbers, [K] (one a head) or [P, K, S] (one a token and head).
      unified_max, sms, work: settings of the kernel (`pallas_kernels.attention.decode.api`), which do not
        change the result.
    """
    del unified_max, sms, work
    (t, n, h), b, (p, kv, s, _) = q.shape, lengths.shape[0], k_pages.shape
    per_block, table = key_blocks(page_table, p, s)
    block = per_block * s
    grouped = q[:b].reshape(b, kv, n // kv, h).astype(jnp.float32) * scale
    first_key = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0)
    first_block = (
        jnp.where(lengths > 0, first_key, jnp.max(lengths, initial=0)).min(initial=jnp.iinfo(jnp.int32).max)
        // block
    )

    def step(i, state):
        ids = lax.dynamic_slice_in_dim(table, i * per_block, per_block, axis=1)

        scores = cap_scores(
            jnp.einsum("bkgh,bksh->bkgs", grouped, read_pages(k_pages, k_scale, ids)), soft_cap
        )
        key = i * block + jnp.arange(block)
        valid = (key < lengths[:, None]) & (key >= first_key[:, None])
        return online_softmax(
            scores, valid[:, None, None, :], read_pages(v_pages, v_scale, ids, values=True), state
        )

    lead = (b, kv, n // kv)
    state = (jnp.full(lead, LOWEST), jnp.zeros(lead), jnp.zeros((*lead, h)))
    _, total, out = lax.fori_loop(first_block, -(-jnp.max(lengths, initial=0) // block), step, state)
    out = (out / jnp.maximum(total, 1e-30)[..., None]).reshape(b, n, h).astype(q.dtype)
    if into is None:
        return jnp.pad(out, ((0, t - b), (0, 0), (0, 0)))
    # Not by `.at[:b].set`: two such scatters under shard_map crash XLA's CPU compiler (jaxlib 0.11.2).
    return lax.dynamic_update_slice_in_dim(
        into, jnp.where((lengths > 0)[:, None, None], out, into[:b]), 0, axis=0
    )


def list_decode_work(lengths: Int[Array, " B"], **settings: object) -> None:
    """Return None: the reference needs no work list."""
