"""Each kernel and its rivals on one GPU: rates, clock, watts and joules, measured in turn in one run.

  python -m jaxflow.bench kernels --output_json benchmarks/h200/kernels/gemm.json
  python -m jaxflow.bench kernels --time_limit_s 300 --seconds 0.3
  python -m jaxflow.bench kernels --only ceilings,decode_attention
  python -m jaxflow.bench kernels --only 'dense_gemm/M 2048'
  python -m jaxflow.bench kernels --share 0/4 --output_json 0.json
  python -m jaxflow.bench kernels --merge 0.json,1.json --output_json FILE

`--share 0/4` runs every fourth case, so that several GPUs can divide the cases. `--merge` combines several
reports and measures nothing.

The two ceilings run first: the bandwidth of a copy and a read, and the rate of cuBLAS. Each kernel's cases
(the other modules of this folder) use random data. Our kernel and its rivals take turns, each with
`--seconds` of back-to-back work. Weights and caches rotate through more memory than the L2 holds. A ratio
above 1 means that our kernel is faster. The report holds the target of each case, and marks a case below its
target as `missed`.

The first case of every group runs first, then every second case, and so on. Groups are ordered by their
kernels' share of the time per served token. Several processes compile the next cases in parallel. Then each
process times its cases while no process compiles. XLA's products use cuBLAS unless XLA_FLAGS has
--xla_gpu_enable_triton_gemm. A time that is impossible for the GPU makes a failed row. The report names the
cases that exceed --time_limit_s, which includes compilation. The report file is written after every case.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from jaxflow.bench.kernels.case import KernelCase, KernelGroup
from jaxflow.bench.kernels.groups import GROUPS
from jaxflow.bench.kernels.workers import Worker, environment, measured, rounds
from jaxflow.bench.report import machine
from jaxflow.bench.report.requests import write_json
from jaxflow.config import ConfigError
from pallas_kernels.measure.provenance import KEYS
from pallas_kernels.measure.script import parse_share


def define_flags() -> None:
    flags.DEFINE_list(
        "only",
        [],
        "Groups to run ("
        + ", ".join(group.name for group in GROUPS)
        + "), or group/part of a case's name. Default: all groups that are not on request only.",
    )
    flags.DEFINE_float("seconds", 0.6, "Seconds to measure each kernel or rival.", lower_bound=0.0)
    flags.DEFINE_float(
        "time_limit_s",
        None,
        "Seconds after the start by which every case must end; later cases are left out.",
        lower_bound=0.0,
    )
    flags.DEFINE_string("output_json", None, "Write the report to this file.")
    flags.DEFINE_string(
        "share", "0/1", "i/n: run every n-th case from case i; cases that share a model stay together."
    )
    flags.DEFINE_list(
        "merge", [], "Report files of several shares to merge into one report, without measuring."
    )
    flags.DEFINE_integer(
        "processes",
        None,
        "Number of processes that compile in parallel; default: one per two cores, at most 8.",
        lower_bound=1,
    )


def chosen(only: Iterable[str]) -> list[tuple[KernelGroup, KernelCase]]:
    """Return the cases that `--only` names: the first case of each group, then the second, and so on.

    Without names, return all cases except those of groups that run on request only.

    Raises: ConfigError for a name without a case.
    """
    most = max(len(group.cases) for group in GROUPS)
    every = [(group, group.cases[i]) for i in range(most) for group in GROUPS if i < len(group.cases)]
    wanted = [item.partition("/") for item in only]
    for name, _, part in wanted:
        if not any(group.name == name and part in case.name for group, case in every):
            groups = ", ".join(group.name for group in GROUPS)
            raise ConfigError(
                "only", f"{name}/{part}", f"GROUP or GROUP/PART of a case's name; groups: {groups}"
            )
    if not wanted:
        return [(group, case) for group, case in every if not group.on_request]
    return [
        (group, case)
        for group, case in every
        if any(group.name == name and part in case.name for name, _, part in wanted)
    ]


def shared(
    cases: Sequence[tuple[KernelGroup, KernelCase]], share: str
) -> list[tuple[KernelGroup, KernelCase]]:
    """Return share `i/n` of the cases, keeping related cases in one share.

    Raises: ConfigError for an invalid share.
    """
    try:
        first, step = parse_share(share)
    except ValueError as error:
        raise ConfigError("share", share, "i/n with i below n, for example 0/4") from error
    units = list(
        dict.fromkeys(group.name if group.together else (group.name, case.name) for group, case in cases)
    )
    mine = set(units[first::step])
    return [(group, case) for group, case in cases if {group.name, (group.name, case.name)} & mine]


def run() -> dict[str, Any]:
    """Run the command and return its report.

    Raises: ConfigError without a GPU, for an unknown name in --only, for an invalid share, and for merged
    reports of two devices.
    """
    f = flags.FLAGS
    if f.merge:
        return show(merged(f.merge, GROUPS))
    cases = shared(chosen(f.only), f.share)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # leaves the GPU memory to the worker processes
    machine.need_gpu("kernels")
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    xla_flags = environment(os.environ)["XLA_FLAGS"]
    result = {
        "command_name": "kernels",
        **machine.describe(),
        "xla_flags": xla_flags,
        "seconds": f.seconds,
        "rows": rows,
        "left_out": left_out,
    }
    processes = min(f.processes or min(8, max(1, (os.cpu_count() or 1) // 2)), max(1, len(cases)))
    workers = [Worker() for _ in range(processes)]
    limit_s = float("inf") if f.time_limit_s is None else f.time_limit_s
    try:
        with tqdm(total=len(cases), unit="case", file=sys.stderr) as bar:
            for name, row in measured(rounds(cases, processes), workers, f.seconds, limit_s):
                bar.update()
                if row is None:
                    left_out.append(name)
                    continue
                rows.append(row)
                for line in text(row):
                    bar.write(line, file=sys.stdout)
                sys.stdout.flush()
                if f.output_json:  # keeps the measurements if a later case fails
                    write_json(f.output_json, result | {"summaries": summaries(rows, GROUPS)})
    finally:
        for worker in workers:
            worker.end()
    if left_out:
        print(
            f"left out after {f.time_limit_s:g} s, {len(left_out)} of {len(cases)} cases: "
            f"{', '.join(left_out)}"
        )
    result["summaries"] = summaries(rows, GROUPS)
    if f.output_json:
        write_json(f.output_json, result)
    return show(result)


def show(result: dict[str, Any]) -> dict[str, Any]:
    """Print the summaries of a report and return the report."""
    for s in result["summaries"]:
        print(
            f"{s['group']}: x{s['geomean']:.3f} of {s['rival']} (geomean of {s['cases']}), least "
            f"x{s['least']:.3f}"
        )
    return result


_SCALE = {"TB/s": 1e12, "TFLOP/s": 1e12, "tok/s": 1.0}


def summaries(rows: Sequence[Mapping[str, Any]], groups: Iterable[KernelGroup]) -> list[dict[str, Any]]:
    """Return the geometric mean and the minimum of each group's ratios to its first rival."""
    targets = {group.name: group.geomean for group in groups}
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
            "target": targets.get(group),
        }
        for (group, rival), values in found.items()
    ]


