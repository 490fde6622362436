"""Predicted seconds of a pipeline stage, as a function of a step's counts."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxflow.config import ConfigError, ModelConfig
from jaxflow.model.cost import Rates
from jaxflow.model.graph import BFLOAT16, Op, Widths, model_graph
from jaxflow.scheduler.state import StepWork

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
class Link:
    """A link between two stages.

    Attributes:
      bytes_per_s: rate of one device's link to its peer in the next stage.
      latency_s: time of an empty transfer.
    """

    bytes_per_s: float = 25e9
    latency_s: float = 500e-6


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

    Each op takes the longest of its compute, memory and network time (NanoFlow §3.2). Each layer takes
    `layer_s` in addition: kernel launches and the latency of collectives, which the roofline of an op lacks.

    Args:
      layers: number of layers of each stage, first stage first. The first stage also embeds; the last one also
        computes the logits.
      tile_rows: rows of a GEMM's tile (SARATHI §4.4); None for GEMMs without tiles.

    Raises:
      ConfigError: for layers that do not sum to the model's, and for a model with windows or experts.
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
        tile_rows: int | None = None,
    ):
        if sum(layers) != config.num_layers or min(layers) < 1:
            raise ConfigError("layers", list(layers), f"positive numbers that sum to {config.num_layers}")
        graph = model_graph(config, tp, widths)
        if any(op.window or op.experts for op in graph.ops()):
            raise ConfigError("model", config.architecture, "a dense model without sliding windows")
        self._tile_rows, self._rates = tile_rows, rates
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
        self._fixed_s = np.array(layers, np.float64) * layer_s
        self._dense = np.array([op.kind == "dense" for op in distinct])
        rows = [next((what for what, each in op.demand if each.flops), "tokens") for op in distinct]
        self._rows = np.array([COUNTS.index(what) for what in rows])  # the count that is M of each op's GEMM
        self._flops = self._matrix(distinct, "flops") / rates.flops_per_s[dtype]
        self._memory = self._matrix(distinct, "memory_bytes") / rates.memory_bytes_per_s
        self._network = self._matrix(distinct, "network_bytes") / rates.network_bytes_per_s

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
        """Return the seconds of each stage, float64 [stages]. counts: as `counts_of` returns them."""
        compute = self._flops @ counts
        if self._tile_rows:
            rows = np.maximum(counts[self._rows], 1e-9)
            compute = np.where(
                self._dense, compute * np.ceil(rows / self._tile_rows) * self._tile_rows / rows, compute
            )
        longest = np.maximum(np.maximum(compute, self._memory @ counts), self._network @ counts)
        return self._repeats @ longest + self._fixed_s
