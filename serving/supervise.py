"""Start a lost server again, a bounded number of times.

A server is lost if a signal that nobody sent through here killed it, or if it ended with the status `LOST`:
another process of its engine was lost. Every process of the engine has a supervisor of its own; they need no
word with each other, because all processes end together, and a new engine waits until all have come.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxflow.parallel.launch import LOST

STEADY_S = 600.0  # a server that ran for so long was no failed start
_MOST_DELAY_S = 30.0


def supervise(arguments: Sequence[str], max_restarts: int) -> int:
    """Run `python -m serving` with these arguments, and start it again when it
    is lost. Return its exit status.

    SIGTERM and SIGINT go to the server, which then drains.
    """
    command = [sys.executable, "-m", "serving", *without_restarts(arguments)]
    children: list[subprocess.Popen] = []
    stopping: list[int] = []

    def on_signal(number: int, _: Any) -> None:
        stopping.append(number)
        if children and children[-1].poll() is None:
            children[-1].send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)

    def run() -> int:
        children.append(subprocess.Popen(command))
        return children[-1].wait()

    return restart(run, max_restarts, lambda: bool(stopping))


def without_restarts(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without --max_restarts, in any spelling, and its value."""
    kept, skip = [], False
    for argument in arguments:
        name, equals, _ = argument.lstrip("-").replace("-", "_").partition("=")
        if skip:
            skip = False
        elif argument.startswith("-") and name == "max_restarts":
            skip = not equals
        else:
            kept.append(argument)
    return kept


def restart(
    run: Callable[[], int],
    most: int,
    stopping: Callable[[], bool],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Call `run` until it is not lost, at most `most` times again in a row. Return its last exit status.

    Between two calls it waits 1 s, then twice as long each time, so that the other processes have ended.
    """
    failures = 0
    while True:
        began_s = clock()
        status = run()
        if clock() - began_s >= STEADY_S:
            failures = 0
        lost = status < 0 or status == LOST
        if not lost or stopping() or failures == most:
            return status if status >= 0 else 128 - status
        failures += 1
        print(f"the server was lost; start {failures} of {most} more", file=sys.stderr, flush=True)
        sleep(min(2.0 ** (failures - 1), _MOST_DELAY_S))
        if stopping():
            return status if status >= 0 else 128 - status
