"""Times work for long enough that the card's governor settles, with its watts and clock beside."""

import contextlib
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pynvml

from pallas_kernels.card import first_visible

_EVERY_S = 0.02
_WINDOWS = 3
_LEAST_S = 0.01  # that a guess of the duration is taken from


@dataclasses.dataclass(frozen=True)
class Sustained:
    """Of one run: the median over windows of its time; the mean watts and median SM clock of all windows, None where no card tells."""

    seconds: float
    watts: float | None
    clock_mhz: float | None


def sustain(run: Callable[[], Any], seconds: float) -> Sustained:
    """Repeats `run` for `seconds`, after a third of that to warm up. `run` enqueues work and returns its arrays."""
    window_s = seconds / _WINDOWS
    times = max(1, round(window_s / _once(run)))
    _repeat(run, times)
    with _sensor() as (watts, clocks):
        found = [_repeat(run, times) / times for _ in range(_WINDOWS)]
    return Sustained(
        statistics.median(found), statistics.fmean(watts) if watts else None, float(statistics.median(clocks)) if clocks else None
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
def _sensor() -> Iterator[tuple[list[float], list[float]]]:
    """Watts and SM clock (MHz) of the first card while open; nothing where JAX's device is not a card, or has no driver that tells."""
    watts: list[float] = []
    clocks: list[float] = []
    if jax.default_backend() != "gpu":
        yield watts, clocks
        return
    try:
        pynvml.nvmlInit()
        card = first_visible()
    except pynvml.NVMLError:
        yield watts, clocks
        return
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(_EVERY_S):
            watts.append(_power(card))
            clocks.append(pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield watts, clocks
    finally:
        stop.set()
        thread.join()
        pynvml.nvmlShutdown()


def _power(card: Any) -> float:
    (now,) = pynvml.nvmlDeviceGetFieldValues(card, [pynvml.NVML_FI_DEV_POWER_INSTANT])
    if now.nvmlReturn == pynvml.NVML_SUCCESS:
        return now.value.uiVal / 1e3
    return pynvml.nvmlDeviceGetPowerUsage(card) / 1e3  # older cards know only the mean of the last second
