"""Finds how an engine should run a model on a machine. Its results are files; nothing of it is imported while
serving.

  python -m search COMMAND [flags]

  correct      puts what a plan gained on a GPU in place of what was predicted of it
  cost         compute, memory, network and energy of a model's step, what binds, and the optimal throughput
  energy       fits joules of a FLOP and a byte to runs that were measured: the fourth resource's constants
  machine      measures the links, memories and rates that placements are searched with
  measure      how long each op of a model takes on this GPU, alone and beside others: a profile for plan
  placement    where to keep a model that does not fit the device: FlexGen's policy search
  offload      runs the policy of placement beside its rivals, and holds what was predicted against it
  plan         how a step is cut into nano-batches that overlap: NanoFlow's two-stage search

`python -m search COMMAND --help` lists a command's flags.
"""

import importlib
import sys
from types import ModuleType

from absl import flags

from jaxflow.cli.engine_flags import parse
from jaxflow.cli.exit_status import exit_status
from jaxflow.config import ConfigError
from jaxflow.model.checkpoints.checkpoint import CheckpointError
from jaxflow.parallel.mesh import choose_platform

COMMANDS = {
    "correct": "nanobatch.correct",
    "cost": "cost",
    "energy": "profile.energy",
    "machine": "placement.machine",
    "measure": "profile.measure",
    "offload": "placement.offload",
    "placement": "placement.command",
    "plan": "nanobatch.plan",
}


def main(argv: list[str]) -> int:
    """Runs one command; returns the exit status: 2 for a wrong command line, 1 for what could not be done."""
    if len(argv) < 2 or argv[1] in ("--help", "-h", "help"):
        print(__doc__)
        return 0 if len(argv) > 1 else 2
    if argv[1] not in COMMANDS:
        print(f"error: {argv[1]!r} is no command; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    command = importlib.import_module(f"search.{COMMANDS[argv[1]]}")
    command.define_flags()
    if {"--help", "-h"} & set(argv[2:]):
        print(command.__doc__, *_flag_help(command), sep="\n")
        return 0
    try:
        parse(argv[1:])
    except flags.Error as error:
        print(f"error: {error}\n`python -m search {argv[1]} --help` lists the flags", file=sys.stderr)
        return 2
    choose_platform()
    try:
        command.run()
    except BrokenPipeError:
        raise
    except (ConfigError, CheckpointError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _flag_help(command: ModuleType) -> list[str]:
    """Of the command's own flags, then of those that another command's module has for it."""
    others = (
        name
        for name in flags.FLAGS.flags_by_module_dict()
        if name.startswith("search.") and name != command.__name__
    )
    return [flags.FLAGS.module_help(name) for name in (command.__name__, *others)]


if __name__ == "__main__":
    sys.exit(exit_status(main, sys.argv))
