"""The time line of an engine's start, in seconds by phase."""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

from jaxflow.engine.deferred import is_deferred

COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's event after a compilation
RATE = "weights_gb_per_s"  # 10^9 bytes a second, a key of `StartTimes.summary`
# Of this process, without the deferred programs.
_compiled = {"programs": 0, "xla_threads_s": 0.0, "loaded": 0}
_loaded_later = 0


def _count_compilation(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == COMPILED and not is_deferred():
        _compiled["programs"] += 1
        _compiled["xla_threads_s"] += duration_secs


jax.monitoring.register_event_duration_secs_listener(_count_compilation)


def num_compiled() -> int:
    """Return the programs that XLA has compiled or read from its cache in this
    process, without deferred ones.
    """
    return int(_compiled["programs"])


def count_loaded() -> None:
    """Count a program that another process compiled, and that this thread has loaded."""
    global _loaded_later
    if is_deferred():
        _loaded_later += 1
    else:
        _compiled["loaded"] += 1


def num_loaded_later() -> int:
    """Return the deferred programs of this process that another process compiled."""
    return _loaded_later


class StartTimes:
    """The seconds of each phase of a start.

    Phases of several threads may overlap, so their sum may exceed the total.
    """

    def __init__(self) -> None:
        self._begin_s, self._before = time.perf_counter(), dict(_compiled)
        self._lock = threading.Lock()
        self._spans: dict[str, list[tuple[float, float]]] = {}  # begin and end of each block of a phase
        self._read_bytes = 0

    def count_read(self, size: int) -> None:
        """Add the bytes of files that the phase `weights` has read."""
        self._read_bytes += size

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._spans.setdefault(name, []).append((begin_s, time.perf_counter()))

    def summary(self) -> dict[str, float]:
        """Return the seconds of each phase, and further keys. The phase that ended first comes first.

        `import_s` is the time from the begin of the process to the begin of the start. A system without /proc
        has no `import_s`. `total_s` is the time from the begin of the start until now. `programs` counts the
        programs that XLA compiled or read from its cache. `xla_threads_s` adds up the times of these
        programs, including autotuning. `loaded` counts those of the programs that another process compiled.
        `overlap_s` is the time in which programs were lowered or compiled while weights were loaded. The key
        is missing without such a time. `weights_gb` are the 10^9 bytes of the files with weights, and
        `weights_gb_per_s` their rate in the phase `weights`. Both are missing without such files.
        """
        start_s = time.perf_counter() - self._begin_s
        age_s = process_seconds()
        before = {} if age_s is None else {"import_s": age_s - start_s}
        compiled = {name: value - self._before[name] for name, value in _compiled.items()}
        with self._lock:  # programs are compiled in the background
            spans = {name: tuple(each) for name, each in self._spans.items()}
        phases = {f"{name}_s": sum(end - begin for begin, end in each) for name, each in spans.items()}
        overlap_s = _overlap_s(spans)
        both = {"overlap_s": overlap_s} if overlap_s else {}
        return before | phases | both | {"total_s": start_s} | compiled | self._reading(phases)

    def _reading(self, phases: Mapping[str, float]) -> dict[str, float]:
        """Return the figures of the files with weights. phases: the seconds of each phase."""
        if not self._read_bytes:
            return {}
        size = self._read_bytes / 1e9
        return {"weights_gb": size, RATE: size / phases["weights_s"]}


def _overlap_s(spans: Mapping[str, Sequence[tuple[float, float]]]) -> float:
    """Return the seconds in which programs were lowered or compiled while weights were loaded."""
    made = (*spans.get("lowering", ()), *spans.get("compilation", ()))
    pairs = itertools.product(spans.get("weights", ()), made)
    return sum(max(0.0, min(one[1], two[1]) - max(one[0], two[0])) for one, two in pairs)


def describe(summary: Mapping[str, float]) -> str:
    """Return the phases of a summary as one line of text."""
    phases = ", ".join(
        f"{name.removesuffix('_s').replace('_', ' ')} {value:.1f} s"
        for name, value in summary.items()
        if name.endswith("_s") and name != RATE
    )
    programs = f"{summary['programs']:.0f} programs"
    loaded = f", {summary['loaded']:.0f} of them compiled by processes" if summary.get("loaded") else ""
    read = (
        f"; {summary['weights_gb']:.1f} GB of weights at {summary[RATE]:.1f} GB/s" if RATE in summary else ""
    )
    return f"start: {phases}; {programs}{loaded}{read}"


def process_seconds() -> float | None:
    """Return the seconds since this process began; None where the system has no /proc."""
    try:
        after_name = Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()
        up_s = float(Path("/proc/uptime").read_text("utf-8").split()[0])
    except OSError:
        return None
    return up_s - int(after_name[19]) / os.sysconf("SC_CLK_TCK")
