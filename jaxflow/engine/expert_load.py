"""The tokens at each expert since the start, as the host reads them from the counts of the steps."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    import jax  # the status page must not import JAX: its streams would stop for seconds


class ExpertTokens(msgspec.Struct, frozen=True):
    """The tokens that went to each expert.

    layers: the mixture layers, [L]. tokens: int64 [L, E].
    """

    layers: list[int]
    tokens: np.ndarray

    def imbalance(self) -> list[float]:
        """Return the largest over the mean number of tokens of an expert,
        for each layer; 0 without tokens.
        """
        largest, mean = self.tokens.max(axis=1), self.tokens.mean(axis=1)
        return (largest / np.maximum(mean, 1e-9)).tolist()


class ExpertCounter:
    """The totals of counts that wrap at 2**32. Any thread may use it.

    The device's counts stay where they are until somebody asks. An answer adds what came since the answer
    before, so the totals are exact if somebody asks before an expert gets 2**32 more tokens.

    Args:
      layers: the mixture layers.
      ranks: the data-parallel ranks. The counts of a rank follow those of the rank before.
    """

    def __init__(self, layers: Sequence[int], ranks: int = 1):
        self._ranks = ranks
        self._layers, self._lock = list(layers), threading.Lock()
        self._counts: tuple[jax.Array, ...] = ()  # as of the last step that was read
        self._seen: np.ndarray | None = None
        self._total: np.ndarray | None = None

    def put(self, counts: "tuple[jax.Array, ...]") -> None:
        """Take the counts of a step that has ended. Nothing is copied."""
        self._counts = counts

    def read(self) -> ExpertTokens | None:
        """Return the tokens at each expert, or None for a model without mixture
        layers and before the first step.
        """
        counts = self._counts
        if not counts:
            return None
        now = np.concatenate([self._of_all_ranks(each) for each in counts])
        with self._lock:
            if self._seen is None or self._total is None:
                self._seen, self._total = np.zeros_like(now), np.zeros(now.shape, np.int64)
            self._total = self._total + (now - self._seen)  # the difference of uint32 wraps, too
            self._seen = now
            return ExpertTokens(self._layers, self._total)

    def _of_all_ranks(self, counts: "jax.Array") -> np.ndarray:
        """Return the counts of a stage over all ranks, uint32 [layers, E]."""
        if not counts.is_fully_addressable:  # each rank has the counts of all, see `Programs.counted`
            return np.asarray(counts.addressable_data(0))
        each = np.asarray(counts)
        return each.reshape(self._ranks, -1, each.shape[1]).sum(0, np.uint32)
