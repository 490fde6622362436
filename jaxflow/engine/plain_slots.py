"""The slots whose tokens only need to be told: most of a thousand decodes a step pass here, without a loop in
Python.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from jaxflow.request import Delta
from jaxflow.scheduler.state import Sequence


class PlainSlots:
    """By slot, whether its sequence looks for nothing in its tokens but the model's end tokens, and what its
    deltas carry.

    Arrays over slots. A slot is closed until its sequence has told its first token there, and again when it
    changes hands.
    """

    def __init__(self, slots: int, eos: Iterable[int]):
        self._eos = np.array(sorted(eos), np.int32)
        self._open = np.zeros(slots, bool)
        self._heeds_eos = np.zeros(slots, bool)
        self._request_ids = np.full(slots, None, object)
        self._indices = np.zeros(slots, np.int32)

    def open(self, seq: Sequence, *, heeds_eos: bool) -> None:
        """From now on `seq`, which has a slot, needs no look at its tokens."""
        slot = seq.slot
        self._open[slot], self._heeds_eos[slot] = True, heeds_eos
        self._request_ids[slot], self._indices[slot] = seq.request.request_id, seq.index

    def close(self, slot: int) -> None:
        self._open[slot] = False

    def only_told(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """bool [n]: which of these slots' tokens, int32 [n], end nothing and are looked at by nobody."""
        ends = (tokens[:, None] == self._eos).any(axis=1)
        return self._open[slots] & ~(ends & self._heeds_eos[slots])

    def deltas(self, slots: np.ndarray, tokens: np.ndarray) -> Iterator[Delta]:
        """What the callers are told."""
        return map(
            Delta,
            self._request_ids[slots].tolist(),
            self._indices[slots].tolist(),
            zip(tokens.tolist(), strict=True),
        )
