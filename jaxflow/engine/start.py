"""The start of an engine, from settings and a checkpoint."""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxflow.config import EngineConfig, ModelConfig
from jaxflow.engine.driver import Driver
from jaxflow.engine.executor import Executor
from jaxflow.engine.executor_start import make_executor, make_staged_executor, warm_up
from jaxflow.engine.first_layouts import between_steps, prepare_in_background
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.loop_start import make_loop, make_ranked_loop
from jaxflow.engine.lowering_start import end_lowering, make_lowering
from jaxflow.engine.rank_pages import rank_pages
from jaxflow.engine.rehearsal import rehearse
from jaxflow.engine.settings import resolve
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.engine.start_times import StartTimes, describe
from jaxflow.engine.step_plans import choose_plans, stage_layers
from jaxflow.engine.stored_format import with_stored_format
from jaxflow.engine.team import Team
from jaxflow.kv.device_cache import page_bytes, page_groups
from jaxflow.kv.tiers.page import copy_to
from jaxflow.kv.tiers.start import (
    HostTier,
    best_seconds,
    disk_tier,
    open_disk,
    pinned_bytes,
    pinned_pool_gib,
    reserve,
    start_host_tier,
    start_rank_tiers,
)
from jaxflow.model.attention_spans import with_spans
from jaxflow.model.checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxflow.model.checkpoints.fingerprint import kv_fingerprint
from jaxflow.model.stage import stages_of
from jaxflow.parallel.mesh import choose_platform, is_here, on_gpu, stage_meshes
from jaxflow.pipeline.plan import Plan
from pallas_kernels.kernel_set import KernelSet

log = logging.getLogger(__name__)
CheckPlans = Callable[[Mapping[int, Sequence[Plan]]], None]


def prepare_process(config: EngineConfig) -> None:
    """Set JAX's platform, memory limits and compilation cache, before its first use."""
    choose_platform()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{config.gpu_memory_utilization:.3f}")
    if config.kv_offloading_size:
        devices = config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
        limit = pinned_pool_gib(config.kv_offloading_size, devices)
        os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(limit))
    where = config.compilation_cache_dir
    where = str(Path.home() / ".cache" / "jaxflow" / "compiled") if where is None else where
    if where and not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", where)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def open_model(config: EngineConfig) -> Checkpoint:
    """Return the checkpoint of the settings, with their attention spans.
    Raises: ConfigError, CheckpointError.
    """
    checkpoint = open_checkpoint(config.model, load_format=config.load_format)
    model = with_spans(config, checkpoint.model_config, checkpoint.name)
    return dataclasses.replace(checkpoint, model_config=model)


@dataclasses.dataclass(frozen=True)
class Engine:
    """A warm engine, and its parts.

    start: seconds by phase of the start, see `StartTimes.summary`.
    """

    config: EngineConfig  # resolved
    driver: Driver
    executor: Executor | StagedExecutor
    warm_up_s: float
    start: Mapping[str, float]


