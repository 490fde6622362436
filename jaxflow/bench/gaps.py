"""How long the device does nothing while an engine runs: what a profiler sees of its kernels, by the length
of the gaps between them.

The profiler runs for a moment in the middle of a run, and may slow it: kernels of a CUDA graph are traced one
by one. So the shares are at most too large, and the run that they are of is no measurement of throughput.
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

from jaxflow.bench.trace_events import Kernel, read_kernels

BOUNDS_US = (2.0, 5.0, 10.0, 20.0, 50.0, 200.0)  # lengths by which gaps are sorted
STEP_US = 20.0  # a gap as long is no border between two kernels of a step: these are 2 to 6 us
COPIES = ("MemcpyH2D", "MemcpyD2H")  # beside the steps, by the copy engines: no work of the device's
_POLL_S = 0.02


@dataclasses.dataclass
class Watched:
    """What a profiler saw, once its block has ended."""

    kernels: list[Kernel] = dataclasses.field(default_factory=list)

    def summary(self) -> dict[str, Any] | None:
        """`shares`; None for a trace without kernels."""
        return shares(self.kernels) if self.kernels else None


@contextlib.contextmanager
def watch(seconds: float, begin: Callable[[], bool]) -> Iterator[Watched]:
    """While the block runs, profiles `seconds` of it from the moment on at which `begin()` is true; less, if
    the block ends before.
    """
    watched, over = Watched(), threading.Event()
    settings = jax.profiler.ProfileOptions()
    settings.python_tracer_level = 0
    settings.host_tracer_level = 0 if jax.default_backend() == "gpu" else 2  # a CPU's kernels are the host's

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
            watched.kernels = read_kernels(path)


def shares(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """The share of the time from the first kernel to the last in which none runs: in all, between steps, by
    the gaps' lengths.

    A gap is between steps if the program that runs is another after it, or if it is longer than kernels of
    one step leave.

    kernels: in order of their start, at least one; copies to and from the host are none.
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
