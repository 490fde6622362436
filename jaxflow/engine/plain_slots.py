"""Deltas of the slots whose tokens need no inspection except for end tokens: those of most decodes."""

from collections.abc import Iterable, Iterator

import numpy as np

from jaxflow.request import Delta
from jaxflow.scheduler.state import Sequence


class PlainSlots:
    """Arrays over slots: is the slot open, and the fields of its deltas.

    The tokens of an open slot pass without a Python loop, unless they are end tokens. A slot is open from its
    sequence's first token in it until it gets another sequence.
    """

    def __init__(self, slots: int, eos: Iterable[int]):
        self._eos = np.array(sorted(eos), np.int32)
        self._open = np.zeros(slots, bool)
        self._heeds_eos = np.zeros(slots, bool)
        self._request_ids = np.full(slots, None, object)
        self._indices = np.zeros(slots, np.int32)

    def open(self, seq: Sequence, *, heeds_eos: bool) -> None:
        """Open the slot of a sequence. `heeds_eos`: the model's end tokens end the sequence."""
        slot = seq.slot
        self._open[slot], self._heeds_eos[slot] = True, heeds_eos
        self._request_ids[slot], self._indices[slot] = seq.request.request_id, seq.index

    def close(self, slot: int) -> None:
        """Close a slot, for a new sequence."""
        self._open[slot] = False

    def pass_through(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return bool [n]: for each slot, whether its token, int32 [n], needs no inspection.

        A negative token stands for a row without one.
        """
        ends = (tokens[:, None] == self._eos).any(axis=1)
        return self._open[slots] & (tokens >= 0) & ~(ends & self._heeds_eos[slots])

    def deltas(self, slots: np.ndarray, tokens: np.ndarray) -> Iterator[Delta]:
        """Return the deltas of tokens, one a slot."""
        return map(
            Delta,
            self._request_ids[slots].tolist(),
            self._indices[slots].tolist(),
            zip(tokens.tolist(), strict=True),
        )
