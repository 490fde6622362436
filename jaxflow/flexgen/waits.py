"""Seconds for which the thread of a stage's block loop waited, by phase and cause.

The causes are `computation` (the step before), `stage` (what another stage hands over), `stores` (copies and
writes to the tiers), and the calls that start copies (`copies`) and programs (`programs`). Such a call takes
microseconds, except at a first use, where memory is not free yet, and where a pinned pool grows.
"""

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

Cause = Literal["computation", "stage", "stores", "copies", "programs"]


class Wait(msgspec.Struct):
    """Waits for one cause: their number, their seconds together, and the longest one's seconds."""

    times: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0

    def add(self, other: "Wait") -> None:
        """Add other waits to these."""
        self.times += other.times
        self.seconds += other.seconds
        self.longest_s = max(self.longest_s, other.longest_s)


StageWaits = Mapping[str, Mapping[str, Wait]]  # by phase and cause


class Waits:
    """Waits of one stage's thread since the last `take`. `phase`: "prefill" or "decode", of this step."""

    def __init__(self) -> None:
        self.phase = "prefill"
        self._found: dict[str, dict[str, Wait]] = {}

    @contextlib.contextmanager
    def of(self, cause: Cause) -> Iterator[None]:
        """Count the time of a `with` block as a wait."""
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            by_cause = self._found.setdefault(self.phase, {})
            by_cause.setdefault(cause, Wait()).add(Wait(1, seconds, seconds))

    def take(self) -> StageWaits:
        """Return the waits since the last call."""
        found, self._found = self._found, {}
        return found


def added_waits(blocks: Iterable[Sequence[StageWaits]]) -> list[dict[str, dict[str, Wait]]]:
    """Return the waits of several blocks together, for each stage."""
    sums: list[dict[str, dict[str, Wait]]] = []
    for stages in blocks:
        sums += [{} for _ in stages[len(sums) :]]
        for total, one in zip(sums, stages, strict=True):
            entries = itertools.chain.from_iterable(
                [(phase, cause, wait) for cause, wait in by_cause.items()] for phase, by_cause in one.items()
            )
            for phase, cause, wait in entries:
                total.setdefault(phase, {}).setdefault(cause, Wait()).add(wait)
    return sums
