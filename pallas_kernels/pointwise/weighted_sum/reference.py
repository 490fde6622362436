"""Reference implementation of the sum that brings the rows of a mixture's experts back to their tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def weighted_sum(
    y: Float[Array, "M D"],
    places: Int[Array, "T e"],
    weights: Float[Array, "T e"],
    *,
    partial: bool = False,
    sms: int | None = None,
) -> Float[Array, "T D"]:
    """Return the sum of each token's rows of y with these weights, in float32, from the first to the last.

    One gather reads all rows. XLA makes one kernel of the gather and the sum, and compiles few instructions.

    Args:
      places: the row of each pair. weights: float32.
      partial: whether there can be pairs without a row, which add nothing. Their places are M or more.
      sms: number of SMs that a kernel may occupy; the result does not depend on it.
    """
    del sms
    rows = y.at[places].get(mode="clip").astype(jnp.float32) * weights[:, :, None]
    if partial:
        rows = jnp.where((places < y.shape[0])[:, :, None], rows, 0.0)
    total = rows[:, 0]
    for choice in range(1, places.shape[1]):  # XLA's own sum on a CPU has an order that depends on T
        total = total + rows[:, choice]
    return total.astype(y.dtype)
