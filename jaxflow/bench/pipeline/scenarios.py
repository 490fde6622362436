"""The setting of SARATHI's study of pipelines (§5.3), and the layouts and step policies that it compares."""

import concurrent.futures
import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from jaxflow.bench.engine.policies import Hybrid, OrcaBest, OrcaWorst, PrefillFirst, RequestLevel
from jaxflow.bench.pipeline.simulate import PipelineRun, ReplicaLayout, simulate
from jaxflow.bench.pipeline.stage_time import StageLink, StageTimer, cap_joules
from jaxflow.bench.workload.lengths import Item
from jaxflow.config import ConfigError
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES, Rates
from jaxflow.model.stage_split import split_layers
from jaxflow.scheduler.scheduler import DecodeMaximal, StepPolicy

# The paper does not say whether its chunk of 256 tokens includes the decodes of the step.
STEP_CHUNK = "sarathi, chunk with decodes"
PROMPT_CHUNK = "sarathi, chunk beside decodes"
ORCA_BEST, TP_ONLY = "orca-best", "tp only, orca-best"
COMPARED = (STEP_CHUNK, PROMPT_CHUNK, ORCA_BEST, TP_ONLY)  # the scenarios of the ratios
# SARATHI §5.3: ratios of the paper's simulation.
PAPER = {
    "bubble_orca_best_over_sarathi": 6.29,
    "speedup_over_orca_best": 1.91,
    "speedup_over_tp_only": 1.48,
    "tp_only_over_orca_best": 1.28,
}


@dataclasses.dataclass(frozen=True)
class Study:
    """The setting of the study. The paper states the fields down to `pd_ratio`; it leaves the others open.

    Attributes:
      stages, tp: pipeline stages, and tensor-parallel devices of a stage.
      slots: running sequences of a micro-batch in the pipeline, and of a replica without stages.
      chunk: tokens of a step with chunks.
      lengths: least and most tokens of a request, prompt and output.
      zipf: exponent of the distribution of lengths. pd_ratio: prompt tokens over output tokens.
      length_order: the lengths by falling probability: from the shortest, or in a random order.
      layer_s: seconds of a layer beyond its ops' roofline.
      host_s: seconds of the host between two steps of a micro-batch.
      measured: True for the rates that were measured on the device, where they are known, and for the power
        cap; False for the rates of its datasheet.
      compute_share, memory_share: shares of these FLOP/s and of this memory rate that ops reach.
      tile_rows: rows of a GEMM's tile; None for GEMMs without tiles.
      sends_all: True if each device of a stage sends all activations, False if it sends its share.
      micro_batches: in flight in the pipeline; None for one a stage.
      moving: True if requests may change their micro-batch between two steps.
      requests_per_s: requests arrive evenly at this rate; None if all wait from the start.
      orca_prompts: most prompts that Orca-best prefills in a step.
    """

    model: str = "opt-175b"  # the shapes of GPT-3 175B
    device: str = "A100-80GB"
    stages: int = 8
    tp: int = 8
    requests: int = 10_000
    slots: int = 27
    replica_slots: int = 11
    chunk: int = 256
    lengths: tuple[int, int] = (1024, 4096)
    zipf: float = 0.4
    pd_ratio: float = 10.0
    length_order: Literal["rising", "random"] = "rising"
    layer_s: float = 400e-6
    link: StageLink = dataclasses.field(default_factory=StageLink)
    host_s: float = 15e-3
    measured: bool = False
    compute_share: float = 1.0
    memory_share: float = 1.0
    tile_rows: int | None = None
    sends_all: bool = False
    micro_batches: int | None = None
    moving: bool = False
    requests_per_s: float | None = None
    orca_prompts: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("stages", "tp", "requests", "slots", "replica_slots", "chunk", "orca_prompts")
        for field in (*counts, "micro_batches", "tile_rows", "requests_per_s"):
            value = getattr(self, field)
            if value is not None and value <= 0:
                raise ConfigError(field, value, "a positive number")
        for field in ("layer_s", "host_s"):
            if getattr(self, field) < 0:
                raise ConfigError(field, getattr(self, field), "a number of seconds from 0")
        for field in ("compute_share", "memory_share"):
            if not 0 < getattr(self, field) <= 1:
                raise ConfigError(field, getattr(self, field), "a share in (0, 1]")
        if self.length_order not in ("rising", "random"):
            raise ConfigError("length_order", self.length_order, "rising or random")
        if self.device not in DEVICES:
            raise ConfigError("device", self.device, f"one of {', '.join(DEVICES)}")
        if self.chunk < self.slots:
            raise ConfigError(
                "chunk", self.chunk, f"at least the {self.slots} slots, a token for each decode"
            )

    @property
    def is_papers(self) -> bool:
        """Return True for the paper's deployment and lengths, with any number of requests."""
        stated = ("model", "device", "stages", "tp", "slots", "replica_slots", "chunk", "lengths", "zipf")
        papers = {field.name: field.default for field in dataclasses.fields(Study)}
        return all(getattr(self, field) == papers[field] for field in (*stated, "pd_ratio"))

    @property
    def rates(self) -> Rates:
        """Return the rates that the ops reach."""
        device = DEVICES[self.device]
        rates = device.rates if self.measured else device.datasheet
        return dataclasses.replace(
            rates,
            flops_per_s={name: self.compute_share * each for name, each in rates.flops_per_s.items()},
            memory_bytes_per_s=self.memory_share * rates.memory_bytes_per_s,
        )

    def items(self) -> list[Item]:
        """Return requests with Zipf-distributed lengths and a fixed ratio of prompt to output."""
        low, high = self.lengths
        weights = np.arange(1, high - low + 2, dtype=np.float64) ** -self.zipf
        rng = np.random.default_rng(self.seed)
        lengths = np.arange(low, high + 1)
        if self.length_order == "random":
            lengths = rng.permutation(lengths)
        totals = rng.choice(lengths, self.requests, p=weights / weights.sum())
        outputs = np.maximum(1, np.round(totals / (1 + self.pd_ratio))).astype(int)
        return [Item(int(t - d), int(d)) for t, d in zip(totals, outputs, strict=True)]

    def arrivals_s(self) -> np.ndarray | None:
        """Return the time at which each request arrives, [n]; None if all wait from the start."""
        return None if self.requests_per_s is None else np.arange(self.requests) / self.requests_per_s


