"""Find how an engine runs a model on a machine. The results are files; serving imports nothing of search.

  python -m search COMMAND [flags]

  correct      replaces a plan's predicted gains with gains measured on a GPU
  cost         prints a step's compute, memory, network and energy, what binds it, and the optimal throughput
  energy       fits the joules of a FLOP and of a byte to measured runs
  joules       prints the joules per token of each op of a step, beside those of the whole step
  machine      measures the links, memories and rates that a placement search needs
  measure      measures how long each op takes on this GPU, in isolation and in pairs: a profile for plan
  offload      runs a placement and its rivals, and compares each with its prediction
  placement    finds where to keep a model that exceeds the device: FlexGen's policy search
  plan         finds how to split a step into overlapping nano-batches: NanoFlow's two-stage search
  spans        chooses the span of each KV head by its effect on a model's answers

`python -m search COMMAND --help` lists a command's flags. Searches and fits need the extra `search`:

  pip install 'jaxflow[search]'                     with pip
  python3 run.py exec python -m search COMMAND      in a source checkout
"""

import sys
from types import ModuleType

from absl import flags

from jaxflow.cli.exit_status import exit_status
from jaxflow.cli.subcommands import Subcommands
from jaxflow.config import ConfigError
from jaxflow.flexgen.policy import PolicyError
from jaxflow.model.checkpoints.checkpoint import CheckpointError
from jaxflow.parallel.mesh import choose_platform
from jaxflow.pipeline.plan import PlanError
from search import INSTALL, UserError

COMMANDS = {
    "correct": "nanobatch.correct",
    "cost": "cost",
    "energy": "profile.energy",
    "joules": "profile.joules",
    "machine": "placement.machine",
    "measure": "profile.measure",
    "offload": "placement.offload",
    "placement": "placement.command",
    "plan": "nanobatch.plan",
    "spans": "spans",
}
# Any other exception is a defect of the program and keeps its traceback.
USER_ERRORS = (UserError, ConfigError, CheckpointError, PlanError, PolicyError, OSError)
RENAMED = {"measured_alone": "measured_only"}  # flags of earlier releases
EXTRA = ("mip", "highspy", "optax")  # the packages of the extra `search`


def main(argv: list[str]) -> int:
    """Run one command and return its exit status: 2 for a wrong command line, 1 for a failed command.

    A flag's value that the command refuses makes a wrong command line, too.
    """
    command = Subcommands("search", __doc__, COMMANDS, RENAMED, _flag_help).select(argv)
    if isinstance(command, int):
        return command
    choose_platform()
    try:
        command.run()
    except BrokenPipeError:
        raise
    except flags.Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) and error.field in flags.FLAGS else 1
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        print(f"error: search {argv[1]} needs {error.name}: {INSTALL}", file=sys.stderr)
        return 1
    return 0


def _flag_help(command: ModuleType) -> list[str]:
    """Return the help of the command's flags, then of the command's flags from other modules of search."""
    others = (
        name
        for name in flags.FLAGS.flags_by_module_dict()
        if name.startswith("search.") and name != command.__name__
    )
    return [flags.FLAGS.module_help(name) for name in (command.__name__, *others)]


if __name__ == "__main__":
    sys.exit(exit_status(main, sys.argv))
