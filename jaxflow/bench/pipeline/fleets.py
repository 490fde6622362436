"""The best of tensor, pipeline and expert parallelism and replicas for a fleet of devices, by simulation.

  python -m jaxflow.bench pipeline --simulate --devices 8,64,256,1024 --layouts auto --output_json fleets.json

A layout is simulated once, on virtual clocks under the engine's own step policy. D devices hold as many
replicas of the layout as fit. Replicas share nothing, so their rates add. A layout is dropped if the weights
and the KV of one full-length sequence for each micro-batch do not fit. Ops take the rates and the fixed times
that were measured on the device (`pallas_kernels.cards`), where measurements exist. TP stays within a server
of 8 devices.

A mixture has more layouts (`jaxflow.bench.pipeline.expert_sharing`): whole experts over the TP devices, and
data-parallel attention over devices that share the experts. The latter are simulated twice: each all-to-all
takes its time, or runs beside the other ops of a second nano-batch. One of the data-parallel devices is
simulated. The others have equal steps, but for the pairs at their experts.
"""

import concurrent.futures
import dataclasses
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jaxflow.bench.pipeline.expert_sharing import (
    EXCHANGES,
    HOST_DEVICES,
    RateShares,
    Sharing,
    balances_of,
    op_rates,
    shared_graph,
    shares_of,
    slots_with_copies,
)
from jaxflow.bench.pipeline.simulate import PipelineRun, ReplicaLayout, simulate
from jaxflow.bench.pipeline.splits import SIZES_TP, DeviceSplit, all_splits
from jaxflow.bench.pipeline.stage_time import (
    COUNTS,
    CapJoules,
    StageLink,
    StageTimer,
    cap_joules,
    gemm_dtype,
)
from jaxflow.bench.workload.lengths import Item
from jaxflow.config import ConfigError, ModelConfig
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES
from jaxflow.model.energy import Power, shipped_power
from jaxflow.model.graph import BFLOAT16, FP8, Graph, Widths, Work, padded_vocabulary
from jaxflow.model.stage_split import split_layers
from jaxflow.scheduler.scheduler import DecodeMaximal
from pallas_kernels.cards import Card, card_of

MEMORY_SHARE = 0.9  # the share of memory for weights and KV, as EngineConfig.gpu_memory_utilization
SLOT_RESERVE = 1.5  # slots over the mean number of decodes of a full step.
BALANCE_TOKENS = 4096  # steps of these tokens give the balance of experts. Larger steps are more even.
SCALE_OUT = StageLink(50e9, 20e-6)  # between servers: 400 Gb/s a device

FP8_ALL = Widths(weights=1.0, kv=2.0, wide_weights=1.0)  # DeepSeek-V3: e4m3 weights, 16-bit KV
WIDTHS = {
    "bf16": (BFLOAT16, "bfloat16"),
    "fp8": (FP8, "float8_e4m3fn"),
    "fp8_all": (FP8_ALL, "float8_e4m3fn"),
}
MODELS = ("llama-3-70b:bf16", "llama-3-70b:fp8", "qwen3-235b-a22b:fp8", "deepseek-v3:fp8_all")


@dataclasses.dataclass(frozen=True)
class FleetSetting:
    """The setting of the comparison.

    Attributes:
      models: names as MODEL:WIDTHS, see `WIDTHS`.
      devices: numbers of devices. layouts: empty for `all_splits`.
      chunk: tokens of a step. steps: simulated steps of each micro-batch.
      lengths, pd_ratio: of the requests, as in `Study`; the lengths are uniform.
      scale_out: the link between stages of different servers.
    """

    models: tuple[str, ...] = MODELS
    device: str = "H200"
    devices: tuple[int, ...] = (8, 64, 256, 1024)
    layouts: tuple[DeviceSplit, ...] = ()
    chunk: int = 2048
    steps: int = 400
    lengths: tuple[int, int] = (1024, 4096)
    pd_ratio: float = 10.0
    scale_out: StageLink = SCALE_OUT
    seed: int = 0

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError("device", self.device, f"one of {', '.join(DEVICES)}")
        if not self.devices or min(self.devices) < 1:
            raise ConfigError("devices", list(self.devices), "positive numbers of devices")
        for model in self.models:
            if model.partition(":")[2] not in WIDTHS:
                raise ConfigError("models", model, f"MODEL:WIDTHS with widths {', '.join(WIDTHS)}")

    def cases(self) -> list[tuple[str, DeviceSplit]]:
        """Return each model with each layout that some number of devices can hold in full replicas."""
        found = []
        for model in self.models:
            mixture = model_of(model).num_experts > 0
            found += [
                (model, split)
                for split in self.layouts or all_splits(mixture)
                if mixture or split.expert_devices == 1
                if any(number % split.devices == 0 for number in self.devices)
            ]
        return found

    def items(self, micro_batches: int) -> list[Item]:
        """Return the requests of one layout, enough for `steps` steps of each micro-batch."""
        low, high = self.lengths
        number = int(self.steps * self.chunk * micro_batches / (0.5 * (low + high)))
        totals = np.random.default_rng(self.seed).integers(low, high, max(4, number), endpoint=True)
        outputs = np.maximum(1, np.round(totals / (1 + self.pd_ratio))).astype(int)
        return [Item(int(t - d), int(d)) for t, d in zip(totals, outputs, strict=True)]


