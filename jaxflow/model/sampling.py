"""Sampling of the next token of every row on the device: `plain` (greedy and temperature) and `full`.

A draw is the largest of logit + temperature · Gumbel noise (Gumbel-max). The noise is a function of the seed,
the position of the token and the token id. So a draw does not depend on the row's index, the batch or the
plan. A change of a logit by e moves a draw with a probability of about e / temperature. The noise is hashed
inside the pass that finds the maximum; no array of noise exists.

Top-k, top-p and min-p are limits below which a logit cannot be drawn. `KernelSet.draw_filtered` finds them
without sorting. A change of a logit may move the last kept token out of the limit. This changes a draw only
where that token is the drawn one.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxflow.model.logprobs import LogprobsOut, asked_logprobs
from jaxflow.model.slot_params import SlotParams, adjust, count_drawn, rows_of
from pallas_kernels.cards import this_card
from pallas_kernels.pointwise.draw import noise
from pallas_kernels.pointwise.draw.reference import draw as draw_reference
from pallas_kernels.pointwise.sample.reference import draw_filtered as filtered_reference

ROWS = 128  # the least number of rows that `full_by_rows` takes at a time
ROW_BYTES = 11  # temporary bytes per logit: a copy, adjusted logits, searched logits


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
    asked: jax.Array,
    masks: jax.Array | None = None,
    *,
    draw_filtered: Callable = filtered_reference,
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
      asked: [R] bool, rows that ask for log-probabilities.
      masks: [R, words] int32, a bit for each token that may be drawn; None for all tokens.
      draw_filtered: `KernelSet.draw_filtered`.

    Returns: tokens [R] int32, counts with the tokens added, and raw log-probabilities, which are zeros
    if no row asks for them.
    """
    slots = jnp.where(slots < 0, counts.shape[0], slots)
    row = rows_of(params, slots)
    x = adjust(logits, row, counts, slots, position)
    if masks is not None:
        x = jnp.where(may_follow(masks, x.shape[1]), x, -jnp.inf)
    keys = _row_keys(seed, position)
    tokens = draw_filtered(x, temperature, keys, row.min_p, row.top_k, row.top_p)
    return tokens, count_drawn(counts, slots, tokens), asked_logprobs(logits, tokens, asked)


def full_by_rows(
    logits: jax.Array,
    temperature: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    slots: jax.Array,
    params: SlotParams,
    counts: jax.Array,
    asked: jax.Array,
    *,
    draw_filtered: Callable = filtered_reference,
    most: int = ROWS,
    masks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, LogprobsOut]:
    """Run `full` on at most `most` rows at a time, which bounds its temporary arrays."""
    run = functools.partial(full, draw_filtered=draw_filtered)
    rows = logits.shape[0]
    blocks = -(-rows // most)
    size = -(-rows // blocks)
    if blocks == 1:
        return run(logits, temperature, seed, position, slots, params, counts, asked, masks)

    def block(counts: jax.Array, number: jax.Array) -> tuple[jax.Array, tuple[jax.Array, LogprobsOut]]:
        start = jnp.minimum(number * size, rows - size)
        x, heat, key, at, mine, asks = (
            lax.dynamic_slice_in_dim(a, start, size)
            for a in (logits, temperature, seed, position, slots, asked)
        )
        # The last block repeats rows of the block before it, to have the same size.
        mine = jnp.where(start + jnp.arange(size) < number * size, -1, mine)
        bits = None if masks is None else lax.dynamic_slice_in_dim(masks, start, size)
        tokens, counts, found = run(x, heat, key, at, mine, params, counts, asks, bits)
        return counts, (tokens, found)

    def joined(made: jax.Array) -> jax.Array:
        """Return [blocks, size, ...] as [R, ...], without the rows that the last block repeats."""
        return jnp.concatenate([made[:-1].reshape(-1, *made.shape[2:]), made[-1, blocks * size - rows :]])

    counts, made = lax.scan(block, counts, jnp.arange(blocks))
    tokens, found = jax.tree.map(joined, made)
    return tokens, counts, found


def may_follow(masks: jax.Array, tokens: int) -> jax.Array:
    """Return bool [R, tokens]: the bits of masks [R, words] int32, low bits first.

    True beyond the last word, where the padding of the vocabulary has logits of -inf.
    """
    bits = (masks[:, :, None] >> jnp.arange(32)) & 1
    bits = bits.reshape(masks.shape[0], -1)[:, :tokens]
    return jnp.pad(bits, ((0, 0), (0, tokens - bits.shape[1])), constant_values=1) != 0


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