def text(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text lines of a row, one per implementation."""
    lead = f"{row['group']:18} {row['case']:28}"
    if "failed" in row:
        yield f"{lead} failed: {row['failed']}"
        return
    for name, implementation in row["implementations"].items():
        ratio = f"x{row['ratios'][name]:.3f}" if name in row["ratios"] else ""
        sensed = (
            f"{implementation['mhz']:5.0f} MHz {implementation['watts']:4.0f} W "
            f"{implementation['joules'] * 1e3:9.3f} mJ"
            if implementation["mhz"]
            else "no clock or watts"
        )
        yield (
            f"{lead:47} {name:16} {implementation['us']:10.1f} us "
            f"{implementation['rate'] / _SCALE[row['unit']]:9.3f} {row['unit']:8} {ratio:7}"
            f" {sensed} ±{implementation['spread'] / 2:.1%}"
            + ("  missed" if lead and row["reached"] is False else "")
        )
        lead = ""
    for name, us in row["recorded_us"].items():
        yield f"{'':47} {name:16} {us:10.1f} us, recorded"


def merged(paths: Iterable[str], groups: Iterable[KernelGroup]) -> dict[str, Any]:
    """Return one report of several shares, with each case once, in the benchmark's order.

    A failed row is replaced by a row of the same case in another report.

    The command of the merged report joins the commands of the shares.

    Raises: ConfigError for reports of several devices, and for another kind of
      file; OSError for a missing file.
    """
    groups = tuple(groups)
    parts = [read(path) for path in paths]
    devices = {part["device"] for part in parts}
    if len(devices) != 1:
        raise ConfigError("merge", ", ".join(sorted(devices)) or "none", "reports of one device")
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
    return parts[0] | {
        "command": " && ".join(part["command"] for part in parts),
        "rows": rows,
        "left_out": left,
        "summaries": summaries(rows, groups),
    }


def read(path: str | Path) -> dict[str, Any]:
    """Return a report of this command.

    Raises: ConfigError for another kind of file; OSError for a missing file.
    """
    wanted = {"command_name", "rows", "left_out", *KEYS}
    with contextlib.suppress(ValueError):  # not JSON
        found = json.loads(Path(path).read_text("utf-8"))
        if isinstance(found, dict) and wanted <= set(found) and found["command_name"] == "kernels":
            rows = found["rows"]
            if all(isinstance(row, dict) and {"group", "case"} <= set(row) for row in rows):
                return found
    raise ConfigError("merge", path, f"reports of `bench kernels` with the keys {', '.join(sorted(wanted))}")
