"""The best of tensor parallelism, pipeline stages and replicas for a fleet of devices, by simulation.

  python -m jaxflow.bench pipeline --simulate --devices 8,64,256,1024 --layouts auto --output_json fleets.json

A layout TP x PP is simulated once, on virtual clocks under the engine's own step policy. D devices hold D / (TP * PP)
replicas of the layout. Replicas share nothing, so their rates add. A layout is dropped if the weights and the KV of
one full-length sequence for each micro-batch do not fit. Ops take the rates and the fixed times that were measured
on the device (`pallas_kernels.cards`), where measurements exist. TP stays within a server of 8 devices. The cost
model has no expert parallelism.
"""

import concurrent.futures
import dataclasses
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jaxflow.bench.pipeline.simulate import Layout, PipelineRun, simulate
from jaxflow.bench.pipeline.stage_time import COUNTS, Link, StageTimer, gemm_dtype
from jaxflow.bench.workload.lengths import Item
from jaxflow.config import ConfigError, ModelConfig
from jaxflow.config import Layer as LayerConfig
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES
from jaxflow.model.energy import Power, shipped_power
from jaxflow.model.graph import BFLOAT16, FP8, Graph, Widths, Work, model_graph, padded_vocabulary
from jaxflow.model.stage_split import split_layers
from jaxflow.scheduler.scheduler import DecodeMaximal
from pallas_kernels.cards import card_of

SERVER = 8  # devices of one server
MEMORY_SHARE = 0.9  # of a device's memory for weights and KV, as EngineConfig.gpu_memory_utilization
SLOT_RESERVE = 1.5  # slots over the mean number of decodes of a full step
SIZES_TP, SIZES_PP = (1, 2, 4, 8), (1, 2, 4, 8)
SCALE_OUT = Link(50e9, 20e-6)  # between servers: 400 Gb/s a device

# DeepSeek-V3's sizes with grouped attention in place of MLA: 672e9 weights, of which a token meets 37e9, and 576 KV
# elements a token and layer. A query-key pair has fewer FLOPs than in MLA with absorbed projections: 55,296 against
# 278,528 a layer. The shared expert is one of the 9 that a token meets.
DEEPSEEK_V3_LIKE = ModelConfig(
    "deepseek-v3-like",
    vocab_size=129_280,
    hidden_size=7168,
    num_heads=48,
    num_kv_heads=1,
    head_dim=288,
    intermediate_size=18_432,
    layers=(LayerConfig(),) * 3 + (LayerConfig(experts=True),) * 58,
    max_position=4096,
    num_experts=257,
    experts_per_token=9,
    expert_intermediate_size=2048,
)
FP8_ALL = Widths(weights=1.0, kv=2.0, wide_weights=1.0)  # DeepSeek-V3: e4m3 experts, 16-bit KV
WIDTHS = {
    "bf16": (BFLOAT16, "bfloat16"),
    "fp8": (FP8, "float8_e4m3fn"),
    "fp8_all": (FP8_ALL, "float8_e4m3fn"),
}
MODELS = ("llama-3-70b:bf16", "llama-3-70b:fp8", "deepseek-v3-like:fp8_all")


