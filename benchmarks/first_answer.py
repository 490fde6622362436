"""Time `python3 run.py` as whole processes: with an empty folder of compiled programs, and with a filled one.

  python -m benchmarks.first_answer --output_json benchmarks/cpu/smollm2-135m/first-answer.json

Each of `--runs` turns takes a new empty folder, runs the command, and runs the command again with the folder
that the first run filled. `run.py` must have installed its packages before.
"""

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.measure.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
COMMAND = ("python3", "run.py")
READY = b"\nready on "
ASKING = b"-m serving.client"


def run_once(cache: Path) -> dict[str, float]:
    """Run the command. Return the seconds until the server is ready, to the
    answer's first text, and to the end.

    The result also has the seconds of CPU time of all processes of the command.

    Raises: RuntimeError, with the output of a failed command.
    """
    environ = dict(
        os.environ,
        JAX_COMPILATION_CACHE_DIR=str(cache),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    start, cpu_s = time.perf_counter(), ended_children_cpu_s()
    process = subprocess.Popen(
        COMMAND, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    output, ready_s, first_s = b"", 0.0, 0.0
    while piece := os.read(process.stdout.fileno(), 65536):
        output += piece
        if not ready_s and READY in output:
            ready_s = time.perf_counter() - start
        _, asked, answer = output.partition(ASKING)
        if asked and not first_s and answer.partition(b"\n")[2].strip():
            first_s = time.perf_counter() - start
    status, end_s, cpu_s = process.wait(), time.perf_counter() - start, ended_children_cpu_s() - cpu_s
    if status or not first_s:
        raise RuntimeError(
            f"{shlex.join(COMMAND)} ended with status {status}:\n{output.decode(errors='replace')}"
        )
    return {"ready_s": ready_s, "first_text_s": first_s, "whole_s": end_s, "cpu_s": cpu_s}


def ended_children_cpu_s() -> float:
    """Return the seconds of CPU time that this process's ended children and their children took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def summary(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the median of each figure over the runs, and the runs."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]} | {"runs": list(runs)}


def main() -> None:
    """Run the command, and write its report after each turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="Turns of a cold and a warm run.")
    parser.add_argument("--output_json", type=Path, help="File of the report.")
    args = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.first_answer", *sys.argv[1:]])
    report = {"command_name": "first_answer"} | provenance(command)
    report |= {"model": "smollm2-135m", "cpu_cores": os.cpu_count()}
    loads, found = [os.getloadavg()[0]], {"cold": [], "warm": []}
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("cold", "warm"):
                found[name].append(run_once(Path(folder)))
                print(name, found[name][-1], flush=True)
        loads.append(os.getloadavg()[0])
        report |= {"load_average": loads} | {name: summary(runs) for name, runs in found.items()}
        if args.output_json:
            args.output_json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