def model_of(name: str) -> ModelConfig:
    """Return the config of a model by the part of its name before the colon."""
    return open_checkpoint(name.partition(":")[0], load_format="dummy").model_config


def sharing_of(config: ModelConfig, split: DeviceSplit, balances: Mapping[int, float]) -> Sharing | None:
    """Return how a layout shares the experts, with copies of the busy ones.

    None if the devices do not divide the experts. balances: of the experts, by the number of devices.
    """
    devices = split.expert_devices
    if devices == 1:
        return Sharing()
    if config.num_experts % devices:
        return None
    return Sharing(devices, split.dp > 1, slots_with_copies(config.num_experts, devices), balances[devices])


def simulated_balances(
    config: ModelConfig, splits: Collection[DeviceSplit], tokens: int
) -> Mapping[int, float]:
    """Return the balance for each number of devices that share experts. tokens: of a step of all devices."""
    sizes = {split.expert_devices for split in splits} - {1}
    divisors = tuple(sorted(size for size in sizes if config.num_experts % size == 0))
    return balances_of(config.num_experts, config.experts_per_token, divisors, tokens) if divisors else {}


def sequences_that_fit(
    config: ModelConfig,
    graph: Graph,
    layers: Sequence[int],
    tp: int,
    widths: Widths,
    memory_bytes: float,
    longest: int,
) -> int:
    """Return the sequences of `longest` tokens whose KV fits beside the weights in every stage; 0 for none.

    graph: of one device. layers: of each stage. memory_bytes: of one device, for weights and KV.
    """
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
    graph: Graph,
    counts: np.ndarray,
    power: Power,
    dtype: str,
    widths: Widths,
    config: ModelConfig,
    choosers: int = 1,
) -> float:
    """Return the joules above idle of the counted work on one of the
    tensor-parallel devices, over all stages.

    The clock is the highest. The network's joules are unknown and count as 0. counts: the sum over all steps.
    choosers: the devices whose tokens choose among the experts of a layer.
    """
    mean_tokens = choosers * counts[1] / counts[0]
    total = 0.0
    for op, number in Counter(graph.ops()).items():
        work = sum((each * counts[COUNTS.index(what)] for what, each in op.demand), Work())
        if op.experts:
            unread = (1 - config.experts_per_token / config.num_experts) ** mean_tokens
            work = dataclasses.replace(work, weight_bytes=work.weight_bytes * (1 - unread))
        total += number * float(power.dynamic_j(work, gemm_dtype(op, dtype, widths)))
    return total


def stage_timer(
    model: str,
    split: DeviceSplit,
    sharing: Sharing,
    graph: Graph,
    layers: Sequence[int],
    device: str,
    shares: RateShares,
    outside_bytes_per_s: float,
    *,
    overlapped: bool,
    joules: CapJoules | None = None,
) -> StageTimer:
    """Return the timer of the steps of a layout, with the fixed times of the device's card.

    Args:
      model: as MODEL:WIDTHS, see `WIDTHS`.
      graph: of one device. layers: of each stage.
      outside_bytes_per_s: of a device to other hosts, in an all-to-all.
      overlapped: all-to-alls run beside other ops.
      joules: see `StageTimer`.
    """
    config, (widths, dtype) = model_of(model), WIDTHS[model.partition(":")[2]]
    rates, fixed = DEVICES[device].rates, card_of(device).clock or {}
    return StageTimer(
        config,
        layers,
        split.tp,
        rates,
        widths=widths,
        dtype=dtype,
        kernel_s=fixed.get("kernel_s", 0.0),
        collective_s=fixed.get("collective_s", 0.0),
        graph=graph,
        op_rates=op_rates(config, sharing, rates, shares, outside_bytes_per_s),
        choosers=sharing.choosers,
        hidden=EXCHANGES if overlapped else (),
        joules=joules,
    )


