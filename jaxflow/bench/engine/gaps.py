"""Idle time of the device while an engine runs, from a profiler's kernel trace, grouped by gap length.

The profiler runs for a short time in the middle of a run. The profiler may slow the run, because it traces
the kernels of a CUDA graph one by one. Therefore the idle shares are upper bounds, and a profiled run does
not measure throughput.
"""

import contextlib
import dataclasses
import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxflow.bench.report import device_time
from jaxflow.bench.report.trace_events import Kernel, read_devices

BOUNDS_US = (2.0, 5.0, 10.0, 20.0, 50.0, 200.0)  # lower bounds of the gap-length groups
STEP_US = 20.0  # a gap this long lies between steps: gaps between kernels of one step are 2 to 6 us
# copy engines run these concurrently with steps; they do not count as compute
COPIES = ("MemcpyH2D", "MemcpyD2H")
_POLL_S = 0.02


@dataclasses.dataclass
class Watched:
    """The kernels of each device that a profiler recorded. They are available after the `with` block."""

    devices: list[list[Kernel]] = dataclasses.field(default_factory=list)

    def summary(self) -> dict[str, Any] | None:
        """Return `shares` of the first device, and the busy time and collectives of each device.

        None for a trace without kernels.
        """
        kernels = next((each for each in self.devices if each), None)
        return None if kernels is None else shares(kernels) | {"devices": device_time.summary(self.devices)}


@contextlib.contextmanager
def watch(seconds: float, begin: Callable[[], bool]) -> Iterator[Watched]:
    """Profile `seconds` of the `with` block, starting when `begin()` first returns True.

    The profile is shorter if the block ends earlier.
    """
    watched, over = Watched(), threading.Event()
    settings = jax.profiler.ProfileOptions()
    settings.python_tracer_level = 0
    settings.host_tracer_level = 0 if jax.default_backend() == "gpu" else 2  # a CPU's kernels are host events

    def profile(folder: str) -> None:
        while not begin():
            if over.wait(_POLL_S):
                return
        with jax.profiler.trace(folder, profiler_options=settings):
            over.wait(seconds)

    with tempfile.TemporaryDirectory() as folder:
        thread = threading.Thread(target=profile, args=(folder,), name="profiler", daemon=True)
        thread.start()
        try:
            yield watched
        finally:
            over.set()
            thread.join()
        for path in Path(folder).rglob("*.xplane.pb"):
            watched.devices = read_devices(path)


def shares(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Return the idle share of the time from the first kernel to the last: total, between steps, and by gap
    length.

    A gap counts as between steps in two cases: the next kernel belongs to another program, or the gap is
    longer than gaps within a step.

    kernels: at least one, ordered by start, without copies to and from the host.
    """
    own = [kernel for kernel in kernels if not kernel.name.startswith(COPIES)]
    last, gaps, between = own[0], [], []
    for kernel in own[1:]:
        if kernel.start_s > last.stop_s:
            gaps.append(kernel.start_s - last.stop_s)
            if kernel.program != last.program or 1e6 * gaps[-1] >= STEP_US:
                between.append(gaps[-1])
        last = max(last, kernel, key=lambda one: one.stop_s)
    whole = last.stop_s - own[0].start_s
    edges = [0.0, *BOUNDS_US, float("inf")]
    by_length = {}
    for low, high in itertools.pairwise(edges):
        here = [gap for gap in gaps if low <= 1e6 * gap < high]
        name = f"{low:g} us and more" if high == edges[-1] else f"{low:g} to {high:g} us"
        by_length[name] = {"gaps": len(here), "share": sum(here) / whole}
    return {
        "seconds": whole,
        "kernels": len(own),
        "idle_share": sum(gaps) / whole,
        "idle_share_between_steps": sum(between) / whole,
        "programs": len({kernel.program for kernel in own}),
        "longest_gap_us": 1e6 * max(gaps, default=0.0),
        "by_length": by_length,
    }
