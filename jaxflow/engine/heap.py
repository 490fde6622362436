"""Settings of Python's garbage collector for a process with millions of lasting objects.

Compiled programs are most of these objects. They live as long as the process.
"""

import contextlib
import gc
from collections.abc import Iterator

# Python's defaults collect everything after 70,000 new objects. The requests of 1,200 streams are
# more, and such a collection stops the event loop for 50 to 80 ms. Nearly all objects of a
# request end without the collector.
COLLECTOR_THRESHOLDS = (20_000, 10, 10)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection while lasting objects are made.

    Lowering makes millions of them, and their traversal takes an eighth of its time. The imports of an engine
    spend a tenth of their time on traversal.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def freeze_heap() -> None:
    """Keep garbage collections from stopping a step for long.

    All present objects are exempt, and later ones are collected less often (`COLLECTOR_THRESHOLDS`).
    Only a command that owns its process may call this, because garbage of the caller's in reference
    cycles is never collected either.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


def freeze_later_objects() -> None:
    """Exempt the objects made since `freeze_heap` too, without a collection.

    Do nothing where nobody called it.
    """
    if gc.get_threshold() == COLLECTOR_THRESHOLDS:
        gc.freeze()
