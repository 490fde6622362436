"""Puts what a plan gained where it was measured in place of what it was predicted to gain there.

  python -m jaxflow.bench plans --model llama-3.1-8b --plans plans --workloads 1024/512,512/1024 --output_json report.json
  python -m search correct --plan plans/1024-512.json --report report.json --out corrected.json

A plan without predictions, or with --measured_alone any, gets what was measured in their place: between two measured compositions the
engine takes what lies between, beyond them the nearest; and it is offered to the model, device, parallelism and dtypes of the report
(--model: to another model of the same shapes). Of a plan with predictions:

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

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.plans import SHAPES, products_dtype
from jaxflow.model.checkpoint import open_checkpoint
from jaxflow.pipeline.choice import Gain
from jaxflow.pipeline.plan import Plan, Predictions, Target, load, save

# What a gain may differ by after another start of the machine (docs/overlap.md): overlap with attention gained 1.029, then 1.003; sums
# over two devices that products hide, or that are only shorter, 1.057 and 1.066, then 1.049 and 1.058.
_ANOTHER_START = {"kernels": 0.03, "copies": 0.01}


class Point(msgspec.Struct, frozen=True):
    """A composition at which a plan was measured in turn with the sequential one: how many times faster it was, and the spread of that.

    sequential_s: of the sequential step.
    """

    decode_tokens: int
    mean_context_tokens: float
    gain: float
    spread: float
    sequential_s: float = 1.0


def define_flags() -> None:
    flags.DEFINE_string("plan", None, "A plan's file.")
    flags.DEFINE_list("report", [], "Reports of `bench plans` in which it is.")
    flags.DEFINE_string("model", None, "The model that a plan without predictions is offered to; default: the report's.")
    flags.DEFINE_boolean("measured_alone", False, "Leave out what was predicted.")
    flags.DEFINE_string("out", None, "The file for the plan as corrected.")


def run() -> None:
    """The command."""
    f = flags.FLAGS
    for name in ("plan", "report", "out"):
        if not getattr(f, name):
            raise ConfigError(name, getattr(f, name), "a file")
    plan = load(f.plan)
    if f.measured_alone:
        plan = msgspec.structs.replace(plan, predictions=None)
    reports = [json.loads(Path(path).read_text("utf-8")) for path in f.report]
    found = [point for report in reports for point in points(plan, report)]
    if not found:
        raise ConfigError(
            "report", ",".join(f.report), f"a report of plan {plan.name!r} for {plan.tokens} tokens beside the sequential one"
        )
    made = corrected(plan, found) if plan.predictions else as_measured(plan, found, target(reports[0], f.model, found))
    save(made, f.out)
    assert made.predictions is not None
    after = Gain.of(made.predictions)
    for point in found:
        at = point.decode_tokens, point.mean_context_tokens
        before = f"{Gain.of(plan.predictions).at(*at):.3f}" if plan.predictions else "nothing"
        said = f"measured {point.gain:.3f}, predicted {before}, corrected {after.at(*at):.3f}, sure {after.sure(*at):.3f}"
        print(f"{point.decode_tokens} decodes of {point.mean_context_tokens:.0f} keys: {said}")
    print(f"{f.out}: margin {made.predictions.margin:.3f}")


def points(plan: Plan, report: Mapping[str, Any]) -> list[Point]:
    """Where a report of `bench plans` has a plan and the sequential one of its tokens, both launched as usual."""
    rows: Sequence[Mapping[str, Any]] = [
        row for row in report["plans"] if row["tokens"] == plan.tokens and row["graphs"] in (None, "usual")
    ]
    alone = {row["workload"]: row for row in rows if row["sequential"]}
    name = f"{plan.name}, {plan.tokens} tokens"
    mine = (row for row in rows if row["plan"].partition(" [")[0] == name and row["workload"] in alone)
    return [
        Point(
            row["decode_tokens"],
            row["mean_context_tokens"],
            alone[row["workload"]]["step_ms"] / row["step_ms"],
            row["spread"] + alone[row["workload"]]["spread"],
            alone[row["workload"]]["step_ms"] / 1e3,
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


def as_measured(plan: Plan, measured: Iterable[Point], offered: Target) -> Plan:
    """The plan with a table of what was measured: at a composition that was not, the measured one of the nearest contexts.

    Its margin is the most that the measurements spread, and what such a gain differed by after another start of the machine.
    """
    points = tuple(measured)
    decodes, contexts = sorted({p.decode_tokens for p in points}), sorted({round(p.mean_context_tokens) for p in points})

    def nearest(tokens: int, keys: int) -> Point:
        return min((p for p in points if p.decode_tokens == tokens), key=lambda p: abs(p.mean_context_tokens - keys))

    grid = [[nearest(tokens, keys) for keys in contexts] for tokens in decodes]
    predictions = Predictions(
        tuple(decodes),
        tuple(contexts),
        tuple(tuple(p.sequential_s / p.gain for p in row) for row in grid),
        tuple(tuple(p.sequential_s for p in row) for row in grid),
        margin=max(p.spread for p in points) + _ANOTHER_START[plan.sums],
    )
    return msgspec.structs.replace(plan, predictions=predictions, target=offered)


def target(report: Mapping[str, Any], model: str | None, measured: Sequence[Point]) -> Target:
    """What a plan measured in a report is offered to; of compositions, the one with the most decodes.

    Raises: ConfigError for a model of other shapes than the report's.
    """
    config, most = EngineConfig(**report["engine_config"]), max(measured, key=lambda point: point.decode_tokens)
    if model is not None:
        theirs, ours = (open_checkpoint(name, load_format="dummy").model_config for name in (config.model, model))
        if different := [name for name in SHAPES if getattr(theirs, name) != getattr(ours, name)]:
            raise ConfigError("model", model, f"a model of {config.model}'s shapes: they differ in {', '.join(different)}")
    rows = [row for row in report["plans"] if row["decode_tokens"] == most.decode_tokens]
    return Target(
        model=Path(model or config.model).name,
        device=report["device"],
        tensor_parallel_size=config.tensor_parallel_size,
        dtype=products_dtype(config),
        kv_cache_dtype=config.kv_cache_dtype,
        decode_tokens=most.decode_tokens,
        prefill_tokens=rows[0]["prefill_tokens"],
        mean_context_tokens=round(most.mean_context_tokens),
    )
