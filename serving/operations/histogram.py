"""A histogram that takes many equal observations at once."""

import bisect
from collections.abc import Sequence

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0),
)
STEP_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
TOKENS = tuple(float(2**power) for power in range(21))


class Histogram:
    """Counts of values by upper bound, as Prometheus keeps them.

    `prometheus_client.Histogram` takes one value a call. A step has up to a thousand equal latencies.
    """

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of `value`."""
        self._counts[bisect.bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """Return the number of observations."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of observations up to the bound), the last bound infinite."""
        pairs, total = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            pairs.append(("+Inf" if bound == float("inf") else repr(bound), total))
        return pairs
