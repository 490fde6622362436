"""Timing of sustained work: long enough that the power governor settles, with watts, clock and joules."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.measure.sensor import CardReadings, power_by_counter, sample
from pallas_kernels.measure.timing import repeat, seconds_of_one

_WINDOWS = 3


@dataclasses.dataclass(frozen=True)
class Sustained:
    """The time and energy of one run on the first card. All cards of a tensor-parallel run do the same work.

    seconds: the median over the windows. watts, clock_mhz: mean power and median SM clock over all windows,
    or None without a driver. joules: energy of one run by the energy counter, idle power included, or None if
    the counter showed fewer than two steps. energy_step_s: median seconds between steps of the counter.
    temperature_c: the last of the GPU.
    """

    seconds: float
    watts: float | None
    clock_mhz: float | None
    joules: float | None = None
    energy_step_s: float | None = None
    temperature_c: float | None = None


def sustain(run: Callable[[], Any], seconds: float) -> Sustained:
    """Repeat `run` for `seconds`, after a third of this time to warm up, and return its `Sustained`.

    `run` enqueues work and returns its arrays.
    """
    times = max(1, round(seconds / _WINDOWS / seconds_of_one(run)))
    repeat(run, times)
    with sample(cards=1 if jax.default_backend() == "gpu" else 0, counter_reads=4) as readings:
        found = [_window(run, times) for _ in range(_WINDOWS)]
    card = readings.cards[0] if readings.cards else CardReadings()
    watts, step_s = power_by_counter(card.energy)
    return Sustained(
        statistics.median(found),
        statistics.fmean(card.watts) if card.watts else None,
        float(statistics.median(card.clock_mhz)) if card.clock_mhz else None,
        None if watts is None else watts * statistics.fmean(found),
        step_s,
        card.temperature_c[-1] if card.temperature_c else None,
    )


def _window(run: Callable[[], Any], times: int) -> float:
    """Return the mean seconds of a run in a window of `times` runs."""
    start = time.perf_counter()
    repeat(run, times)
    return (time.perf_counter() - start) / times
