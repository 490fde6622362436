"""Log-probabilities of tokens: of the one chosen, its rank, and of the likeliest 20, from raw logits.

Nothing here sorts a vocabulary: the 20 best are found block by block, since every one of them lies in one of
the 20 blocks with the largest maxima.
"""

import math

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

TOP = 20  # likeliest tokens reported a row
VOCABULARY_BLOCK = 4096  # columns of logits that exist at once while prompt log-probabilities are computed


@flax.struct.dataclass
class LogprobsOut:
    """Of R rows: raw log-probabilities (before bias, penalties and temperature)."""

    chosen: jax.Array  # [R] float32, of the chosen token
    rank: jax.Array  # [R] int32, 1 + the number of tokens with a larger logit
    top_ids: jax.Array  # [R, 20] int32, likeliest first, equal ones by id
    top_logprobs: jax.Array  # [R, 20] float32; -inf where the vocabulary has fewer tokens


def top(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row of x [R, n], with their columns, largest first and equal ones by column.

    Returns: values [R, k] and columns [R, k] int32.
    """
    rows, n = x.shape
    block = math.gcd(n, 1 << math.isqrt(max(1, n // k)).bit_length() - 1)
    if block == 1:
        values, columns = lax.top_k(x, k)
        return values, columns.astype(jnp.int32)
    blocks = x.reshape(rows, n // block, block)
    best = jnp.sort(top(blocks.max(-1), k)[1], axis=1)  # in order of columns, so that equal values stay in it
    candidates = jnp.take_along_axis(blocks, best[:, :, None], axis=1).reshape(rows, k * block)
    values, at = top(candidates, k)
    return values, jnp.take_along_axis(best, at // block, axis=1) * block + at % block


def finite(peak: jax.Array) -> jax.Array:
    """A row's maximum to subtract: 0 in place of -inf, so that no -inf - -inf appears."""
    return jnp.where(jnp.isfinite(peak), peak, 0.0)


def token_logprobs(logits: jax.Array, tokens: jax.Array) -> LogprobsOut:
    """Of tokens [R] int32 under raw logits [R, V'] float32 (-inf beyond the vocabulary)."""
    values, ids = _top_padded(logits)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    peak = finite(values[:, 0])
    # Both sums in one reading of the logits; a float32 counts a vocabulary exactly.
    addends = (jnp.exp(logits - peak[:, None]), (logits > chosen).astype(jnp.float32))
    total, larger = lax.reduce(
        addends, (jnp.float32(0),) * 2, lambda a, b: (a[0] + b[0], a[1] + b[1]), dimensions=(1,)
    )
    total = peak + jnp.log(total)
    return LogprobsOut(
        chosen=chosen[:, 0] - total,
        rank=1 + larger.astype(jnp.int32),
        top_ids=ids,
        top_logprobs=values - total[:, None],
    )


def _top_padded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`top(x, TOP)`, with -inf after the last column where x has fewer than TOP."""
    short = max(0, TOP - x.shape[1])
    return top(jnp.pad(x, ((0, 0), (0, short)), constant_values=-jnp.inf), TOP)


def prompt_logprobs(
    hidden: jax.Array,
    lm_head: jax.Array,
    targets: jax.Array,
    *,
    vocab_size: int,
    soft_cap: float | None = None,
    axis: str | None = None,
) -> LogprobsOut:
    """Of the tokens that follow each position of a prompt, without ever holding logits [T, V'].

    Args:
      hidden: [T, D], after the final norm.
      lm_head: [V', D]; rows from `vocab_size` on are padding. Under `axis`, this device's block of rows.
      targets: [T] int32, the token that follows.
      soft_cap: logits become soft_cap · tanh(logits / soft_cap).
      axis: the mesh axis that the vocabulary is sharded over, inside `shard_map`.

    Returns: T rows.
    """
    tokens, columns = hidden.shape[0], lm_head.shape[0]
    width = min(VOCABULARY_BLOCK, columns)
    steps = -(-columns // width)
    offset = lax.axis_index(axis) * columns if axis else 0

    def block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits [T, width] of block i and their token ids. The last block is moved back to fit, its overlap
        -inf.
        """
        start = jnp.minimum(i * width, columns - width)
        weights = lax.dynamic_slice_in_dim(lm_head, start, width)
        x = jnp.einsum("td,vd->tv", hidden, weights, preferred_element_type=jnp.float32)
        if soft_cap is not None:
            x = soft_cap * jnp.tanh(x / soft_cap)
        row = start + jnp.arange(width)
        return jnp.where((row >= i * width) & (offset + row < vocab_size), x, -jnp.inf), offset + row

    def scan(i, carry):
        peak, total, chosen, values, ids = carry
        x, block_ids = block(i)
        new_peak = jnp.maximum(peak, x.max(-1))
        shift = finite(new_peak)
        total = total * jnp.exp(peak - shift) + jnp.exp(x - shift[:, None]).sum(-1)
        chosen = jnp.maximum(chosen, jnp.where(block_ids == targets[:, None], x, -jnp.inf).max(-1))
        block_values, at = _top_padded(x)
        values, ids = _merge(
            jnp.concatenate([values, block_values], 1), jnp.concatenate([ids, block_ids[at]], 1)
        )
        return new_peak, total, chosen, values, ids

    nothing = jnp.full((tokens,), -jnp.inf)
    start = (
        nothing,
        jnp.zeros((tokens,)),
        nothing,
        jnp.full((tokens, TOP), -jnp.inf),
        jnp.zeros((tokens, TOP), jnp.int32),
    )
    if axis:
        start = jax.tree.map(lambda a: lax.pcast(a, axis, to="varying"), start)
    peak, total, chosen, values, ids = lax.fori_loop(0, steps, scan, start)
    if axis:
        shift = finite(lax.pmax(peak, axis))
        total = lax.psum(total * jnp.exp(peak - shift), axis)
        chosen = lax.pmax(chosen, axis)
        values, ids = _merge(*(lax.all_gather(a, axis, axis=1, tiled=True) for a in (values, ids)))
    else:
        shift = finite(peak)
    log_total = (shift + jnp.log(total))[:, None]

    # The rank needs the chosen logit first, exactly as its block computes it: a second sweep, never a second
    # rounding.
    def count(i, larger):
        x, block_ids = block(i)
        return larger + ((x > chosen[:, None]) & (block_ids != targets[:, None])).sum(-1, dtype=jnp.int32)

    zero = jnp.zeros((tokens,), jnp.int32)
    larger = lax.fori_loop(0, steps, count, lax.pcast(zero, axis, to="varying") if axis else zero)
    rank = 1 + (lax.psum(larger, axis) if axis else larger)
    return LogprobsOut(
        chosen=chosen - log_total[:, 0], rank=rank, top_ids=ids, top_logprobs=values - log_total
    )


def _merge(values: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The TOP best of [T, m] candidates given in order of ids among equals."""
    values, at = lax.top_k(values, TOP)
    return values, jnp.take_along_axis(ids, at, axis=1)
