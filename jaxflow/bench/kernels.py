"""Each kernel beside its rivals on one GPU: rates, clock, watts and joules, measured in turn in one run.

  python -m jaxflow.bench kernels --output_json benchmarks/h200-kernels.json
  python -m jaxflow.bench kernels --time_limit_s 300 --seconds 0.3
  python -m jaxflow.bench kernels --only ceilings,decode_attention
  python -m jaxflow.bench kernels --only 'dense_gemm/M 2048'

Two ceilings come first: what a copy and a read move, and what cuBLAS multiplies. Then each kernel's cases (`kernels_*.py`): random data,
the rivals in turn with ours, at least half a second of back-to-back work each, weights and caches rotated past the L2. A ratio above 1
means that ours is faster. What a case must reach stands beside it; one that does not is marked `short`.

The first case of every group comes first, groups by how much of a served token's time their kernels take; then every second case, and so
on. What does not fit --time_limit_s, compilation included, is left out and named. The file is written after every case.
"""

import dataclasses
import gc
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from absl import flags
from tqdm import tqdm

from jaxflow.bench import kernels_attention, kernels_gemm, kernels_other, kernels_sampling, kernels_step, machine
from jaxflow.bench.kernels_case import Case, Group
from jaxflow.bench.report import write_json
from pallas_kernels.checks.timing import interleaved

_ALL = (kernels_other.CEILINGS, kernels_attention.GROUPS, kernels_gemm.GROUPS, kernels_other.GROUPS, kernels_sampling.GROUPS)
_FIRST = ("ceilings", "ceiling_gemm", "decode_attention", "dense_gemm", "fp8_gemm", "decode_attention_fp8", "chunk_attention", "flat_gemm")
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
    return tuple(sorted(groups, key=lambda group: _FIRST.index(group.name) if group.name in _FIRST else len(_FIRST)))


GROUPS: tuple[Group, ...] = _by_importance(group for groups in (*_ALL, kernels_step.GROUPS) for group in groups)


def define_flags() -> None:
    flags.DEFINE_list("only", [], "Names of groups (" + ", ".join(group.name for group in GROUPS) + "), or group/part of a case's name.")
    flags.DEFINE_float("seconds", 0.6, "How long each way is measured.", lower_bound=0.0)
    flags.DEFINE_float("time_limit_s", None, "Leave out what would end later than this many seconds after the start.", lower_bound=0.0)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")


def chosen(only: Iterable[str]) -> list[tuple[Group, Case]]:
    """The cases that `--only` names, all if it names none: the first of each group, then the second. Raises: ValueError for a name that no
    case has."""
    most = max(len(group.cases) for group in GROUPS)
    every = [(group, group.cases[i]) for i in range(most) for group in GROUPS if i < len(group.cases)]
    wanted = [item.partition("/") for item in only]
    for name, _, part in wanted:
        if not any(group.name == name and part in case.name for group, case in every):
            raise ValueError(f"--only {name}/{part}: no such case; groups are {', '.join(group.name for group in GROUPS)}")
    return [
        (group, case) for group, case in every if not wanted or any(group.name == name and part in case.name for name, _, part in wanted)
    ]


def expected(group: str, took: Sequence[tuple[str, float]]) -> float:
    """Seconds that the next case of a group will take, by what (group, seconds) others took: its own median, else that of all."""
    own = [seconds for name, seconds in took if name == group] or [seconds for _, seconds in took]
    return statistics.median(own) if own else 0.0


def measure(group: Group, case: Case, seconds: float) -> dict[str, Any]:
    """One case's row: each way's rate, and ours against each rival."""
    ways = case.prepare()
    timings = interleaved({name: way.run for name, way in ways.items()}, calls={n: w.calls for n, w in ways.items()}, seconds=seconds)
    ours = next(iter(ways))
    row: dict[str, Any] = {"group": group.name, "case": case.name, "unit": group.unit, "ways": {}}
    for name, way in ways.items():
        row["ways"][name] = {"rate": way.amount / timings[name].us * 1e6} | dataclasses.asdict(timings[name])
    speed = {name: (way.amount if way.work is None else way.work) / timings[name].us for name, way in ways.items()}
    row["ratios"] = {name: speed[ours] / speed[name] for name in ways if name != ours}
    row["recorded_us"] = dict(case.recorded_us)
    row["must"] = {"rate": case.rate, "ratio": case.ratio}
    row["reached"] = reached(row)
    return row