@dataclasses.dataclass(frozen=True)
class Fleet:
    """The setting of the comparison.

    Attributes:
      models: names as MODEL:WIDTHS, see `WIDTHS`.
      devices: numbers of devices. layouts: (TP, PP) of the layouts; empty for all of `SIZES_TP` and `SIZES_PP`.
      chunk: tokens of a step. steps: simulated steps of each micro-batch.
      lengths, pd_ratio: of the requests, as in `Study`; the lengths are uniform.
      scale_out: the link between stages of different servers.
    """

    models: tuple[str, ...] = MODELS
    device: str = "H200"
    devices: tuple[int, ...] = (8, 64, 256, 1024)
    layouts: tuple[tuple[int, int], ...] = ()
    chunk: int = 2048
    steps: int = 400
    lengths: tuple[int, int] = (1024, 4096)
    pd_ratio: float = 10.0
    scale_out: Link = SCALE_OUT
    seed: int = 0

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError("device", self.device, f"one of {', '.join(DEVICES)}")
        if not self.devices or min(self.devices) < 1:
            raise ConfigError("devices", list(self.devices), "positive numbers of devices")
        for model in self.models:
            if model.partition(":")[2] not in WIDTHS:
                raise ConfigError("models", model, f"MODEL:WIDTHS with widths {', '.join(WIDTHS)}")
        for tp, pp in self.layouts:
            if not (1 <= tp <= SERVER and pp >= 1):
                raise ConfigError("layouts", f"{tp}x{pp}", f"TPxPP with TP from 1 to {SERVER} and PP from 1")

    def cases(self) -> list[tuple[str, int, int]]:
        """Return each model with each layout that some number of devices can hold in full replicas."""
        layouts = self.layouts or [(tp, pp) for tp in SIZES_TP for pp in SIZES_PP]
        return [
            (model, tp, pp)
            for model in self.models
            for tp, pp in layouts
            if any(number % (tp * pp) == 0 for number in self.devices)
        ]

    def items(self, micro_batches: int) -> list[Item]:
        """Return the requests of one layout, enough for `steps` steps of each micro-batch."""
        low, high = self.lengths
        number = int(self.steps * self.chunk * micro_batches / (0.5 * (low + high)))
        totals = np.random.default_rng(self.seed).integers(low, high, max(4, number), endpoint=True)
        outputs = np.maximum(1, np.round(totals / (1 + self.pd_ratio))).astype(int)
        return [Item(int(t - d), int(d)) for t, d in zip(totals, outputs, strict=True)]


def model_of(name: str) -> ModelConfig:
    """Return the config of a model by the part of its name before the colon."""
    model = name.partition(":")[0]
    if model == DEEPSEEK_V3_LIKE.architecture:
        return DEEPSEEK_V3_LIKE
    return open_checkpoint(model, load_format="dummy").model_config


def sequences_that_fit(
    config: ModelConfig, layers: Sequence[int], tp: int, widths: Widths, memory_bytes: float, longest: int
) -> int:
    """Return the sequences of `longest` tokens whose KV fits beside the weights in every stage; 0 for none.

    layers: of each stage. memory_bytes: of one device, for weights and KV.
    """
    graph = model_graph(config, tp, widths)
    table = config.hidden_size * padded_vocabulary(config, tp) / tp * widths.wide_weights
    fits, first = [], 0
    for stage, number in enumerate(layers):
        ops = [op for layer in graph.layers[first : first + number] for op in layer]
        ops += graph.after if stage == len(layers) - 1 else ()
        weights = sum(each.weight_bytes for op in ops for what, each in op.demand if what == "step")
        weights += table if stage == 0 else 0.0
        kv = sum(
            each.kv_bytes
            for op in ops
            if op.name == "rope_append"
            for what, each in op.demand
            if what == "tokens"
        )
        fits.append(int(max(0.0, memory_bytes - weights) / (kv * longest)))
        first += number
    return min(fits)


def dynamic_joules(
    graph: Graph, counts: np.ndarray, power: Power, dtype: str, widths: Widths, config: ModelConfig
) -> float:
    """Return the joules above idle of the counted work on one of the tensor-parallel devices, over all stages.

    The clock is the highest. The network's joules are unknown and count as 0. counts: the sum over all steps.
    """
    mean_tokens = counts[1] / counts[0]
    total = 0.0
    for op, number in Counter(graph.ops()).items():
        work = sum((each * counts[COUNTS.index(what)] for what, each in op.demand), Work())
        if op.experts:
            unread = (1 - config.experts_per_token / config.num_experts) ** mean_tokens
            work = dataclasses.replace(work, weight_bytes=work.weight_bytes * (1 - unread))
        total += number * float(power.dynamic_j(work, gemm_dtype(op, dtype, widths)))
    return total


