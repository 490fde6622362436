"""How a command ends that its user, or the reader of its output, breaks off: quietly, with the exit status
that a shell expects.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

INTERRUPTED = 128 + signal.SIGINT
UNREAD = 128 + signal.SIGPIPE

_AGAIN_AFTER_S = 0.02


def exit_status(main: Callable[[list[str]], int], argv: Sequence[str]) -> int:
    """What `main(argv)` returns; 130 after an interrupt, and 141 if nobody reads standard output any more, as
    of `| head -1`.

    For a process of its own, which stays one that hears interrupts wherever they meet it. asyncio's handler,
    which cancels its task, and one that ignores them, as of nohup, stay as they are.
    """
    sys.unraisablehook = _unraisable
    try:
        status = main(list(argv))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered would be written, and fail again, at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def _unraisable(what: "sys.UnraisableHookArgs") -> None:
    """Python drops what is raised in a callback of its garbage collector, and JAX has one: an interrupt that
    is lost so comes again.
    """
    if what.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(what)
        return
    main = threading.main_thread().ident  # signals are its business, and wake it from what it waits in
    threading.Timer(_AGAIN_AFTER_S, signal.pthread_kill, [main, signal.SIGINT]).start()
