"""The shared parts of the check scripts: command line, printed rows, and the timed products."""

import argparse
import json
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.measure.provenance import provenance

L2_BYTES = 60 << 20  # of an H200
INTERPRETER_THREADS = 8  # more than the five warpgroups of the largest CTA and the program that starts them

Rows = list[dict[str, Any]]
# rows, share (i, n), seconds of measured work per figure
Part = Callable[[Rows, tuple[int, int], float], None]


def record(rows: Rows, **row: Any) -> None:
    """Record a row and print it as one line. ok: any type with a truth value, for example numpy's bool."""
    row |= {"ok": bool(row["ok"])} if "ok" in row else {}
    rows.append(row)
    print(
        " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True
    )


def parse_share(text: str) -> tuple[int, int]:
    """Return (i, n) of `i/n` with 0 <= i < n. Raises: ValueError."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise ValueError(f"--share {text!r}: accepted is i/n with i below n, for example 0/4")
    return int(found[1]), int(found[2])


def check_file(option: str, path: str | Path) -> None:
    """Check that a file can be written at `path`, before the work whose results it will hold.

    Raises: ValueError, which names the option.
    """
    folder = Path(path).parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{option} {path}: accepted is a file in an existing, writable folder")


def interpret_on_cpu() -> None:
    """Choose the CPU, with threads for the Mosaic interpreter. Call before JAX's first computation.

    The interpreter runs one program for each warpgroup of a CTA, and these wait for each other. XLA continues
    a program on a thread of a pool, which has as many threads as NPROC or the machine's cores. With fewer
    threads than warpgroups, those that wait can hold all threads, and no other warpgroup ever runs.
    """
    os.environ["NPROC"] = str(INTERPRETER_THREADS)
    jax.config.update("jax_platforms", "cpu")


def main(about: str | None, parts: Mapping[str, Part], toy: Mapping[str, Part] | None = None) -> None:
    """Run the parts that the command line names, by default all parts.

    Exits with 1 if a row's `ok` is false, or without a GPU.

    Args:
      about: the script's docstring.
      toy: the parts with --toy, which run on a CPU in the interpreter.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.6, help="seconds of measured work per figure")
    parser.add_argument("--only", default=",".join(parts), help="comma-separated parts to run; default: all")
    parser.add_argument(
        "--share",
        default="0/1",
        help="i/n: run every n-th case from case i, to divide the cases among processes",
    )
    parser.add_argument("--json", help="file for the figures")
    if toy:
        parser.add_argument("--toy", action="store_true", help="small inputs, interpreted on the CPU")
    args = parser.parse_args()
    unknown = [part for part in args.only.split(",") if part not in parts]
    if unknown:
        parser.error(f"--only {unknown[0]!r}: accepted are {', '.join(parts)}")
    try:
        share = parse_share(args.share)
        if args.json:
            check_file("--json", args.json)
    except ValueError as error:
        parser.error(str(error))
    if toy is not None and args.toy:
        interpret_on_cpu()
        parts = toy
    elif jax.default_backend() != "gpu":
        parser.exit(1, f"error: these checks need a GPU; JAX's backend is {jax.default_backend()!r}\n")
    spec = sys.modules["__main__"].__spec__  # None for a script that was not started by `python -m`
    command = shlex.join(["python", *(["-m", spec.name] if spec else sys.argv[:1]), *sys.argv[1:]])
    rows: Rows = []
    for part in args.only.split(","):
        start = time.perf_counter()
        parts[part](rows, share, args.seconds)
        print(f"-- {part}: {time.perf_counter() - start:.0f} s", flush=True)
        if args.json:
            run = provenance(command) | {"clock_mhz": _median(rows, "mhz"), "watts": _median(rows, "watts")}
            with open(args.json, "w") as f:
                json.dump(
                    run | {"rows": rows}, f, indent=1, default=lambda dtype: jax.numpy.dtype(dtype).name
                )
    bad = [row for row in rows if not row.get("ok", True)]
    print(f"{len(bad)} checks failed" if bad else "all checks passed")
    raise SystemExit(bool(bad))


def _median(rows: Rows, key: str) -> float | None:
    """Return the median of a figure over the rows that have it, or None without such a row."""
    found = [row[key] for row in rows if row.get(key) is not None]
    return statistics.median(found) if found else None
