"""Times work on a GPU the way a serving engine runs it: long enough for the power governor to settle, with clock and watts beside it."""

import threading
import time

import jax
import pynvml


class _Sensor:
    """SM clock (MHz, the median of readings 20 ms apart) and mean power (W, from the card's energy counter) while open."""

    def __enter__(self):
        self._clocks, self._stop = [], threading.Event()
        pynvml.nvmlInit()
        self._device = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._start = time.perf_counter(), pynvml.nvmlDeviceGetTotalEnergyConsumption(self._device)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.02):
            self._clocks.append(pynvml.nvmlDeviceGetClockInfo(self._device, pynvml.NVML_CLOCK_SM))

    def __exit__(self, *_):
        joules = (pynvml.nvmlDeviceGetTotalEnergyConsumption(self._device) - self._start[1]) / 1000
        self.watts = joules / (time.perf_counter() - self._start[0])
        self._stop.set()
        self._thread.join()
        self.mhz = sorted(self._clocks)[len(self._clocks) // 2] if self._clocks else None


def sustained(fn, *args, calls: int, seconds: float = 0.6) -> dict:
    """Median time of one of the `calls` that fn(*args) makes, over windows that last `seconds` together.

    Returns: us (microseconds a call), spread (relative, between windows), mhz (None if it was too short to read) and watts.
    """
    jax.block_until_ready(fn(*args))
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    once = time.perf_counter() - start
    per_window = max(1, int(seconds / 4 / max(once, 1e-5)))
    windows = []
    with _Sensor() as sensor:
        for _ in range(5):  # the first one only warms
            start = time.perf_counter()
            for _ in range(per_window):
                out = fn(*args)
            jax.block_until_ready(out)
            windows.append((time.perf_counter() - start) / per_window / calls * 1e6)
    windows = sorted(windows[1:])
    us = (windows[1] + windows[2]) / 2
    return {"us": us, "spread": (windows[-1] - windows[0]) / us, "mhz": sensor.mhz, "watts": sensor.watts}
