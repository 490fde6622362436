"""The time that work takes on a device: NanoFlow's cost model (§3.2, Eq. 1-5) and a roofline for each op.

`DEVICES` holds the datasheet of each device and the rates measured on it. The measured rates are of sustained
work on random data: a card at its power cap does not reach its datasheet.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping

from jaxflow.config import ModelConfig
from jaxflow.model.composition import Composition
from jaxflow.model.graph import Graph, Op, Work, model_graph
from pallas_kernels.cards import Card, card_of, cards

TERA, GIGA = 1e12, 1e9
FP8_PRODUCTS = ("qkv", "out_proj", "up_gate", "down")


@dataclasses.dataclass(frozen=True)
class Rates:
    """The work that one device does in a second.

    flops_per_s: of dense GEMMs, by dtype. network_bytes_per_s: in one direction.
    """

    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    network_bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator. measured: None where no measurement exists.

    sms: streaming multiprocessors. compute_capability: CUDA's, which decides the kernels
    (`pallas_kernels.kernel_set`).
    """

    name: str
    memory_bytes: float
    sms: int
    compute_capability: str
    datasheet: Rates
    measured: Rates | None = None

    @property
    def rates(self) -> Rates:
        """Return the peak rates to compare a run with: measured if known."""
        return self.measured or self.datasheet


def _device(card: Card) -> Device:
    hardware = dict(card.hardware or {})
    rates = {name: Rates(**hardware[name]) for name in ("datasheet", "measured") if name in hardware}
    return Device(
        card.device, hardware["memory_bytes"], hardware["sms"], hardware["compute_capability"], **rates
    )


DEVICES = {name: _device(card) for name, card in cards().items() if card.hardware is not None}


def find_device(kind: str) -> Device | None:
    """Return the device of a driver's name, or None if `DEVICES` lacks it.

    kind: for example "NVIDIA H200" or "NVIDIA A100-SXM4-80GB".
    """
    return DEVICES.get(card_of(kind).device)


def memory_time_s(memory_bytes: float, memory_bytes_per_s: float) -> float:
    """Return Eq. 1: a step at the largest batch reads the full memory once."""
    return memory_bytes / memory_bytes_per_s


def compute_time_s(dense_tokens: float, parameters: float, flops_per_s: float) -> float:
    """Return Eq. 2: each token needs a multiplication and an addition per parameter."""
    return 2 * dense_tokens * parameters / flops_per_s


def network_time_s(
    devices: int, dense_tokens: float, hidden: int, element_bytes: float, layers: int, bytes_per_s: float
) -> float:
    """Return Eq. 3: two all-reduces a layer move the activations four times.

    bytes_per_s: of all devices together.
    """
    return 4 * devices * dense_tokens * hidden * element_bytes * layers / bytes_per_s


def optimal_throughput(flops_per_s: float, parameters: float) -> float:
    """Return Eq. 5: tokens per second, prompt and output together, of devices that only run dense GEMMs."""
    return flops_per_s / (2 * parameters)


def dense_parameters(config: ModelConfig, sampled: float = 1.0) -> float:
    """Return P_Model of Eq. 2, exactly: the weight elements ΣNₘKₘ that one token meets.

    The embedding table is looked up, not multiplied. A token meets only the experts that it chooses. Only a
    share `sampled` of the tokens (outputs, not prompts) meets the head.
    """
    graph = model_graph(config)
    step = Composition(decode_tokens=1, decode_keys=1, samples=sampled)
    return sum(op.work(step).flops for op in graph.ops() if op.kind == "dense") / 2


@dataclasses.dataclass(frozen=True)
class Times:
    """The seconds that each resource of a device needs for some work by itself."""

    compute_s: float = 0.0
    memory_s: float = 0.0
    network_s: float = 0.0

    @property
    def longest_s(self) -> float:
        """Return T_op: the time of the work in isolation, bound by one resource."""
        return max(self.compute_s, self.memory_s, self.network_s)

    def __add__(self, other: "Times") -> "Times":
        return Times(
            self.compute_s + other.compute_s, self.memory_s + other.memory_s, self.network_s + other.network_s
        )

    def __mul__(self, factor: float) -> "Times":
        return Times(self.compute_s * factor, self.memory_s * factor, self.network_s * factor)


def work_times(work: Work, rates: Rates, dtype: str = "bfloat16") -> Times:
    """Return T_compute, T_memory and T_network of some work (Table 2's columns)."""
    return Times(
        work.flops / rates.flops_per_s[dtype],
        work.memory_bytes / rates.memory_bytes_per_s,
        work.network_bytes / rates.network_bytes_per_s,
    )


def op_times(
    op: Op, step: Composition, rates: Rates, dtype: str = "bfloat16", tile_rows: int | None = None
) -> Times:
    """Return the times of an op.

    dtype: of the GEMMs. Under float8_e4m3fn only the four GEMMs of a layer in `FP8_PRODUCTS` are fp8; all
    other ops are bfloat16. tile_rows: a dense GEMM computes full tiles of this many rows (SARATHI §4.4);
    None: exactly its rows.
    """
    if dtype == "float8_e4m3fn" and op.name not in FP8_PRODUCTS:
        dtype = "bfloat16"
    times = work_times(op.work(step), rates, dtype)
    rows = op.rows(step)
    if not rows or tile_rows is None:
        return times
    padded_s = times.compute_s * math.ceil(rows / tile_rows) * tile_rows / rows
    return Times(padded_s, times.memory_s, times.network_s)


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """The times of a step.

    sequential_s: op after op, each bound by one resource. resources: the sums over the ops. The longest sum
    is the time under perfect overlap (NanoFlow §3.7).
    """

    sequential_s: float
    resources: Times


def step_timer(
    graph: Graph, rates: Rates, dtype: str = "bfloat16", tile_rows: int | None = None
) -> Callable[[Composition], StepTimes]:
    """Return a function from a step's composition to its times. Equal ops of many layers are counted once."""
    repeated = tuple(collections.Counter(graph.ops()).items())

    def times(step: Composition) -> StepTimes:
        sequential_s = compute_s = memory_s = network_s = 0.0
        for op, number in repeated:
            one = op_times(op, step, rates, dtype, tile_rows)
            sequential_s += number * one.longest_s
            compute_s += one.compute_s * number
            memory_s += one.memory_s * number
            network_s += one.network_s * number
        return StepTimes(sequential_s, Times(compute_s, memory_s, network_s))

    return times
