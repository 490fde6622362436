"""Reference implementation of a router's choice: the largest scores of each row."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_RANKED_BY_COMPARISON = 32  # at most so many scores are ranked by comparing each with each


def top_k(
    scores: Float[Array, "T E"], chosen: int, *, softmax: bool = False, sms: int | None = None
) -> tuple[Float[Array, "T e"], Int[Array, "T e"]]:
    """Return the `chosen` largest scores of each row and their columns, the largest first, as `lax.top_k`.

    The columns of a row of NaN are different too. A small number of scores is ranked by comparing each with
    each, because XLA sorts in several kernels.

    Args:
      softmax: return the softmax of the chosen scores instead of the scores.
      sms: number of SMs that a kernel may occupy; the result does not depend on it.
    """
    del sms
    values, columns = _largest(scores, chosen)
    return jax.nn.softmax(values, axis=-1) if softmax else values, columns


def _largest(scores: Float[Array, "T E"], chosen: int) -> tuple[Float[Array, "T e"], Int[Array, "T e"]]:
    number = scores.shape[1]
    if number > _RANKED_BY_COMPARISON:
        return lax.top_k(scores, chosen)
    at = jnp.arange(number, dtype=jnp.int32)
    # NaN compares as neither larger nor smaller, and would give every score the first rank.
    ranked = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    one, other = ranked[:, :, None], ranked[:, None, :]
    rank = jnp.sum(((other > one) | ((other == one) & (at[None, :] < at[:, None]))).astype(jnp.int32), axis=2)
    here = rank[:, None, :] == at[:chosen, None]  # [T, e, E]: whether a score is a row's first, second, ...
    return jnp.sum(jnp.where(here, scores[:, None, :], 0.0), axis=2), jnp.sum(jnp.where(here, at, 0), axis=2)
