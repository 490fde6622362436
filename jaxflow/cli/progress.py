"""Progress of long work: a bar on a terminal, and lines in a log."""

import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

_EVERY_S = 10.0


class ProgressLines:
    """Lines on standard error with the number of steps done: at the end, and every 10 s before."""

    def __init__(self, title: str, total: int | None, unit: str):
        self._title, self._unit = title, unit
        self._of = "" if total is None else f" of {total}"
        self._done, self._started = 0, time.perf_counter()
        self._next = self._started + _EVERY_S

    def update(self, steps: int = 1) -> None:
        """Count steps."""
        self._done += steps
        if time.perf_counter() >= self._next:
            self._tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell()

    def _tell(self) -> None:
        now = time.perf_counter()
        self._next = now + _EVERY_S
        done = f"{self._title}: {self._done}{self._of} {self._unit}s in {now - self._started:.1f} s"
        print(done, file=sys.stderr, flush=True)


Progress = tqdm | ProgressLines


def progress_of(title: str, total: int | None, unit: str, *, shown: bool) -> Progress:
    """Return what shows the progress of work as its `update` is called, within a `with` block."""
    if shown and not sys.stderr.isatty():
        return ProgressLines(title, total, unit)
    return tqdm(total=total, desc=title, unit=unit, delay=1.0, smoothing=0.05, disable=not shown)
