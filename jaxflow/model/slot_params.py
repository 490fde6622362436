"""The full sampler's state on the device, per slot: sampling settings, and the count of each token.

A slot is a row of these arrays. One running sequence owns it from admission until it ends or is pre-empted.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

SUPPRESSED = 72  # end and stop tokens of one request
BIASED = 300
BAD_WORDS = 128  # forbidden runs of tokens
BAD_WORD_TOKENS = 12  # of one run
ANY_TOKEN = -1  # in a run: matches every token, and none
NO_TOKEN = 2**31 - 1  # beyond every vocabulary: writes at this index are dropped
IN_PROMPT = 0x8000  # the bit of a count that marks a token of the prompt
COUNT = 0x7FFF  # the bits that count outputs, which is also the largest count


Array = jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotParams:
    """Settings of Q slots (axis 0 of every array), or of one slot without that axis."""

    top_k: Array  # [Q] int32; 0: off
    top_p: Array  # [Q] float32
    min_p: Array  # [Q] float32
    repetition_penalty: Array  # [Q] float32
    presence_penalty: Array  # [Q] float32
    frequency_penalty: Array  # [Q] float32
    min_position: Array  # [Q] int32; `suppressed` tokens are excluded at earlier positions
    suppressed: Array  # [Q, SUPPRESSED] int32, padded with NO_TOKEN
    bias_ids: Array  # [Q, BIASED] int32, padded with NO_TOKEN
    bias: Array  # [Q, BIASED] float32
    other_bias: (
        Array  # [Q] float32, of the tokens that `bias_ids` lacks: 0, or -inf to allow only those listed
    )
    # [Q, BAD_WORDS, BAD_WORD_TOKENS] int32, padded in front with ANY_TOKEN; NO_TOKEN at the end: unused.
    bad_words: Array
    recent: Array  # [Q, BAD_WORD_TOKENS - 1] int32, the last output tokens, the latest at the end


def slot_values(
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    min_position: int = 0,
    suppressed: Sequence[int] = (),
    logit_bias: Mapping[int, float] | None = None,
    allowed: Sequence[int] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    recent: Sequence[int] | np.ndarray = (),
) -> SlotParams:
    """Return the settings of one slot, as numpy arrays. The defaults change nothing.

    Args:
      top_k: 0 or -1 for off.
      min_position: prompt tokens + min_tokens: the first index in the sequence where `suppressed` may appear.
      suppressed: end and stop token ids.
      allowed: the only tokens that may be drawn; None for all.
      bad_words: runs of tokens, of which the last one is excluded after the others.
      recent: the last output tokens, for `bad_words`.

    Raises:
      ValueError: more entries than SUPPRESSED, BIASED or BAD_WORDS, or a longer run than BAD_WORD_TOKENS.
    """
    bias = dict(logit_bias or {})
    if allowed is not None:
        bias = {token: bias.get(token, 0.0) for token in allowed}
        suppressed = [token for token in suppressed if token in bias]
    for name, given, most in (
        ("suppressed", len(suppressed), SUPPRESSED),
        ("logit_bias" if allowed is None else "allowed", len(bias), BIASED),
        ("bad_words", len(bad_words), BAD_WORDS),
        ("the longest of bad_words", max(map(len, bad_words), default=0), BAD_WORD_TOKENS),
    ):
        if given > most:
            raise ValueError(f"{name} has {given} entries: at most {most} are accepted")

    def padded(values: Sequence[float], size: int, fill: float, dtype: type) -> np.ndarray:
        return np.array([*values, *[fill] * (size - len(values))], dtype)

    runs = np.full((BAD_WORDS, BAD_WORD_TOKENS), ANY_TOKEN, np.int32)
    runs[len(bad_words) :, -1] = NO_TOKEN
    for row, run in enumerate(bad_words):
        runs[row, BAD_WORD_TOKENS - len(run) :] = run
    latest = list(recent)[1 - BAD_WORD_TOKENS :]

    return SlotParams(
        top_k=np.array(max(0, min(top_k, NO_TOKEN)), np.int32),
        top_p=np.array(top_p, np.float32),
        min_p=np.array(min_p, np.float32),
        repetition_penalty=np.array(repetition_penalty, np.float32),
        presence_penalty=np.array(presence_penalty, np.float32),
        frequency_penalty=np.array(frequency_penalty, np.float32),
        min_position=np.array(min_position, np.int32),
        suppressed=padded(suppressed, SUPPRESSED, NO_TOKEN, np.int32),
        bias_ids=padded(list(bias), BIASED, NO_TOKEN, np.int32),
        bias=padded(list(bias.values()), BIASED, 0.0, np.float32),
        other_bias=np.array(0.0 if allowed is None else -np.inf, np.float32),
        bad_words=runs,
        recent=np.array([ANY_TOKEN] * (BAD_WORD_TOKENS - 1 - len(latest)) + latest, np.int32),
    )


def empty_slots(slots: int, padded_vocab: int) -> tuple[SlotParams, jax.Array]:
    """Return neutral settings of Q slots, and counts [Q, V'] uint16 of zero."""
    params = jax.tree.map(lambda a: jnp.tile(a, (slots,) + (1,) * np.ndim(a)), slot_values())
    return params, jnp.zeros((slots, padded_vocab), jnp.uint16)


def set_slot(
    params: SlotParams, counts: jax.Array, slot: jax.Array, values: SlotParams
) -> tuple[SlotParams, jax.Array]:
    """Return the arrays with new settings for a slot and its counts cleared (donate both arguments)."""
    params = jax.tree.map(lambda a, value: a.at[slot].set(value), params, values)
    return params, counts.at[slot].set(jnp.zeros((), jnp.uint16))


def count_tokens(counts: jax.Array, slot: jax.Array, token_ids: jax.Array, outputs: jax.Array) -> jax.Array:
    """Return the counts with known tokens of a sequence added to its slot.

    A long sequence comes in several calls of one size.

    Args:
      counts: [Q, V'] uint16 (donate it).
      slot: int32.
      token_ids: [n] int32, padded with NO_TOKEN.
      outputs: [n] bool: whether the token was drawn, instead of given in the prompt.
    """
    row = counts[slot].astype(jnp.int32)
    drawn = jnp.zeros_like(row).at[jnp.where(outputs, token_ids, NO_TOKEN)].add(1, mode="drop")
    given = jnp.zeros_like(row).at[jnp.where(outputs, NO_TOKEN, token_ids)].set(IN_PROMPT, mode="drop")
    total = jnp.minimum((row & COUNT) + drawn, COUNT)
    return counts.at[slot].set((((row & IN_PROMPT) | given) | total).astype(jnp.uint16))


def rows_of(params: SlotParams, slots: jax.Array) -> SlotParams:
    """Return the settings of rows [R] with slots [R] int32. A slot out of range gets neutral settings."""
    return jax.tree.map(
        lambda a, neutral: jnp.where(
            (slots < a.shape[0]).reshape(-1, *[1] * (a.ndim - 1)),
            a.at[slots].get(mode="clip"),
            jnp.asarray(neutral),
        ),
        params,
        slot_values(),
    )


def adjust(
    logits: jax.Array, row: SlotParams, counts: jax.Array, slots: jax.Array, position: jax.Array
) -> jax.Array:
    """Return the logits after logit bias, suppressed tokens, penalties and bad words, in this order.

    One pass over the vocabulary applies the penalties without bias. The few biased entries are then computed
    again.

    Args:
      logits: [R, V'] float32.
      row: the settings of the R rows.
      counts: [Q, V'] uint16.
      slots: [R] int32, the rows' slots in counts; a slot out of range has no counts.
      position: [R] int32, the index that the token will have in its sequence.

    Returns: [R, V'] float32.
    """
    seen = counts.at[slots].get(mode="fill", fill_value=0)
    x = _penalised(logits + row.other_bias[:, None], seen, row)
    suppression = jnp.where(position < row.min_position, -jnp.inf, 0.0)
    ids = jnp.concatenate([row.bias_ids, row.suppressed], axis=1)
    bias = jnp.concatenate([row.bias, jnp.broadcast_to(suppression[:, None], row.suppressed.shape)], axis=1)
    # An id may be in both lists. Each of its entries gets the sum, so that the last write does not matter.
    bias = jnp.where(ids[:, :, None] == ids[:, None, :], bias[:, None, :], 0.0).sum(-1)
    at = jnp.arange(logits.shape[0])[:, None]
    biased = logits.at[at, ids].get(mode="fill", fill_value=0.0) + bias
    seen = counts.at[slots[:, None], ids].get(mode="fill", fill_value=0)
    x = x.at[at, ids].set(_penalised(biased, seen, row), mode="drop")
    return x.at[at, _ends_of_bad_words(row)].set(-jnp.inf, mode="drop")


def _ends_of_bad_words(row: SlotParams) -> jax.Array:
    """Return the token that each bad word excludes now, [R, BAD_WORDS] int32; NO_TOKEN for none."""
    before, last = row.bad_words[:, :, :-1], row.bad_words[:, :, -1]
    matches = ((before == ANY_TOKEN) | (before == row.recent[:, None, :])).all(-1)
    return jnp.where(matches, last, NO_TOKEN)


def add_recent(recent: jax.Array, slots: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return `SlotParams.recent` with tokens [R] added for distinct slots [R].

    Slots out of range are dropped.
    """
    rows = jnp.concatenate([recent.at[slots].get(mode="clip")[:, 1:], tokens[:, None]], axis=1)
    return recent.at[slots].set(rows, mode="drop")


def _penalised(x: jax.Array, counts: jax.Array, row: SlotParams) -> jax.Array:
    """Return logits [R, n] after the penalties for the counts [R, n]."""
    penalty = row.repetition_penalty[:, None]
    x = jnp.where(counts > 0, jnp.where(x > 0, x / penalty, x * penalty), x)
    drawn = (counts & COUNT).astype(jnp.float32)
    return (
        x - row.frequency_penalty[:, None] * drawn - jnp.where(drawn > 0, row.presence_penalty[:, None], 0.0)
    )


def count_drawn(counts: jax.Array, slots: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the counts with tokens [R] added for distinct slots [R] (donate counts).

    Slots out of range are dropped.
    """
    old = counts.at[slots, tokens].get(mode="fill", fill_value=0)
    return counts.at[slots, tokens].set(jnp.where((old & COUNT) == COUNT, old, old + 1), mode="drop")
