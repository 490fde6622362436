r"""SARATHI's study of pipeline parallelism (§5.3, Fig. 12), by simulation or on the engine's own stages.

  python -m jaxflow.bench pipeline --simulate --output_json study.json --plot study.png
  python -m jaxflow.bench pipeline --model llama-3.1-8b --load_format dummy --pipeline_parallel_size 2 \
      --tensor_parallel_size 1 --num_requests 200 --slots 32

Without --simulate the engine runs the requests on its stages under each policy, and measures the bubbles
(`jaxflow.bench.pipeline.engine`). The rest of this text is about the simulation.

GPT-3 175B on 64 A100: 8 pipeline stages of 8 tensor-parallel devices under five step policies,
and 8 replicas of 8 devices. The engine's scheduler decides each step, the cost model its time.
The paper's figures stand beside.

A stage takes --layer_us a layer in addition to the roofline of its ops: kernel launches and the latency of
collectives. A hand-over between two stages takes --link_us in addition to its bytes. The host takes --host_us
between two steps of a micro-batch. The defaults of the three are not measured. They were fitted to the
paper's ratios, so agreement with the ratios is a fit and no prediction.
--assumptions shows the ratios under other settings that the paper leaves open
(benchmarks/notes/pipelines.md). --devices 8,64 finds the best of tensor parallelism, stages and replicas for
other models and devices instead (`jaxflow.bench.pipeline.fleets`).
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from matplotlib.figure import Figure

from jaxflow.bench.pipeline import assumptions, engine, fleets
from jaxflow.bench.pipeline.scenarios import (
    COMPARED,
    PAPER,
    PROMPT_CHUNK,
    Study,
    ratios,
    run_all,
    scenarios,
    stage_layers,
)
from jaxflow.bench.pipeline.simulate import PipelineRun
from jaxflow.bench.pipeline.splits import DeviceSplit
from jaxflow.bench.pipeline.stage_time import StageLink
from jaxflow.bench.report import machine
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.start import prepare_process
from jaxflow.model.cost import DEVICES


def measure(
    study: Study, processes: int = 2, ratios_only: bool = False, also: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the report of all scenarios.

    Args:
      processes: scenarios that run at the same time.
      ratios_only: simulate only scenarios that the ratios need, and those of `also`.
    """
    needed = (*COMPARED, *also)
    names = [name for name in scenarios(study) if not ratios_only or name in needed]
    start_s = time.perf_counter()
    found = dict(zip(names, run_all([(study, name) for name in names], processes), strict=True))
    runs = {name: run for name, (run, _) in found.items()}
    return {
        "command_name": "pipeline",
        "study": dataclasses.asdict(study),
        "layers": list(stage_layers(study)),
        "simulated_in_s": time.perf_counter() - start_s,
        "simulation_cpu_s": {name: cpu_s for name, (_, cpu_s) in found.items()},
        "scenarios": {name: describe(run) for name, run in runs.items()},
        "ratios": ratios(runs),
        "ratios_prompt_chunk": ratios(runs, PROMPT_CHUNK),
        "paper": PAPER if study.is_papers else {},
    }


def describe(run: PipelineRun) -> dict[str, Any]:
    """Return the figures of a run, with the curves of Fig. 12 at 51 quantiles."""
    quantiles = np.linspace(0, 1, 51)
    return {
        "duration_s": run.duration_s,
        "token_throughput": run.tokens / run.duration_s,
        "busy_share": run.busy_share,
        "median_bubble_s": float(np.median(run.bubble_s)),
        "micro_batch_steps": run.steps,
        "bubble_s_quantiles": np.quantile(run.bubble_s, quantiles).tolist(),
        "finished_s_quantiles": np.quantile(run.finished_s, quantiles).tolist(),
    }


def text(report: Mapping[str, Any]) -> str:
    """Return the report as two tables."""
    lines = [f"{'scenario':28}{'seconds':>10}{'tokens/s':>12}{'busy':>8}{'median bubble, s':>18}"]
    for name, row in report["scenarios"].items():
        lines.append(
            f"{name:28}{row['duration_s']:10.0f}{row['token_throughput']:12,.0f}{row['busy_share']:8.0%}"
            f"{row['median_bubble_s']:18.2f}"
        )
    lines.append(f"\n{'ratio':40}{'step chunk':>12}{'prompt chunk':>14}{'paper':>8}")
    for name, value in report["ratios"].items():
        other = report["ratios_prompt_chunk"][name]
        paper = f"{report['paper'][name]:.2f}" if report["paper"] else "-"
        lines.append(f"{name:40}{value:12.2f}{other:14.2f}{paper:>8}")
    return "\n".join(lines)


