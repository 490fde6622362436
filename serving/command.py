"""How the commands of this package begin."""

import functools
import sys
from collections.abc import Callable

from absl import app

from jaxflow.cli.exit_status import exit_status


def run(main: Callable[[list[str]], int]) -> None:
    """Parses the flags and runs `main`; ends the process. As of the other commands, --help is no failure:
    absl's own exit status is 1.
    """
    if {"--help", "-h"} & set(sys.argv[1:]):
        app.usage(shorthelp=True, writeto_stdout=True, exitcode=0)
    app.run(functools.partial(exit_status, main))