def reached(row: dict[str, Any]) -> bool | None:
    """Whether ours reaches what the case must; None if it must nothing."""
    rate, ratio = row["must"]["rate"], row["must"]["ratio"]
    if rate is None and ratio is None:
        return None
    ours = next(iter(row["ways"].values()))["rate"]
    return (rate is None or ours >= rate) and (ratio is None or next(iter(row["ratios"].values())) >= ratio)


def summaries(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The geometric mean and the least of each group's ratios to its first rival, over its cases."""
    must = {group.name: group.geomean for group in GROUPS}
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
            "must": must[group],
        }
        for (group, rival), values in found.items()
    ]


def text(row: dict[str, Any]) -> Iterator[str]:
    """A row as lines: one a way."""
    lead = f"{row['group']:18} {row['case']:28}"
    if "failed" in row:
        yield f"{lead} failed: {row['failed']}"
        return
    for name, way in row["ways"].items():
        ratio = f"x{row['ratios'][name]:.3f}" if name in row["ratios"] else ""
        sensed = f"{way['mhz']:5.0f} MHz {way['watts']:4.0f} W {way['joules'] * 1e3:9.3f} mJ" if way["mhz"] else "too short to sense"
        yield (
            f"{lead:47} {name:16} {way['us']:10.1f} us {way['rate'] / _SCALE[row['unit']]:9.3f} {row['unit']:8} {ratio:7}"
            f" {sensed} ±{way['spread'] / 2:.1%}" + ("  short" if lead and row["reached"] is False else "")
        )
        lead = ""
    for name, us in row["recorded_us"].items():
        yield f"{'':47} {name:16} {us:10.1f} us, recorded"


_SCALE = {"TB/s": 1e12, "TFLOP/s": 1e12, "tok/s": 1.0}


def run() -> dict[str, Any]:
    """The command. Raises: ValueError where there is no GPU, or for a name in --only that nothing has."""
    f = flags.FLAGS
    cases = chosen(f.only)
    if jax.default_backend() != "gpu":
        raise ValueError(f"bench kernels needs a GPU: JAX's backend here is {jax.default_backend()!r}")
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    took: list[tuple[str, float]] = []
    result = {"command_name": "kernels", **machine.describe(), "seconds": f.seconds, "rows": rows, "left_out": left_out}
    start = time.monotonic()
    with tqdm(cases, unit="case", file=sys.stderr) as bar:
        for group, case in bar:
            bar.set_description(f"{group.name} {case.name}")
            began = time.monotonic()
            if f.time_limit_s is not None and began - start + expected(group.name, took) > f.time_limit_s:
                left_out.append(f"{group.name}/{case.name}")
                continue
            try:
                rows.append(measure(group, case, f.seconds))
            except Exception as error:  # a rival that does not run, or a kernel: the other rows are still wanted
                rows.append({"group": group.name, "case": case.name, "failed": f"{type(error).__name__}: {error}"[:300]})
            took.append((group.name, time.monotonic() - began))
            for line in text(rows[-1]):
                bar.write(line, file=sys.stdout)
            sys.stdout.flush()
            if f.output_json:  # what is measured is kept, whatever comes next
                write_json(f.output_json, result | {"summaries": summaries(rows)})
            gc.collect()
    if left_out:
        print(f"left out after {f.time_limit_s:g} s, {len(left_out)} of {len(cases)} cases: {', '.join(left_out)}")
    result["summaries"] = summaries(rows)
    if f.output_json:
        write_json(f.output_json, result)
    for s in result["summaries"]:
        print(f"{s['group']}: x{s['geomean']:.3f} of {s['rival']} (geomean of {s['cases']}), least x{s['least']:.3f}")
    return result
