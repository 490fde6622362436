"""Plans compared in the steady state of workloads, in one process: full steps of the engine's executor, back
to back.

  python -m jaxflow.bench plans --model llama-3.1-8b --load_format dummy --plans plans/
      --workloads 1024/512,512/512,512/1024
  python -m jaxflow.bench plans --model llama-3.1-8b --load_format dummy --graphs xla,whole
      --workloads 64x1100,256x1100

A workload is prompt/output tokens, or decodes x keys. Its average step (NanoFlow §3.1) runs with random
weights, pages and tokens. The sequential plan runs for every step size that a plan has, and for every size in
--tokens. Plans take turns, so that clock and temperature are the same for all. Each plan is measured for
--seconds. --graphs runs every plan once with each launch method.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from tqdm import tqdm

from jaxflow.bench.engine.serve import find_model_config
from jaxflow.bench.plans.bed import USUAL, Bed, bed_of_flags
from jaxflow.bench.plans.steady import (
    StepWorkload,
    parse_workload,
)
from jaxflow.bench.report import machine, optimum
from jaxflow.bench.report.requests import write_json
from jaxflow.bench.workload import flags as options
from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.engine.step_plans import products_dtype
from jaxflow.model.composition import Composition
from jaxflow.pipeline.choice import Gain, between, is_sequential
from jaxflow.pipeline.plan import Plan, digest
from jaxflow.pipeline.streams import GRAPHS
from pallas_kernels.measure.timing import Timing, interleaved


def define_flags() -> None:
    options.define_bed()
    flags.DEFINE_list(
        "workloads", ["1024/512"], "Workloads: prompt/output tokens (1024/512), or decodes x keys (256x1100)."
    )
    flags.DEFINE_list(
        "graphs",
        [USUAL],
        f"Launch methods of the kernels: {USUAL}, {', '.join(GRAPHS)}. Every plan runs with each.",
    )
    flags.DEFINE_float(
        "seconds",
        6.0,
        "Seconds to measure each plan on each workload, divided into three windows.",
        lower_bound=0.0,
    )
    flags.DEFINE_float(
        "max_minutes",
        8.0,
        "Minutes after which no further workload starts, including compilation.",
        lower_bound=0.0,
    )


def measure(bed: Bed, workload: StepWorkload, seconds: float) -> list[dict[str, Any]]:
    """Return one row per plan."""
    ready = bed.ready(workload)
    timings = interleaved(
        {name: steady.enqueue for name, (steady, _) in ready.items()},
        seconds=seconds,
        cards=bed.config.tensor_parallel_size,
    )
    return rows(
        bed.config,
        bed.model,
        workload,
        [(bed.variants[name], name, ready[name][1], timings[name]) for name in ready],
    )


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError, PlanError, CheckpointError."""
    f, begun = flags.FLAGS, time.monotonic()
    workloads = [parse_workload(text) for text in f.workloads]
    if not workloads:
        raise ConfigError(
            "workloads", "", "one or more comma-separated workloads, for example 1024/512,256x1100"
        )
    bed = bed_of_flags(workloads, f.graphs)
    made_s = time.monotonic() - begun
    found: list[dict[str, Any]] = []
    left_out: list[str] = []

    def result() -> dict[str, Any]:
        return {
            "command_name": "plans",
            "model": Path(bed.config.model).name,
            "num_layers": bed.model.num_layers,
            "engine_config": dataclasses.asdict(bed.config),
            "kv_pages": list(bed.executor.num_pages),
            "made_s": made_s,
            "measured_s": time.monotonic() - begun - made_s,
            "plans": found,
            "left_out": left_out,
            **summary(found),
            **machine.describe(),
        }

    for workload in tqdm(workloads, unit="workload", disable=not sys.stderr.isatty()):
        if time.monotonic() - begun > 60 * f.max_minutes:
            left_out.append(workload.name)
            continue
        found += measure(bed, workload, f.seconds)
        if f.output_json:  # keeps the measurements if a later workload fails
            write_json(f.output_json, result())
    print(text(result()))
    return result()


