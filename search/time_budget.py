"""A time limit for work of many pieces: how many more fit, by what those before them took."""

import dataclasses
import time
from collections.abc import Callable

_FIRST_S = 3.0  # that a piece is thought to take before any was done


class Budget:
    """Seconds since its making. `clock` is read for the time, in seconds."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic):
        self.limit_s, self.clock, self.begun = limit_s, clock, clock()
        self._took: dict[str, tuple[float, int]] = {}

    @property
    def spent_s(self) -> float:
        return self.clock() - self.begun

    @property
    def left_s(self) -> float:
        return max(0.0, self.limit_s - self.spent_s)

    def took(self, kind: str, seconds: float, pieces: int = 1) -> None:
        """Remembers it. Later pieces count more than early ones: what was first compiled or warmed up says
        little of the rest.
        """
        before, number = self._took.get(kind, (0.0, 0))
        self._took[kind] = (0.7 * before + seconds, round(0.7 * number) + pieces)

    def a_piece_s(self, kind: str) -> float:
        """What a piece is expected to take."""
        seconds, number = self._took.get(kind, (_FIRST_S, 1))
        return seconds / max(1, number)

    def fits(self, *kinds: str) -> int:
        """How many pieces that need one of each kind are expected to be done in time."""
        return int(self.left_s / max(1e-9, sum(map(self.a_piece_s, kinds))))


class Turns:
    """So many pieces in a row, until a time by the clock: each may take its part of what those before it
    left.
    """

    def __init__(self, limit_s: float, number: int, clock: Callable[[], float] = time.monotonic):
        self.budget, self.left = Budget(limit_s, clock), number

    def next_s(self) -> float:
        """For the next piece; a second where nothing is left."""
        part = self.budget.left_s / self.left
        self.left -= 1
        return max(1.0, part)


@dataclasses.dataclass(frozen=True)
class Limit:
    """When a search is to end, by a clock in seconds."""

    stop: float
    clock: Callable[[], float]

    @property
    def passed(self) -> bool:
        return self.clock() > self.stop

    def part(self, share: float) -> "Limit":
        """For the first of what is left."""
        now = self.clock()
        return Limit(now + max(0.0, self.stop - now) * share, self.clock)

    def most(self, seconds: float) -> float:
        """So long, or what is left; a second for what is begun all the same."""
        return max(1.0, min(seconds, self.stop - self.clock()))
