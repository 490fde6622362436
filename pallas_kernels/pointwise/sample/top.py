"""The largest values of rows, without a sort: the k best lie in the k blocks with the largest maxima."""

import math

import jax
import jax.numpy as jnp
from jax import lax


def top(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the k largest values of each row of x [R, n], with their columns.

    The largest come first. Equal values are in order of columns.

    Returns: values [R, k] and columns [R, k] int32.
    """
    rows, n = x.shape
    block = math.gcd(n, 1 << math.isqrt(max(1, n // k)).bit_length() - 1)
    if block == 1:
        values, columns = lax.top_k(x, k)
        return values, columns.astype(jnp.int32)
    blocks = x.reshape(rows, n // block, block)
    best = jnp.sort(top(blocks.max(-1), k)[1], axis=1)  # keeps equal values in order of columns
    candidates = jnp.take_along_axis(blocks, best[:, :, None], axis=1).reshape(rows, k * block)
    values, at = top(candidates, k)
    return values, jnp.take_along_axis(best, at // block, axis=1) * block + at % block


def finite(peak: jax.Array) -> jax.Array:
    """Return a row's maximum to subtract: 0 in place of -inf, which avoids -inf - -inf."""
    return jnp.where(jnp.isfinite(peak), peak, 0.0)
