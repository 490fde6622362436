"""Times work on a GPU the way a serving engine runs it: long enough for the power governor to settle, rivals in turn, with clock, watts
and joules beside each."""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import pynvml

_AHEAD = 3  # programs in flight: enough to hide the host, few enough that their outputs fit in memory


@dataclasses.dataclass(frozen=True)
class Timing:
    """Of one call: `us`, its median time over windows; `spread` of the windows, relative; `mhz`, the SM clock's median (None: too short to
    read); `watts`, the card's mean power; `joules`. `seconds`: how long was measured in all."""

    us: float
    spread: float
    mhz: float | None
    watts: float
    joules: float
    seconds: float


class _Sensor:
    """SM clock (MHz, readings 20 ms apart) and energy (J, the card's own counter) while open."""

    def __enter__(self):
        self.clocks, self._stop = [], threading.Event()
        pynvml.nvmlInit()
        self._device = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._joules = pynvml.nvmlDeviceGetTotalEnergyConsumption(self._device)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.02):
            self.clocks.append(pynvml.nvmlDeviceGetClockInfo(self._device, pynvml.NVML_CLOCK_SM))

    def __exit__(self, *_):
        self.joules = (pynvml.nvmlDeviceGetTotalEnergyConsumption(self._device) - self._joules) / 1000
        self._stop.set()
        self._thread.join()


def _repeat(run: Callable[[], Any], times: int) -> None:
    ahead: deque = deque()
    for _ in range(times):
        ahead.append(run())
        if len(ahead) > _AHEAD:
            jax.block_until_ready(ahead.popleft())
    jax.block_until_ready(ahead)


def _once(run: Callable[[], Any]) -> float:
    """Seconds of one run, roughly: of ever more of them, until they last 30 ms."""
    _repeat(run, 1)
    times = 1
    while True:
        start = time.perf_counter()
        _repeat(run, times)
        took = time.perf_counter() - start
        if took > 0.03:
            return took / times
        times *= 4


def interleaved(
    ways: Mapping[str, Callable[[], Any]], *, calls: Mapping[str, int] | int = 1, seconds: float = 0.6, rounds: int = 3
) -> dict[str, Timing]:
    """Times several ways to do something in turn, so that heat, clocks and neighbours are the same for all.

    Args:
      ways: each enqueues a program and returns its arrays; it should last a millisecond or more, so that the host is not what is timed.
      calls: how many calls of what is being timed one program makes, of each way or of all.
      seconds: how long each way is measured in all, in `rounds` windows. One more window, the first, only warms.
    """
    many = dict.fromkeys(ways, calls) if isinstance(calls, int) else calls
    times, windows, clocks, joules = {}, {name: [] for name in ways}, {name: [] for name in ways}, dict.fromkeys(ways, 0.0)
    for name, run in ways.items():
        times[name] = max(1, round(seconds / rounds / _once(run)))
    order = list(ways.items())
    for i in range(rounds + 1):
        for name, run in order if i % 2 else reversed(order):
            with _Sensor() as sensor:
                start = time.perf_counter()
                _repeat(run, times[name])
                took = time.perf_counter() - start
            if i:
                windows[name].append(took / times[name] / many[name])
                clocks[name] += sensor.clocks
                joules[name] += sensor.joules
    return {name: _timing(windows[name], clocks[name], joules[name], times[name] * many[name]) for name in ways}


def _timing(windows: list[float], clocks: list[float], joules: float, calls: int) -> Timing:
    middle, total = float(np.median(windows)), sum(windows) * calls
    return Timing(
        us=middle * 1e6,
        spread=(max(windows) - min(windows)) / middle,
        mhz=float(np.median(clocks)) if clocks else None,
        watts=joules / total,
        joules=joules / calls / len(windows),
        seconds=total,
    )


def sustained(fn, *args, calls: int, seconds: float = 0.6) -> dict:
    """`Timing`, as a dictionary, of one of the `calls` that fn(*args) makes."""
    return dataclasses.asdict(interleaved({"": lambda: fn(*args)}, calls=calls, seconds=seconds, rounds=4)[""])
