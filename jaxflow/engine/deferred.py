"""Programs that are compiled after an engine's start, on a thread or by their first caller."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

_compiling = threading.local()
_threads: list[threading.Thread] = []


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


def compile_in_background(programs: Sequence[DeferredProgram]) -> threading.Thread:
    """Compile programs one after another on a thread, which ends early when the process ends.

    The thread is no daemon: an interpreter that ends while XLA compiles would crash.
    """

    def run() -> None:
        for program in programs:
            if not threading.main_thread().is_alive():
                return
            program.ready()

    thread = threading.Thread(target=run, name="compile")
    thread.start()
    _threads[:] = [*(one for one in _threads if one.is_alive()), thread]
    return thread


def is_compiling() -> bool:
    """Return True while a thread of `compile_in_background` runs."""
    return any(thread.is_alive() for thread in _threads)


def wait_until_compiled() -> None:
    """Wait for the threads of `compile_in_background`, so that a measurement has the machine for itself."""
    for thread in _threads:
        thread.join()
