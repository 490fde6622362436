"""Run some of a set of named commands, one after another, each within a time limit."""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pallas_kernels.measure.provenance import COMMIT_VARIABLE


def add_flags(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Add the flags of `run_all` to a parser."""
    parser.add_argument("--only", default=",".join(names), help=f"some of {', '.join(names)}")
    parser.add_argument("--seconds", type=float, default=600.0, help="of one measurement at most")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each throughput")
    parser.add_argument("--commit", help="of sources outside a checkout")
    parser.add_argument("--show", action="store_true", help="print the commands and run nothing")


def run_all(given: argparse.Namespace, commands: Mapping[str, Sequence[str]]) -> int:
    """Run the commands of `--only`. Return the exit status: 1 if one failed or ran out of time.

    A command that runs out of time keeps the runs of `bench throughput` that ended before.

    Args:
      given: the flags of `add_flags`.
      commands: the arguments of Python of each name. The argument after --output_json is the report's path.
    """
    wanted = given.only.split(",")
    if unknown := [name for name in wanted if name not in commands]:
        print(f"--only {','.join(unknown)}: some of {', '.join(commands)} are accepted", file=sys.stderr)
        return 2
    if given.commit:
        os.environ[COMMIT_VARIABLE] = given.commit
    failed = []
    for name in wanted:
        line = [sys.executable, *repeated(commands[name], given.repeats)]
        print(*line, flush=True)
        if not given.show:
            Path(line[line.index("--output_json") + 1]).parent.mkdir(parents=True, exist_ok=True)
            if (fault := _fault(line, given.seconds)) is not None:
                print(f"{name}: {fault}", file=sys.stderr)
                failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def repeated(line: Sequence[str], repeats: int) -> list[str]:
    """Return the command, with so many runs if it is `bench throughput`."""
    more = ["--repeats", str(repeats)] if "throughput" in line and repeats != 1 else []
    return [*line, *more]


def _fault(line: Sequence[str], seconds: float) -> str | None:
    """Run a command for so many seconds at most; return why it failed, or None for success."""
    try:
        status = subprocess.run(line, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return f"ended after {seconds:g} s, the limit of --seconds"
    if status >= 0:
        return f"exit status {status}" if status else None
    killed = "; a system without free memory sends it" if status == -signal.SIGKILL else ""
    return f"ended by {signal.Signals(-status).name}{killed}"
