"""Exit statuses of the commands: help, interrupts, and a closed standard output."""

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

INTERRUPTED = 128 + signal.SIGINT
OUTPUT_CLOSED = 128 + signal.SIGPIPE

_RESEND_AFTER_S = 0.02


def run_command(
    main: Callable[[list[str]], int],
    infinite: Collection[str] = (),
    others: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Parse absl's flags in any spelling of `flag_names`, call `main` with the remaining
    arguments, and end the process.

    --help exits with status 0, where absl itself would exit with 1. A wrong flag exits with status 2. The
    flags in `infinite` take infinity. `others` names, by flags that other commands have, what this command
    takes in their place.
    """
    from absl import app, flags  # commands with argparse do not need absl

    from jaxflow.cli.flag_errors import flag_error
    from jaxflow.cli.flag_names import canonical
    from jaxflow.cli.float_flags import check_floats

    if {"--help", "-h"} & set(sys.argv[1:]):
        app.usage(shorthelp=True, writeto_stdout=True, exitcode=0)

    def parsed(argv: list[str]) -> list[str]:
        try:
            rest = flags.FLAGS(argv)
            check_floats(flags.FLAGS, infinite)
            return rest
        except flags.Error as error:
            name = error.flagname if isinstance(error, flags.UnrecognizedFlagError) else ""
            hint = f"{others[name]}\n" if name in others else ""
            sys.exit(usage_error(f"{flag_error(error)}\n{hint}".rstrip()))

    app.run(functools.partial(exit_status, main), argv=canonical(sys.argv), flags_parser=parsed)


def usage_error(message: str) -> int:
    """Print an error of a command line. Return its exit status, 2."""
    print(f"error: {message}\n--help lists the flags", file=sys.stderr)
    return 2


def exit_status(main: Callable[[list[str]], int], argv: Sequence[str]) -> int:
    """Return the exit status of `main(argv)`.

    The status is 130 after an interrupt. It is 141 after standard output was closed, as `| head -1` closes a
    pipe. Signal handlers stay as they are: asyncio's handler, and the ignored interrupt of nohup.
    """
    sys.unraisablehook = _resend_interrupt
    try:
        status = main(list(argv))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output at exit, and the flush of the closed pipe would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED


def _resend_interrupt(unraisable: "sys.UnraisableHookArgs") -> None:
    """Send an interrupt again that Python dropped because it hit a callback of the garbage collector.

    JAX registers such a callback.
    """
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)
        return
    main = threading.main_thread().ident  # only the main thread handles signals
    threading.Timer(_RESEND_AFTER_S, signal.pthread_kill, [main, signal.SIGINT]).start()
