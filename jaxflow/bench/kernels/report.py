"""The report of `bench kernels`: text lines, summaries of groups, and merged reports of several shares."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxflow.bench.kernels.case import Group

_SCALE = {"TB/s": 1e12, "TFLOP/s": 1e12, "tok/s": 1.0}


def summaries(rows: Sequence[Mapping[str, Any]], groups: Iterable[Group]) -> list[dict[str, Any]]:
    """Return the geometric mean and the minimum of each group's ratios to its first rival."""
    must = {group.name: group.geomean for group in groups}
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for rival, ratio in list(row.get("ratios", {}).items())[:1]:
            found.setdefault((row["group"], rival), []).append(ratio)
    return [
        {
            "group": group,
            "rival": rival,
            "cases": len(values),
            "geomean": math.exp(sum(map(math.log, values)) / len(values)),
            "least": min(values),
            "must": must.get(group),
        }
        for (group, rival), values in found.items()
    ]


def text(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text lines of a row, one per implementation."""
    lead = f"{row['group']:18} {row['case']:28}"
    if "failed" in row:
        yield f"{lead} failed: {row['failed']}"
        return
    for name, way in row["ways"].items():
        ratio = f"x{row['ratios'][name]:.3f}" if name in row["ratios"] else ""
        sensed = (
            f"{way['mhz']:5.0f} MHz {way['watts']:4.0f} W {way['joules'] * 1e3:9.3f} mJ"
            if way["mhz"]
            else "no clock or watts"
        )
        yield (
            f"{lead:47} {name:16} {way['us']:10.1f} us {way['rate'] / _SCALE[row['unit']]:9.3f} {row['unit']:8} {ratio:7}"
            f" {sensed} ±{way['spread'] / 2:.1%}" + ("  missed" if lead and row["reached"] is False else "")
        )
        lead = ""
    for name, us in row["recorded_us"].items():
        yield f"{'':47} {name:16} {us:10.1f} us, recorded"


def merged(paths: Iterable[str], groups: Iterable[Group]) -> dict[str, Any]:
    """Return one report of several shares, with each case once, in the benchmark's order.

    A failed row is replaced by a row of the same case in another report.

    Raises: ValueError for reports of several devices, and for a file that is no such report, by its name;
    OSError for a missing file.
    """
    groups = tuple(groups)
    parts = [read(path) for path in paths]
    devices = {part["device"] for part in parts}
    if len(devices) != 1:
        raise ValueError(
            "--merge: accepted are reports of one device; these are of "
            f"{', '.join(sorted(devices)) or 'none'}"
        )
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in (row for part in parts for row in part["rows"]):
        key = (row["group"], row["case"])
        if key not in found or "failed" in found[key]:
            found[key] = row
    order = {
        (group.name, case.name): i for i, (group, case) in enumerate((g, c) for g in groups for c in g.cases)
    }
    rows = [found[key] for key in sorted(found, key=lambda key: order.get(key, len(order)))]
    names = {f"{group}/{case}" for group, case in found}
    left = [
        name
        for name in dict.fromkeys(name for part in parts for name in part["left_out"])
        if name not in names
    ]
    commands = [command for part in parts for command in part.get("commands", [part["command"]])]
    return parts[0] | {
        "commands": commands,
        "rows": rows,
        "left_out": left,
        "summaries": summaries(rows, groups),
    }


def read(path: str | Path) -> dict[str, Any]:
    """Return a report of this command.

    Raises: ValueError, which names the file, for another kind of file; OSError for a missing file.
    """
    try:
        found = json.loads(Path(path).read_text("utf-8"))
        if found["command_name"] != "kernels":
            raise ValueError(f"command_name={found['command_name']!r}; accepted is 'kernels'")
        missing = [name for name in ("device", "command", "left_out") if name not in found]
        missing += [name for row in found["rows"] for name in ("group", "case") if name not in row]
        if missing:
            raise ValueError(f"the key {missing[0]} is missing")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: not a report of `bench kernels` ({type(error).__name__}: {error})"
        ) from error
    return found
