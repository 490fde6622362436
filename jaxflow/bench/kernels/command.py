"""Each kernel and its rivals on one GPU: rates, clock, watts and joules, measured in turn in one run.

  python -m jaxflow.bench kernels --output_json benchmarks/h200-kernels.json
  python -m jaxflow.bench kernels --time_limit_s 300 --seconds 0.3
  python -m jaxflow.bench kernels --only ceilings,decode_attention
  python -m jaxflow.bench kernels --only 'dense_gemm/M 2048'
  python -m jaxflow.bench kernels --share 0/4 --output_json 0.json
  python -m jaxflow.bench kernels --merge 0.json,1.json --output_json FILE

`--share 0/4` runs every fourth case, so that several GPUs can divide the cases. `--merge` combines several
reports and measures nothing.

The two ceilings run first: the bandwidth of a copy and a read, and the rate of cuBLAS. Each kernel's cases
(`kernels_*.py`) use random data. Our kernel and its rivals take turns, each with `--seconds` of back-to-back
work. Weights and caches rotate through more memory than the L2 holds. A ratio above 1 means that our kernel
is faster. The report holds the target of each case, and marks a case below its target as `missed`.

The first case of every group runs first, then every second case, and so on. Groups are ordered by their
kernels' share of the time per served token. Several processes compile the next cases in parallel. Then each
process times its cases while no process compiles. XLA's products use cuBLAS unless XLA_FLAGS has
--xla_gpu_enable_triton_gemm. A time that is impossible for the GPU makes a failed row. The report names the
cases that exceed --time_limit_s, which includes compilation. The report file is written after every case.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from absl import flags
from tqdm import tqdm

from jaxflow.bench.kernels import attention as kernels_attention
from jaxflow.bench.kernels import gemm as kernels_gemm
from jaxflow.bench.kernels import memory_bound as kernels_other
from jaxflow.bench.kernels import sampling as kernels_sampling
from jaxflow.bench.kernels import step as kernels_step
from jaxflow.bench.kernels.case import Case, Group
from jaxflow.bench.kernels.pool import Worker, environment, measured, rounds
from jaxflow.bench.kernels.report import merged, summaries, text
from jaxflow.bench.report import machine
from jaxflow.bench.report.requests import write_json
from pallas_kernels.measure.script import parse_share

_ALL = (
    kernels_other.CEILINGS,
    kernels_attention.GROUPS,
    kernels_gemm.GROUPS,
    kernels_other.GROUPS,
    kernels_sampling.GROUPS,
)
_FIRST = (
    "ceilings",
    "ceiling_gemm",
    "decode_attention",
    "dense_gemm",
    "fp8_gemm",
    "decode_attention_fp8",
    "chunk_attention",
    "flat_gemm",
)
_FIRST += (
    "fp8_flat_gemm",
    "decode_step_bf16",
    "decode_step_fp8",
    "layer_bf16",
    "layer_fp8",
    "chunk_attention_fp8",
    "rope_append",
    "add_norm",
)


def _by_importance(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Return the groups that dominate the time per served token, followed by the others in their given order."""
    return tuple(
        sorted(groups, key=lambda group: _FIRST.index(group.name) if group.name in _FIRST else len(_FIRST))
    )


GROUPS: tuple[Group, ...] = _by_importance(
    group for groups in (*_ALL, kernels_step.GROUPS) for group in groups
)


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


def chosen(only: Iterable[str]) -> list[tuple[Group, Case]]:
    """Return the cases that `--only` names: the first case of each group, then the second, and so on.

    Without names, return all cases except those of groups that run on request only.

    Raises: ValueError for a name without a case.
    """
    most = max(len(group.cases) for group in GROUPS)
    every = [(group, group.cases[i]) for i in range(most) for group in GROUPS if i < len(group.cases)]
    wanted = [item.partition("/") for item in only]
    for name, _, part in wanted:
        if not any(group.name == name and part in case.name for group, case in every):
            raise ValueError(
                f"--only {name}/{part}: no such case; accepted groups: "
                f"{', '.join(group.name for group in GROUPS)}"
            )
    if not wanted:
        return [(group, case) for group, case in every if not group.asked]
    return [
        (group, case)
        for group, case in every
        if any(group.name == name and part in case.name for name, _, part in wanted)
    ]


def shared(cases: Sequence[tuple[Group, Case]], share: str) -> list[tuple[Group, Case]]:
    """Return share `i/n` of the cases, keeping related cases in one share.

    Raises: ValueError for an invalid share.
    """
    first, step = parse_share(share)
    units = list(
        dict.fromkeys(group.name if group.together else (group.name, case.name) for group, case in cases)
    )
    mine = set(units[first::step])
    return [(group, case) for group, case in cases if {group.name, (group.name, case.name)} & mine]


def run() -> dict[str, Any]:
    """Run the command and return its report.

    Raises: ValueError without a GPU, for an unknown name in --only, for an invalid share, and for merged
    reports of two devices.
    """
    f = flags.FLAGS
    if f.merge:
        return told(merged(f.merge, GROUPS))
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
    return told(result)


def told(result: dict[str, Any]) -> dict[str, Any]:
    """Print the summaries of a report and return the report."""
    for s in result["summaries"]:
        print(
            f"{s['group']}: x{s['geomean']:.3f} of {s['rival']} (geomean of {s['cases']}), least "
            f"x{s['least']:.3f}"
        )
    return result
