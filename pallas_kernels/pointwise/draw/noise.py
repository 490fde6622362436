"""Gumbel noise of a row's key and a token id: a hash, then two logarithms."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

SERIES = 2.0**-8  # below this u, three terms give -log(1 - u) to float32's precision


def gumbel(keys: jax.Array, token: jax.Array) -> jax.Array:
    """Return standard Gumbel noise, float32 [R, n], from -2.9 to 22.9.

    Args:
      keys: [R, 3] uint32, random words of each row.
      token: [n] or [R, n] int32, token ids from 0.
    """
    bits = hash_bits([keys[:, i : i + 1] for i in range(3)], jnp.atleast_2d(token))
    # The noise is -log(-log(1 - u)). Large noise has a small u, which float32 holds to 24 bits.
    u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))
    return -jnp.log(jnp.where(u < SERIES, series, -jnp.log(1.0 - u)))


def hash_bits(words: Sequence[jax.Array], token: jax.Array) -> jax.Array:
    """Return 32 random bits for each token, uint32. words: three uint32 arrays that broadcast with `token`.

    The shifts and factors are those of `triple32` (C. Wellons, hash-prospector), whose bias of avalanche is
    2e-5. A word of the key is added before each factor but the first, so that rows are not permutations of
    each other.
    """
    h = token.astype(jnp.uint32) + words[0]
    h = (h ^ (h >> 17)) * jnp.uint32(0xED5AD4BB) + words[1]
    h = (h ^ (h >> 11)) * jnp.uint32(0xAC4C1B51) + words[2]
    h = (h ^ (h >> 15)) * jnp.uint32(0x31848BAB)
    return h ^ (h >> 14)
