"""Drawing the next token of every row on the device: `plain` (greedy and temperature) and `full` (every setting).

A draw is a function of the row's logits, its seed and the position of the token, and of nothing else: not of the
row's place, the batch or the plan. Each row takes one uniform number and finds the token where the cumulated
probability passes it, in two levels of sums, so that the vocabulary is read twice and no noise of its size is made.
The limits of top-k and top-p are found by searching the bits of the limiting value, not by sorting.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxflow.model.logprobs import LogprobsOut, finite, token_logprobs
from jaxflow.model.slot_params import SlotParams, adjust, count_drawn, rows_of

SUM_BLOCK = 512  # logits summed into one entry of the upper level, at most
DIGIT = 4  # bits of a limit found in one pass over the logits
COLDEST = 1e-7  # a positive temperature below it is taken for it, lest a difference of logits overflows
LOWEST = 0x007FFFFF  # the key of -inf

OfValues = Callable[[jax.Array], jax.Array]  # [R, n] -> [R, n]


def plain(logits: jax.Array, temperature: jax.Array, seed: jax.Array, position: jax.Array) -> jax.Array:
    """One token a row: the likeliest where the temperature is 0, else a draw.

    Args:
      logits: [R, V'] float32, -inf beyond the vocabulary.
      temperature: [R] float32.
      seed: [R, 2] uint32.
      position: [R] int32, the index that the token will have in its sequence.

    Returns: [R] int32. A row of -inf gives 0.
    """
    drawn, possible = _draw(logits, _mass(logits, temperature), seed, position)
    return jnp.where((temperature > 0) & possible, drawn, logits.argmax(-1).astype(jnp.int32))


def full(
    logits: jax.Array,
    temperature: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    slots: jax.Array,
    params: SlotParams,
    counts: jax.Array,
) -> tuple[jax.Array, jax.Array, LogprobsOut]:
    """One token a row under all settings: bias, suppressed tokens, penalties, temperature, min-p, top-k, top-p.

    Tokens that tie with the last one kept by top-k or top-p are kept too. Top-p is of what min-p and top-k left.

    Args:
      logits, temperature, seed, position: as for `plain`.
      slots: [R] int32, where the row's settings and counts are. A row with a slot below 0 or from Q on draws as in
        `plain` and counts nothing: padding, rows without such settings, rows whose token nobody will use. No two
        rows have the same slot.
      params: settings of Q slots.
      counts: [Q, V'] uint16 (donate it).

    Returns: tokens [R] int32, counts with the tokens added, and raw log-probabilities.
    """
    slots = jnp.where(slots < 0, counts.shape[0], slots)
    row = rows_of(params, slots)
    x = adjust(logits, row, counts.at[slots].get(mode="fill", fill_value=0), position)

    likely = finite(x.max(-1)) + _heat(temperature) * jnp.log(row.min_p)  # where the mass is min_p of the largest
    k = jnp.where(row.top_k > 0, jnp.minimum(row.top_k, x.shape[1]), x.shape[1]).astype(jnp.float32)
    floor = jnp.maximum(likely, largest_limit(x, jnp.ones_like, k))  # a float32 counts a vocabulary exactly
    mass = jnp.where(x >= floor[:, None], _mass(x, temperature)(x), 0.0)
    nucleus = largest_limit(mass, lambda m: m, mass.sum(-1) * row.top_p)
    nucleus = jnp.where(row.top_p < 1.0, nucleus, 0.0)[:, None]

    drawn, possible = _draw(mass, lambda m: jnp.where(m >= nucleus, m, 0.0), seed, position)
    tokens = jnp.where((temperature > 0) & possible, drawn, x.argmax(-1).astype(jnp.int32))
    return tokens, count_drawn(counts, slots, tokens), token_logprobs(logits, tokens)


def uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """One number in (0, 1) for each seed [R, 2] uint32 and position [R] int32 -> [R] float32."""

    def bits(words: jax.Array, at: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, at), dtype=jnp.uint32)

    return ((jax.vmap(bits)(seed, position) >> 9).astype(jnp.float32) + 0.5) * 2.0**-23


def largest_limit(x: jax.Array, weigh: OfValues, target: jax.Array) -> jax.Array:
    """The largest value v of a row such that the values >= v weigh at least the target.

    Floats compare as integers do once their bits are rearranged (`_value` undoes it), so v is found digit by digit of
    `DIGIT` bits, from the highest: one pass over x for each, which sums up beyond every candidate at once.

    Args:
      x: [R, n] float32, finite or -inf.
      weigh: what each value of x weighs, not negative.
      target: [R] float32.

    Returns: [R] float32; -inf where even all together weigh less than the target.
    """

    def digit(step: jax.Array, limit: jax.Array) -> jax.Array:
        shift = (32 - DIGIT - DIGIT * step).astype(jnp.uint32)
        pivots = [_value(limit + (jnp.uint32(d) << shift))[:, None] for d in range(1, 2**DIGIT)]
        weights = weigh(x)
        sums = lax.reduce(
            tuple(jnp.where(x >= pivot, weights, 0.0) for pivot in pivots),
            tuple(jnp.float32(0) for _ in pivots),
            lambda a, b: tuple(u + v for u, v in zip(a, b, strict=True)),
            dimensions=(1,),
        )
        reached = sum((total >= target).astype(jnp.uint32) for total in sums)  # sums fall from pivot to pivot
        return limit + (reached << shift)

    return _value(lax.fori_loop(0, 32 // DIGIT, digit, jnp.zeros((x.shape[0],), jnp.uint32)))


def _value(key: jax.Array) -> jax.Array:
    """uint32 -> float32, rising with it, both zeros being equal; -inf below its key, NaN above that of +inf."""
    key = jnp.maximum(key, LOWEST)
    bits = jnp.where(key >> 31 == 1, key ^ jnp.uint32(1 << 31), ~key)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _mass(x: jax.Array, temperature: jax.Array) -> OfValues:
    """What the logits of the rows of x weigh in a draw, 1 for the largest."""
    peak, heat = finite(x.max(-1))[:, None], _heat(temperature)[:, None]
    return lambda y: jnp.exp((y - peak) / heat)


def _heat(temperature: jax.Array) -> jax.Array:
    """A temperature to divide by: 1 for greedy rows, whose draw is not used."""
    return jnp.where(temperature > 0, jnp.maximum(temperature, COLDEST), 1.0)


def _draw(x: jax.Array, weigh: OfValues, seed: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A column of each row of x [R, n], as likely as `weigh` of it, and whether any column weighs something."""
    rows, n = x.shape
    block = math.gcd(n, SUM_BLOCK)
    blocks = x.reshape(rows, n // block, block)
    sums = weigh(x).reshape(blocks.shape).sum(-1)
    total = sums.sum(-1)
    at, rest = _first_above(sums, uniform(seed, position) * total)
    inner = jnp.take_along_axis(blocks, at[:, None, None], axis=1)[:, 0]
    return at * block + _first_above(weigh(inner), rest)[0], total > 0


def _first_above(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the running sum of weights [R, n] first passes target [R], and what of the target is left there.

    Only an entry with some weight is named, whatever the rounding of the sums: if none passes, the last such one.
    """
    n = weights.shape[1]
    sums = jnp.cumsum(weights, axis=1)
    some = weights > 0
    passed = some & (sums > target[:, None])
    last = n - 1 - some[:, ::-1].argmax(-1)
    at = jnp.where(passed.any(-1), passed.argmax(-1), last).astype(jnp.int32)
    before = jnp.take_along_axis(sums - weights, at[:, None], axis=1)[:, 0]
    return at, target - before