Measured = tuple[
    tuple[Plan, str | None], str, Composition, Timing
]  # (plan, graphs), name, the step, its time


def rows(
    config: EngineConfig, model: ModelConfig, workload: StepWorkload, measured: Sequence[Measured]
) -> list[dict[str, Any]]:
    """Return a row for each plan, with ratios to the sequential plan of the same size and to the best
    sequential plan.

    config: resolved.
    """
    tp = config.tensor_parallel_size
    rates = [step.tokens / timing.us * 1e6 for _, _, step, timing in measured]
    alone = [rate for rate, ((plan, _), *_) in zip(rates, measured, strict=True) if is_sequential(plan)]
    predicted = {plan.tokens: plan for (plan, _), *_ in measured if plan.predictions is not None}
    found = []
    for rate, ((plan, graphs), name, step, timing) in zip(rates, measured, strict=True):
        same = [
            r
            for r, ((p, _), *_) in zip(rates, measured, strict=True)
            if is_sequential(p) and p.tokens == plan.tokens
        ]
        row = {
            "workload": workload.name,
            "plan": name,
            "digest": digest(plan),
            "graphs": graphs,
            "tokens": plan.tokens,
            "sequential": is_sequential(plan),
            "decode_tokens": int(step.decode_tokens),
            "prefill_tokens": int(step.chunk_tokens),
            "mean_context_tokens": step.decode_keys,
            "step_ms": timing.us / 1e3,
            "spread": timing.spread,
            "tokens_per_s": rate,
            "watts": timing.watts,
            "sm_clock_mhz": timing.mhz,
            "cards": tp,
            "joules_per_token": None if timing.joules is None else timing.joules / step.tokens,
            "against_sequential_of_its_size": rate / max(same),
            "against_best_sequential": rate / max(alone),
        }
        row |= _prediction(plan, predicted, model, step, timing)
        row |= _optimum(config, model, step, tp, rate)
        found.append(row)
    return found


def _prediction(
    plan: Plan, by_tokens: Mapping[int, Plan], model: ModelConfig, step: Composition, timing: Timing
) -> dict[str, Any]:
    """Return the predicted time of the plan at this composition. A truncated model has no prediction.

    The sequential plan's prediction comes from the other plans of its size.
    """
    source = by_tokens.get(plan.tokens) if is_sequential(plan) else plan
    if source is None or source.predictions is None:
        return {"predicted_ms": None, "prediction_error": None, "predicted_gain": None, "sure_gain": None}
    p = source.predictions
    table = p.sequential_s if is_sequential(plan) else p.step_s
    predicted_ms = 1e3 * between(
        p.decode_tokens, p.mean_context_tokens, table, step.decode_tokens, step.decode_keys
    )
    of = find_model_config(source.target.model) if source.target else None
    whole = of is None or of.num_layers == model.num_layers
    gain = Gain((0,), (0,), ((1.0,),)) if is_sequential(plan) else Gain.of(p)
    return {
        "predicted_ms": predicted_ms if whole else None,
        "prediction_error": predicted_ms / (timing.us / 1e3) - 1 if whole else None,
        "predicted_gain": gain.at(step.decode_tokens, step.decode_keys),
        "sure_gain": gain.sure(step.decode_tokens, step.decode_keys),
    }


