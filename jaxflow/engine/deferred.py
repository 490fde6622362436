"""Programs that are compiled after an engine's start, on a thread or by their first caller."""

import concurrent.futures
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

DELAY_S = 10.0  # after a start, in which the first requests have the machine for themselves
LONGEST_WAIT_S = 900.0  # of `wait_until_compiled`
_POLL_S = 0.1
_compiling = threading.local()
_background: list[tuple[threading.Thread, threading.Event]] = []  # the event ends the thread's delay
_awaited = threading.Event()  # set while somebody waits in `wait_until_compiled`


def is_deferred() -> bool:
    """Return True on a thread that compiles a deferred program."""
    return getattr(_compiling, "active", False)


class DeferredProgram:
    """A program that is compiled once: by `compile_in_background`, or by the first call if that comes before.

    A call during the compilation waits for its end. So a request waits no longer than for a start that
    compiles all programs. A fault of the compilation is raised to each caller, which compiles again.
    """

    def __init__(self, make: Callable[[], Callable]):
        """`make`: returns the compiled program."""
        self._make, self._lock = make, threading.Lock()
        self._program: Callable | None = None

    @property
    def is_made(self) -> bool:
        """True once the program is compiled."""
        return self._program is not None

    def ready(self) -> Callable:
        """Return the compiled program."""
        with self._lock:
            if self._program is None:
                _compiling.active = True
                try:
                    self._program = self._make()
                finally:
                    _compiling.active = False
            return self._program

    def __call__(self, *args: Any) -> Any:
        """Run the program."""
        return (self._program or self.ready())(*args)


def while_it_lives(method: Callable[[], object]) -> Callable[[], object]:
    """Return a job that calls an object's method, or does nothing once the object is gone."""
    weak = weakref.WeakMethod(method)

    def job() -> None:
        if (found := weak()) is not None:
            found()

    return job


def compile_in_background(jobs: Sequence[Callable[[], object]], delay_s: float = 0.0) -> threading.Thread:
    """Run jobs that compile one after another on a thread, which ends early when the process ends.

    The thread is no daemon: an interpreter that ends while XLA compiles would crash.

    delay_s: seconds before the first job. `wait_until_compiled` ends the delay.
    """
    hurry = threading.Event()

    def run() -> None:
        begin = time.monotonic() + delay_s
        while main_runs() and time.monotonic() < begin and not hurry.wait(_POLL_S):
            pass
        for job in jobs:
            if not main_runs():
                return
            job()

    thread = threading.Thread(target=run, name="compile")
    thread.start()
    _background[:] = [*(one for one in _background if one[0].is_alive()), (thread, hurry)]
    return thread


def wait_for(future: Future) -> None:
    """Wait for a future. Raises: CancelledError once the process ends."""
    while not future.done():
        if not main_runs():
            raise concurrent.futures.CancelledError("the process ends")
        concurrent.futures.wait([future], _POLL_S)


def main_runs() -> bool:
    """Return False once the process ends. Threads that compile then end, too."""
    return threading.main_thread().is_alive()


def is_compiling() -> bool:
    """Return True while a thread of `compile_in_background` runs or waits for its delay."""
    return any(thread.is_alive() for thread, _ in _background)


class Turns:
    """Lets one thread in at a time, and any number while somebody waits for all compilations."""

    def __init__(self) -> None:
        self._changed, self._inside = threading.Condition(), 0

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Run the block when it is this thread's turn."""
        with self._changed:
            while self._inside and not _awaited.is_set():
                self._changed.wait(_POLL_S)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify()


def wait_until_compiled(limit_s: float = LONGEST_WAIT_S) -> None:
    """Wait for the threads of `compile_in_background`, so that a measurement has the machine for itself.

    Raises:
      TimeoutError: a thread still compiles after `limit_s` seconds.
    """
    end_s = time.monotonic() + limit_s
    _awaited.set()
    try:
        for thread, hurry in _background:
            hurry.set()
            thread.join(max(0.0, end_s - time.monotonic()))
            if thread.is_alive():
                raise TimeoutError(f"the programs of the engine are not compiled after {limit_s:.0f} s")
    finally:
        _awaited.clear()