def run_layout(fleet: Fleet, model: str, tp: int, pp: int) -> dict[str, Any] | None:
    """Simulate one layout. Return its figures, or None if it does not fit."""
    config, (widths, dtype) = model_of(model), WIDTHS[model.partition(":")[2]]
    device, card = DEVICES[fleet.device], card_of(fleet.device)
    if config.num_heads % tp or pp > config.num_layers:
        return None
    layers = split_layers(config, pp, tp, device.rates, fleet.chunk)
    fit = sequences_that_fit(config, layers, tp, widths, MEMORY_SHARE * device.memory_bytes, fleet.lengths[1])
    items = fleet.items(pp)
    # More slots than a step's tokens keep busy are of no use, and a micro-batch would take the requests of the others.
    useful = math.ceil(SLOT_RESERVE * fleet.chunk / (1 + fleet.pd_ratio))
    slots = min(fit // pp, useful, max(1, len(items) // pp))
    if not slots:
        return None
    fixed = card.clock or {}
    timer = StageTimer(
        config,
        layers,
        tp,
        device.rates,
        widths=widths,
        dtype=dtype,
        kernel_s=fixed.get("kernel_s", 0.0),
        collective_s=fixed.get("collective_s", 0.0),
    )
    inside = Link(device.rates.network_bytes_per_s, fleet.scale_out.latency_s)
    run = simulate(
        items,
        Layout(1, pp, slots, fleet.chunk),
        DecodeMaximal,
        timer,
        None if pp == 1 else inside if tp * pp <= SERVER else fleet.scale_out,
        send_bytes=widths.activations * config.hidden_size / tp,
        host_s=fixed.get("step_s", 0.0) if pp == 1 else 0.0,
    )
    rate = steady_rate(run)
    return {
        "tp": tp,
        "pp": pp,
        "slots": slots,
        "tokens_per_s": rate,
        "tokens_per_s_per_device": rate / (tp * pp),
        "token_interval_s": run.duration_s * pp / run.steps,
        "busy_share": run.busy_share,
        "joules_per_token": _joules(run, rate, model_graph(config, tp, widths), tp, pp, model, fleet.device),
    }


def steady_rate(run: PipelineRun) -> float:
    """Return the tokens/s until the last request begins, prompt and output together.

    Once no request waits, the steps have fewer prompt tokens, and the rate is not that of a loaded deployment.
    If all requests begin at once, the rate is that of the full run.
    """
    if not run.last_start_s:
        return run.tokens / run.duration_s
    return run.tokens_until_last_start / run.last_start_s


def _joules(
    run: PipelineRun, rate: float, graph: Graph, tp: int, pp: int, model: str, device: str
) -> float | None:
    """Return the joules of a token, or None where the device's power constants are unknown.

    A busy device draws its cap at most.
    """
    power, (widths, dtype) = shipped_power(device), WIDTHS[model.partition(":")[2]]
    if power is None:
        return None
    dynamic = dynamic_joules(graph, run.counts, power, dtype, widths, model_of(model))
    limit = (power.cap_w - power.idle_w) * float(run.busy_s.sum())
    return tp * min(dynamic, limit) / run.tokens + power.idle_w * tp * pp / rate


def measure(fleet: Fleet, processes: int = 2) -> dict[str, Any]:
    """Return the figures of every layout, and the best layouts of each number of devices."""
    start_s = time.perf_counter()
    cases = fleet.cases()
    if processes == 1:
        found = [run_layout(fleet, *case) for case in cases]
    else:
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(processes, mp_context=spawn) as pool:
            found = list(pool.map(run_layout, [fleet] * len(cases), *zip(*cases, strict=True)))
    models: dict[str, Any] = {}
    for model in fleet.models:
        rows = [(row, tp, pp) for (name, tp, pp), row in zip(cases, found, strict=True) if name == model]
        fitting = [row for row, _, _ in rows if row]
        models[model] = {
            "layouts": fitting,
            "do_not_fit": [f"{tp}x{pp}" for row, tp, pp in rows if not row],
            "best": {str(number): best_of(fitting, number) for number in fleet.devices},
        }
    return {
        "command_name": "pipeline",
        "fleet": dataclasses.asdict(fleet),
        "simulated_in_s": time.perf_counter() - start_s,
        "models": models,
    }


def best_of(rows: Sequence[Mapping[str, Any]], devices: int) -> dict[str, Any]:
    """Return the layouts with the most tokens/s and the fewest joules a token on a number of devices."""
    whole = [
        {**row, "replicas": devices // size, "fleet_tokens_per_s": row["tokens_per_s"] * (devices // size)}
        for row in rows
        if devices % (size := row["tp"] * row["pp"]) == 0
    ]
    known = [row for row in whole if row["joules_per_token"] is not None]
    return {
        "tokens_per_s": max(whole, key=lambda row: row["fleet_tokens_per_s"], default=None),
        "joules_per_token": min(known, key=lambda row: row["joules_per_token"], default=None),
    }


def text(report: Mapping[str, Any]) -> str:
    """Return the report as two tables for each model: the layouts, and the best for each number of devices."""
    lines = []
    for model, found in report["models"].items():
        lines.append(
            f"{model:28}{'slots':>7}{'tokens/s/device':>17}{'J/token':>9}{'ms/output token':>17}{'busy':>7}"
        )
        for row in sorted(found["layouts"], key=lambda row: -row["tokens_per_s_per_device"]):
            lines.append(
                f"{'  TP ' + str(row['tp']) + ' x PP ' + str(row['pp']):28}{row['slots']:7}"
                f"{row['tokens_per_s_per_device']:17,.0f}{_joules_text(row):>9}"
                f"{1e3 * row['token_interval_s']:17.1f}{row['busy_share']:7.0%}"
            )
        if found["do_not_fit"]:
            lines.append(f"  do not fit: {', '.join(found['do_not_fit'])}")
        for number, best in found["best"].items():
            for what, row in best.items():
                if row:
                    lines.append(
                        f"  {number + ' devices, best ' + what.replace('_', ' '):36}TP {row['tp']} x PP {row['pp']} x "
                        f"{row['replicas']:<5}{row['fleet_tokens_per_s']:15,.0f} tokens/s{_joules_text(row):>9} J/token"
                    )
        lines.append("")
    return "\n".join(lines)


def _joules_text(row: Mapping[str, Any]) -> str:
    joules = row["joules_per_token"]
    return "-" if joules is None else f"{joules:.3f}"


def draw(report: Mapping[str, Any]) -> Figure:
    """Return the layouts of each model: tokens/s a device beside joules a token, or beside the token interval."""
    models = report["models"]
    figure = Figure(figsize=(4.2 * len(models), 3.8), layout="constrained")
    for i, (model, found) in enumerate(models.items()):
        axes = figure.add_subplot(1, len(models), i + 1)
        for row in found["layouts"]:
            known = row["joules_per_token"] is not None
            x, y = (
                row["tokens_per_s_per_device"],
                row["joules_per_token"] if known else row["token_interval_s"],
            )
            axes.plot(x, y, "o", color=f"C{SIZES_TP.index(row['tp'])}" if row["tp"] in SIZES_TP else "gray")
            axes.annotate(
                f"{row['tp']}x{row['pp']}", (x, y), textcoords="offset points", xytext=(4, 3), fontsize=7
            )
            axes.set_ylabel("joules a token" if known else "seconds between output tokens")
        axes.set(title=model, xlabel="tokens/s a device")
        axes.grid(alpha=0.3)
    return figure
