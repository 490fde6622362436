"""The predicted time of a step, corrected by the measured times of earlier steps."""

import bisect
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from jaxflow.scheduler.state import Sequence, StepWork

MOST_CORRECTION = 8.0  # factor between the largest correction and the prediction
RISE, FALL = 0.2, 0.01  # weights of a measured step that was slower, or faster, than predicted


class StepTime:
    """The seconds of a step: the bucket's time, and the attention's time for each key.

    The correction follows slow steps at once and fast steps slowly, so that a prediction is rarely too low.
    Not thread-safe.

    Args:
      buckets: token counts of the compiled steps, ascending.
      bucket_s: seconds of a step of each bucket that reads no keys.
      key_s: seconds for each key that a decode reads.
      pair_s: seconds for each pair of a prefill token and a key that the token sees.
    """

    def __init__(self, buckets: Seq[int], bucket_s: Seq[float], key_s: float, pair_s: float):
        self._buckets, self._bucket_s = tuple(buckets), tuple(bucket_s)
        self._key_s, self._pair_s = key_s, pair_s
        self._correction = 1.0

    def seconds(self, tokens: int, keys: int, pairs: int) -> float:
        """Return the predicted seconds of a step.

        Args:
          tokens: of the decodes and the chunks together.
          keys: that all decodes read.
          pairs: of a prefill token and a key, over all chunks.
        """
        return self._correction * self._uncorrected(tokens, keys, pairs)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from the measured time of a step."""
        chunks = [(chunk.start, chunk.tokens) for chunk in work.chunks]
        keys = int(work.decode_positions.sum()) + len(work.decode_positions)
        ratio = seconds / self._uncorrected(work.num_tokens, keys, sum(pairs_of(*chunk) for chunk in chunks))
        weight = RISE if ratio > self._correction else FALL
        self._correction += weight * (min(ratio, MOST_CORRECTION) - self._correction)

    def _uncorrected(self, tokens: int, keys: int, pairs: int) -> float:
        at = min(bisect.bisect_left(self._buckets, tokens), len(self._buckets) - 1)
        return self._bucket_s[at] + keys * self._key_s + pairs * self._pair_s


def pairs_of(start: int, tokens: int) -> int:
    """Return the query-key pairs of a causal chunk whose first token is at position `start`."""
    return tokens * start + tokens * (tokens + 1) // 2


def most_within(limit_s: float, seconds: Callable[[int], float], most: int) -> int:
    """Return the largest number of tokens, at most `most`, with `seconds(number)
    <= limit_s`; 0 if there is none.

    `seconds` must not fall.
    """
    if most and seconds(most) <= limit_s:
        return most
    return max(0, bisect.bisect_right(range(most), limit_s, key=seconds) - 1)


def keys_of(positions: np.ndarray) -> np.ndarray:
    """Return the keys that the first k decodes read, int64 [n + 1], from the
    decodes' positions, int32 [n].
    """
    return np.concatenate([[0], np.cumsum(positions.astype(np.int64) + 1)])


def cut_chunks(chunks: list[tuple[Sequence, int]], tokens: int) -> list[tuple[Sequence, int]]:
    """Return the first `tokens` tokens of chunks of (sequence, tokens)."""
    kept = []
    for seq, wanted in chunks:
        if tokens <= 0:
            break
        kept.append((seq, min(wanted, tokens)))
        tokens -= wanted
    return kept