def draw(report: Mapping[str, Any]) -> Figure:
    """Return the curves of Fig. 12: bubble time of the requests, and completed requests over time."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    share = np.linspace(0, 1, 51)
    for name, row in report["scenarios"].items():
        if row["median_bubble_s"] > 0:
            left.plot(np.maximum(row["bubble_s_quantiles"], 1e-3), share, label=name)
        right.plot(row["finished_s_quantiles"], share * report["study"]["requests"], label=name)
    left.set(xscale="log", xlabel="bubble time of a request (s)", ylabel="share of requests")
    right.set(xlabel="time (s)", ylabel="completed requests")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    return figure


def define_flags() -> None:
    """Define the flags of `bench pipeline`."""
    default, link = Study(), StageLink()
    flags.DEFINE_bool("simulate", False, "Simulate the study on virtual clocks; no device is needed.")
    flags.DEFINE_string("model", default.model, "Model: a shipped config's name, or a folder.")
    flags.DEFINE_enum("device", default.device, list(DEVICES), "Device of the cost model.")
    flags.DEFINE_integer("pipeline_parallel_size", default.stages, "Stages of the pipeline.", lower_bound=1)
    flags.DEFINE_integer("tensor_parallel_size", default.tp, "Devices of a stage.", lower_bound=1)
    flags.DEFINE_integer(
        "num_requests", default.requests, "Requests, all waiting from the start.", lower_bound=1
    )
    flags.DEFINE_integer("slots", default.slots, "Running sequences of a micro-batch.", lower_bound=1)
    flags.DEFINE_integer(
        "replica_slots", default.replica_slots, "Running sequences of a replica.", lower_bound=1
    )
    flags.DEFINE_integer("chunk_tokens", default.chunk, "Tokens of a step with chunks.", lower_bound=1)
    flags.DEFINE_float("layer_us", 1e6 * default.layer_s, "Microseconds of a layer beyond its roofline.", 0.0)
    flags.DEFINE_float("link_gb_s", link.bytes_per_s / 1e9, "Link between stages, GB/s a device.", 1e-3)
    flags.DEFINE_float("link_us", 1e6 * link.latency_s, "Latency of the link, microseconds.", 0.0)
    flags.DEFINE_float("host_us", 1e6 * default.host_s, "Microseconds of the host between two steps.", 0.0)
    flags.DEFINE_list(
        "request_tokens",
        [str(n) for n in default.lengths],
        "Least and most tokens of a request, prompt and output.",
    )
    flags.DEFINE_float("pd_ratio", default.pd_ratio, "Prompt tokens over output tokens.", 0.01)
    flags.DEFINE_enum(
        "load_format",
        "auto",
        ("auto", "dummy"),
        "Without --simulate: as for the engine, see bench throughput.",
    )
    flags.DEFINE_integer("repeats", 3, "Without --simulate: runs of each policy.", lower_bound=1)
    flags.DEFINE_list("policies", list(engine.POLICIES), "The policies to run; see --ratios_only.")
    flags.DEFINE_string(
        "step_sizes",
        None,
        "Without --simulate: token counts of the compiled steps. Default: the engine's sizes that the "
        "policies use.",
    )
    flags.DEFINE_string(
        "compilation_cache_dir", None, "Without --simulate: keep compiled programs in this folder."
    )
    fleet = fleets.FleetSetting()
    flags.DEFINE_list("devices", [], "Find the best layout of these numbers of devices; H200s by default.")
    flags.DEFINE_list(
        "layouts", ["auto"], "With --devices: layouts as TPxPP, TPxPP+ep, dpN or dpN+overlap, or auto."
    )
    flags.DEFINE_list(
        "fleet_models", list(fleet.models), "With --devices: models as MODEL:bf16, fp8 or fp8_all."
    )
    flags.DEFINE_integer(
        "fleet_steps", fleet.steps, "With --devices: steps of each micro-batch.", lower_bound=1
    )
    flags.DEFINE_bool(
        "ratios_only",
        False,
        "Simulate only the scenarios that the paper's ratios need, and those of --policies if it is given.",
    )
    flags.DEFINE_bool(
        "measured_rates",
        False,
        "Ops reach the measured rates of the device, not those of its datasheet. Steps keep the power cap.",
    )
    flags.DEFINE_bool("assumptions", False, "Simulate the study under each open assumption, and compare.")
    flags.DEFINE_integer("seed", default.seed, "Seed of the lengths.")
    flags.DEFINE_integer("processes", 2, "Scenarios that are simulated at the same time.", lower_bound=1)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")
    flags.DEFINE_string("plot", None, "Draw the chart into this file.")


def fleet_of_flags(f: flags.FlagValues) -> fleets.FleetSetting:
    """Return the fleet that the flags name. Flags of the study that are absent have the fleet's defaults.

    Raises:
      ConfigError: for devices and layouts that are no numbers, and as `fleets.Fleet`.
    """
    fleet = fleets.FleetSetting()
    try:
        devices = tuple(int(word) for word in f.devices)
    except ValueError:
        raise ConfigError("devices", ",".join(f.devices), "numbers of devices, as 8,64") from None
    names = f.layouts if f.layouts != ["auto"] else ()
    return fleets.FleetSetting(
        models=tuple(f.fleet_models),
        device=f.device if f["device"].present else fleet.device,
        devices=devices,
        layouts=tuple(DeviceSplit.parse(name) for name in names),
        chunk=f.chunk_tokens if f["chunk_tokens"].present else fleet.chunk,
        steps=f.fleet_steps,
        seed=f.seed,
    )


def run() -> dict[str, Any]:
    """Run the command and return its report.

    Raises:
      ConfigError: for flags that name no study.
    """
    f = flags.FLAGS
    if f.assumptions and (f.plot or not f.simulate or f.devices):
        raise ConfigError("assumptions", True, "False with --plot or --devices, and False without --simulate")
    if f.devices and not f.simulate:
        raise ConfigError("devices", ",".join(f.devices), "unset without --simulate")
    if not f.simulate and not f["model"].present:
        raise ConfigError("model", f.model, "one that --model names, or --simulate")
    try:
        low, high = (int(word) for word in f.request_tokens)
    except ValueError:
        low = high = 0
    if not 2 <= low <= high:
        raise ConfigError(
            "request_tokens", ",".join(f.request_tokens), "LEAST,MOST: two rising numbers from 2"
        )
    study = Study(
        model=f.model,
        device=f.device,
        stages=f.pipeline_parallel_size,
        tp=f.tensor_parallel_size,
        requests=f.num_requests,
        slots=f.slots,
        replica_slots=f.replica_slots,
        chunk=f.chunk_tokens,
        lengths=(low, high),
        pd_ratio=f.pd_ratio,
        layer_s=1e-6 * f.layer_us,
        host_s=1e-6 * f.host_us,
        measured=f.measured_rates,
        link=StageLink(1e9 * f.link_gb_s, 1e-6 * f.link_us),
        seed=f.seed,
    )
    if f.devices:
        report = machine.describe() | fleets.measure(fleet_of_flags(f), f.processes)
        print(fleets.text(report))
    elif f.assumptions:
        report = machine.describe() | assumptions.measure(study, f.processes)
        print(assumptions.text(report))
    elif f.simulate:
        also = f.policies if f["policies"].present else ()
        report = machine.describe() | measure(study, f.processes, f.ratios_only, also)
        print(text(report))
    else:
        config = EngineConfig(
            model=f.model,
            load_format=f.load_format,
            tensor_parallel_size=study.tp,
            pipeline_parallel_size=study.stages,
            step_sizes=f.step_sizes,
            compilation_cache_dir=f.compilation_cache_dir,
        )
        prepare_process(config)
        head = {"command_name": "pipeline", **machine.describe()}
        report = head | engine.measure(
            config,
            study.items(),
            slots=study.slots,
            chunk=study.chunk,
            repeats=f.repeats,
            policies=f.policies,
            seed=study.seed,
            keep=lambda result: machine.keep(f.output_json, head | result),
        )
        print(engine.text(report))
    if f.plot:
        Path(f.plot).parent.mkdir(parents=True, exist_ok=True)
        plot = fleets.draw if f.devices else draw if f.simulate else engine.draw
        plot(report).savefig(f.plot, dpi=130)
    return report
