"""The reference implementation of a draw: the largest of logit + temperature · Gumbel noise in each row."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.pointwise.draw.noise import gumbel


def draw(
    x: Float[Array, "R V"],
    temperature: Float[Array, " R"],
    keys: UInt32[Array, "R 3"],
    limit: Float[Array, " R"] | None = None,
) -> Int[Array, " R"]:
    """Return the token of the largest x + temperature · noise in each row, the first of equal ones.

    The draw costs nothing if all limits are +inf.

    Args:
      x: finite or -inf. A row of -inf gives 0.
      temperature: 0 draws the largest x.
      keys: random words of each row. The noise of a token depends on them and on the token id.
      limit: smaller x cannot be drawn. A row with a limit of +inf gives 0. Default: no limit.
    """

    def likeliest(scores: jax.Array) -> jax.Array:
        return scores.argmax(-1).astype(jnp.int32)

    scores = x + temperature[:, None] * gumbel(keys, jnp.arange(x.shape[1], dtype=jnp.int32))
    if limit is None:
        return likeliest(scores)
    return lax.cond(
        (limit < jnp.inf).any(),
        lambda: likeliest(jnp.where(x >= limit[:, None], scores, -jnp.inf)),
        lambda: jnp.zeros(x.shape[:1], jnp.int32),
    )