def _optimum(
    config: EngineConfig, model: ModelConfig, step: Composition, tp: int, rate: float
) -> dict[str, Any]:
    """Return the fractions of Eq. 5 (all devices together) and of the four-resource bound, and the limiting
    resource."""
    dtype = products_dtype(config)
    best = optimum.optimal(model, step.chunk_tokens, step.decode_tokens, dtype=dtype, tp=tp)
    reached = rate / best["optimal_token_throughput"]
    return {"fraction_of_optimal": reached} | optimum.of_step(
        model, dataclasses.asdict(config), jax.devices()[0].device_kind, step, rate
    )


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean prediction error, and the engine's choice for each workload and step size.

    The choice is among the plans with predictions. The summary compares it with the best plan of the same
    size, and with the best plan of any size, by tokens per second without padding.
    """
    errors = [abs(row["prediction_error"]) for row in found if row["prediction_error"] is not None]
    picks = []
    for workload, tokens in dict.fromkeys((row["workload"], row["tokens"]) for row in found):
        every = [row for row in found if row["workload"] == workload]
        here = [row for row in every if row["tokens"] == tokens]
        compared = [row for row in here if row["sure_gain"] is not None]
        if len(compared) > 1:
            picked = max(compared, key=lambda row: row["sure_gain"])
            best, of_any = (max(rows, key=lambda row: row["tokens_per_s"]) for rows in (here, every))
            picks.append(
                {
                    "workload": workload,
                    "tokens": tokens,
                    "picked": picked["plan"],
                    "best": best["plan"],
                    "picked_to_best": picked["tokens_per_s"] / best["tokens_per_s"],
                    "best_of_any_size": of_any["plan"],
                    "picked_to_best_of_any_size": picked["tokens_per_s"] / of_any["tokens_per_s"],
                }
            )
    return {"mean_prediction_error": statistics.mean(errors) if errors else None, "picks": picks}


def text(result: Mapping[str, Any]) -> str:
    """Return the report as text."""
    lines = [" Plans, in the Steady State ".center(132, "=")]
    for workload in dict.fromkeys(row["workload"] for row in result["plans"]):
        here = [row for row in result["plans"] if row["workload"] == workload]
        one = here[0]
        shape = (
            f"{one['decode_tokens']} decodes of {one['mean_context_tokens']:.0f} keys, "
            f"{one['prefill_tokens']} prefill tokens"
        )
        lines += [f" {workload}: {shape} ".center(132, "-"), _HEAD]
        lines += [_line(row) for row in here]
    if result["mean_prediction_error"] is not None:
        lines.append(f"The mean error of predicted step times is {result['mean_prediction_error']:.1%}.")
    for pick in result["picks"]:
        where = f"{pick['workload']}, {pick['tokens']} tokens"
        said = (
            f"{where}: the engine picks {pick['picked']!r}, with {pick['picked_to_best']:.3f} of the rate "
            f"of the best, {pick['best']!r}"
        )
        if pick["best_of_any_size"] != pick["best"]:
            said += (
                f", and {pick['picked_to_best_of_any_size']:.3f} of the best of any size, "
                f"{pick['best_of_any_size']!r}"
            )
        lines.append(f"{said}.")
    if result["left_out"]:
        lines.append(f"Left out by the time limit: {', '.join(result['left_out'])}")
    took = f"Made in {result['made_s']:.0f} s, measured in {result['measured_s']:.0f} s"
    lines.append(f"{took}, on {result['num_devices']} x {result['device']}")
    return "\n".join([*lines, f"Command: {result['command']}", "=" * 132])


_HEAD = (
    f"{'plan':<52}{'ms':>9}{'tok/s':>9}{'/same':>7}{'/best':>7}{'predicted':>11}{'error':>8}{'Eq. 5':>7}"
    f"{'bound':>7}{'watts':>7}{'MHz':>7}"
)


def _line(row: Mapping[str, Any]) -> str:
    def cell(value: float | None, form: str, width: int) -> str:
        return f"{'-' if value is None else format(value, form):>{width}}"

    return (
        f"{row['plan'][:51]:<52}{row['step_ms']:>9.3f}{row['tokens_per_s']:>9.0f}"
        f"{row['against_sequential_of_its_size']:>7.3f}{row['against_best_sequential']:>7.3f}"
        + cell(row["predicted_ms"], ".3f", 11)
        + cell(row["prediction_error"], "+.1%", 8)
        + cell(row["fraction_of_optimal"], ".1%", 7)
        + cell(row["fraction_of_bound"], ".1%", 7)
        + cell(row["watts"], ".0f", 7)
        + cell(row["sm_clock_mhz"], ".0f", 7)
    )