def start_engine(
    config: EngineConfig,
    checkpoint: Checkpoint,
    *,
    kernels: KernelSet | None = None,
    executor: Executor | StagedExecutor | None = None,
    team: Team | None = None,
    progress: bool = True,
    check_plans: CheckPlans | None = None,
) -> Engine:
    """Load a model, compile its programs and start the engine.

    Args:
      kernels: None for the device's kernels.
      team: the processes of the engine; None for one. In all but process 0, the call follows process 0 until
        its end, and raises SystemExit.
      executor: the executor of an engine that has ended, with the same settings except for the KV tiers. It
        must have page copies if there is a host tier.
      check_plans: takes the plans of each step size before anything is loaded. It raises ConfigError for
        plans that the caller refuses.

    Raises:
      ConfigError, CheckpointError, PlanError, ProcessesError
    """
    given, times = config, StartTimes()
    config = with_stored_format(config, checkpoint)
    resolved = functools.partial(resolve, config, checkpoint.model_config)
    with times.phase("devices"):  # the first use of JAX's devices is here
        config = resolved() if team is None else team.resolve(config, resolved)
        log.info(
            "steps: at most %d tokens of at most %d sequences (max_num_batched_tokens%s, max_num_seqs%s)",
            config.max_num_batched_tokens,
            config.max_num_seqs,
            "" if given.max_num_batched_tokens else " by default",
            "" if given.max_num_seqs else " by default",
        )
        plans = choose_plans(config, checkpoint.model_config)
    if check_plans is not None:
        check_plans(plans)
    if team is not None:
        team.compare(given, config, checkpoint, plans)
    fingerprint = kv_fingerprint(config, checkpoint)
    with contextlib.ExitStack() as undo:
        part = None if team is None else team.part(own_page_bytes(config, checkpoint.model_config))
        disk = open_disk(config, checkpoint.model_config, fingerprint, part)
        if disk is not None:
            undo.callback(disk.close)
        warm_up_s = 0.0
        if executor is None:
            how: dict[str, Any] = {"kernels": kernels, "team": team, "progress": progress, "times": times}
            lowering = None
            if kernels is None and team is None:
                lowering = make_lowering(config, checkpoint.model_config, plans)
            if lowering is not None:
                undo.callback(lowering.close)
            make = make_executor if config.pipeline_parallel_size == 1 else make_staged_executor
            executor = make(config, checkpoint, plans, lowering=lowering, **how)
            warm_up_s = warm_up(config, checkpoint.model_config, executor, team=team, progress=progress)
        if team is not None:
            if config.kv_offloading_size and team.leader is not None and on_gpu():
                reserve(executor.page_shapes(), pinned_bytes(config, executor.page_shapes(), disk))
            team.follow_or_lead(
                executor, lambda: None if disk is None else disk_tier(disk, executor.page_shapes())
            )
        measure = functools.partial(prefill_seconds_per_token, executor)
        if config.data_parallel_size > 1:
            assert isinstance(executor, Executor)
            tiers: Sequence[HostTier] = ()
            if config.kv_offloading_size:
                shapes = [pages.page_shapes() for pages in rank_pages(executor)]
                tiers = start_rank_tiers(config, shapes, measure, disk)
            loop = make_ranked_loop(config, checkpoint.model_config, executor, tiers, fingerprint=fingerprint)
        else:
            tier = None
            if config.kv_offloading_size:
                copy = copy_to if team is None else team.recorder.copy
                share = None if team is None else team.share_disk
                tier = start_host_tier(config, executor.page_shapes(), measure, disk, copy=copy, share=share)
            loop = make_loop(config, checkpoint.model_config, executor, tier, fingerprint=fingerprint)
        driver = Driver(loop)
        if team is not None:
            team.watch(driver)
        driver.start()
        if executor.substitutes:
            prepare_in_background(
                executor, _on_compiled(executor, driver, team), _on_prepared(executor, team)
            )
        else:
            _on_prepared(executor, team)()
            executor.compile_deferred()
        undo.pop_all()
    found = times.summary()
    log.info(describe(found))
    return Engine(config, driver, executor, warm_up_s, found)


def _on_compiled(
    executor: Executor | StagedExecutor, driver: Driver, team: Team | None
) -> Callable[[StepLayout], None]:
    """Return a function that makes a compiled layout ready, once all processes have compiled it."""
    make_ready = between_steps(executor, driver.call)

    def on_compiled(layout: StepLayout) -> None:
        if team is not None:
            team.wait_for_layout(layout)
        make_ready(layout)

    return on_compiled


def _on_prepared(executor: Executor | StagedExecutor, team: Team | None) -> Callable[[], None]:
    """Return a function to call once no process compiles any more."""

    def on_prepared() -> None:
        end_lowering(executor)
        if team is not None:
            team.watch_closely()

    return on_prepared


def own_page_bytes(config: EngineConfig, model: ModelConfig) -> tuple[int, ...]:
    """Return the bytes of a page of each layer group on the devices of this process. config: resolved."""
    tp, stages = config.tensor_parallel_size, stages_of(stage_layers(config, model))
    found = dict.fromkeys(model.windows, 0)
    for stage, mesh in zip(stages, stage_meshes(tp, len(stages)), strict=True):
        groups = page_groups(stage.config(model), config.kv_cache_dtype, tp)
        devices = len(mesh.local_devices) if is_here(mesh) else 0
        for group, size in zip(groups, page_bytes(groups, config.block_size, tp), strict=True):
            found[group.window] += devices * size
    return tuple(found.values())


def prefill_seconds_per_token(executor: Executor | StagedExecutor) -> float:
    """Measure the time of a token's prefill in the largest step, without attention.

    The chunks of a prompt follow each other on P stages of equal time, so a
    chunk takes the time of one stage.
    """
    layout = executor.layouts[max(executor.layouts)][0]
    stage_times = executor.num_stages + 1  # the stages' times in a rehearsal of two steps
    return best_seconds(lambda: rehearse(executor, layout)) / stage_times / layout.tokens
