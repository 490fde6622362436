"""The sequences that wait for a seat, oldest first, and how long one of them takes to get it."""

import bisect
import operator

from jaxflow.scheduler.sequence import Sequence

BY_AGE = operator.attrgetter("key")


class Waiting:
    """Two lines: sequences of more tokens than a step, and shorter ones.

    A sequence's tokens must not change while it waits.
    """

    def __init__(self, token_budget: int):
        self._budget = token_budget
        self._lines: tuple[list[Sequence], list[Sequence]] = ([], [])

    def add(self, seq: Sequence) -> None:
        bisect.insort(self._line(seq), seq, key=BY_AGE)

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out, if it is there."""
        line = self._line(seq)
        i = bisect.bisect_left(line, seq.key, key=BY_AGE)
        if line[i : i + 1] == [seq]:
            del line[i]

    def head(self, *, long_too: bool) -> Sequence | None:
        """The oldest; `long_too`: long ones count."""
        heads = [line[0] for line in self._lines[: 1 + long_too] if line]
        return min(heads, key=BY_AGE, default=None)

    def _line(self, seq: Sequence) -> list[Sequence]:
        return self._lines[seq.num_total > self._budget]


class Interval:
    """The recent mean time between two events."""

    def __init__(self) -> None:
        self.seconds = 1.0
        self._last_s: float | None = None

    def count(self, now: float) -> None:
        """An event at this time, in seconds."""
        if self._last_s is not None:
            self.seconds += 0.1 * (now - self._last_s - self.seconds)
        self._last_s = now
