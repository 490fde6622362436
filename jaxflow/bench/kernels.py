"""Each kernel beside its rivals on one GPU: rates, clock, watts and joules, measured in turn in one run.

  python -m jaxflow.bench kernels --output_json benchmarks/h200-kernels.json
  python -m jaxflow.bench kernels --time_limit_s 300 --seconds 0.3
  python -m jaxflow.bench kernels --only ceilings,decode_attention
  python -m jaxflow.bench kernels --only 'dense_gemm/M 2048'
  python -m jaxflow.bench kernels --share 0/4 --output_json 0.json         every fourth case, for a GPU of its
  own each python -m jaxflow.bench kernels --merge 0.json,1.json --output_json FILE   one report of several;
  measures nothing

Two ceilings come first: what a copy and a read move, and what cuBLAS multiplies. Then each kernel's cases
(`kernels_*.py`): random data, the rivals in turn with ours, `--seconds` of back-to-back work each, weights
and caches rotated past the L2. A ratio above 1 means that ours is faster. What a case must reach stands
beside it; one that does not is marked `missed`.

The first case of every group comes first, groups by how much of a served token's time their kernels take;
then every second case, and so on. Several processes compile the next cases beside each other, then each times
its own with nobody compiling. XLA's products are cuBLAS' unless XLA_FLAGS has --xla_gpu_enable_triton_gemm. A
time that the card cannot have met makes a failed row. What does not fit --time_limit_s, compilation included,
is left out and named. The file is written after every case.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from absl import flags
from tqdm import tqdm

from jaxflow.bench import (
    kernels_attention,
    kernels_gemm,
    kernels_other,
    kernels_sampling,
    kernels_step,
    machine,
)
from jaxflow.bench.kernels_case import Case, Group
from jaxflow.bench.kernels_pool import Worker, environment, measured, rounds
from jaxflow.bench.kernels_report import merged, summaries, text
from jaxflow.bench.report import write_json
from pallas_kernels.checks.script import parse_share

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
    """Those that a served token's time goes into, then the others as they come."""
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
        "Names of groups ("
        + ", ".join(group.name for group in GROUPS)
        + "), or group/part of a case's name.",
    )
    flags.DEFINE_float("seconds", 0.6, "How long each way is measured.", lower_bound=0.0)
    flags.DEFINE_float(
        "time_limit_s",
        None,
        "Leave out what would end later than this many seconds after the start.",
        lower_bound=0.0,
    )
    flags.DEFINE_string("output_json", None, "Write the report to this file.")
    flags.DEFINE_string(
        "share", "0/1", "i/n: every n-th case from the i-th on; cases of one model stay together."
    )
    flags.DEFINE_list("merge", [], "Only make one report of these, of several shares.")
    flags.DEFINE_integer(
        "processes",
        None,
        "That compile beside each other; default: one for two cores, 8 at most.",
        lower_bound=1,
    )


def chosen(only: Iterable[str]) -> list[tuple[Group, Case]]:
    """The cases that `--only` names, all but those of groups that want asking if it names none: the first of
    each group, then the second.

    Raises: ValueError for a name that no case has.
    """
    most = max(len(group.cases) for group in GROUPS)
    every = [(group, group.cases[i]) for i in range(most) for group in GROUPS if i < len(group.cases)]
    wanted = [item.partition("/") for item in only]
    for name, _, part in wanted:
        if not any(group.name == name and part in case.name for group, case in every):
            raise ValueError(
                f"--only {name}/{part}: no such case; groups are {', '.join(group.name for group in GROUPS)}"
            )
    if not wanted:
        return [(group, case) for group, case in every if not group.asked]
    return [
        (group, case)
        for group, case in every
        if any(group.name == name and part in case.name for name, _, part in wanted)
    ]


def shared(cases: Sequence[tuple[Group, Case]], share: str) -> list[tuple[Group, Case]]:
    """A share `i/n` of the cases; those that belong together are in one share. Raises: ValueError for what is
    none.
    """
    first, step = parse_share(share)
    units = list(
        dict.fromkeys(group.name if group.together else (group.name, case.name) for group, case in cases)
    )
    mine = set(units[first::step])
    return [(group, case) for group, case in cases if {group.name, (group.name, case.name)} & mine]


def run() -> dict[str, Any]:
    """The command.

    Raises: ValueError where there is no GPU, for a name in --only that nothing has, for what is no share, and
    for reports of two devices.
    """
    f = flags.FLAGS
    if f.merge:
        return told(merged(f.merge, GROUPS))
    cases = shared(chosen(f.only), f.share)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the memory is the workers'
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
                if f.output_json:  # what is measured is kept, whatever comes next
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
    """The report, its summaries said."""
    for s in result["summaries"]:
        print(
            f"{s['group']}: x{s['geomean']:.3f} of {s['rival']} (geomean of {s['cases']}), least "
            f"x{s['least']:.3f}"
        )
    return result
