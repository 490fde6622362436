"""Puts what a plan gained where it was measured in place of what it was predicted to gain there.

  python -m jaxflow.bench plans --model llama-3.1-8b --plans plans --workloads 1024/512,512/1024 --output_json report.json
  python -m search correct --plan plans/1024-512.json --report report.json --out corrected.json

A prediction that is off is off alike for steps that are alike: a plan's predicted gains over the sequential step are multiplied by the
geometric mean of measured over predicted gain of the report's workloads. Their `margin` becomes the most that a corrected gain is above
a measured one, and the spread of the measurements. The engine then runs the plan for steps like those where it was seen to gain.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from absl import flags

from jaxflow.config import ConfigError
from jaxflow.pipeline.choice import Gain
from jaxflow.pipeline.plan import Plan, load, save


class Point(msgspec.Struct, frozen=True):
    """A composition at which a plan was measured in turn with the sequential one: how many times faster it was, and the spread of that."""

    decode_tokens: int
    mean_context_tokens: float
    gain: float
    spread: float


def define_flags() -> None:
    flags.DEFINE_string("plan", None, "A plan's file.")
    flags.DEFINE_list("report", [], "Reports of `bench plans` in which it is.")
    flags.DEFINE_string("out", None, "The file for the plan as corrected.")


def run() -> None:
    """The command."""
    f = flags.FLAGS
    for name in ("plan", "report", "out"):
        if not getattr(f, name):
            raise ConfigError(name, getattr(f, name), "a file")
    plan = load(f.plan)
    found = [point for path in f.report for point in points(plan, json.loads(Path(path).read_text("utf-8")))]
    if not found:
        raise ConfigError(
            "report", ",".join(f.report), f"a report of plan {plan.name!r} for {plan.tokens} tokens beside the sequential one"
        )
    made = corrected(plan, found)
    save(made, f.out)
    assert plan.predictions is not None and made.predictions is not None
    before, after = Gain.of(plan.predictions), Gain.of(made.predictions)
    for point in found:
        at = point.decode_tokens, point.mean_context_tokens
        said = f"measured {point.gain:.3f}, predicted {before.at(*at):.3f}, corrected {after.at(*at):.3f}, sure {after.sure(*at):.3f}"
        print(f"{point.decode_tokens} decodes of {point.mean_context_tokens:.0f} keys: {said}")
    print(f"{f.out}: margin {made.predictions.margin:.3f}")


def points(plan: Plan, report: Mapping[str, Any]) -> list[Point]:
    """Where a report of `bench plans` has a plan and the sequential one of its tokens, both launched as usual."""
    rows: Sequence[Mapping[str, Any]] = [
        row for row in report["plans"] if row["tokens"] == plan.tokens and row["graphs"] in (None, "usual")
    ]
    alone = {row["workload"]: row for row in rows if row["sequential"]}
    mine = (row for row in rows if row["plan"].startswith(f"{plan.name}, ") and row["workload"] in alone)
    return [
        Point(
            row["decode_tokens"],
            row["mean_context_tokens"],
            alone[row["workload"]]["step_ms"] / row["step_ms"],
            row["spread"] + alone[row["workload"]]["spread"],
        )
        for row in mine
    ]


def corrected(plan: Plan, measured: Iterable[Point]) -> Plan:
    """The plan with its predictions brought to what was measured. Raises: ConfigError for a plan without predictions."""
    if plan.predictions is None:
        raise ConfigError("plan", plan.name, "a plan with predictions, as `search plan` writes it")
    measured, before = tuple(measured), Gain.of(plan.predictions)
    ratios = [point.gain / before.at(point.decode_tokens, point.mean_context_tokens) for point in measured]
    factor = math.exp(sum(map(math.log, ratios)) / len(ratios))
    too_good = max(factor / ratio - 1 for ratio in ratios)
    margin = max(0.0, too_good) + max(point.spread for point in measured)
    steps = tuple(tuple(seconds / factor for seconds in row) for row in plan.predictions.step_s)
    return msgspec.structs.replace(plan, predictions=msgspec.structs.replace(plan.predictions, step_s=steps, margin=margin))