def run_layout(fleet: FleetSetting, model: str, split: DeviceSplit) -> dict[str, Any] | None:
    """Simulate one layout. Return its figures, or None if it does not fit."""
    config, (widths, _) = model_of(model), WIDTHS[model.partition(":")[2]]
    device, card = DEVICES[fleet.device], card_of(fleet.device)
    tp, pp = split.tp, split.pp
    splits = [each for name, each in fleet.cases() if name == model]
    sharing = sharing_of(config, split, simulated_balances(config, splits, BALANCE_TOKENS))
    if config.num_heads % tp or pp > config.num_layers or sharing is None:
        return None
    layers = split_layers(config, pp, tp, device.rates, fleet.chunk)
    graph = shared_graph(config, tp, widths, sharing)
    memory_bytes = MEMORY_SHARE * device.memory_bytes
    fit = sequences_that_fit(config, graph, layers, tp, widths, memory_bytes, fleet.lengths[1])
    items = fleet.items(pp)
    # More slots than a step's tokens keep busy are of no use, and a micro-batch would
    # take the requests of the others.
    useful = math.ceil(SLOT_RESERVE * fleet.chunk / (1 + fleet.pd_ratio))
    slots = min(fit // pp, useful, max(1, len(items) // pp))
    if not slots:
        return None
    fixed = card.clock or {}
    outside = outside_bytes_per_s(card, fleet)
    timer = stage_timer(
        model,
        split,
        sharing,
        graph,
        layers,
        fleet.device,
        shares_of(card),
        outside,
        overlapped=split.overlapped,
        joules=cap_joules(fleet.device),
    )
    inside = StageLink(device.rates.network_bytes_per_s, fleet.scale_out.latency_s)
    run = simulate(
        items,
        ReplicaLayout(1, pp, slots, fleet.chunk),
        DecodeMaximal,
        timer,
        None if pp == 1 else inside if split.devices <= HOST_DEVICES else fleet.scale_out,
        send_bytes=widths.activations * config.hidden_size / tp,
        host_s=fixed.get("step_s", 0.0) if pp == 1 else 0.0,
    )
    rate = steady_rate(run)  # one data-parallel device
    even = dataclasses.replace(sharing, balance=1.0)
    return {
        "layout": split.name,
        **dataclasses.asdict(split),
        "expert_slots": sharing.slots,
        "expert_balance": sharing.balance,
        "slots": slots,
        "tokens_per_s": rate * split.dp,
        "tokens_per_s_per_device": rate / (tp * pp),
        "token_interval_s": run.duration_s * pp / run.steps,
        "busy_share": run.busy_share,
        "joules_per_token": _joules(
            run, rate, shared_graph(config, tp, widths, even), split, sharing, model, fleet.device
        ),
    }


def outside_bytes_per_s(card: Card, fleet: FleetSetting) -> float:
    """Return the rate of an all-to-all between hosts, a device: the card's, or
    that of the link between stages.
    """
    scale_out = (card.hardware or {}).get("scale_out", {})
    return scale_out.get("all_to_all_bytes_per_s", fleet.scale_out.bytes_per_s)


def steady_rate(run: PipelineRun) -> float:
    """Return the tokens/s until the last request begins, prompt and output together.

    Once no request waits, the steps have fewer prompt tokens, and the rate is not that of a loaded
    deployment. If all requests begin at once, the rate is that of the full run.
    """
    if not run.last_start_s:
        return run.tokens / run.duration_s
    return run.tokens_until_last_start / run.last_start_s


def _joules(
    run: PipelineRun, rate: float, graph: Graph, split: DeviceSplit, sharing: Sharing, model: str, device: str
) -> float | None:
    """Return the joules of a token, or None where the device's power constants are unknown.

    A busy device draws its cap at most.
    """
    power, (widths, dtype) = shipped_power(device), WIDTHS[model.partition(":")[2]]
    if power is None:
        return None
    dynamic = dynamic_joules(graph, run.counts, power, dtype, widths, model_of(model), sharing.choosers)
    tp, pp = split.tp, split.pp  # a data-parallel device has the joules and the rate of one
    limit = (power.cap_w - power.idle_w) * float(run.busy_s.sum())
    return tp * min(dynamic, limit) / run.tokens + power.idle_w * tp * pp / rate


def measure(fleet: FleetSetting, processes: int = 2) -> dict[str, Any]:
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
        rows = [(row, split) for (name, split), row in zip(cases, found, strict=True) if name == model]
        fitting = [row for row, _ in rows if row]
        models[model] = {
            "layouts": fitting,
            "do_not_fit": [split.name for row, split in rows if not row],
            "best": {str(number): best_of(fitting, number) for number in fleet.devices},
        }
    return {
        "command_name": "pipeline",
        "fleet": dataclasses.asdict(fleet),
        "simulated_in_s": time.perf_counter() - start_s,
        "models": models,
    }


def best_of(rows: Sequence[Mapping[str, Any]], devices: int) -> dict[str, Any]:
    """Return the layouts with the most tokens/s and the fewest joules a token on a number of devices.

    Overlapped all-to-alls have a key of their own: the engine does not overlap them.
    """
    whole = [
        {**row, "replicas": devices // size, "fleet_tokens_per_s": row["tokens_per_s"] * (devices // size)}
        for row in rows
        if devices % (size := row["tp"] * row["pp"] * row["dp"]) == 0
    ]
    sequential = [row for row in whole if not row["overlapped"]]
    known = [row for row in sequential if row["joules_per_token"] is not None]
    fastest = {
        name: max(several, key=lambda row: row["fleet_tokens_per_s"], default=None)
        for name, several in (("tokens_per_s", sequential), ("overlapped_tokens_per_s", whole))
    }
    least = min(known, key=lambda row: row["joules_per_token"], default=None)
    return {**fastest, "joules_per_token": least}


def text(report: Mapping[str, Any]) -> str:
    """Return the report as two tables for each model: the layouts, and the
    best for each number of devices.
    """
    lines = []
    for model, found in report["models"].items():
        lines.append(
            f"{model:28}{'slots':>7}{'tokens/s/device':>17}{'J/token':>9}{'ms/output token':>17}{'busy':>7}"
        )
        for row in sorted(found["layouts"], key=lambda row: -row["tokens_per_s_per_device"]):
            lines.append(
                f"{'  ' + label(row):28}{row['slots']:7}"
                f"{row['tokens_per_s_per_device']:17,.0f}{_joules_text(row):>9}"
                f"{1e3 * row['token_interval_s']:17.1f}{row['busy_share']:7.0%}"
            )
        if found["do_not_fit"]:
            lines.append(f"  do not fit: {', '.join(found['do_not_fit'])}")
        for number, best in found["best"].items():
            for what, row in best.items():
                if row:
                    goal = f"{number} devices, best {what.replace('_', ' ')}"
                    fleet = f"{label(row)} x {row['replicas']}"
                    rate = f"{row['fleet_tokens_per_s']:15,.0f} tokens/s"
                    lines.append(f"  {goal:42}{fleet:24}{rate}{_joules_text(row):>9} J/token")
        lines.append("")
    return "\n".join(lines)


def label(row: Mapping[str, Any]) -> str:
    """Return the layout of a row in words."""
    if row["dp"] > 1:
        stages = f" x PP {row['pp']}" if row["pp"] > 1 else ""
        return f"DP {row['dp']}, EP {row['dp']}{stages}" + ", overlapped" * row["overlapped"]
    return f"TP {row['tp']} x PP {row['pp']}" + (f", EP {row['tp']}" if row["whole_experts"] else "")


def _joules_text(row: Mapping[str, Any]) -> str:
    joules = row["joules_per_token"]
    return "-" if joules is None else f"{joules:.3f}"


def draw(report: Mapping[str, Any]) -> Figure:
    """Return the layouts of each model: tokens/s a device beside joules a
    token, or beside the token interval.
    """
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
            shape = "s" if row["whole_experts"] else "^" if row["dp"] > 1 else "o"
            axes.plot(x, y, shape, color=f"C{SIZES_TP.index(row['tp'])}" if row["tp"] in SIZES_TP else "gray")
            axes.annotate(
                row["layout"].replace("+overlap", "*"),
                (x, y),
                textcoords="offset points",
                xytext=(4, 3),
                fontsize=7,
            )
            axes.set_ylabel("joules a token" if known else "seconds between output tokens")
        axes.set(title=model, xlabel="tokens/s a device")
        axes.grid(alpha=0.3)
    return figure
