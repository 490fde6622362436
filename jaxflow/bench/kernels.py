"""Each kernel beside its rivals on one GPU: rates, clock, watts and joules, measured in turn in one run.

  python -m jaxflow.bench kernels --output_json benchmarks/h200-kernels.json
  python -m jaxflow.bench kernels --only ceilings,decode_attention
  python -m jaxflow.bench kernels --only 'dense_gemm/M 2048'

Two ceilings come first: what a copy and a read move, and what cuBLAS multiplies. Then each kernel's cases (`kernels_*.py`): random data,
the rivals in turn with ours, at least half a second of back-to-back work each, weights and caches rotated past the L2. A ratio above 1
means that ours is faster. What a case must reach stands beside it; one that does not is marked `short`.
"""

import dataclasses
import gc
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from absl import flags
from tqdm import tqdm

from jaxflow.bench import kernels_attention, kernels_gemm, kernels_other, kernels_sampling, kernels_step, machine
from jaxflow.bench.kernels_case import Case, Group
from jaxflow.bench.report import write_json
from pallas_kernels.checks.timing import interleaved

GROUPS: tuple[Group, ...] = (
    *kernels_other.CEILINGS,
    *kernels_attention.GROUPS,
    *kernels_gemm.GROUPS,
    *kernels_other.GROUPS,
    *kernels_sampling.GROUPS,
    *kernels_step.GROUPS,
)


def define_flags() -> None:
    flags.DEFINE_list("only", [], "Names of groups (" + ", ".join(group.name for group in GROUPS) + "), or group/part of a case's name.")
    flags.DEFINE_float("seconds", 0.6, "How long each way is measured.", lower_bound=0.0)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")


def chosen(only: Iterable[str]) -> list[tuple[Group, Case]]:
    """The cases that `--only` names, all if it names none. Raises: ValueError for a name that no case has."""
    every = [(group, case) for group in GROUPS for case in group.cases]
    wanted = [item.partition("/") for item in only]
    for name, _, part in wanted:
        if not any(group.name == name and part in case.name for group, case in every):
            raise ValueError(f"--only {name}/{part}: no such case; groups are {', '.join(group.name for group in GROUPS)}")
    return [
        (group, case) for group, case in every if not wanted or any(group.name == name and part in case.name for name, _, part in wanted)
    ]


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
    result = {"command_name": "kernels", **machine.describe(), "seconds": f.seconds, "rows": rows}
    with tqdm(cases, unit="case", file=sys.stderr) as bar:
        for group, case in bar:
            bar.set_description(f"{group.name} {case.name}")
            try:
                rows.append(measure(group, case, f.seconds))
            except Exception as error:  # a rival that does not run, or a kernel: the other rows are still wanted
                rows.append({"group": group.name, "case": case.name, "failed": f"{type(error).__name__}: {error}"[:300]})
            for line in text(rows[-1]):
                bar.write(line, file=sys.stdout)
            sys.stdout.flush()
            if f.output_json:  # what is measured is kept, whatever comes next
                write_json(f.output_json, result | {"summaries": summaries(rows)})
            gc.collect()
    result["summaries"] = summaries(rows)
    for s in result["summaries"]:
        print(f"{s['group']}: x{s['geomean']:.3f} of {s['rival']} (geomean of {s['cases']}), least x{s['least']:.3f}")
    return result
