"""The reference implementation of a draw under min-p, top-k and top-p, in operations of XLA.

Limits are searched, and tokens drawn, in the few blocks of logits with the largest maxima. Whole rows are
read only where these blocks may not hold all tokens that can be drawn.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.pointwise.draw import noise
from pallas_kernels.pointwise.draw.reference import draw
from pallas_kernels.pointwise.sample.limits import largest_limit, token_limits
from pallas_kernels.pointwise.sample.top import finite, top

BLOCK = 16  # columns of a block in the search for limits
BLOCKS = 256  # blocks kept: at least the usual top-k
COLDEST = 1e-7  # the least temperature in a weight: below it a difference of logits may overflow

OfValues = Callable[[jax.Array], jax.Array]  # [R, n] -> [R, n]


def draw_filtered(
    x: Float[Array, "R V"],
    temperature: Float[Array, " R"],
    keys: UInt32[Array, "R 3"],
    min_p: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
) -> Int[Array, " R"]:
    """Return the token of the largest x + temperature · noise in each row, among those that the filters keep.

    Tokens that tie with the last token kept by top-k or top-p are kept. Top-p applies to the tokens that
    min-p and top-k keep.

    Args:
      x: finite or -inf. A row of -inf gives 0.
      temperature: 0 draws the largest x.
      keys: random words of each row. The noise of a token depends on them and on the token id.
      min_p: the least share of the largest probability, from 0 to 1; 0 for none.
      top_k: 0, or V or more, for no limit.
      top_p: in (0, 1]; 1 for no limit.
    """
    few = _largest_blocks(x)
    return _drawn(x, few, _limits(x, few, temperature, min_p, top_k, top_p), temperature, keys)


class _Few(NamedTuple):
    """The blocks of columns of [R, n] logits with the largest maxima."""

    logits: jax.Array  # [R, m]
    tokens: jax.Array  # [R, m] or [1, m] int32, their columns
    least: jax.Array  # [R]: the blocks hold every logit of at least this value
    peak: jax.Array  # [R], the largest logit


def _largest_blocks(x: jax.Array) -> _Few:
    """Return the `BLOCKS` blocks of x [R, n] with the largest maxima, or all of x if it has no more."""
    rows, n = x.shape
    width = math.gcd(n, BLOCK)
    if n // width <= BLOCKS:
        return _Few(x, jnp.arange(n, dtype=jnp.int32)[None], jnp.full((rows,), -jnp.inf), x.max(-1))
    blocks = x.reshape(rows, n // width, width)
    maxima, best = top(blocks.max(-1), BLOCKS)
    few = jnp.take_along_axis(blocks, best[:, :, None], axis=1)
    tokens = best[:, :, None] * width + jnp.arange(width, dtype=jnp.int32)
    return _Few(few.reshape(rows, -1), tokens.reshape(rows, -1), maxima[:, -1], maxima[:, 0])


def _limits(
    x: jax.Array,
    blocks: _Few,
    temperature: jax.Array,
    min_p: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> jax.Array:
    """Return the smallest logit that min-p, top-k and top-p keep in each row of x [R, V] -> [R]; -inf for
    all.

    The limits are searched in the few largest blocks, which nearly always hold all kept tokens.
    `token_limits` examines the full rows whose limit may lie below these blocks.
    """
    n = x.shape[1]
    few = jnp.where(blocks.logits >= blocks.least[:, None], blocks.logits, -jnp.inf)
    peak, heat = finite(blocks.peak), heat_of(temperature)
    mass = _mass(peak, heat)

    cuts_count, cuts_mass = (top_k > 0) & (top_k < n), top_p < 1.0
    k = jnp.where(cuts_count, top_k, n).astype(jnp.float32)  # a float32 counts a vocabulary exactly
    likely = peak + heat * jnp.log(min_p)  # the logit with min_p times the largest mass
    count_limit = jnp.where(cuts_count, largest_limit(few, jnp.ones_like, k), -jnp.inf)
    floor = jnp.maximum(likely, count_limit)
    held = floor >= blocks.least
    total = mass(x).sum(-1)
    left = jnp.where(held, jnp.where(few >= floor[:, None], mass(few), 0.0).sum(-1), total)
    nucleus = largest_limit(few, mass, left * top_p)
    limit = jnp.where(cuts_mass, jnp.maximum(floor, nucleus), floor)
    if few.shape[1] == n:
        return limit
    counted = ~cuts_count | (count_limit > -jnp.inf)
    known = counted & (~cuts_mass | held | ((floor == -jnp.inf) & (nucleus > -jnp.inf)))
    return jnp.where(
        known, limit, token_limits(x, peak, heat, total, likely, k, top_p, ~known & (temperature > 0))
    )


def _drawn(x: jax.Array, few: _Few, limit: jax.Array, temperature: jax.Array, keys: jax.Array) -> jax.Array:
    """Return the drawn token of each row of x [R, V] among the logits of at least the limit, int32 [R].

    `draw` examines the full rows whose limit may lie below the few blocks.
    """
    scores = few.logits + temperature[:, None] * noise.gumbel(keys, few.tokens)
    scores = jnp.where(few.logits >= limit[:, None], scores, -jnp.inf)
    near = _first_of_largest(scores, jnp.broadcast_to(few.tokens, scores.shape))
    if few.logits.shape == x.shape:
        return near
    # A logit that equals `least` may lie in a block that was not kept.
    far = ~(limit > few.least) & (temperature > 0)
    return jnp.where(far, draw(x, temperature, keys, jnp.where(far, limit, jnp.inf)), near)


def _first_of_largest(scores: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the token of the largest score of each row, the least of equal ones. Both are [R, m]."""

    def larger(a: tuple, b: tuple) -> tuple:
        wins = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jnp.where(wins, a[0], b[0]), jnp.where(wins, a[1], b[1])

    nothing = jnp.float32(-jnp.inf), jnp.int32(2**31 - 1)
    return lax.reduce((scores, tokens), nothing, larger, dimensions=(1,))[1]


def _mass(peak: jax.Array, heat: jax.Array) -> OfValues:
    """Return a function from logits to their weights in a draw, 1 at the rows' peaks [R]."""
    return lambda y: jnp.exp((y - peak[:, None]) / heat[:, None])


def heat_of(temperature: jax.Array) -> jax.Array:
    """Return a temperature to divide by: 1 for greedy rows, which ignore their draw."""
    return jnp.where(temperature > 0, jnp.maximum(temperature, COLDEST), 1.0)
