"""Drawing the next token of every row on the device: `plain` (greedy and temperature) and `full` (every
setting).

A draw is a function of the row's logits, its seed and the position of the token, and of nothing else: not of
the row's place, the batch or the plan. Each row takes one uniform number and finds the token where the
cumulated probability passes it, in two levels of sums, so that the vocabulary is read twice and no noise of
its size is made. The limits of top-k and top-p are found by searching the bits of the limiting value, not by
sorting.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxflow.model.logprobs import LogprobsOut, finite, token_logprobs, top
from jaxflow.model.slot_params import SlotParams, adjust, count_drawn, rows_of
from pallas_kernels.pointwise.sample.reference import largest_limit, token_limits

SUM_BLOCK = 512  # logits summed into one entry of the upper level, at most
BLOCK = 16  # columns of a block that is kept or not when limits are searched
ROWS = 128  # rows that `full_by_rows` adjusts at once, at least
ROW_BYTES = 11  # that these need beside the logits, a logit: a copy, what is adjusted, what is searched
BLOCKS = 256  # blocks kept: no less than the top-k that people ask for
COLDEST = 1e-7  # a positive temperature below it is taken for it, lest a difference of logits overflows

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
    drawn, possible = _draw(logits, _mass(finite(logits.max(-1)), _heat(temperature)), seed, position)
    return jnp.where((temperature > 0) & possible, drawn, logits.argmax(-1).astype(jnp.int32))


def full(
    logits: jax.Array,
    temperature: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    slots: jax.Array,
    params: SlotParams,
    counts: jax.Array,
    *,
    search: Callable = token_limits,
) -> tuple[jax.Array, jax.Array, LogprobsOut]:
    """One token a row under all settings: bias, suppressed tokens, penalties, temperature, min-p, top-k,
    top-p.

    Tokens that tie with the last one kept by top-k or top-p are kept too. Top-p is of what min-p and top-k
    left.

    Args:
      logits, temperature, seed, position: as for `plain`.
      slots: [R] int32, where the row's settings and counts are. A row with a slot below 0 or from Q on draws
      as in
        `plain` and counts nothing: padding, rows without such settings, rows whose token nobody will use. No
        two rows have the same slot.
      params: settings of Q slots.
      counts: [Q, V'] uint16 (donate it).
      search: `KernelSet.token_limits`.

    Returns: tokens [R] int32, counts with the tokens added, and raw log-probabilities.
    """
    slots = jnp.where(slots < 0, counts.shape[0], slots)
    row = rows_of(params, slots)
    x = adjust(logits, row, counts, slots, position)
    few = _largest_blocks(x)
    limit = _limits(x, few, temperature, row, search)[:, None]
    mass = _mass(finite(few.peak), _heat(temperature))
    drawn, possible = _draw(x, lambda y: jnp.where(y >= limit, mass(y), 0.0), seed, position)
    tokens = jnp.where((temperature > 0) & possible, drawn, few.likeliest)
    return tokens, count_drawn(counts, slots, tokens), token_logprobs(logits, tokens)


def full_by_rows(
    logits: jax.Array,
    temperature: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    slots: jax.Array,
    params: SlotParams,
    counts: jax.Array,
    *,
    search: Callable = token_limits,
    most: int = ROWS,
) -> tuple[jax.Array, jax.Array, LogprobsOut]:
    """`full`, at most `most` rows at a time, so that what it makes of the logits' size exists for so many
    rows only.
    """
    rows = logits.shape[0]
    blocks = -(-rows // most)
    size = -(-rows // blocks)
    if blocks == 1:
        return full(logits, temperature, seed, position, slots, params, counts, search=search)

    def block(counts: jax.Array, number: jax.Array) -> tuple[jax.Array, tuple[jax.Array, LogprobsOut]]:
        start = jnp.minimum(number * size, rows - size)
        x, heat, key, at, mine = (
            lax.dynamic_slice_in_dim(a, start, size) for a in (logits, temperature, seed, position, slots)
        )
        mine = jnp.where(
            start + jnp.arange(size) < number * size, -1, mine
        )  # the last block repeats rows to be whole
        tokens, counts, found = full(x, heat, key, at, mine, params, counts, search=search)
        return counts, (tokens, found)

    def whole(made: jax.Array) -> jax.Array:
        """[blocks, size, ...] -> [R, ...], without the rows that the last block repeats."""
        return jnp.concatenate([made[:-1].reshape(-1, *made.shape[2:]), made[-1, blocks * size - rows :]])

    counts, made = lax.scan(block, counts, jnp.arange(blocks))
    tokens, found = jax.tree.map(whole, made)
    return tokens, counts, found


def rows_at_once(memory_bytes: int, vocabulary: int) -> int:
    """Rows for `full_by_rows` to take together on a device of so much memory: as many as need an 80th of it
    at most.

    Blocks cost time: 1,024 rows of 128,256 logits in eight, two and one took 5.3, 2.7 and 1.5 ms on an H200.
    """
    rows = ROWS
    while 2 * rows * vocabulary * ROW_BYTES <= memory_bytes / 80:
        rows *= 2
    return rows


def uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """One number in (0, 1) for each seed [R, 2] uint32 and position [R] int32 -> [R] float32."""

    def bits(words: jax.Array, at: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, at), dtype=jnp.uint32)

    return ((jax.vmap(bits)(seed, position) >> 9).astype(jnp.float32) + 0.5) * 2.0**-23


class _Few(NamedTuple):
    """The blocks of columns of [R, n] logits with the largest maxima."""

    logits: jax.Array  # [R, m], the block with the largest maximum first
    least: jax.Array  # [R]: they hold every logit from this on
    peak: jax.Array  # [R], the largest logit
    likeliest: jax.Array  # [R] int32, the first column that has it


def _largest_blocks(x: jax.Array) -> _Few:
    """The `BLOCKS` blocks of x [R, n] with the largest maxima; all of x where it has no more."""
    rows, n = x.shape
    width = math.gcd(n, BLOCK)
    if n // width <= BLOCKS:
        return _Few(x, jnp.full((rows,), -jnp.inf), x.max(-1), x.argmax(-1).astype(jnp.int32))
    blocks = x.reshape(rows, n // width, width)
    maxima, best = top(blocks.max(-1), BLOCKS)
    few = jnp.take_along_axis(blocks, best[:, :, None], axis=1)
    likeliest = best[:, 0] * width + few[:, 0].argmax(-1).astype(jnp.int32)
    return _Few(few.reshape(rows, -1), maxima[:, -1], maxima[:, 0], likeliest)


def _limits(
    x: jax.Array, blocks: _Few, temperature: jax.Array, row: SlotParams, search: Callable
) -> jax.Array:
    """The smallest logit that min-p, top-k and top-p leave in each row of x [R, V'] -> [R]; -inf where
    nothing is cut off.

    Nearly always all that top-k and top-p leave lies in the few largest blocks: the limits are searched
    there. `search` looks through whole rows, where a limit lies below what those blocks are sure to hold.
    """
    n = x.shape[1]
    few = jnp.where(blocks.logits >= blocks.least[:, None], blocks.logits, -jnp.inf)
    peak, heat = finite(blocks.peak), _heat(temperature)
    mass = _mass(peak, heat)

    cuts_count, cuts_mass = (row.top_k > 0) & (row.top_k < n), row.top_p < 1.0
    k = jnp.where(cuts_count, row.top_k, n).astype(jnp.float32)  # a float32 counts a vocabulary exactly
    likely = peak + heat * jnp.log(row.min_p)  # where the mass is min_p of the largest
    count_limit = jnp.where(cuts_count, largest_limit(few, jnp.ones_like, k), -jnp.inf)
    floor = jnp.maximum(likely, count_limit)
    held = floor >= blocks.least
    total = mass(x).sum(-1)
    left = jnp.where(held, jnp.where(few >= floor[:, None], mass(few), 0.0).sum(-1), total)
    nucleus = largest_limit(few, mass, left * row.top_p)
    limit = jnp.where(cuts_mass, jnp.maximum(floor, nucleus), floor)
    if few.shape[1] == n:
        return limit
    counted = ~cuts_count | (count_limit > -jnp.inf)
    known = counted & (~cuts_mass | held | ((floor == -jnp.inf) & (nucleus > -jnp.inf)))
    return jnp.where(
        known, limit, search(x, peak, heat, total, likely, k, row.top_p, ~known & (temperature > 0))
    )


def _mass(peak: jax.Array, heat: jax.Array) -> OfValues:
    """What logits weigh in a draw, 1 for those at the rows' peaks [R]."""
    return lambda y: jnp.exp((y - peak[:, None]) / heat[:, None])


def _heat(temperature: jax.Array) -> jax.Array:
    """A temperature to divide by: 1 for greedy rows, whose draw is not used."""
    return jnp.where(temperature > 0, jnp.maximum(temperature, COLDEST), 1.0)


def _draw(x: jax.Array, weigh: OfValues, seed: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A column of each row of x [R, n], as likely as `weigh` of it, and whether any column weighs
    something."""
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

    Only an entry with some weight is named, whatever the rounding of the sums: if none passes, the last such
    one.
    """
    n = weights.shape[1]
    sums = jnp.cumsum(weights, axis=1)
    some = weights > 0
    passed = some & (sums > target[:, None])
    last = n - 1 - some[:, ::-1].argmax(-1)
    at = jnp.where(passed.any(-1), passed.argmax(-1), last).astype(jnp.int32)
    before = jnp.take_along_axis(sums - weights, at[:, None], axis=1)[:, 0]
    return at, target - before
