"""Predicted seconds of a pipeline stage, as a function of a step's counts."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxflow.config import ConfigError, ModelConfig
from jaxflow.model.cost import FP8_PRODUCTS, Rates
from jaxflow.model.energy import shipped_power
from jaxflow.model.graph import BFLOAT16, Graph, Op, Widths, model_graph
from jaxflow.scheduler.state import StepWork
from pallas_kernels.cards import card_of

COUNTS = (
    "step",
    "tokens",
    "samples",
    "decode_tokens",
    "decode_keys",
    "chunk_tokens",
    "chunk_keys",
    "chunk_pairs",
)


@dataclasses.dataclass(frozen=True)
class StageLink:
    """A link between two stages.

    Attributes:
      bytes_per_s: rate of one device's link to its peer in the next stage.
      latency_s: time of an empty transfer.
      holds_stage: True if a stage begins its next micro-batch only when it has sent the last one.
    """

    bytes_per_s: float = 25e9
    latency_s: float = 2e-3
    holds_stage: bool = False


@dataclasses.dataclass(frozen=True)
class CapJoules:
    """The joules above idle of a FLOP, by dtype, and of a byte of device memory, at the power cap.

    This is the fixed account of docs/cost-model.md, which describes the engine's steps.

    watts: of one device at its cap, above idle.
    """

    flop: Mapping[str, float]
    byte: float
    watts: float


def cap_joules(device: str) -> CapJoules | None:
    """Return the fixed account in the card of a device of `jaxflow.model.cost.DEVICES`, or None."""
    fixed, power = card_of(device).fixed_joules, shipped_power(device)
    if fixed is None or power is None:
        return None
    return CapJoules(fixed["flop"], fixed["byte"], power.cap_w - fixed["idle_w"])


def counts_of(work: StepWork) -> np.ndarray:
    """Return the counts of a scheduled step in the order of `COUNTS`, float64 [8]."""
    decodes = len(work.decode_positions)
    keys = float(work.decode_positions.sum()) + decodes
    samples, tokens, chunk_keys, pairs = decodes, 0, 0, 0.0
    for chunk in work.chunks:
        samples += chunk.samples
        tokens += chunk.tokens
        chunk_keys += chunk.start + chunk.tokens
        pairs += chunk.tokens * chunk.start + chunk.tokens * (chunk.tokens + 1) / 2
    rows = work.bucket - tokens  # rows of ended sequences in a padded batch are computed as well
    return np.array([1.0, work.bucket, samples, rows, keys, tokens, chunk_keys, pairs], np.float64)


class StageTimer:
    """The seconds of each stage of a pipeline for a step.

    Each op takes the longest of its compute, memory and network time (NanoFlow §3.2). An op
    takes `kernel_s` or `collective_s` in addition, and a layer `layer_s`: launches and
    latencies, which the roofline of an op lacks. A step takes at least its joules over the watts of the cap.

    Args:
      layers: number of layers of each stage, first stage first. The first stage also embeds; the
        last one also computes the logits.
      dtype: of the GEMMs. Under float8_e4m3fn the GEMMs of attention and of dense MLPs are fp8, and those of
        experts too if `widths.experts` is 1.
      tile_rows: rows of a GEMM's tile (SARATHI §4.4); None for GEMMs without tiles.
      graph: the ops of one device; None for those of `model_graph`.
      op_rates: the rates of ops that do not reach `rates`, by name.
      choosers: the devices whose tokens choose among the experts of a layer,
          each with the tokens of the step.
      hidden: the ops that run beside the other ops of another nano-batch, by name. A step is then two
        nano-batches of half the tokens, which both read the weights and take the fixed times. It takes the
        longer of the two sums, or the time of one batch where this is less. The sums do not count the first
        of these ops, beside which no other op runs.
      joules: of the device; None for devices without a power cap.

    Raises:
      ConfigError: for layers that do not sum to the model's, for a model with
        windows, and for tiles of experts.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[int],
        tp: int,
        rates: Rates,
        *,
        widths: Widths = BFLOAT16,
        dtype: str = "bfloat16",
        layer_s: float = 0.0,
        kernel_s: float = 0.0,
        collective_s: float = 0.0,
        tile_rows: int | None = None,
        graph: Graph | None = None,
        op_rates: Mapping[str, Rates] | None = None,
        choosers: int = 1,
        hidden: Sequence[str] = (),
        joules: CapJoules | None = None,
    ):
        if sum(layers) != config.num_layers or min(layers) < 1:
            raise ConfigError("layers", list(layers), f"positive numbers that sum to {config.num_layers}")
        graph = graph or model_graph(config, tp, widths)
        if any(op.window for op in graph.ops()):
            raise ConfigError("model", config.architecture, "a model without sliding windows")
        if tile_rows and any(op.experts for op in graph.ops()):
            raise ConfigError("tile_rows", tile_rows, "None for a mixture of experts")
        self._tile_rows, self._choosers = tile_rows, choosers
        stages: list[collections.Counter[Op]] = []
        first = 0
        for stage, number in enumerate(layers):
            ops = [op for layer in graph.layers[first : first + number] for op in layer]
            ops = [*(graph.before if stage == 0 else ()), *ops]
            ops += graph.after if stage == len(layers) - 1 else ()
            stages.append(collections.Counter(ops))
            first += number
        distinct = tuple(dict.fromkeys(op for stage in stages for op in stage))
        self._repeats = np.array([[stage[op] for op in distinct] for stage in stages], np.float64)
        self._names = [op.name for op in distinct]
        each_s = np.array([collective_s if op.kind == "network" else kernel_s for op in distinct])
        self._each_s, self._layers_s = each_s, np.array(layers, np.float64) * layer_s
        self._hidden = np.array([op.name in hidden for op in distinct])
        self._dense = np.array([op.kind == "dense" for op in distinct])
        rows = [next((what for what, each in op.demand if each.flops), "tokens") for op in distinct]
        self._rows = np.array([COUNTS.index(what) for what in rows])  # the count that is M of each op's GEMM
        dtypes = [gemm_dtype(op, dtype, widths) for op in distinct]
        own = [(op_rates or {}).get(op.name, rates) for op in distinct]
        flops_per_s = [each.flops_per_s[one] for each, one in zip(own, dtypes, strict=True)]
        memory = np.array([[each.memory_bytes_per_s] for each in own])
        self._flops = self._matrix(distinct, "flops") / np.array(flops_per_s)[:, None]
        # A step reads the weights of those experts that its tokens choose.
        weights = self._matrix(distinct, "weight_bytes") / memory
        self._memory = self._matrix(distinct, "memory_bytes") / memory
        self._experts = np.array([op.experts is not None for op in distinct])
        self._expert_s = np.where(self._experts, weights[:, 0], 0.0)
        self._experts_of = (config.num_experts, config.experts_per_token)
        self._keeps_cap = joules is not None
        if joules is not None:
            flop_j = np.array([[joules.flop[one]] for one in dtypes])
            byte_s = joules.byte / joules.watts
            self._cap_s = (
                self._matrix(distinct, "flops") * flop_j / joules.watts
                + self._matrix(distinct, "memory_bytes") * byte_s
            )
            self._cap_expert_s = self._expert_s * memory[:, 0] * byte_s
        network = np.array([[each.network_bytes_per_s] for each in own])
        self._network = self._matrix(distinct, "network_bytes") / network

    @staticmethod
    def _matrix(ops: Sequence[Op], quantity: str) -> np.ndarray:
        """Return the quantity of each op for one of each count: [ops, counts]."""
        rows = []
        for op in ops:
            row = dict.fromkeys(COUNTS, 0.0)
            for what, each in op.demand:
                row[what] += getattr(each, quantity)
            rows.append([row[what] for what in COUNTS])
        return np.array(rows)

    def __call__(self, counts: np.ndarray) -> np.ndarray:
        """Return the seconds of each stage, float64 [stages]. counts: of `counts_of`."""
        whole = np.maximum(self._repeats @ self._op_s(counts) + self._layers_s, self._least_s(counts))
        if not self._hidden.any():
            return whole
        half = np.where(np.arange(len(COUNTS)) == COUNTS.index("step"), counts, counts / 2)
        each = self._op_s(half)
        shown = self._repeats @ np.where(self._hidden, 0.0, each) + self._layers_s
        hidden = self._repeats @ np.where(self._hidden, each, 0.0)
        return np.minimum(whole, 2 * np.maximum(np.maximum(shown, hidden), self._least_s(half)))

    def _least_s(self, counts: np.ndarray) -> np.ndarray:
        """Return the seconds that each stage's joules take at the power cap, float64 [stages]."""
        if not self._keeps_cap:
            return np.zeros(len(self._repeats))
        return self._repeats @ (self._cap_s @ counts - self._cap_expert_s * self._unread(counts))

    def _unread(self, counts: np.ndarray) -> float:
        """Return the share of the experts of a layer that a step leaves out, times the number of steps."""
        if not self._experts.any():
            return 0.0
        number, chosen = self._experts_of
        return float(counts[0] * (1 - chosen / number) ** (self._choosers * counts[1]))

    def by_op(self, counts: np.ndarray) -> dict[str, float]:
        """Return the seconds of the ops of each name in one batch, over all stages, fixed times included."""
        total = self._repeats.sum(axis=0) * self._op_s(counts)
        names = dict.fromkeys(self._names, 0.0)
        for name, each in zip(self._names, total, strict=True):
            names[name] += float(each)
        return names

    def _op_s(self, counts: np.ndarray) -> np.ndarray:
        """Return the seconds of each distinct op, float64 [ops]."""
        compute = self._flops @ counts
        if self._tile_rows:
            rows = np.maximum(counts[self._rows], 1e-9)
            compute = np.where(
                self._dense, compute * np.ceil(rows / self._tile_rows) * self._tile_rows / rows, compute
            )
        memory = self._memory @ counts
        memory -= self._expert_s * self._unread(counts)
        return np.maximum(np.maximum(compute, memory), self._network @ counts) + self._each_s


def gemm_dtype(op: Op, dtype: str, widths: Widths) -> str:
    """Return the dtype of an op's GEMM."""
    if op.name in FP8_PRODUCTS or (op.experts and widths.experts == 1.0):
        return dtype
    return "bfloat16" if dtype == "float8_e4m3fn" else dtype
