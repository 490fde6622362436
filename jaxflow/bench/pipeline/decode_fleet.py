"""Decode steps of a mixture over many devices: each layout, and each assumption
changed alone, by the cost model.

  python -m jaxflow.bench decode_fleet --output_json decode-fleet.json

All sequences decode, and prompts are computed elsewhere. A sequence has its prompt and on average half of its
output. Each layout has as many sequences a device as `--sequences`, or as many full-length ones as fit. A
fleet holds as many replicas of a layout as it has devices for. The public figure to compare with is vLLM's
for DeepSeek-R1 on H200s.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from jaxflow.bench.pipeline.expert_sharing import (
    ATTENTION,
    EXCHANGES,
    GROUPED,
    RateShares,
    Sharing,
    op_rates,
    shared_graph,
    shares_of,
)
from jaxflow.bench.pipeline.fleets import (
    MEMORY_SHARE,
    WIDTHS,
    FleetSetting,
    model_of,
    outside_bytes_per_s,
    sequences_that_fit,
    sharing_of,
    simulated_balances,
    stage_timer,
)
from jaxflow.bench.pipeline.splits import DeviceSplit
from jaxflow.bench.pipeline.stage_time import COUNTS, StageTimer, gemm_dtype
from jaxflow.bench.report import machine
from jaxflow.config import ConfigError, ModelConfig
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES, Device, Times, work_times
from jaxflow.model.stage_split import split_layers
from pallas_kernels.cards import card_of

E4M3_ROW = 1 + 4 / 128  # bytes of an element of a row in e4m3, with a float32 scale for 128 elements
LAYOUTS = (
    "dp64",
    "dp64+overlap",
    "dp32",
    "dp32+overlap",
    "dp16",
    "dp16+overlap",
    "dp8",
    "dp8+overlap",
    "dp8x8",
    "dp8x8+overlap",
    "8x1",
    "8x1+ep",
    "8x8",
    "2x8",
    "1x8",
)
PUBLIC = {
    "output_tokens_per_s_per_device": {"32": 2180, "72": 2070, "96": 1970},
    "source": "blog.vllm.ai/2025/12/17/large-scale-serving.html, chart of decode throughput, read off: "
    "DeepSeek-R1 on H200s with ConnectX-7, by the number of devices that share the experts; output tokens "
    "of the decode devices only, 2,000 prompt and 2,000 output tokens, 256 sequences a device",
}
FLASH_MLA_FLOPS_PER_S = (
    660e12  # public, not measured here: github.com/deepseek-ai/FlashMLA, dense decode on an H800
)
MOST = 64.0  # times an assumption, in the search for what reaches the target


@dataclasses.dataclass(frozen=True)
class Decode:
    """The decode steps to simulate.

    Attributes:
      model: as MODEL:WIDTHS, see `jaxflow.bench.pipeline.fleets.WIDTHS`.
      devices: of the fleet. sequences: of a device.
      prompt_tokens, output_tokens: of a sequence.
      target: tokens/s of a device to compare with.
    """

    model: str = "deepseek-v3:fp8_all"
    device: str = "H200"
    devices: int = 64
    sequences: int = 256
    prompt_tokens: int = 2000
    output_tokens: int = 2000
    target: float = 2200.0

    @property
    def keys(self) -> float:
        """Return the mean keys that a sequence reads."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """The assumptions of a prediction, besides the rates of the device.

    Attributes:
      shares: the shares of the rates that the kernels reach.
      outside_bytes_per_s: of a device to other hosts, in an all-to-all.
      balance: of the experts' loads; None for that of placements by load with copies.
      sent_bytes, returned_bytes, once_a_host: as in `Sharing`.
      overlapped: True if all-to-alls overlap with a second nano-batch, in every layout with all-to-alls.
    """

    shares: RateShares
    outside_bytes_per_s: float
    balance: float | None = None
    sent_bytes: float = 2.0
    returned_bytes: float = 2.0
    once_a_host: bool = False
    overlapped: bool = False


def measured(device: str) -> Assumptions:
    """Return the assumptions of a card, in the form that `jaxflow.model.exchanged_experts` has."""
    card = card_of(device)
    return Assumptions(shares_of(card), outside_bytes_per_s(card, FleetSetting(device=device)))


def predict(
    decode: Decode, split: DeviceSplit, given: Assumptions, balances: Mapping[int, float]
) -> dict[str, Any] | None:
    """Return the predicted step of a layout, or None if the layout does not fit.

    balances: of the experts, by the number of devices, where `given` has none.
    """
    config, device = model_of(decode.model), DEVICES[decode.device]
    sharing = _sharing(config, split, given, balances)
    if config.num_heads % split.tp or split.pp > config.num_layers or sharing is None:
        return None
    timer, fit = _timer(decode, config, device, split, sharing, given)
    batch = min(decode.sequences * split.tp, fit // split.pp)  # a micro-batch on a data-parallel device
    if not batch:
        return None
    step = Composition(batch, decode.keys)
    counts = np.array([step.count(what) for what in COUNTS], np.float64)
    stage_s = float(timer(counts).max())
    parts = timer.by_op(counts)
    total = sum(parts.values())
    sums = {
        "attention": sum(parts.get(name, 0.0) for name in ATTENTION),
        "experts": sum(parts.get(name, 0.0) for name in GROUPED),
        "all_to_alls": sum(parts.get(name, 0.0) for name in EXCHANGES),
    }
    return {
        "layout": split.name,
        "sequences_per_device": batch / split.tp,
        "expert_balance": sharing.balance,
        "tokens_per_s_per_device": batch / stage_s / (split.tp * split.pp),
        "token_interval_s": stage_s * split.pp,
        "one_batch_s": {**sums, "other": total - sum(sums.values())},
    }


def _sharing(
    config: ModelConfig, split: DeviceSplit, given: Assumptions, balances: Mapping[int, float]
) -> Sharing | None:
    known = balances if given.balance is None else {split.expert_devices: given.balance}
    found = sharing_of(config, split, known)
    if found is None or found.devices == 1:
        return found
    return dataclasses.replace(
        found,
        sent_bytes=given.sent_bytes,
        returned_bytes=given.returned_bytes,
        once_a_host=given.once_a_host,
    )


def _timer(
    decode: Decode,
    config: ModelConfig,
    device: Device,
    split: DeviceSplit,
    sharing: Sharing,
    given: Assumptions,
) -> tuple[StageTimer, int]:
    """Return the timer of a step, and the full-length sequences that fit."""
    widths, _ = WIDTHS[decode.model.partition(":")[2]]
    layers = split_layers(config, split.pp, split.tp, device.rates, decode.sequences)
    graph = shared_graph(config, split.tp, widths, sharing)
    timer = stage_timer(
        decode.model,
        split,
        sharing,
        graph,
        layers,
        decode.device,
        given.shares,
        given.outside_bytes_per_s,
        overlapped=split.overlapped or given.overlapped,
    )
    longest = decode.prompt_tokens + decode.output_tokens
    memory_bytes = MEMORY_SHARE * device.memory_bytes
    return timer, sequences_that_fit(config, graph, layers, split.tp, widths, memory_bytes, longest)


def bound(decode: Decode, split: DeviceSplit, given: Assumptions) -> dict[str, float]:
    """Return the tokens/s of a device if each resource alone set the time of a layout.

    Loads are even, each op has the full rates, and nothing has a fixed time. The
    network has the rates of `given`.
    """
    config, device = model_of(decode.model), DEVICES[decode.device]
    widths, dtype = WIDTHS[decode.model.partition(":")[2]]
    sharing = Sharing(
        split.expert_devices,
        split.dp > 1,
        sent_bytes=given.sent_bytes,
        returned_bytes=given.returned_bytes,
        once_a_host=given.once_a_host,
    )
    own = op_rates(config, sharing, device.rates, RateShares(), given.outside_bytes_per_s)
    step = Composition(decode.sequences, decode.keys)
    times = Times()
    for op in shared_graph(config, split.tp, widths, sharing).ops():
        times += work_times(op.work(step), own.get(op.name, device.rates), gemm_dtype(op, dtype, widths))
    return {
        "compute": decode.sequences / times.compute_s,
        "memory": decode.sequences / times.memory_s,
        "network": decode.sequences / times.network_s,
    }


def variations(base: Assumptions, product_flops_per_s: float) -> dict[str, Assumptions]:
    """Return the assumptions with one of them changed, by name.

    product_flops_per_s: of the device, in bfloat16.
    """

    def shares(**changed: float) -> Assumptions:
        return dataclasses.replace(base, shares=dataclasses.replace(base.shares, **changed))

    def other(**changed: Any) -> Assumptions:
        return dataclasses.replace(base, **changed)

    flash = FLASH_MLA_FLOPS_PER_S / product_flops_per_s
    found = {
        "overlap 1": other(overlapped=True),
        "rows sent in e4m3": other(sent_bytes=E4M3_ROW),
        "a row once a host": other(once_a_host=True),
        "balance 1.0": other(balance=1.0),
        "balance 0.9": other(balance=0.9),
        "balance 0.8": other(balance=0.8),
        "grouped products 1.0": shares(grouped_flops=1.0, grouped_bytes=1.0),
        "grouped products 0.7": shares(grouped_flops=0.7, grouped_bytes=0.7),
        "latent attention 1.0": shares(latent_flops=1.0),
        "latent attention 0.94, FlashMLA": shares(latent_flops=flash),
        "latent attention 0.55": shares(latent_flops=0.55),
    }
    found |= {
        f"network {rate:.0f} GB/s": other(outside_bytes_per_s=1e9 * rate) for rate in (25, 50, 100, 200)
    }
    together = other(sent_bytes=E4M3_ROW, once_a_host=True)
    found["e4m3, once a host"] = together
    found["e4m3, once a host, overlap 1"] = dataclasses.replace(together, overlapped=True)
    return found


def least_that_reaches(reaches: Callable[[float], bool], low: float) -> float | None:
    """Return the least factor from `low` to `MOST` that reaches the target, or None.

    `reaches` is monotone.
    """
    high = MOST
    if reaches(low) or not reaches(high):
        return low if reaches(low) else None
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def needed(
    decode: Decode, split: DeviceSplit, base: Assumptions, balances: Mapping[int, float]
) -> dict[str, float | None]:
    """Return the least value of each rate alone that reaches the target, with the
    rest as it is; None for no value.

    A share above 1 is a kernel beyond the measured rates of the device.
    """
    shares = base.shares

    def search(make: Callable[[float], Assumptions], now: float) -> float | None:
        def reaches(factor: float) -> bool:
            row = predict(decode, split, make(factor), balances)
            return row is not None and row["tokens_per_s_per_device"] >= decode.target

        factor = least_that_reaches(reaches, 1 / MOST)
        return None if factor is None else factor * now

    def network(factor: float) -> Assumptions:
        return dataclasses.replace(base, outside_bytes_per_s=base.outside_bytes_per_s * factor)

    def latent(factor: float) -> Assumptions:
        return dataclasses.replace(
            base, shares=dataclasses.replace(shares, latent_flops=shares.latent_flops * factor)
        )

    def grouped(factor: float) -> Assumptions:
        changed = {
            "grouped_flops": shares.grouped_flops * factor,
            "grouped_bytes": shares.grouped_bytes * factor,
        }
        return dataclasses.replace(base, shares=dataclasses.replace(shares, **changed))

    return {
        "outside_bytes_per_s": search(network, base.outside_bytes_per_s),
        "latent_flops": search(latent, shares.latent_flops),
        "grouped_flops": search(grouped, shares.grouped_flops),
    }


def measure(decode: Decode, layouts: Sequence[DeviceSplit]) -> dict[str, Any]:
    """Return the prediction of each layout, and those of the first layout under each assumption."""
    base, first = measured(decode.device), layouts[0]
    config = model_of(decode.model)
    balances = simulated_balances(config, layouts, decode.sequences * decode.devices)
    rows = {split.name: predict(decode, split, base, balances) for split in layouts}
    product = DEVICES[decode.device].rates.flops_per_s["bfloat16"]

    def rates(cases: Mapping[str, tuple[DeviceSplit, Assumptions]]) -> dict[str, float | None]:
        found = {name: predict(decode, *case, balances) for name, case in cases.items()}
        return {name: row["tokens_per_s_per_device"] if row else None for name, row in found.items()}

    as_public = dataclasses.replace(base, sent_bytes=E4M3_ROW)
    return {
        "command_name": "decode_fleet",
        "decode": dataclasses.asdict(decode),
        "assumptions": dataclasses.asdict(base),
        "public": PUBLIC,
        "layouts": [row for row in rows.values() if row],
        "do_not_fit": [name for name, row in rows.items() if not row],
        "changed": rates({name: (first, given) for name, given in variations(base, product).items()}),
        "sent_in_e4m3": rates({split.name: (split, as_public) for split in layouts if split.dp > 1}),
        "bound_tokens_per_s_per_device": bound(decode, first, base),
        "needed": {
            str(overlapped): needed(decode, first, dataclasses.replace(base, overlapped=overlapped), balances)
            for overlapped in (False, True)
        },
    }


def text(report: Mapping[str, Any]) -> str:
    """Return the report as a table of layouts and a table of assumptions."""
    decode = report["decode"]
    head = ("sequences", "balance", "tokens/s", "ms a step", "attention", "experts", "all-to-all", "other")
    lines = [
        f"{decode['model']}, {decode['devices']} {decode['device']}s, tokens/s and sequences a device, ms of "
        "one batch",
        "layout".ljust(16) + "".join(word.rjust(12) for word in head),
    ]
    for row in sorted(report["layouts"], key=lambda row: -row["tokens_per_s_per_device"]):
        cells = [
            f"{row['sequences_per_device']:.0f}",
            f"{row['expert_balance']:.3f}",
            f"{row['tokens_per_s_per_device']:,.0f}",
            f"{1e3 * row['token_interval_s']:.1f}",
            *(f"{1e3 * each:.1f}" for each in row["one_batch_s"].values()),
        ]
        lines.append(row["layout"].ljust(16) + "".join(cell.rjust(12) for cell in cells))
    if report["do_not_fit"]:
        lines.append(f"do not fit: {', '.join(report['do_not_fit'])}")
    first = next(row for row in report["layouts"])
    lines += [
        "",
        f"{first['layout']}: {first['tokens_per_s_per_device']:,.0f} tokens/s a device; with one change:",
    ]
    lines += [f"  {name:36}{rate:10,.0f}" for name, rate in report["changed"].items() if rate]
    lines += [
        f"  {name + ', rows sent in e4m3':36}{rate:10,.0f}"
        for name, rate in report["sent_in_e4m3"].items()
        if rate
    ]
    lines += [
        f"  bound by {name:27}{rate:10,.0f}" for name, rate in report["bound_tokens_per_s_per_device"].items()
    ]
    for overlapped, found in report["needed"].items():
        values = ", ".join(f"{name} {_value(value)}" for name, value in found.items())
        lines.append(f"  alone reaches {decode['target']:,.0f}, overlapped {overlapped}: {values}")
    return "\n".join(lines)


def _value(value: float | None) -> str:
    return "no value" if value is None else f"{value:.3g}"


def define_flags() -> None:
    """Define the command's flags."""
    default = Decode()
    flags.DEFINE_string("model", default.model, "Model as MODEL:bf16, fp8 or fp8_all.")
    flags.DEFINE_enum("device", default.device, list(DEVICES), "Device of the cost model.")
    flags.DEFINE_integer("devices", default.devices, "Devices of the fleet.", lower_bound=1)
    flags.DEFINE_integer("sequences", default.sequences, "Sequences of a device.", lower_bound=1)
    flags.DEFINE_integer("input_len", default.prompt_tokens, "Prompt tokens of a sequence.", lower_bound=1)
    flags.DEFINE_integer("output_len", default.output_tokens, "Output tokens of a sequence.", lower_bound=1)
    flags.DEFINE_float("target", default.target, "Tokens/s of a device to compare with.", lower_bound=0.0)
    flags.DEFINE_list(
        "layouts", list(LAYOUTS), "TPxPP, TPxPP+ep, dpN or dpN+overlap. The assumptions vary for the first."
    )
    flags.DEFINE_string("output_json", None, "Write the report to this file.")


def run() -> dict[str, Any]:
    """Run the command and return its report.

    Raises:
      ConfigError: for layouts of another form or size, and an unknown model.
    """
    f = flags.FLAGS
    if f.model.partition(":")[2] not in WIDTHS:
        raise ConfigError("model", f.model, f"MODEL:WIDTHS with widths {', '.join(WIDTHS)}")
    decode = Decode(f.model, f.device, f.devices, f.sequences, f.input_len, f.output_len, f.target)
    layouts = [DeviceSplit.parse(name) for name in f.layouts]
    for split in layouts:
        if f.devices % split.devices:
            raise ConfigError("layouts", split.name, f"layouts whose devices divide --devices {f.devices}")
    report = machine.describe() | measure(decode, layouts)
    print(text(report))
    return report
