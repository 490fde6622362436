"""Run several commands in turns on one machine and write one report with the reports of all runs.

    python -m benchmarks.in_turns SETTINGS.json --turns 3 --output_json REPORT.json

SETTINGS.json holds `what`, a title, and `sides`. A side has a `name` and `command`, the arguments of `python`
for a command that takes --output_json. A report that holds several runs gives a value for each of them. A
side may also have a `folder` with other sources, the `commit` of those sources, `env` and `server`, the
arguments of `python` for a server that runs during the command. `part` is the path of the part of a side's
report that holds the figures, as `points.0`. The first side is the base of the comparison. The report is
written anew after every run, so that a stopped comparison keeps its finished runs.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxflow.bench.report.requests import write_json
from pallas_kernels.measure.provenance import COMMIT_VARIABLE, commit, provenance

FIGURE = "total_token_throughput"
STOP_S = 60.0
LOG_CHARACTERS = 2000


def run_side(side: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Run a side's command once. Return its start time, its report and exit status, or the end of its log.

    seconds: the limit of the run; a slower command is stopped and counts as failed.
    """
    begin = time.time()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "report.json")
        with _server(side, Path(folder, "server.log")) as server:
            log = Path(folder, "command.log")
            line = [sys.executable, *side["command"], "--output_json", str(out)]
            status = _run(line, side, log, seconds)
        done = {
            "side": side["name"],
            "part": side.get("part"),
            "started_at_s": begin,
            "seconds": time.time() - begin,
            "exit_status": status,
            "report": json.loads(out.read_text("utf-8")) if out.exists() else None,
        }
        if server is not None:
            done["server_exit_status"] = server.returncode
        if status or done.get("server_exit_status"):
            logs = sorted(Path(folder).glob("*.log"))
            done["logs"] = {path.stem: path.read_text("utf-8")[-LOG_CHARACTERS:] for path in logs}
    return done


@contextlib.contextmanager
def _server(side: Mapping[str, Any], log: Path) -> Iterator[subprocess.Popen | None]:
    """Run the side's server, if it has one, and stop it at the end as an operator does: with SIGTERM."""
    if not side.get("server"):
        yield None
        return
    with log.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, *side["server"]], stdout=file, stderr=file, cwd=_folder(side), env=_env(side)
        )
        try:
            yield server
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _run(line: Sequence[str], side: Mapping[str, Any], log: Path, seconds: float) -> int:
    """Run a command and return its exit status; 124 for a command that was stopped at its limit."""
    # A client beside a server must not take the memory that the server's device has left.
    more = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if side.get("server") else {}
    with log.open("w") as file:
        try:
            env = _env(side) | more
            return subprocess.run(
                line, stdout=file, stderr=file, cwd=_folder(side), env=env, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            return 124


def _folder(side: Mapping[str, Any]) -> Path:
    return Path(side.get("folder", ".")).resolve()


def _env(side: Mapping[str, Any]) -> dict[str, str]:
    known = side.get("commit") or commit()
    return os.environ | side.get("env", {}) | ({COMMIT_VARIABLE: known} if known else {})


def figures(runs: Sequence[Mapping[str, Any]], figure: str) -> dict[str, Any]:
    """Return the values of a figure by side, with median and range, and each
    median over that of the first side.

    figure: a key of the runs' reports, or a path of keys and list indexes joined by dots.
    """
    values: dict[str, list[float]] = {}
    for run in runs:
        values.setdefault(run["side"], []).extend(_values(run, figure))
    medians = {side: statistics.median(found) for side, found in values.items() if found}
    base = next(iter(medians.values()), None)
    return {
        side: {
            "values": found,
            "median": medians[side],
            "range": [min(found), max(found)],
            "ratio": medians[side] / base if base else None,
        }
        for side, found in values.items()
        if found
    }


def _values(run: Mapping[str, Any], figure: str) -> list[float]:
    """Return the values of a figure in a run's report: one, or one of each of the report's own runs.

    figure: see `figures`.
    """
    value, path = run["report"], ".".join(filter(None, (run.get("part"), figure)))
    if value is None:
        return []
    several = value.get("runs", [])
    if several and all(path in one for one in several):
        return [one[path] for one in several if one[path] is not None]
    for key in path.split("."):
        value = value[int(key) if isinstance(value, list) else key]
    return [] if value is None else [value]


def report(settings: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the report without the keys of `provenance`."""
    power = [run["report"]["power"] for run in runs if (run["report"] or {}).get("power")]
    return {
        "clock_mhz": statistics.fmean(one["mean_sm_clock_mhz"] for one in power) if power else None,
        "watts": statistics.fmean(one["mean_watts"] for one in power) if power else None,
        "what": settings["what"],
        "sides": settings["sides"],
        "figures": {name: figures(runs, name) for name in settings.get("figures", [FIGURE])},
        "runs": list(runs),
    }


def describe(run: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return a line about one run."""
    found = run["report"] or {}
    values = {name: figures([run], name).get(run["side"], {}).get("median") for name in names}
    return (
        f"turn {run['turn']}, {run['side']}: exit status {run['exit_status']} after {run['seconds']:.0f} s, "
        f"warm-up {found.get('warm_up_s') or 0:.0f} s, failed {found.get('failed')}, {values}"
        + "".join(f"\n--- {name}\n{text}" for name, text in run.get("logs", {}).items())
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", type=Path)
    parser.add_argument("--turns", type=int, default=3, help="runs of each side")
    parser.add_argument("--run_s", type=float, default=600.0, help="seconds of one run at most")
    parser.add_argument(
        "--limit_s", type=float, default=math.inf, help="seconds in all: no run begins that would end later"
    )
    parser.add_argument("--output_json", type=Path, required=True)
    given = parser.parse_args(arguments)
    try:
        settings = json.loads(given.settings.read_text("utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"{given.settings}: no settings in JSON ({error})")
    runs: list[dict[str, Any]] = []
    line = shlex.join(["python", "-m", "benchmarks.in_turns", *arguments])
    begin = time.monotonic()
    for turn, side in itertools.product(range(given.turns), settings["sides"]):
        # A side's first run may compile: the last run of the same side tells the length of the next.
        last = next((run["seconds"] for run in reversed(runs) if run["side"] == side["name"]), 0.0)
        if time.monotonic() - begin + last > given.limit_s:
            print(
                f"turn {turn}, {side['name']}: not begun, since --limit_s {given.limit_s:g} is near",
                flush=True,
            )
            break
        runs.append({"turn": turn, **run_side(side, given.run_s)})
        print(describe(runs[-1], settings.get("figures", [FIGURE])), flush=True)
        write_json(given.output_json, {"command_name": "in_turns", **report(settings, runs)})
    # JAX of this process starts last: the device belongs to the runs until here.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    head = {"command_name": "in_turns", **provenance(line)}
    write_json(given.output_json, head | report(settings, runs))
    whole = len(runs) == given.turns * len(settings["sides"])
    return 0 if whole and not any(run["exit_status"] or run.get("server_exit_status") for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
