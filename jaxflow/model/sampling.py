"""Sampling of the next token of every row on the device: `plain` (greedy and temperature) and `full`.

A draw is the largest of logit + temperature · Gumbel noise (Gumbel-max). The noise is a function of the seed,
the position of the token and the token id. So a draw does not depend on the row's index, the batch or the
plan. A change of a logit by e moves a draw with a probability of about e / temperature. The noise is hashed
inside the pass that finds the maximum; no array of noise exists.

Top-k, top-p and min-p are limits below which a logit cannot be drawn. They are found by a search over the
bits of the limit, without sorting. A change of a logit may move the last kept token out of the limit. This
changes a draw only where that token is the drawn one.

`full` draws from the few blocks of logits that the search for limits reads, where they hold all tokens that
can be drawn. `KernelSet.draw` reads whole rows.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxflow.model.logprobs import LogprobsOut, finite, token_logprobs, top
from jaxflow.model.slot_params import SlotParams, adjust, count_drawn, rows_of
from pallas_kernels.cards import this_card
from pallas_kernels.pointwise.draw import noise
from pallas_kernels.pointwise.draw.reference import draw as draw_reference
from pallas_kernels.pointwise.sample.reference import COLDEST, largest_limit, token_limits

BLOCK = 16  # columns of a block in the search for limits
ROWS = 128  # the least number of rows that `full_by_rows` takes at a time
ROW_BYTES = 11  # temporary bytes per logit: a copy, adjusted logits, searched logits
BLOCKS = 256  # blocks kept: at least the usual top-k

OfValues = Callable[[jax.Array], jax.Array]  # [R, n] -> [R, n]


def plain(
    logits: jax.Array,
    temperature: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    *,
    draw: Callable = draw_reference,
) -> jax.Array:
    """Return one token per row: the likeliest at temperature 0, otherwise a draw.

    Args:
      logits: [R, V'] float32, -inf beyond the vocabulary.
      temperature: [R] float32.
      seed: [R, 2] uint32.
      position: [R] int32, the index that the token will have in its sequence.
      draw: `KernelSet.draw`.

    Returns: [R] int32. A row of -inf gives 0.
    """
    return draw(logits, temperature, _row_keys(seed, position))


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
    draw: Callable = draw_reference,
    draw_filtered: Callable | None = None,
) -> tuple[jax.Array, jax.Array, LogprobsOut]:
    """Return one token per row under all settings.

    The settings are bias, suppressed tokens, penalties, temperature, min-p, top-k and top-p. Tokens that tie
    with the last token kept by top-k or top-p are kept. Top-p applies to the tokens that min-p and top-k
    keep.

    Args:
      logits, temperature, seed, position: as for `plain`.
      slots: [R] int32, the rows' slots in `params` and `counts`, all different. A row with a slot out of [0,
      Q)
        draws as in `plain` and counts nothing: padding, rows without settings, rows with an unused token.
      params: settings of Q slots.
      counts: [Q, V'] uint16 (donate it).
      search: `KernelSet.token_limits`. draw: `KernelSet.draw`.
      draw_filtered: `KernelSet.draw_filtered`; None: draw from the few largest blocks of logits.

    Returns: tokens [R] int32, counts with the tokens added, and raw log-probabilities.
    """
    slots = jnp.where(slots < 0, counts.shape[0], slots)
    row = rows_of(params, slots)
    x = adjust(logits, row, counts, slots, position)
    keys = _row_keys(seed, position)
    if draw_filtered is not None:
        tokens = draw_filtered(x, temperature, keys, row.min_p, row.top_k, row.top_p)
    else:
        few = _largest_blocks(x)
        tokens = _drawn(x, few, _limits(x, few, temperature, row, search), temperature, keys, draw)
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
    draw: Callable = draw_reference,
    draw_filtered: Callable | None = None,
    most: int = ROWS,
) -> tuple[jax.Array, jax.Array, LogprobsOut]:
    """Run `full` on at most `most` rows at a time, which bounds its temporary arrays."""
    run = functools.partial(full, search=search, draw=draw, draw_filtered=draw_filtered)
    rows = logits.shape[0]
    blocks = -(-rows // most)
    size = -(-rows // blocks)
    if blocks == 1:
        return run(logits, temperature, seed, position, slots, params, counts)

    def block(counts: jax.Array, number: jax.Array) -> tuple[jax.Array, tuple[jax.Array, LogprobsOut]]:
        start = jnp.minimum(number * size, rows - size)
        x, heat, key, at, mine = (
            lax.dynamic_slice_in_dim(a, start, size) for a in (logits, temperature, seed, position, slots)
        )
        # The last block repeats rows of the block before it, to have the same size.
        mine = jnp.where(start + jnp.arange(size) < number * size, -1, mine)
        tokens, counts, found = run(x, heat, key, at, mine, params, counts)
        return counts, (tokens, found)

    def joined(made: jax.Array) -> jax.Array:
        """Return [blocks, size, ...] as [R, ...], without the rows that the last block repeats."""
        return jnp.concatenate([made[:-1].reshape(-1, *made.shape[2:]), made[-1, blocks * size - rows :]])

    counts, made = lax.scan(block, counts, jnp.arange(blocks))
    tokens, found = jax.tree.map(joined, made)
    return tokens, counts, found


def rows_at_once(memory_bytes: int, vocabulary: int) -> int:
    """Return the rows that `full_by_rows` takes at a time: their arrays need at most an 80th of the memory.

    Blocks cost time: 1,024 rows of 128,256 logits in eight, two and one took 5.3, 2.7 and 1.5 ms on an H200.
    """
    rows = ROWS
    while 2 * rows * vocabulary * ROW_BYTES <= memory_bytes * this_card().sampler_memory_share:
        rows *= 2
    return rows


def gumbel(seed: jax.Array, position: jax.Array, token: jax.Array) -> jax.Array:
    """Return the noise of draws, float32 [R, n]. seed, position: as for `plain`. token: [n] int32."""
    return noise.gumbel(_row_keys(seed, position), token)


def _row_keys(seed: jax.Array, position: jax.Array) -> jax.Array:
    """Return three words for each row, uint32 [R, 3]: Threefry of the seed [R, 2] and the position [R]."""

    def words(seed: jax.Array, at: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, at), (3,), jnp.uint32)

    return jax.vmap(words)(seed, position)


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
    x: jax.Array, blocks: _Few, temperature: jax.Array, row: SlotParams, search: Callable
) -> jax.Array:
    """Return the smallest logit that min-p, top-k and top-p keep in each row of x [R, V'] -> [R]; -inf for
    all.

    The limits are searched in the few largest blocks, which nearly always hold all kept tokens. `search`
    examines the full rows whose limit may lie below these blocks.
    """
    n = x.shape[1]
    few = jnp.where(blocks.logits >= blocks.least[:, None], blocks.logits, -jnp.inf)
    peak, heat = finite(blocks.peak), _heat(temperature)
    mass = _mass(peak, heat)

    cuts_count, cuts_mass = (row.top_k > 0) & (row.top_k < n), row.top_p < 1.0
    k = jnp.where(cuts_count, row.top_k, n).astype(jnp.float32)  # a float32 counts a vocabulary exactly
    likely = peak + heat * jnp.log(row.min_p)  # the logit with min_p times the largest mass
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


def _drawn(
    x: jax.Array, few: _Few, limit: jax.Array, temperature: jax.Array, keys: jax.Array, draw: Callable
) -> jax.Array:
    """Return the drawn token of each row of x [R, V'] among the logits of at least the limit, int32 [R].

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


def _heat(temperature: jax.Array) -> jax.Array:
    """Return a temperature to divide by: 1 for greedy rows, which ignore their draw."""
    return jnp.where(temperature > 0, jnp.maximum(temperature, COLDEST), 1.0)