def scenarios(study: Study) -> dict[str, tuple[ReplicaLayout, Callable[[], StepPolicy]]]:
    """Return the layout and policy of each scenario of the study, by name."""
    prompts = study.orca_prompts
    whole = (
        study.lengths[1] * prompts + study.slots
    )  # tokens of a step that holds full prompts and all decodes
    all_prompts = study.lengths[1] * study.slots
    pipeline = ReplicaLayout(1, study.micro_batches or study.stages, study.slots, study.chunk, study.moving)
    full = dataclasses.replace(pipeline, token_budget=whole)
    together = dataclasses.replace(pipeline, token_budget=all_prompts, moving=False)
    replicas = ReplicaLayout(study.stages, 1, study.replica_slots, whole)
    longer = dataclasses.replace(pipeline, token_budget=study.chunk + study.slots - 1)
    single_chunk = study.chunk - (study.slots - 1)
    return {
        "sarathi": (pipeline, DecodeMaximal),
        STEP_CHUNK: (pipeline, lambda: Hybrid(single_chunk)),
        PROMPT_CHUNK: (longer, lambda: Hybrid(study.chunk)),
        ORCA_BEST: (full, lambda: OrcaBest(prompts)),
        "orca-worst": (together, OrcaWorst),
        "prefill-first": (together, PrefillFirst),
        "request-level": (together, RequestLevel),
        TP_ONLY: (replicas, lambda: OrcaBest(prompts)),
    }


def stage_layers(study: Study) -> tuple[int, ...]:
    """Return the layers of each stage of the study's pipeline, balanced for a step with a chunk."""
    config = open_checkpoint(study.model, load_format="dummy").model_config
    return split_layers(config, study.stages, study.tp, study.rates, study.chunk)


def run_scenario(study: Study, name: str) -> tuple[PipelineRun, float]:
    """Simulate one scenario. Return its run, and the CPU seconds that the simulation took."""
    start_s = time.process_time()
    config = open_checkpoint(study.model, load_format="dummy").model_config
    layout, make_policy = scenarios(study)[name]
    layers = (config.num_layers,) if layout.replicas > 1 else stage_layers(study)
    timer = StageTimer(
        config,
        layers,
        study.tp,
        study.rates,
        layer_s=study.layer_s,
        tile_rows=study.tile_rows,
        joules=cap_joules(study.device) if study.measured else None,
    )
    run = simulate(
        study.items(),
        layout,
        make_policy,
        timer,
        study.link if len(layers) > 1 else None,
        send_bytes=2.0 * config.hidden_size / (1 if study.sends_all else study.tp),
        host_s=study.host_s,
        arrivals_s=study.arrivals_s(),
    )
    return run, time.process_time() - start_s


def run_all(cases: list[tuple[Study, str]], processes: int) -> list[tuple[PipelineRun, float]]:
    """Return `run_scenario` of each case, in order. processes: cases that run at the same time."""
    if processes == 1:
        return [run_scenario(*case) for case in cases]
    spawn = multiprocessing.get_context("spawn")  # JAX has threads, which a fork does not copy
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        return list(pool.map(run_scenario, *zip(*cases, strict=True)))


def ratios(runs: Mapping[str, PipelineRun], sarathi_name: str = STEP_CHUNK) -> dict[str, float]:
    """Return the ratios of §5.3. sarathi_name: the scenario that stands for SARATHI."""
    sarathi, orca, tp = (runs[name] for name in (sarathi_name, ORCA_BEST, TP_ONLY))
    return {
        "bubble_orca_best_over_sarathi": float(np.median(orca.bubble_s) / np.median(sarathi.bubble_s)),
        "speedup_over_orca_best": orca.duration_s / sarathi.duration_s,
        "speedup_over_tp_only": tp.duration_s / sarathi.duration_s,
        "tp_only_over_orca_best": orca.duration_s / tp.duration_s,
    }
