"""The limits of top-k and top-p in operations of XLA: a search over the bits of the limit, without a sort."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

DIGIT = 4  # bits of the limit that one pass over the logits finds
_LOWEST = 0x007FFFFF  # the key of -inf

OfValues = Callable[[jax.Array], jax.Array]  # [R, n] -> [R, n]


def token_limits(
    x: Float[Array, "R V"],
    peak: Float[Array, " R"],
    heat: Float[Array, " R"],
    total: Float[Array, " R"],
    floor: Float[Array, " R"],
    k: Float[Array, " R"],
    p: Float[Array, " R"],
    wanted: Bool[Array, " R"],
) -> Float[Array, " R"]:
    """Return the smallest logit that min-p, top-k and top-p keep in each row. Ties with this logit stay.

    Top-p applies to the mass that the other two keep. The search costs nothing if no row is wanted.

    Args:
      x: finite or -inf.
      peak: subtracted before exp: the row's maximum (finite).
      heat: temperatures, positive. A logit weighs exp((x - peak) / heat).
      total: the weight of all logits of a row.
      floor: min-p's limit as a logit; -inf for none.
      k: integers from 1; V or more for no limit.
      p: in (0, 1]; 1 for no limit.
      wanted: rows to search; other rows return their floor.
    """

    def search() -> jax.Array:
        def mass(values):
            return jnp.exp((values - peak[:, None]) / heat[:, None])

        low = jnp.maximum(floor, largest_limit(x, jnp.ones_like, k))
        left = jnp.where(low > -jnp.inf, jnp.where(x >= low[:, None], mass(x), 0.0).sum(-1), total)
        return jnp.where(p < 1.0, jnp.maximum(low, largest_limit(x, mass, left * p)), low)

    return lax.cond(wanted.any(), lambda: jnp.where(wanted, search(), floor), lambda: floor)


def largest_limit(x: Float[Array, "R n"], weigh: OfValues, target: Float[Array, " R"]) -> Float[Array, " R"]:
    """Return the largest value v of a row such that the values >= v weigh at least the target, or -inf if
    all weigh less.

    The bits of floats, rearranged (`_value` inverts this), compare like integers. So the search finds v in
    digits of `DIGIT` bits, from the
    highest digit: one pass over x for each digit sums the weights above all candidates at once.

    Args:
      x: finite or -inf.
      weigh: the weights of values of x, not negative.
    """

    def digit(step: jax.Array, limit: jax.Array) -> jax.Array:
        shift = (32 - DIGIT - DIGIT * step).astype(jnp.uint32)
        pivots = [_value(limit | (jnp.uint32(d) << shift))[:, None] for d in range(1, 2**DIGIT)]
        weights = weigh(x)
        sums = lax.reduce(
            tuple(jnp.where(x >= pivot, weights, 0.0) for pivot in pivots),
            tuple(jnp.float32(0) for _ in pivots),
            lambda a, b: tuple(u + v for u, v in zip(a, b, strict=True)),
            dimensions=(1,),
        )
        reached = sum((total >= target).astype(jnp.uint32) for total in sums)  # sums fall from pivot to pivot
        return limit | (reached << shift)

    return _value(lax.fori_loop(0, 32 // DIGIT, digit, jnp.zeros((x.shape[0],), jnp.uint32)))


def _value(key: jax.Array) -> jax.Array:
    """Return float32 numbers that rise with uint32 keys; zeros are equal, keys below -inf give -inf, keys
    above +inf give NaN.
    """
    key = jnp.maximum(key, _LOWEST)
    bits = jnp.where(key >> 31 == 1, key ^ jnp.uint32(1 << 31), ~key)
    return lax.bitcast_convert_type(bits, jnp.float32)
