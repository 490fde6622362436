"""The choice of a command in `python -m PROGRAM COMMAND [flags]`, and the parsing of its flags."""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from absl import flags

from jaxflow.cli.engine_flags import parse
from jaxflow.cli.flag_errors import flag_error


@dataclasses.dataclass(frozen=True)
class Subcommands:
    """The commands of a program.

    Attributes:
      program: the package that `python -m` runs.
      usage: the text that lists the commands.
      modules: each command's module below the package. The module has `define_flags()` and `run()`.
      renamed: flags of earlier releases, and their names today.
      flag_help: returns the parts of a command's flag help.
    """

    program: str
    usage: str | None
    modules: Mapping[str, str]
    renamed: Mapping[str, str]
    flag_help: Callable[[ModuleType], list[str]]

    def select(self, argv: Sequence[str]) -> ModuleType | int:
        """Return the module of the command in `argv`, with its flags parsed.

        Returns an exit status if no command is to run: 0 after help, 2 for a wrong command line.
        """
        if len(argv) < 2 or argv[1] in ("--help", "-h", "help"):
            print(self.usage)
            return 0 if len(argv) > 1 else 2
        if argv[1] not in self.modules:
            print(f"error: unknown command {argv[1]!r}; accepted: {', '.join(self.modules)}", file=sys.stderr)
            return 2
        command = importlib.import_module(f"{self.program}.{self.modules[argv[1]]}")
        command.define_flags()
        if {"--help", "-h"} & set(argv[2:]):
            print(command.__doc__, *self.flag_help(command), sep="\n")
            return 0
        try:
            parse(list(argv[1:]))
        except flags.Error as error:
            given = {
                word.lstrip("-").partition("=")[0].replace("-", "_") for word in argv[2:] if word[:1] == "-"
            }
            names = [f"--{old} is now --{new}" for old, new in self.renamed.items() if old in given]
            help_command = f"`python -m {self.program} {argv[1]} --help` lists the flags"
            print(f"error: {flag_error(error)}", *names, help_command, sep="\n", file=sys.stderr)
            return 2
        return command
