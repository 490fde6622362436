"""A toy engine for tests: any of the small checkpoints, driven step by step without a thread."""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
import paths
from hurry import OFTEN, compile_on_use

from jaxflow.config import EngineConfig
from jaxflow.engine.executor import Executor
from jaxflow.engine.executor_start import make_executor, make_staged_executor
from jaxflow.engine.loop import Loop
from jaxflow.engine.loop_start import make_loop, make_ranked_loop
from jaxflow.engine.rank_pages import rank_pages
from jaxflow.engine.ranked_loop import RankedLoop
from jaxflow.engine.settings import resolve
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.engine.step_plans import choose_plans
from jaxflow.kv.tiers.page import page_size
from jaxflow.kv.tiers.page_copies import PageCopies
from jaxflow.kv.tiers.policy import FetchCosts
from jaxflow.kv.tiers.rank_copies import RankCopies
from jaxflow.kv.tiers.start import open_disk, start_host_tier, start_rank_tiers
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.request import Delta, Event, Finished, Request, SamplingParams, Started

ALWAYS_LOAD = FetchCosts(bytes_per_s=1e15, latency_s=0.0, seconds_per_token=1.0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=5)


def executor(
    model: str,
    tp: int = 1,
    budget: int = 64,
    seqs: int = 8,
    pages: int = 96,
    plan: str = "sequential",
    quantization: str | None = None,
    kv: str = "auto",
    ep: bool = False,
    ranks: int = 1,
) -> tuple[EngineConfig, Executor]:
    """Return an executor of a checkpoint under tests/data/models, one for all tests that ask for the same.

    Its programs are compiled at their first use, but those of the usual engine of stories260K before.
    """
    return _executor(model, tp, budget, seqs, pages, plan, quantization, kv, ep, ranks)


@functools.cache  # by position: to a cache, an argument left out is not the same as its default
def _executor(
    model: str,
    tp: int,
    budget: int,
    seqs: int,
    pages: int,
    plan: str,
    quantization: str | None,
    kv: str,
    ep: bool,
    ranks: int,
) -> tuple[EngineConfig, Executor]:
    settings = EngineConfig(
        model=str(paths.MODELS / model),
        block_size=16,
        tensor_parallel_size=tp,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        num_kv_pages=pages,
        step_sizes=str(
            min(budget, 16)
        ),  # and the budget; each more is two programs, for each of dozens of engines
        plan=plan,
        quantization=quantization,
        kv_cache_dtype=kv,
        enable_expert_parallel=ep,
        data_parallel_size=ranks,
    )
    checkpoint = open_checkpoint(settings.model)
    config = resolve(settings, checkpoint.model_config)
    made = make_executor(config, checkpoint, choose_plans(config, checkpoint.model_config), progress=False)
    # A model of five layers runs for thousands of steps. Other models have two layers, since their
    # compilation takes longer than their run.
    if (model, tp, plan, quantization, kv) == ("stories260K", 1, "sequential", None, "auto"):
        compiled = made.compiler._compile
        made.compiler._compile = lambda lowered, options=None: compiled(lowered, OFTEN | (options or {}))
        made.warm_up()
    else:
        compile_on_use(made)
    return config, made


def loop(
    model: str,
    *,
    tp: int = 1,
    budget: int = 64,
    plan: str = "sequential",
    quantization: str | None = None,
    kv: str = "auto",
    ep: bool = False,
    **changes,
) -> Loop:
    """A fresh loop (empty pages, empty prefix cache) over the shared executor; `changes` are of its
    `SchedulerConfig`.
    """
    config, made = executor(model, tp, budget, plan=plan, quantization=quantization, kv=kv, ep=ep)
    return make_loop(config, made.programs.context.config, made, **changes)


def ranked_loop(
    model: str,
    ranks: int,
    *,
    tp: int = 1,
    budget: int = 16,
    pages: int = 96,
    plan: str = "sequential",
    kv: str = "auto",
    **changes,
) -> RankedLoop:
    """Return a fresh loop of data-parallel ranks of tp devices. `changes`: of its `SchedulerConfig`."""
    config, made = executor(model, tp=tp, budget=budget, pages=pages, plan=plan, kv=kv, ep=True, ranks=ranks)
    return make_ranked_loop(config, made.programs.context.config, made, **changes)


@functools.cache
def staged_executor(
    model: str,
    stages: int,
    tp: int,
    budget: int,
    pages: int,
    plan: str,
    kv_offloading_size: float = 0.0,
    ep: bool = False,
) -> tuple[EngineConfig, StagedExecutor]:
    """Return an executor of several pipeline stages, with the settings of `executor`."""
    settings = EngineConfig(
        model=str(paths.MODELS / model),
        block_size=16,
        tensor_parallel_size=tp,
        pipeline_parallel_size=stages,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        num_kv_pages=pages,
        step_sizes=str(min(budget, 16)),
        plan=plan,
        kv_offloading_size=kv_offloading_size,
        enable_expert_parallel=ep,
    )
    checkpoint = open_checkpoint(settings.model)
    config = resolve(settings, checkpoint.model_config)
    plans = choose_plans(config, checkpoint.model_config)
    made = make_staged_executor(config, checkpoint, plans, progress=False)
    for stage in made.stages:
        compile_on_use(stage)
    return config, made


def staged_loop(
    model: str,
    stages: int,
    *,
    tp: int = 1,
    budget: int = 16,
    pages: int = 96,
    plan: str = "sequential",
    ep: bool = False,
    **changes,
) -> Loop:
    """Return a fresh loop over `stages` pipeline stages. `changes`: of its `SchedulerConfig`."""
    config, made = staged_executor(model, stages, tp, budget, pages, plan, ep=ep)
    return make_loop(config, open_checkpoint(config.model).model_config, made, **changes)


