"""Latent attention of prefill chunks with keys and values by head (MLA without absorption), for Hopper.

The keys and values of all heads are made from the latent vectors of a window of pages, and attention over
the window is added to that of the windows before. So their memory does not grow with the context.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.latent.window_kernel import PLAIN, ROTARY, attend_window
from pallas_kernels.attention.latent.windows import WindowWork, pairs_of_window, window_work
from pallas_kernels.attention.paged import LOWEST, PAGE


def list_up_chunk_work(chunks: jax.Array, tokens: int) -> WindowWork:
    """Return the work list of `up_chunk_attention` for chunks among `tokens` rows of q, for all layers.

    The chunks need at most `windows.MOST_WINDOWS` windows of `pairs_of_window`.
    """
    return window_work(chunks, tokens, pairs_of_window(tokens, chunks.shape[0]))


def up_chunk_attention(
    q: jax.Array,
    rope_pages: jax.Array,
    latent_pages: jax.Array,
    key_up: jax.Array,
    value_up: jax.Array,
    page_table: jax.Array,
    chunks: jax.Array,
    *,
    scale: float,
    sms: int | None = None,
    work: WindowWork | None = None,
    pairs: int | None = None,
    interpret=None,
) -> jax.Array:
    """Return the causal attention of prefill chunks over their sequences' pages of latent vectors.

    The reference implementation is `pallas_kernels.attention.latent.reference.up_chunk_attention`.

    Args:
      q: [T, N, 192] bfloat16, N a multiple of 8; the last 64 columns are rotary.
      rope_pages, latent_pages: [P, 1, 64, 64] and [P, 1, 64, R] bfloat16.
      key_up, value_up: [N, 128, R] bfloat16, which make a head's keys and values from latent vectors.
      page_table: [R, MP] int32; entries past a sequence's last page are never read.
      chunks: [C, 4] int32, as for `pallas_kernels.attention.latent.api.chunk_attention`.
      scale: scores are q·k · scale; scale may be 0 or negative.
      sms: CTAs of the attention kernel; None: all SMs.
      work: `list_up_chunk_work(...)` for the same chunks and T, if layers share one list.
      pairs: page pairs of a window, without a list; None: see `pairs_of_window`.
    Returns:
      [T, N, 128] bfloat16; 0 at tokens outside all chunks.
    Raises:
      ValueError: for a shape or dtype outside the limits.
    """
    _check(q, rope_pages, latent_pages, key_up, value_up)
    (t, n, _), rank = q.shape, latent_pages.shape[3]
    if work is None:
        pairs = pairs or pairs_of_window(t, chunks.shape[0])
        most = -(-chunks.shape[0] * (page_table.shape[1] + 1) // (2 * pairs))
        work = window_work(chunks, t, pairs, most)
    weights = [x.reshape(n * PLAIN, rank) for x in (key_up, value_up)]

    def add_window(i, state):
        out, top = state
        own: WindowWork = jax.tree.map(lambda x: x[i] if x.ndim else x, work)
        ids = page_table[own.rows, jnp.clip(own.places, 0, page_table.shape[1] - 1)]
        ids = jnp.clip(ids, 0, latent_pages.shape[0] - 1)
        latent, rotary = latent_pages[ids].reshape(-1, rank), rope_pages[ids].reshape(-1, ROTARY)
        # XLA would join two products of one array, and copy both parts out of the result.
        same = latent, lax.optimization_barrier(latent)
        keys, values = (jnp.einsum("sr,mr->sm", x, w) for x, w in zip(same, weights, strict=True))
        how = {"scale": scale, "sms": sms, "interpret": interpret}
        new, levels = attend_window(q, keys, values, rotary, own.chunks, **how)
        level = jnp.where(own.tiles[:, None] < 0, 2 * LOWEST, levels[own.tiles, :, own.inside])
        return add_parts(out, top, new, level)

    start = jnp.zeros((t, n, PLAIN), q.dtype), jnp.full((t, n), LOWEST, jnp.float32)
    return lax.fori_loop(0, work.count, add_window, start)[0]


def add_parts(
    out: jax.Array, top: jax.Array, new: jax.Array, level: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the output and the level of two parts of the keys of each row.

    out, new: [T, N, H], each divided by its sum of weights. top, level: [T, N] float32, log2 of these sums.
    A part with a level of `LOWEST` or less has no keys, and may hold any output.
    """
    higher = jnp.maximum(top, level)
    old_weight, weight = jnp.exp2(top - higher), jnp.where(level > LOWEST, jnp.exp2(level - higher), 0.0)
    total = old_weight + weight
    given = jnp.where(level[..., None] > LOWEST, new.astype(jnp.float32), 0.0)
    summed = out.astype(jnp.float32) * (old_weight / total)[..., None] + given * (weight / total)[..., None]
    return summed.astype(out.dtype), higher + jnp.log2(total)


def takes(rank: int, plain_dim: int, value_dim: int, rope_dim: int, heads: int) -> bool:
    """Return whether the kernel takes these widths and this number of heads on a device."""
    return (plain_dim, value_dim, rope_dim) == (PLAIN, PLAIN, ROTARY) and rank % 64 == 0 and heads % 8 == 0


def _check(q, rope_pages, latent_pages, key_up, value_up) -> None:
    """Raise ValueError for arguments outside the kernel's limits."""
    (_, n, _), (p, kv, s, rank) = q.shape, latent_pages.shape
    if (kv, s) != (1, PAGE) or rope_pages.shape != (p, 1, PAGE, ROTARY):
        raise ValueError(
            f"pages {rope_pages.shape} and {latent_pages.shape}: accepted are [P, 1, {PAGE}, {ROTARY}] and "
            f"[P, 1, {PAGE}, R]"
        )
    for name, x in {"key_up": key_up, "value_up": value_up}.items():
        if x.shape != (n, PLAIN, rank):
            raise ValueError(f"{name} {list(x.shape)}: accepted is {[n, PLAIN, rank]}")
    dtypes = [x.dtype.name for x in (q, rope_pages, latent_pages, key_up, value_up)]
    if set(dtypes) != {"bfloat16"}:
        raise ValueError(f"dtypes {', '.join(dtypes)}: accepted is bfloat16 for queries, pages and weights")
