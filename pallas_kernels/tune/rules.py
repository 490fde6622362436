"""The JSON of the tuned table: rules from measurements, merges of runs, and atomic writes."""

import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.gemm import tuned_table as table
from pallas_kernels.gemm.tuned_table import Choice, Shape

# The minimum relative gain of a change of kernels between numbers of rows, and of a kernel over XLA's
# product.
TIE = 0.01

# The kind of XLA's product in a row's `xla`, which old rows lack.
CUBLAS, ANY = ("cublas", "cublas or triton")


# What the best kernel has least of. time: time in short windows. tokens: time in windows in which the card
# settles at its power cap, so the best kernel has the most tokens/s there. energy: joules in such windows.
OBJECTIVES = ("time", "tokens", "energy")


def costs(one: Mapping[str, Any]) -> Mapping[str, float]:
    """Return what decides between the kernels of a measured number of rows: joules or microseconds."""
    return one["joules"] if one.get("objective") == "energy" else one["us"]


def rival(xla_flags: str) -> str:
    """Return the kind of XLA's products under XLA_FLAGS: cuBLAS only, or the faster of cuBLAS and Triton.

    The last of equal flags wins.
    """
    name, setting = "--xla_gpu_enable_triton_gemm", ""
    for flag in xla_flags.split():
        key, _, value = flag.partition("=")
        setting = value if key == name else setting
    return CUBLAS if setting.lower() == "false" else ANY


def rule_of(shape: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON of a shape's rule.

    measured: by ascending rows, the times of each kernel, and the kind of XLA's product (`rival`). With an
    `objective` other than time also the objective, and the joules of each kernel.
    """
    best: list[Choice] = []
    for one in measured:
        best.append(labelled(best_of(costs(one), label(best[-1]) if best else None), one["rows"]))
    rules = [
        {"rows": c.rows, "kernel": c.kernel} | ({"tile": dict(c.tile)} if c.tile else {})
        for c in table.choices(best)
    ]
    return {"shape": shape, "choices": rules, "measured": measured}


def best_of(cost: Mapping[str, float], before: str | None) -> str:
    """Return the kernel with the least cost, in microseconds or joules.

    The kernel of the previous number of rows stays if it is as good within TIE, so that noise makes no
    inflection points. Otherwise XLA's wins if it is as good, because our kernels take seconds to compile
    for each number of rows.
    """
    name = min(cost, key=lambda kernel: cost[kernel])
    as_good = [
        kernel
        for kernel in (before, "xla")
        if kernel is not None and cost.get(kernel, float("inf")) <= cost[name] * (1 + TIE)
    ]
    return as_good[0] if as_good else name


def label(choice: Choice) -> str:
    """Return a choice's name in the table: the kernel and the fields of its tile."""
    return choice.kernel + "".join(f" {name}={value}" for name, value in choice.tile)


def labelled(text: str, rows: int) -> Choice:
    """Return the choice of a `label`, for a number of rows."""
    name, *tile = text.split(" ")
    return Choice(
        rows, name, tuple((field, int(value)) for field, _, value in (each.partition("=") for each in tile))
    )


def missing(
    shapes: Iterable[Shape], rows: Iterable[int], old: Mapping[str, Any] | None, objective: str = "time"
) -> list[Shape]:
    """Return the shapes without a rule that was measured at all these numbers of rows for the objective."""
    known = [
        (
            rule["shape"],
            {one["rows"] for one in rule.get("measured", ()) if one.get("objective", "time") == objective},
        )
        for rule in (old or {}).get("rules", [])
    ]
    return [
        shape
        for shape in shapes
        if not any(of == dataclasses.asdict(shape) and set(rows) <= at for of, at in known)
    ]


def merged(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's JSON with new rules.

    New times replace old times of the same shape and number of rows.
    """
    kept = list((old or {}).get("rules", []))
    rules = []
    for rule in new["rules"]:
        before = [one for one in kept if one["shape"] == rule["shape"]]
        kept = [one for one in kept if one["shape"] != rule["shape"]]
        at = {one["rows"]: one for of in (*before, rule) for one in of.get("measured", ())}
        rules.append(rule_of(rule["shape"], [at[rows] for rows in sorted(at)]) if at else rule)
    return {**new, "rules": kept + rules}


def merge(paths: Iterable[str], output: str) -> list[str]:
    """Merge the tables of several runs into one file. Return the paths without a file, of runs that had no
    shape.

    Raises: ValueError without any file, or for files of several devices.
    """
    paths = list(paths)
    absent = [path for path in paths if not Path(path).exists()]
    if len(absent) == len(paths):
        raise ValueError(f"--merge {' '.join(paths)}: no file exists; accepted is at least one file")
    files = [read(path) for path in paths if path not in absent]
    devices = {file["device"] for file in files}
    if len(devices) > 1:
        raise ValueError(
            f"--merge: tables of {', '.join(sorted(devices))}: accepted are tables of one device"
        )
    write(output, functools.reduce(merged, files))
    return absent


def read(path: str | Path) -> dict[str, Any]:
    """Return a table's JSON. Raises: ValueError, which names the file, for a damaged file."""
    with table.named(path):
        found = json.loads(Path(path).read_text("utf-8"))
        table.parse(found)
        for rule in found["rules"]:
            for one in rule.get("measured", ()):
                _check_measured(rule["shape"], one)
    return found


def _check_measured(shape: Mapping[str, Any], one: Mapping[str, Any]) -> None:
    """Check one row of a rule's times. Raises: ValueError, or another error for damaged JSON."""
    rows, us = one.get("rows"), one.get("us")
    if not isinstance(rows, int) or not us or not all(isinstance(time, float | int) for time in us.values()):
        raise ValueError(
            f"rows={rows!r}, us={us!r} of {shape}: accepted are a number of rows, and the microseconds of "
            "each kernel"
        )
    objective, joules = one.get("objective", "time"), one.get("joules", {})
    if objective not in OBJECTIVES or (objective == "energy" and joules.keys() != us.keys()):
        raise ValueError(
            f"objective={objective!r}, joules={joules!r} of {shape} at {rows} rows: accepted are "
            f"{', '.join(OBJECTIVES)}, for energy with the joules of each kernel"
        )
    if one.get("xla", ANY) not in (CUBLAS, ANY):
        raise ValueError(
            f"xla={one['xla']!r} of {shape} at {rows} rows: accepted are {CUBLAS!r}, {ANY!r}, or no entry"
        )


def write(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write a file atomically, so that an interrupted run leaves a complete file."""
    partial = Path(f"{path}.part")
    partial.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    os.replace(partial, path)