@functools.cache
def _with_copies(
    model: str, tp: int, budget: int, kv: str, sizes: tuple[int, ...] = (1, 4)
) -> tuple[EngineConfig, Executor]:
    config, made = executor(model, tp, budget, kv=kv)
    made.add_page_copies(
        PageCopies(made.page_groups, made.num_pages, config.block_size, made.programs.mesh, sizes)
    )
    return config, made


@functools.cache
def _staged_with_copies(model: str, stages: int, tp: int, budget: int) -> tuple[EngineConfig, StagedExecutor]:
    config, made = staged_executor(model, stages, tp, budget, 96, "sequential", kv_offloading_size=0.001)
    for stage in made.stages:
        assert stage.copies is not None
        stage.add_page_copies(stage.copies)  # the executor counts as warm now, so the copies are compiled
    return config, made


@functools.cache
def _ranks_with_copies(model: str, ranks: int, tp: int = 1) -> tuple[EngineConfig, Executor]:
    config, made = executor(model, tp=tp, budget=16, ep=True, ranks=ranks)
    made.add_page_copies(
        RankCopies(made.page_groups, made.num_pages, config.block_size, made.programs.mesh, (1, 4))
    )
    return config, made


def offloading_ranked_loop(
    model: str,
    ranks: int,
    host_pages: int,
    *,
    tp: int = 1,
    costs: FetchCosts = ALWAYS_LOAD,
    disk_folder: Path | None = None,
    **changes,
) -> RankedLoop:
    """Return a `ranked_loop` with a host tier of `host_pages` for each rank; the caller closes the loop.

    Args: see `offloading_loop`.
    """
    config, made = _ranks_with_copies(model, ranks, tp)
    model_config = open_checkpoint(config.model).model_config
    shapes = [pages.page_shapes() for pages in rank_pages(made)]
    size = max(map(page_size, shapes[0]))
    config = dataclasses.replace(config, kv_offloading_size=ranks * host_pages * size / 2**30)
    disk = None
    if disk_folder is not None:
        config = dataclasses.replace(config, kv_disk_path=str(disk_folder), kv_disk_size=1.0)
        disk = open_disk(config, model_config, b"a model")
    tiers = start_rank_tiers(config, shapes, lambda: 1.0, disk, costs=costs)
    return make_ranked_loop(config, model_config, made, tiers, **changes)


def offloading_loop(
    model: str,
    host_pages: int,
    *,
    tp: int = 1,
    stages: int = 1,
    budget: int = 64,
    kv: str = "auto",
    costs: FetchCosts = ALWAYS_LOAD,
    staging_pages: int | None = None,
    disk_folder: Path | None = None,
    disk_fingerprint: bytes = b"a model",
    **changes,
) -> Loop:
    """Return a `loop` with a host tier of `host_pages` of the largest group; the caller closes the loop.

    Args:
      stages: of a `staged_loop`; 1 for a `loop`.
      disk_folder: the folder of a disk tier below the host.
    """
    made: Executor | StagedExecutor
    if stages == 1:
        config, made = _with_copies(model, tp, budget, kv)
    else:
        config, made = _staged_with_copies(model, stages, tp, budget)
    model_config, pages = open_checkpoint(config.model).model_config, made.page_shapes()
    size = max(map(page_size, pages))
    config = dataclasses.replace(config, kv_offloading_size=host_pages * size / 2**30)
    disk = None
    if disk_folder is not None:
        config = dataclasses.replace(config, kv_disk_path=str(disk_folder), kv_disk_size=1.0)
        disk = open_disk(config, model_config, disk_fingerprint)
    tier = start_host_tier(config, pages, lambda: 1.0, disk, costs=costs)
    if staging_pages is not None:
        tier = dataclasses.replace(tier, staging_bytes=staging_pages * size)
    return make_loop(config, model_config, made, tier, **changes)


class Result:
    """The result of one request."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.token_ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list] = {}
        self.finished: dict[int, Finished] = {}

    def take(self, event: Event) -> None:
        if isinstance(event, Started):
            assert self.started is None and not self.token_ids
            self.started = event
        elif isinstance(event, Delta):
            assert self.started is not None and event.index not in self.finished
            self.token_ids.setdefault(event.index, []).extend(event.token_ids)
            self.logprobs.setdefault(event.index, []).extend(event.logprobs or ())
        else:
            assert event.index not in self.finished
            self.finished[event.index] = event

    @property
    def tokens(self) -> list[int]:
        return self.token_ids[0]


def run(
    engine: Loop,
    requests: Iterable[Request],
    *,
    at_step: dict[int, Sequence[Request]] | None = None,
    preempt_at: Collection[int] = (),
) -> dict[str, Result]:
    """Runs requests to their end; before the step of a number more of them may join, or the youngest that
    runs loses its place.
    """
    results: dict[str, Result] = {}
    late = dict(at_step or {})

    def add(request: Request) -> None:
        engine.add(request, 0.0)
        results[request.request_id] = Result()

    for request in requests:
        add(request)
    step = 0
    while engine.has_work or late:
        for request in late.pop(step, ()):
            add(request)
        if step in preempt_at and engine.scheduler.num_running > 1:
            engine.scheduler.preempt_youngest()
        for event in engine.step():
            results[event.request_id].take(event)
        step += 1
        assert step < 20_000, "the engine does not end"
    return results


def prompts(golden: dict) -> list[np.ndarray]:
    return [np.array(p["prompt_ids"], np.int32) for p in golden["prompts"]]
