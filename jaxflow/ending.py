"""How a command ends that its user, or the reader of its output, breaks off: quietly, with the exit status that a shell expects."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
UNREAD = 128 + signal.SIGPIPE

_AGAIN_AFTER_S = 0.02


def exit_status(main: Callable[[list[str]], int], argv: Sequence[str]) -> int:
    """What `main(argv)` returns; 130 after an interrupt, and 141 if nobody reads standard output any more, as of `| head -1`.

    For a process of its own: it says how SIGINT is taken, if nobody else has.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as of nohup
        signal.signal(signal.SIGINT, _interrupt)
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


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, where it is not lost: Python drops what a callback of its garbage collector raises, and JAX has one."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    if frame is not None and frame.f_code in callbacks:
        main = threading.main_thread().ident  # signals are its business, and wake it from what it waits in
        threading.Timer(_AGAIN_AFTER_S, signal.pthread_kill, [main, signal.SIGINT]).start()
        return
    raise KeyboardInterrupt
