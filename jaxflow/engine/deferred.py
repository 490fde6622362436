"""Programs that are compiled after an engine's start, on a thread or by their first caller."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

DELAY_S = 10.0  # after a start, in which the first requests have the machine for themselves
_POLL_S = 0.1
_compiling = threading.local()
_background: list[tuple[threading.Thread, threading.Event]] = []  # the event ends the thread's delay


def is_deferred() -> bool:
    """Return True on a thread that compiles a deferred program."""
    return getattr(_compiling, "active", False)


class DeferredProgram:
    """A program that is compiled once: by `compile_in_background`, or by the first call if that comes before.

    A call during the compilation waits for its end. So a request waits no longer than for a start that compiles
    all programs. A fault of the compilation is raised to each caller, which compiles again.
    """

    def __init__(self, make: Callable[[], Callable]):
        """`make`: returns the compiled program."""
        self._make, self._lock = make, threading.Lock()
        self._program: Callable | None = None

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


def compile_in_background(programs: Sequence[DeferredProgram], delay_s: float = 0.0) -> threading.Thread:
    """Compile programs one after another on a thread, which ends early when the process ends.

    The thread is no daemon: an interpreter that ends while XLA compiles would crash.

    delay_s: seconds before the first compilation. `wait_until_compiled` ends the delay.
    """
    hurry = threading.Event()

    def run() -> None:
        begin = time.monotonic() + delay_s
        while _main_runs() and time.monotonic() < begin and not hurry.wait(_POLL_S):
            pass
        for program in programs:
            if not _main_runs():
                return
            program.ready()

    thread = threading.Thread(target=run, name="compile")
    thread.start()
    _background[:] = [*(one for one in _background if one[0].is_alive()), (thread, hurry)]
    return thread


def _main_runs() -> bool:
    return threading.main_thread().is_alive()


def is_compiling() -> bool:
    """Return True while a thread of `compile_in_background` runs or waits for its delay."""
    return any(thread.is_alive() for thread, _ in _background)


def wait_until_compiled() -> None:
    """Wait for the threads of `compile_in_background`, so that a measurement has the machine for itself."""
    for thread, hurry in _background:
        hurry.set()
        thread.join()
