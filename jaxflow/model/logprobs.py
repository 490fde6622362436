"""Log-probabilities from raw logits: of the chosen token, its rank, and of the 20 likeliest tokens.

No function sorts a vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pointwise.sample.top import finite, top

TOP = 20  # likeliest tokens that are reported per row
VOCABULARY_BLOCK = 4096  # columns of logits that exist at once in `prompt_logprobs`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogprobsOut:
    """Raw log-probabilities of R rows, before bias, penalties and temperature."""

    chosen: jax.Array  # [R] float32, of the chosen token
    rank: jax.Array  # [R] int32, 1 + the number of tokens with a larger logit
    top_ids: jax.Array  # [R, 20] int32, likeliest first, equal ones by id
    top_logprobs: jax.Array  # [R, 20] float32; -inf where the vocabulary has fewer tokens


def token_logprobs(logits: jax.Array, tokens: jax.Array) -> LogprobsOut:
    """Return log-probabilities of tokens [R] int32 under logits [R, V'] float32 (-inf beyond the
    vocabulary)."""
    values, ids = _top_padded(logits)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    peak = finite(values[:, 0])
    # One pass over the logits gives both sums. A float32 counts a vocabulary exactly.
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


def asked_logprobs(logits: jax.Array, tokens: jax.Array, asked: jax.Array) -> LogprobsOut:
    """Return `token_logprobs` if a row asks for them, otherwise zeros without a read of the logits.

    asked: [R] bool. A row that asks gets the same numbers with and without the others.
    """
    shapes = jax.eval_shape(token_logprobs, logits, tokens)
    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    return lax.cond(asked.any(), token_logprobs, lambda *_: nothing, logits, tokens)


def _top_padded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `top(x, TOP)`, padded with -inf if x has fewer than TOP columns."""
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
    """Return log-probabilities of each prompt token's successor, without logits of shape [T, V'].

    Args:
      hidden: [T, D], after the final norm.
      lm_head: [V', D]; rows from `vocab_size` on are padding. Under `axis`, this device's block of rows.
      targets: [T] int32, the successor of each token.
      soft_cap: logits become soft_cap · tanh(logits / soft_cap).
      axis: the mesh axis that shards the vocabulary, inside `shard_map`.

    Returns: T rows.
    """
    tokens, columns = hidden.shape[0], lm_head.shape[0]
    width = min(VOCABULARY_BLOCK, columns)
    steps = -(-columns // width)
    offset = lax.axis_index(axis) * columns if axis else 0

    def block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return logits [T, width] of block i and their token ids.

        The last block starts earlier to have the full width. Its overlap is -inf.
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

    # The rank needs the chosen logit exactly as its block computes it, so a second pass repeats the blocks.
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
    """Return the TOP best of [T, m] candidates. Equal candidates must be in order of ids."""
    values, at = lax.top_k(values, TOP)
    return values, jnp.take_along_axis(ids, at, axis=1)
