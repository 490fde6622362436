"""Where top-k and top-p cut a row of logits, found by searching the bits of the limiting value, without
sorting.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

DIGIT = 4  # bits of a limit found in one pass over the logits
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
    *,
    sms: int | None = None,
) -> Float[Array, " R"]:
    """The smallest logit that min-p, top-k and top-p leave in each row; what ties with it stays too.

    Top-p is of the mass that the other two leave. Rows that nobody wants cost nothing where none is wanted.

    Args:
      x: finite or -inf.
      peak: what is subtracted before exp: the row's maximum (finite).
      heat: temperatures, positive. A logit weighs exp((x - peak) / heat).
      total: what all logits of a row weigh.
      floor: min-p's limit as a logit; -inf for none.
      k: whole numbers from 1, V or more for no limit.
      p: of (0, 1]; 1 for no limit.
      wanted: rows that are searched; the others get their floor.
      sms: how many SMs a kernel may occupy; it does not change what is computed.
    """
    del sms

    def search() -> jax.Array:
        def mass(values):
            return jnp.exp((values - peak[:, None]) / heat[:, None])

        low = jnp.maximum(floor, largest_limit(x, jnp.ones_like, k))
        left = jnp.where(low > -jnp.inf, jnp.where(x >= low[:, None], mass(x), 0.0).sum(-1), total)
        return jnp.where(p < 1.0, jnp.maximum(low, largest_limit(x, mass, left * p)), low)

    return lax.cond(wanted.any(), lambda: jnp.where(wanted, search(), floor), lambda: floor)


def largest_limit(x: Float[Array, "R n"], weigh: OfValues, target: Float[Array, " R"]) -> Float[Array, " R"]:
    """The largest value v of a row such that the values >= v weigh at least the target; -inf where even all
    weigh less.

    Floats compare as integers do once their bits are rearranged (`_value` undoes it), so v is found digit by
    digit of
    `DIGIT` bits, from the highest: one pass over x for each, which sums up beyond every candidate at once.

    Args:
      x: finite or -inf.
      weigh: what each value of x weighs, not negative.
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
    """uint32 -> float32, rising with it, both zeros being equal; -inf below its key, NaN above that of +inf."""
    key = jnp.maximum(key, _LOWEST)
    bits = jnp.where(key >> 31 == 1, key ^ jnp.uint32(1 << 31), ~key)
    return lax.bitcast_convert_type(bits, jnp.float32)
