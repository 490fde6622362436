"""Times work on a GPU the way a serving engine runs it: long enough for the power governor to settle, with clock and watts beside it."""

import threading
import time

import jax

try:
    import pynvml
except ImportError:  # the figures then lack clock and watts
    pynvml = None


class _Sensor:
    """Reads SM clock (MHz) and power (W) every 50 ms while open."""

    def __enter__(self):
        self.clocks, self.watts, self._stop = [], [], threading.Event()
        if pynvml is not None:
            pynvml.nvmlInit()
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def _watch(self):
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        while not self._stop.wait(0.05):
            self.clocks.append(pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM))
            self.watts.append(pynvml.nvmlDeviceGetPowerUsage(device) / 1000)

    def __exit__(self, *_):
        self._stop.set()
        if pynvml is not None:
            self._thread.join()


def sustained(fn, *args, calls: int, seconds: float = 0.6) -> dict:
    """Median time of one of the `calls` that fn(*args) makes, over windows that last `seconds` together.

    Returns: us (microseconds a call), spread (relative, between windows), mhz and watts (medians while it ran, None without NVML).
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
    middle = lambda x: sorted(x)[len(x) // 2] if x else None  # noqa: E731
    us = (windows[1] + windows[2]) / 2
    return dict(us=us, spread=(windows[-1] - windows[0]) / us, mhz=middle(sensor.clocks), watts=middle(sensor.watts))
