"""The tuned table's JSON: rules of what was measured, shares and runs joined, files that are whole."""

import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.gemm import tuned_table as table
from pallas_kernels.gemm.tuned_table import Choice, Shape

# what must be gained to change kernels from one number of rows to the next, and by a kernel that must be
# compiled over XLA's
TIE = 0.01

CUBLAS, ANY = (
    "cublas",
    "cublas or triton",
)  # what XLA's product was, in a row's `xla`; a row without one was written before it was kept


def rival(xla_flags: str) -> str:
    """What XLA's products are under XLA_FLAGS: cuBLAS' alone, or the faster of cuBLAS' and Triton's. The last
    of equal flags holds.
    """
    name, said = "--xla_gpu_enable_triton_gemm", ""
    for flag in xla_flags.split():
        key, _, value = flag.partition("=")
        said = value if key == name else said
    return CUBLAS if said.lower() == "false" else ANY


def rule_of(shape: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A shape's rule, as it stands in the table's JSON.

    measured: by number of rows, ascending, the times of each way, and what XLA's product was (`rival`).
    """
    best: list[Choice] = []
    for one in measured:
        best.append(labelled(fastest(one["us"], label(best[-1]) if best else None), one["rows"]))
    rules = [
        {"rows": c.rows, "kernel": c.kernel} | ({"tile": dict(c.tile)} if c.tile else {})
        for c in table.choices(best)
    ]
    return {"shape": shape, "choices": rules, "measured": measured}


def fastest(us: Mapping[str, float], before: str | None) -> str:
    """The way of least time.

    The one before it stays where it is as good, so that noise makes no inflection points; else XLA's is taken
    where that is as good: ours cost some seconds of compiling for every number of rows.
    """
    name = min(us, key=lambda way: us[way])
    as_good = [
        way
        for way in (before, "xla")
        if way is not None and us.get(way, float("inf")) <= us[name] * (1 + TIE)
    ]
    return as_good[0] if as_good else name


def label(choice: Choice) -> str:
    """A way's name in the table: the kernel and its tile's fields."""
    return choice.kernel + "".join(f" {name}={value}" for name, value in choice.tile)


def labelled(text: str, rows: int) -> Choice:
    """The choice of a `label`, for so many rows."""
    name, *tile = text.split(" ")
    return Choice(
        rows, name, tuple((field, int(value)) for field, _, value in (each.partition("=") for each in tile))
    )


def missing(shapes: Iterable[Shape], rows: Iterable[int], old: Mapping[str, Any] | None) -> list[Shape]:
    """The shapes that a table's JSON has no rule for that was measured at these numbers of rows."""
    known = [
        (rule["shape"], {one["rows"] for one in rule.get("measured", ())})
        for rule in (old or {}).get("rules", [])
    ]
    return [
        shape
        for shape in shapes
        if not any(of == dataclasses.asdict(shape) and set(rows) <= at for of, at in known)
    ]


def merged(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """A table's JSON with new rules: of a shape that it has, new times stand in for the old ones of as many
    rows, and others stay.
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
    """Writes one table of what shares of the shapes wrote, of which some may have been left no shape and no
    file: the paths of those.

    Raises: ValueError where there is no file at all, or files are of several devices.
    """
    paths = list(paths)
    absent = [path for path in paths if not Path(path).exists()]
    if len(absent) == len(paths):
        raise ValueError(f"--merge {' '.join(paths)}: no such file")
    files = [read(path) for path in paths if path not in absent]
    devices = {file["device"] for file in files}
    if len(devices) > 1:
        raise ValueError(f"--merge: tables of one device, not of {', '.join(sorted(devices))}")
    write(output, functools.reduce(merged, files))
    return absent


def read(path: str | Path) -> dict[str, Any]:
    """A table's JSON. Raises: ValueError, which names the file, for what is none."""
    with table.named(path):
        found = json.loads(Path(path).read_text("utf-8"))
        table.parse(found)
        for rule in found["rules"]:
            for one in rule.get("measured", ()):
                _check_measured(rule["shape"], one)
    return found


def _check_measured(shape: Mapping[str, Any], one: Mapping[str, Any]) -> None:
    """Raises: ValueError for what is no row of a rule's times; that or another for what is no JSON object."""
    rows, us = one.get("rows"), one.get("us")
    if not isinstance(rows, int) or not us or not all(isinstance(time, float | int) for time in us.values()):
        raise ValueError(
            f"rows={rows!r}, us={us!r} of {shape}: a number of rows, and the microseconds of each way"
        )
    if one.get("xla", ANY) not in (CUBLAS, ANY):
        raise ValueError(f"xla={one['xla']!r} of {shape} at {rows} rows: {CUBLAS!r}, {ANY!r}, or none")


def write(path: str | Path, data: Mapping[str, Any]) -> None:
    """In one go, so that what a run that is cut short leaves is whole."""
    partial = Path(f"{path}.part")
    partial.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    os.replace(partial, path)
