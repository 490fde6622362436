"""Draws that compute noise only where a row needs it."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.pointwise.draw import reference


def draw(
    x: Float[Array, "R V"],
    temperature: Float[Array, " R"],
    keys: UInt32[Array, "R 3"],
    limit: Float[Array, " R"] | None = None,
) -> Int[Array, " R"]:
    """Return the token of the largest x + temperature · noise in each row, the first of equal ones.

    The reference implementation is `pallas_kernels.pointwise.draw.reference.draw`, which describes
    the arguments. XLA computes the noise of a row on one core of a CPU. For 49,152 tokens this takes
    1.4 ms, and the largest x is found in 0.2 ms.
    """
    if limit is not None:
        return reference.draw(x, temperature, keys, limit)
    return lax.cond(
        (temperature > 0).any(),
        lambda: reference.draw(x, temperature, keys),
        lambda: x.argmax(-1).astype(jnp.int32),
    )
