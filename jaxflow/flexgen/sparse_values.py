"""Top-k sparse values (FlexGen §5): scores over all keys, and only the V rows of the top k percent.

The softmax of a new token covers its own key and all cached keys that the token sees. For each sequence and
KV head, the softmax weights of the head's queries are added. The k percent of the cached keys with the
largest sums are chosen, at least one. With as many KV heads as query heads the choice is for each query, as
in the paper. A KV head that several devices store counts as several heads, each with its own queries. The
output is the sum of the V rows of the chosen keys and of the token itself, with the weights of the whole
softmax: the other rows are dropped, and the weights do not grow. A prompt's attention is dense.

Every tier and both places of attention choose by this definition, so that a placement does not change it.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention.reference import LOWEST, cap_scores

_EPSILON = 1e-9  # for rounding errors: 10 % of 50 keys are 5 keys
NO_ROW = -1  # in place of the position of a row that is not fetched


def top_count(percent: float, keys: int) -> int:
    """Return the number of chosen keys of `keys` cached keys."""
    return min(keys, max(1, math.ceil(percent * keys / 100 - _EPSILON)))


def choose(
    q: Float[Array, "R N H"],
    k: Float[Array, "R K T H"],
    new_k: Float[Array, "R K H"],
    positions: Int[Array, " R"],
    live: Bool[Array, " R"],
    *,
    percent: float,
    most: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Int[Array, "R K C"], Float[Array, "R K G C+1"]]:
    """Return the positions of the chosen keys, largest first, and the softmax weights of the chosen rows.

    The weight of the token's own row is the last one. Unused places have position `NO_ROW` and weight 0.

    Args:
      k: cached keys by position; keys from the token's position on are ignored.
      positions: position of the new token of each row.
      live: rows without a sequence choose nothing.
      most: C, the largest count of any row.
    """
    (rows, heads, tokens, width), total = k.shape, positions.astype(jnp.int32)
    grouped = q.reshape(rows, heads, -1, width).astype(jnp.float32) * scale
    scores = cap_scores(jnp.einsum("rkgh,rkth->rkgt", grouped, k.astype(jnp.float32)), soft_cap)
    own = cap_scores(jnp.einsum("rkgh,rkh->rkg", grouped, new_k.astype(jnp.float32)), soft_cap)
    first = jnp.zeros_like(total) if window is None else jnp.maximum(total + 1 - window, 0)
    key = jnp.arange(tokens)
    seen = ((key >= first[:, None]) & (key < total[:, None]) & live[:, None])[:, None]  # [R, 1, T]
    weights = jax.nn.softmax(
        jnp.concatenate([jnp.where(seen[:, None], scores, LOWEST), own[..., None]], axis=-1), axis=-1
    )
    _, index = jax.lax.top_k(jnp.where(seen, weights[..., :-1].sum(2), -1.0), most)
    counts = jnp.asarray(np.array([top_count(percent, n) for n in range(tokens + 1)], np.int32))
    count = jnp.where(live, counts[jnp.clip(total - first, 0, tokens)], 0)
    kept = jnp.arange(most) < count[:, None, None]  # [R, 1, C]
    found = jnp.take_along_axis(weights[..., :-1], index[:, :, None], axis=-1) * kept[:, :, None]
    return jnp.where(kept, index, NO_ROW), jnp.concatenate([found, weights[..., -1:]], axis=-1)


def attend(
    weights: Float[Array, "R K G C+1"], v: Float[Array, "R K C H"], new_v: Float[Array, "R K H"]
) -> Float[Array, "R N H"]:
    """Return the attention of the chosen rows and of the token's own row, in the dtype of `new_v`."""
    rows, heads, group, _ = weights.shape
    out = jnp.einsum("rkgc,rkch->rkgh", weights[..., :-1], v.astype(jnp.float32))
    out = out + weights[..., -1:] * new_v.astype(jnp.float32)[:, :, None]
    return out.reshape(rows, heads * group, -1).astype(new_v.dtype)


def take_rows(v: Float[Array, "R K T H"], index: Int[Array, "R K C"]) -> Float[Array, "R K C H"]:
    """Return the rows of V at the chosen positions. An unused place holds any row."""
    return jnp.take_along_axis(v, jnp.maximum(index, 0)[..., None], axis=2)


def top_positions(weights: np.ndarray, count: int) -> np.ndarray:
    """Return the positions [K, count] of the largest weights [K, T] of each head, in any order."""
    return (
        np.argpartition(-weights, count - 1, axis=-1)[:, :count]
        if count
        else np.empty((len(weights), 0), int)
    )
