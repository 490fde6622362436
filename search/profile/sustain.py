"""Times work for long enough that the card's governor settles, with its watts and clock beside, and the
joules of its energy counter.

The counter (NVML's, of the whole card) moves in steps of some tens of milliseconds, up to a tenth of a
second. So what is taken is the joules between the first and the last of its steps that were seen, over the
seconds between these two: where it is asked every 5 ms, that is off by 10 ms of the span at most, whatever
the steps are.
"""

import contextlib
import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import pynvml

from pallas_kernels.nvml import first_visible

_EVERY_S = 0.005  # that the energy counter is asked
_SENSED_EVERY = 4  # asks of the counter to one of the watts and the clock
_WINDOWS = 3
_LEAST_S = 0.01  # that a guess of the duration is taken from


@dataclasses.dataclass(frozen=True)
class Sustained:
    """The result of one run: median time of the windows, mean watts and median SM clock; None without a
    sensor.

    joules: of one run by the energy counter, idle power included; None without two steps of the counter.
    energy_step_s: the median time between the steps.
    """

    seconds: float
    watts: float | None
    clock_mhz: float | None
    joules: float | None = None
    energy_step_s: float | None = None


@dataclasses.dataclass
class _Readings:
    """steps: (seconds, joules) at each step of the energy counter."""

    watts: list[float] = dataclasses.field(default_factory=list)
    clocks: list[float] = dataclasses.field(default_factory=list)
    steps: list[tuple[float, float]] = dataclasses.field(default_factory=list)


def sustain(run: Callable[[], Any], seconds: float) -> Sustained:
    """Repeats `run` for `seconds`, after a third of that to warm up. `run` enqueues work and returns its
    arrays.
    """
    window_s = seconds / _WINDOWS
    times = max(1, round(window_s / _once(run)))
    _repeat(run, times)
    with _sensor() as read:
        found = [_repeat(run, times) / times for _ in range(_WINDOWS)]
    watts, step_s = by_counter(read.steps)
    return Sustained(
        statistics.median(found),
        statistics.fmean(read.watts) if read.watts else None,
        float(statistics.median(read.clocks)) if read.clocks else None,
        None if watts is None else watts * statistics.fmean(found),
        step_s,
    )


def by_counter(steps: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """(mean watts, seconds between steps) from steps of an energy counter, (seconds, joules) each; Nones of
    fewer than two.
    """
    if len(steps) < 2:
        return None, None
    (first_s, first_j), (last_s, last_j) = steps[0], steps[-1]
    return (last_j - first_j) / (last_s - first_s), statistics.median(
        b - a for (a, _), (b, _) in itertools.pairwise(steps)
    )


def _repeat(run: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times - 1):
        run()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def _once(run: Callable[[], Any]) -> float:
    """Seconds of one run, roughly: of ever more of them, the first not counted."""
    _repeat(run, 1)
    times = 1
    while (took := _repeat(run, times)) < _LEAST_S:
        times *= 4
    return took / times


@contextlib.contextmanager
def _sensor() -> Iterator[_Readings]:
    """What the first card says while open; nothing where JAX's device is not a card, or has no driver that
    tells.
    """
    read = _Readings()
    if jax.default_backend() != "gpu":
        yield read
        return
    try:
        pynvml.nvmlInit()
        card = first_visible()
    except pynvml.NVMLError:
        yield read
        return
    stop = threading.Event()

    def watch() -> None:
        asked, before = 0, _joules(card)
        while not stop.wait(_EVERY_S):
            now = _joules(card)
            if now is not None and now != before:
                read.steps.append((time.perf_counter(), now))
                before = now
            if not asked % _SENSED_EVERY:
                read.watts.append(_power(card))
                read.clocks.append(pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM))
            asked += 1

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield read
    finally:
        stop.set()
        thread.join()
        pynvml.nvmlShutdown()


def _joules(card: Any) -> float | None:
    """By the card's energy counter; None of a card that has none."""
    try:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1e3
    except pynvml.NVMLError:
        return None


def _power(card: Any) -> float:
    (now,) = pynvml.nvmlDeviceGetFieldValues(card, [pynvml.NVML_FI_DEV_POWER_INSTANT])
    if now.nvmlReturn == pynvml.NVML_SUCCESS:
        return now.value.uiVal / 1e3
    return pynvml.nvmlDeviceGetPowerUsage(card) / 1e3  # older cards know only the mean of the last second
