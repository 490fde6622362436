"""The start of an engine, from settings and a checkpoint. All defaults are resolved here."""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from tqdm import tqdm

from jaxflow.config import KV_DTYPES, ConfigError, EngineConfig, ModelConfig, Window
from jaxflow.engine.ahead_of_time import is_timed, target_of, untimed
from jaxflow.engine.beside_loading import device_bytes_of, have_same_shapes, load_and_prepare, open_pools
from jaxflow.engine.default_seqs import TOKENS_OF_SEQ, default_max_num_seqs, default_step_tokens
from jaxflow.engine.driver import Driver
from jaxflow.engine.executor import Executor, rehearse
from jaxflow.engine.expert_slots import check_slots, with_slots
from jaxflow.engine.first_layouts import between_steps, first_layouts, prepare_in_background
from jaxflow.engine.kernel_choice import choose_kernels, tell_kernels
from jaxflow.engine.known_starts import KnownStarts
from jaxflow.engine.latent_limits import check_latent
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.loop import Loop
from jaxflow.engine.lowered_cache import lowered_folder, open_lowered_programs
from jaxflow.engine.lowering_processes import Description, LoweringProcesses, number_of_processes
from jaxflow.engine.page_count import ask_for_programs, count_pages, first_guess, memory_budget
from jaxflow.engine.program_memory import SPARE
from jaxflow.engine.programs import Programs
from jaxflow.engine.ranked_loop import RankedLoop
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.engine.start_times import StartTimes, describe
from jaxflow.engine.step_plans import (
    choose_plans,
    cost_device,
    default_plan,
    largest_step,
    make_layouts,
    one_alone,
    read_while_launched,
    stage_layers,
    stage_plan,
    uses_pdl,
)
from jaxflow.engine.step_time_prediction import predict_step_time
from jaxflow.engine.stored_format import with_stored_format
from jaxflow.engine.team import Team
from jaxflow.engine.weight_shapes import to_values
from jaxflow.kv.device_cache import page_bytes, page_groups
from jaxflow.kv.tiers.host_machine import free_host_bytes
from jaxflow.kv.tiers.offload import KvOffload
from jaxflow.kv.tiers.page import copy_to
from jaxflow.kv.tiers.page_copies import PageCopies
from jaxflow.kv.tiers.rank_copies import RankCopies
from jaxflow.kv.tiers.start import (
    HostTier,
    best_seconds,
    check_host,
    disk_tier,
    open_disk,
    pinned_bytes,
    pinned_pool_gib,
    reserve,
    start_host_tier,
    start_rank_tiers,
)
from jaxflow.model import softmax_range
from jaxflow.model.attention_spans import with_spans
from jaxflow.model.checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxflow.model.checkpoints.fingerprint import kv_fingerprint
from jaxflow.model.composition import Composition
from jaxflow.model.cost import op_times
from jaxflow.model.graph import model_graph
from jaxflow.model.op_registry import Context
from jaxflow.model.ops import head_table
from jaxflow.model.sampling import rows_at_once
from jaxflow.model.stage import Stage, stages_of
from jaxflow.model.weight_spec import Leaf
from jaxflow.model.weights import Weights, leaves, shapes, shardings
from jaxflow.parallel.links import fault_text
from jaxflow.parallel.mesh import (
    DP,
    TP,
    axis_of,
    choose_platform,
    expert_axis_of,
    is_here,
    make_rank_mesh,
    of_several_processes,
    on_gpu,
    ranks_of,
    sharded,
    stage_meshes,
)
from jaxflow.pipeline.choice import is_sequential
from jaxflow.pipeline.compiler import compile_plan, xla_options
from jaxflow.pipeline.handwritten import sequential_plan
from jaxflow.pipeline.plan import Plan
from jaxflow.scheduler.batch_budget import BatchBudget
from jaxflow.scheduler.config import SchedulerConfig
from jaxflow.scheduler.running import make_page_tables
from jaxflow.scheduler.scheduler import Scheduler, StepPolicy
from pallas_kernels.gemm.api import Product, product_of, shape_of
from pallas_kernels.kernel_set import HOPPER, KernelSet, has_bounded
from pallas_kernels.quantized import BlockFp8, Quantized
from pallas_kernels.this_device import this_device

log = logging.getLogger(__name__)
FEWEST_LAYERED = 8  # fewest layers of a model that runs one program a layer on a CPU
# XLA uses vectors of 256 bits by default. With 512 bits, the products of one row with bfloat16 or e4m3
# weights take about a fifth less CPU time. A CPU without such vectors runs two instructions for one.
CPU_OPTIONS = {"xla_cpu_prefer_vector_width": 512}
CheckPlans = Callable[[Mapping[int, Sequence[Plan]]], None]
# The settings that a step's programs depend on, the key of the cache of lowered programs. The others say
# where files are, or concern the weights' values and the host only.
PROGRAM_FIELDS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "block_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "enable_eplb",
    "num_redundant_experts",
    "max_model_len",
    "max_num_batched_tokens",
    "step_sizes",
    "max_num_seqs",
    "gpu_memory_utilization",
    "num_kv_pages",
    "kv_offloading_size",
    "plan",
    "kernels",
    "enforce_eager",
)


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


def resolve(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return the settings with their defaults for this device and model. Raises: ConfigError."""
    if config.attention_spans is not None and not model.span_classes:
        raise ConfigError("attention_spans", config.attention_spans, "unset for this command")
    gpu = on_gpu()
    dtype = config.dtype if config.dtype != "auto" else ("bfloat16" if gpu else "float32")
    longest = config.max_model_len or model.max_position
    if longest > model.max_position:
        raise ConfigError(
            "max_model_len", longest, f"at most {model.max_position}, which the checkpoint was made for"
        )
    config = dataclasses.replace(
        config, dtype=dtype, kv_cache_dtype=KV_DTYPES[config.kv_cache_dtype] or dtype
    )
    if model.attention_sinks and jnp.dtype(config.kv_cache_dtype).itemsize == 1:
        raise ConfigError(
            "kv_cache_dtype",
            config.kv_cache_dtype,
            "auto, bfloat16 or float32 for a model with attention sinks, whose layers with a window lose "
            "accuracy in 8 bits",
        )
    check_latent(config, model)
    mixture = (model.num_experts, model.experts_per_token, config.data_parallel_size)
    by_default = default_step_tokens(*mixture) if gpu else 256
    budget = config.max_num_batched_tokens or largest_step(config, model) or by_default
    seqs = config.max_num_seqs or default_max_num_seqs(budget, *_kv_bytes(config, model, budget))
    config = dataclasses.replace(config, max_num_seqs=seqs)
    if budget < seqs:
        raise ConfigError(
            "max_num_batched_tokens",
            budget,
            f"at least max_num_seqs={seqs}, a token for each running sequence",
        )
    most = max(seqs, _machine_bytes() // _step_token_bytes(model, dtype))
    if budget > most:
        raise ConfigError("max_num_batched_tokens", budget, f"at most {most}, which the memory may hold")
    config = dataclasses.replace(config, max_model_len=longest, max_num_batched_tokens=budget)
    return dataclasses.replace(config, plan=default_plan(config, model)) if config.plan == "auto" else config


def _kv_bytes(config: EngineConfig, model: ModelConfig, budget: int) -> tuple[float, float]:
    """Return the bytes for KV pages of one tensor-parallel shard over all stages, and
    the bytes of a sequence's pages.

    The sequence has `TOKENS_OF_SEQ` tokens, or `max_model_len` if that is less. On a CPU all shards share the
    free memory, of which pages use half (`memory_budget`). config: its dtypes are resolved.

    Args:
      budget: most tokens of a step.
    """
    tp, stages, ranks = config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size
    groups = page_groups(model, config.kv_cache_dtype, tp)
    tokens = min(TOKENS_OF_SEQ, config.max_model_len or model.max_position)
    sizes = page_bytes(groups, config.block_size, tp)
    seq_bytes = sum(
        group.pages_of(tokens, config.block_size) * size for group, size in zip(groups, sizes, strict=True)
    )
    weights = _shard_bytes(config, model)
    if on_gpu():
        step = budget * _step_token_bytes(model, config.dtype)
        return stages * ((1 - SPARE) * _usable_bytes(config) - step) - weights, seq_bytes
    shards = tp * ranks
    return (free_host_bytes() / shards - weights) * config.gpu_memory_utilization / 2, seq_bytes


def _shard_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return the bytes of all layers' weights on one tensor-parallel shard.
    config: its dtypes are resolved.
    """
    sizes = {TP: config.tensor_parallel_size, DP: config.data_parallel_size}
    tree = leaves(model, config.tensor_parallel_size, **weight_options(config))

    def shard(leaf: Leaf) -> int:
        arrays, specs = jax.tree.leaves(leaf.struct(jnp.dtype(config.dtype))), jax.tree.leaves(leaf.specs)
        return sum(
            array.size * array.dtype.itemsize // math.prod(sizes.get(axis, 1) for axis in _axes(spec))
            for array, spec in zip(arrays, specs, strict=True)
        )

    return sum(shard(leaf) for leaf in jax.tree.leaves(tree))


def _axes(spec: PartitionSpec) -> list[str]:
    """Return the mesh axes of a partition."""
    return [axis for part in spec if part for axis in ((part,) if isinstance(part, str) else part)]


def _usable_bytes(config: EngineConfig) -> float:
    """Return the bytes of a GPU that the engine uses; those of the card where no such GPU is present."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_limit"] if stats else config.gpu_memory_utilization * cost_device().memory_bytes


def _machine_bytes() -> int:
    """Return the bytes of memory that a step could have: of a device, or the free ones of the host."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_limit"] if stats else free_host_bytes()


def _step_token_bytes(model: ModelConfig, dtype: str) -> int:
    """Return the least bytes that a token of a step needs.

    These are residual, Q, K, V, the MLP's inner activations and the embeddings of each layer.
    """
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    inputs = model.num_layers * model.layer_input_size
    return jnp.dtype(dtype).itemsize * (2 * model.hidden_size + heads + 2 * model.widest_mlp + inputs)


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
            warm_up = functools.partial(
                _warm_up, config, checkpoint.model_config, team=team, progress=progress
            )
            lowering = None
            if kernels is None and team is None:
                lowering = _lowering(config, checkpoint.model_config, plans)
            if lowering is not None:
                undo.callback(lowering.close)
            make = make_executor if config.pipeline_parallel_size == 1 else make_staged_executor
            executor = make(config, checkpoint, plans, lowering=lowering, **how)
            warm_up_s = warm_up(executor)
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
                shapes = [pages.page_shapes() for pages in executor.rank_pages()]
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
        _end_lowering(executor)
        if team is not None:
            team.watch_closely()

    return on_prepared


def _warm_up(
    config: EngineConfig,
    model: ModelConfig,
    executor: Executor | StagedExecutor,
    *,
    team: Team | None,
    progress: bool,
) -> float:
    """Compile the programs that an executor serves with at first, with a progress bar. Return the seconds.

    config: resolved. The processes of a team compile the same programs.
    """
    first = first_layouts(config, model, executor.layouts)
    wait = (lambda: None) if team is None else team.wait_until_compiled
    with _bar(progress) as bar:
        return executor.warm_up(_advance(bar), wait, first)


def _bar(progress: bool) -> tqdm:
    return tqdm(total=None, desc="Compiling", disable=not progress, unit="program", delay=1.0)


def _lowering(
    config: EngineConfig, model: ModelConfig, plans: Mapping[int, Sequence[Plan]], waits: bool = False
) -> LoweringProcesses | None:
    """Return the processes that lower and compile the programs of a start. The caller closes them.

    None where the engine lowers its programs. Without the setting `lowering_processes`, the engine does so on
    devices without Mosaic kernels, whose programs take a fraction of a second each. config: resolved.
    waits: see `number_of_processes`.
    """
    if config.enforce_eager:  # a process takes longer to start than the programs take to be lowered
        return None
    asked, device = config.lowering_processes, this_device()
    steps = config.pipeline_parallel_size * sum(len(several) for several in plans.values())
    layers = max(stage_layers(config, model))
    nano_ops = max(len(plan.nano_ops) for several in plans.values() for plan in several)
    count = number_of_processes(steps, asked, layers=layers, nano_ops=nano_ops, waits=waits)
    if not count or (asked is None and not has_bounded(device.capability)):
        return None
    undo, folder = contextlib.ExitStack(), lowered_folder()
    if folder is None:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="jaxflow-")))
    known = KnownStarts.of(folder, (program_settings(config), model, plans))
    lowering = LoweringProcesses(count, device, known, on_close=undo.close)
    if not known.sizes():
        lowering.start()
    return lowering


def _end_lowering(executor: Executor | StagedExecutor) -> None:
    """End the processes of `_lowering`, if there are any, once they have prepared all programs."""
    stages = executor.stages if isinstance(executor, StagedExecutor) else (executor,)
    lowering = stages[0].lowering
    if lowering is None:
        return
    if not (executor.substitutes and executor.unready()):
        lowering.remember(executor.num_pages)
    for stage in stages:
        stage.lowering, stage.lowered = None, stage.lowered if lowered_folder() else None
    lowering.close()


def make_executor(
    config: EngineConfig,
    checkpoint: Checkpoint,
    plans: Mapping[int, Sequence[Plan]],
    *,
    kernels: KernelSet | None = None,
    graphs: Mapping[str, str] | None = None,
    team: Team | None = None,
    progress: bool = True,
    times: StartTimes | None = None,
    lowering: LoweringProcesses | None = None,
) -> Executor:
    """Return an executor with its weights and KV cache, before warm-up.

    Args:
      config: resolved.
      plans: at least one plan for each bucket.
      kernels: None for the device's kernels.
      graphs: the launch mode of plans by name (`jaxflow.pipeline.streams.GRAPHS`), instead of the default.
      team: the processes that make the executor together; None for one process.
      times: takes the times of the phases.
      lowering: processes that lower the programs of the executor, all of whose devices are in this process;
        None: this process lowers them.

    Raises:
      ConfigError: for a config with several pipeline stages.
    """
    if config.pipeline_parallel_size != 1:
        raise ConfigError("pipeline_parallel_size", config.pipeline_parallel_size, "1 for this command")
    times = times or StartTimes()
    (executor,) = _make_stages(config, checkpoint, plans, kernels, graphs, team, progress, times, lowering)
    with times.phase("memory"):
        executor.allocate(count_pages(config, checkpoint.model_config, [executor], team))
    _start_unless_known(lowering, executor.num_pages)
    _add_page_copies(config, executor)
    return executor


def _start_unless_known(lowering: LoweringProcesses | None, num_pages: tuple[int, ...]) -> None:
    """Start the processes now if the folder lacks programs for this number of pages."""
    if lowering is not None and not lowering.started and not lowering.knows(num_pages):
        lowering.start()


def make_staged_executor(
    config: EngineConfig,
    checkpoint: Checkpoint,
    plans: Mapping[int, Sequence[Plan]],
    *,
    kernels: KernelSet | None = None,
    team: Team | None = None,
    progress: bool = True,
    times: StartTimes | None = None,
    lowering: LoweringProcesses | None = None,
) -> StagedExecutor:
    """Return an executor of several pipeline stages, before warm-up. Arguments: see `make_executor`."""
    times = times or StartTimes()
    stages = _make_stages(config, checkpoint, plans, kernels, None, team, progress, times, lowering)
    executor = StagedExecutor(stages, None if team is None else team.exchange(), times)
    with times.phase("memory"):
        executor.allocate(count_pages(config, checkpoint.model_config, executor.stages, team))
    _start_unless_known(lowering, executor.num_pages)
    for stage in executor.stages:
        _add_page_copies(config, stage)
    return executor


def make_warm(
    config: EngineConfig, checkpoint: Checkpoint, *, progress: bool, times: StartTimes
) -> Executor | StagedExecutor:
    """Return an executor that has compiled all its programs, for a command that makes its own loops.

    Other processes prepare the programs, as in a start of an engine. All of them have ended their work.
    Arguments: see `make_executor`.
    """
    model = checkpoint.model_config
    plans = choose_plans(config, model)
    make = make_executor if config.pipeline_parallel_size == 1 else make_staged_executor
    with contextlib.ExitStack() as end:
        lowering = _lowering(config, model, plans, waits=True)
        if lowering is not None:
            end.callback(lowering.close)
        executor = make(config, checkpoint, plans, progress=progress, times=times, lowering=lowering)
        with _bar(progress) as bar:
            executor.warm_up(_advance(bar))
        _end_lowering(executor)
    return executor


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


def _add_page_copies(config: EngineConfig, stage: Executor) -> None:
    """Add the programs that copy pages to a stage with its KV cache, if there is a host tier."""
    if config.kv_offloading_size:
        pages, mesh = stage.own_num_pages, stage.programs.mesh
        make = PageCopies if stage.ranks == 1 else RankCopies
        stage.add_page_copies(make(stage.page_groups, pages, config.block_size, mesh))


def _make_stages(
    config: EngineConfig,
    checkpoint: Checkpoint,
    plans: Mapping[int, Sequence[Plan]],
    kernels: KernelSet | None,
    graphs: Mapping[str, str] | None,
    team: Team | None,
    progress: bool,
    times: StartTimes,
    lowering: LoweringProcesses | None,
) -> list[Executor]:
    """Return the executor of each pipeline stage, with its weights. Arguments: see `make_executor`."""
    model, tp = checkpoint.model_config, config.tensor_parallel_size
    config = with_stored_format(config, checkpoint)
    if config.kv_offloading_size:
        check_host(config, model)
    stages = stages_of(stage_layers(config, model))
    ranks = config.data_parallel_size
    meshes = stage_meshes(tp, len(stages)) if ranks == 1 else (make_rank_mesh(ranks, tp),)
    is_own = kernels is None
    check_slots(config, model)
    here = [mesh for mesh in meshes if is_here(mesh)]
    own = [device for mesh in here for device in mesh.local_devices]
    memory = min((device.memory_stats() or {}).get("bytes_limit", 0) for device in own)
    free = [memory_budget(mesh, config) for mesh in here]
    open_pools(own)  # from here until there are weights, a question for a device's memory would wait
    kernels = kernels or choose_kernels(config, model)  # a refusal comes before the weights are read
    folder = None if lowering is None else lowering.known.path.parent

    def load() -> list[Weights]:
        with times.phase("weights"):
            loaded = [
                _load(config, checkpoint, mesh, stage, progress)
                if is_here(mesh)
                else _absent(config, model, mesh, stage)
                for stage, mesh in zip(stages, meshes, strict=True)
            ]
            jax.block_until_ready(loaded)
        if team is None:  # else a process reads a part of the files
            times.count_read(checkpoint.stored_bytes())
        return loaded

    def is_one_alone(weights: Sequence[Weights]) -> bool:  # ranks with one decode each are rare
        return ranks == 1 and one_alone(dense_products(model, weights[-1]).values(), kernels)

    target = target_of(meshes[0]) if lowering is not None and on_gpu() and _untimed(config) else None

    def make(weights: Sequence[Weights], one: bool, memory: int) -> list[Executor]:
        names = stage_names(model, stages, list(map(to_values, weights)))
        rest = (kernels, is_own, one, graphs, memory, times, folder)
        made = [
            make_stage(config, model, plans, stage, mesh, each, *rest, name=name)
            for stage, mesh, each, name in zip(stages, meshes, weights, names, strict=True)
        ]
        for executor in made if lowering is not None else ():
            assert executor.lowered is not None
            executor.lowered = dataclasses.replace(executor.lowered, target=target)
            executor.lowering = lowering
        return made

    def describe(weights: Sequence[Weights], one: bool, memory: int) -> None:
        """Describe the programs to the processes that prepare them. A second equal call does nothing."""
        assert lowering is not None
        buckets = {tokens: tuple(several) for tokens, several in plans.items()}
        values = tuple(map(to_values, weights))
        launched = None if graphs is None else dict(graphs)
        lowering.describe(
            Description(config, model, buckets, one, launched, memory, values, str(folder), target)
        )

    made = expected = None
    known = None if lowering is None else lowering.latest_pages(memory)
    reads = known is not None and _reads_early(config, plans)
    if reads or _compiles_early(config, team):
        expected = [_absent(config, model, mesh, stage) for stage, mesh in zip(stages, meshes, strict=True)]

        def prepare(check: Callable[..., None]) -> list[Executor] | None:
            made = make(expected, is_one_alone(expected), memory)
            if known is None:
                _compile_early(config, model, made, free, check)
                return made
            return made if _read_early(config, model, made, known, check) else None

        loaded, made = load_and_prepare(load, prepare, functools.partial(have_same_shapes, expected), times)
        for executor, weights in zip(made or (), loaded, strict=made is not None):
            executor.take_weights(weights)
    elif lowering is not None and lowering.started:
        expected = [_absent(config, model, mesh, stage) for stage, mesh in zip(stages, meshes, strict=True)]
        absent = expected

        def ask(check: Callable[..., None]) -> None:
            try:
                one = is_one_alone(absent)
                describe(absent, one, memory)
                _ask_early(config, model, make(absent, one, memory), free)
            except Exception as error:  # the start meets the fault again
                log.info(
                    "start: no programs are prepared while the weights are loaded: %s", fault_text(error)
                )

        loaded, _ = load_and_prepare(load, ask, lambda _: True, times)
    else:
        loaded = load()
    tell_kernels(kernels, dense_products(model, loaded[-1]), progress)
    one = is_one_alone(loaded)
    if team is not None:  # programs depend on both, and all processes need the same ones
        memory, alone = team.least("programs", [memory, int(one)])
        one = bool(alone)
    made = make(loaded, one, memory) if made is None else made
    if lowering is not None:
        described = loaded if expected is None or not have_same_shapes(expected, loaded) else expected
        describe(described, one, memory)
    return made


def _compiles_early(config: EngineConfig, team: Team | None) -> bool:
    """Return True if the programs are compiled while the weights are loaded.

    A compilation that times products would meet the work of the loading. Copies of
    experts have shapes that the loading decides. config: resolved.
    """
    if not config.enforce_eager or config.enable_eplb or team is not None:
        return False
    return bool(_untimed(config)) if on_gpu() else config.num_kv_pages is not None


def _compile_early(
    config: EngineConfig,
    model: ModelConfig,
    stages: Sequence[Executor],
    free: Sequence[int],
    check: Callable[..., None],
) -> None:
    """Compile the first programs of stages that have the shapes of their weights, for a number of pages.

    `_compiled_pages` checks the number once the weights are loaded.

    Args:
      free: bytes of each stage before the weights are loaded, see `memory_budget`.
      check: called after each program.
    """
    if config.num_kv_pages is not None:
        pages = (config.num_kv_pages,) * len(model.windows)
    else:
        left = [
            each - device_bytes_of(stage.weights) - stage.state_bytes()
            for stage, each in zip(stages, free, strict=True)
        ]
        pages = first_guess(config, model, stages, left)
    for stage in stages:
        check()
        stage.compile_early(pages, check, first_layouts(config, model, stage.layouts))


def _ask_early(
    config: EngineConfig, model: ModelConfig, stages: Sequence[Executor], free: Sequence[int]
) -> None:
    """Let processes prepare programs while the weights are loaded, for the pages of `_early_guess`.

    Args:
      stages: with the shapes of their weights.
      free: bytes of each stage before the weights are loaded, see `memory_budget`.
    """
    first = first_layouts(config, model, stages[0].layouts)
    if first is None:
        return
    if config.num_kv_pages is not None:
        guess = (config.num_kv_pages,) * len(model.windows)
    elif on_gpu():
        left = [
            each - device_bytes_of(stage.weights) - stage.state_bytes()
            for stage, each in zip(stages, free, strict=True)
        ]
        guess = first_guess(config, model, stages, left)
    else:
        return
    ask_for_programs(stages, first, guess)
    for stage in stages:
        if stage.lowering is not None:
            stage.lowering.guess = guess


def _reads_early(config: EngineConfig, plans: Mapping[int, Sequence[Plan]]) -> bool:
    """Return True if a start whose programs are known may read the programs while the weights are loaded.

    The folder has no machine code of programs that XLA times. Copies of experts have
    shapes that the loading decides. config: resolved.
    """
    tp = config.tensor_parallel_size
    timed = on_gpu() and (not _untimed(config) or any(is_timed(first, tp) for first, *_ in plans.values()))
    return not timed and not config.enable_eplb


def _read_early(
    config: EngineConfig,
    model: ModelConfig,
    stages: Sequence[Executor],
    pages: tuple[int, ...],
    check: Callable[..., None],
) -> bool:
    """Read the first programs of stages that have the shapes of their weights. Return False if one is missing
    or damaged. The start then makes all of them once the weights are loaded.

    Args:
      pages: of each layer group, in the latest start with equal settings.
      check: called after each program.
    """
    kept = [stage.lowered for stage in stages]
    try:
        for stage in stages:
            assert stage.lowered is not None
            check()
            stage.lowered = dataclasses.replace(stage.lowered, only_reads=True)
            stage.compile_early(pages, check, first_layouts(config, model, stage.layouts))
    except CancelledError:
        raise
    except Exception as error:  # the start meets a fault of a program again
        log.info("start: no programs are read while the weights are loaded: %s", fault_text(error))
        return False
    for stage, lowered in zip(stages, kept, strict=True):
        stage.lowered = lowered
    return True


def _load(config: EngineConfig, checkpoint: Checkpoint, mesh: Mesh, stage: Stage, progress: bool) -> Weights:
    """Return the weights of a stage on its devices."""
    weights = checkpoint.load(
        config.dtype,
        mesh,
        progress=progress,
        seed=config.seed,
        stage=None if stage.is_model else stage,
        **weight_options(config),
    )
    weights = _calibrated(config, checkpoint, weights, mesh, stage)
    if config.enable_eplb:
        experts = checkpoint.model_config.num_experts
        weights = with_slots(weights, mesh, experts, config.num_redundant_experts)
    return weights


def weight_options(config: EngineConfig) -> dict[str, Any]:
    """Return the options of `jaxflow.model.weights.leaves`. config: resolved."""
    return {
        "quantization": config.quantization,
        "kv_scales": config.kv_cache_dtype == "float8_e4m3fn",
        "expert_parallel": config.enable_expert_parallel,
        "ranks": config.data_parallel_size,
    }


def make_context(
    config: EngineConfig,
    layers: ModelConfig,
    kernels: KernelSet,
    mesh: Mesh,
    windows: tuple[Window, ...] | None = None,
) -> Context:
    """Return the constants of the steps of a model, or of one pipeline stage. windows: see `Context`."""
    spread = expert_axis_of(mesh) if config.enable_expert_parallel else None
    return Context(layers, kernels, axis_of(mesh), windows=windows, expert_axis=spread)


def _absent(config: EngineConfig, model: ModelConfig, mesh: Mesh, stage: Stage) -> Weights:
    """Return the shapes of the weights of a stage that another process has."""
    options = weight_options(config)
    arrays = stage.weights(shapes(model, mesh.shape[TP], jnp.dtype(config.dtype), **options))
    specs = stage.weights(shardings(model, mesh, **options))
    return jax.tree.map(
        lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharded(mesh, spec)), arrays, specs
    )


def stage_names(model: ModelConfig, stages: Sequence[Stage], weights: Sequence[Any]) -> list[str]:
    """Return the name of each stage's programs. Stages whose programs differ in their devices only have one
    name, and so each program of them is lowered and compiled once.

    weights: the shapes of each stage, from `to_values`.
    """
    names: dict[str, str] = {}

    def name(stage: Stage, values: Any) -> str:
        made_of = repr((stage.embeds, stage.samples, stage.config(model).layers, values))
        return names.setdefault(made_of, f" of layers {stage.first} to {stage.stop}")

    if len(stages) == 1:
        return [""]
    return [name(stage, values) for stage, values in zip(stages, weights, strict=True)]


def make_stage(
    config: EngineConfig,
    model: ModelConfig,
    plans: Mapping[int, Sequence[Plan]],
    stage: Stage,
    mesh: Mesh,
    weights: Weights,
    kernels: KernelSet,
    is_own: bool,
    one: bool,
    graphs: Mapping[str, str] | None,
    memory: int,
    times: StartTimes,
    folder: Path | None = None,
    name: str = "",
) -> Executor:
    """Return the executor of one stage, without its KV cache.

    Args:
      is_own: `kernels` are the device's.
      one: a single decode has its own step.
      graphs: see `make_executor`.
      memory: bytes of a device; 0 if unknown.
      folder: of the lowered programs; None for the one in XLA's cache.
      name: of `stage_names`.
    """
    tp, ranks, layers = config.tensor_parallel_size, config.data_parallel_size, stage.config(model)
    assert config.max_num_seqs is not None and config.max_model_len is not None
    quantization = config.quantization
    hidden_bytes = jnp.dtype(config.dtype).itemsize * model.hidden_size
    named = {(tokens, plan.name): plan for tokens, several in plans.items() for plan in several}

    def plan_of(layout: StepLayout) -> Plan:
        # The step of a single decode is in no bucket.
        found = named.get((layout.tokens, layout.plan)) or sequential_plan(
            model, layout.tokens, tp, ranks=ranks
        )
        return found if stage.is_model else stage_plan(found, layers, tp)

    def early(layout: StepLayout) -> bool:
        read = read_while_launched(weights["layers"], model, layout.tokens)
        return layout.plan not in (graphs or {}) and uses_pdl(layout, kernels, mesh.size, read)

    def options_of(layout: StepLayout) -> dict[str, Any]:
        if not on_gpu():
            return CPU_OPTIONS
        alone = early(layout) or config.enforce_eager
        launched, plan = "streams" if alone else (graphs or {}).get(layout.plan), plan_of(layout)
        flags = xla_options(plan, tp, launched, hidden_bytes=hidden_bytes)
        return ({} if is_timed(plan, tp) else _untimed(config)) | flags

    specs = jax.tree.map(lambda array: array.sharding.spec, weights)
    layouts = make_layouts(
        config, model, named.values(), decodes_alone=on_gpu() or config.enforce_eager, one=one
    )
    lowered = None
    if is_own:
        pdl = [layout.key for layout in layouts if early(layout)]
        made_of = program_settings(config), model, plans, graphs, memory, pdl, of_several_processes(mesh)
        lowered = open_lowered_programs(made_of, folder)
    return Executor(
        Programs(
            make_context(config, layers, kernels, mesh, None if stage.is_model else model.windows),
            mesh,
            specs,
            rows_at_once(memory, model.vocab_size),
            embeds=stage.embeds,
            samples=stage.samples,
        ),
        weights,
        layouts,
        lambda layout: compile_plan(
            plan_of(layout), layers, tp, ranks=ranks, quantized=quantization == "fp8", pdl=early(layout)
        ),
        options_of=options_of,
        options=_untimed(config) if on_gpu() else CPU_OPTIONS,
        lowered=lowered,
        kv_dtype=jnp.dtype(config.kv_cache_dtype),
        max_model_len=config.max_model_len,
        defers=not on_gpu(),  # a GPU times kernels while it compiles, in memory that steps need
        is_layered=lambda layout: (
            ranks_of(mesh) == 1 and (config.enforce_eager or has_program_a_layer(plan_of(layout), layers))
        ),
        eager=config.enforce_eager,
        times=times,
        name=name,
    )


def _untimed(config: EngineConfig) -> dict[str, Any]:
    """Return `untimed` of this process's GPU. With `enforce_eager`, GPUs without
    Mosaic kernels compile without timing, too.
    """
    return untimed(config.quantization, HOPPER if config.enforce_eager else this_device().capability)


def has_program_a_layer(plan: Plan, layers: ModelConfig) -> bool:
    """Return True if a step is compiled as one program a layer by default: on a CPU, for a model of many
    layers.

    A GPU replays the launches of a whole step, and other plans overlap operations of different layers.
    """
    return not on_gpu() and layers.num_layers >= FEWEST_LAYERED and is_sequential(plan)


def program_settings(config: EngineConfig) -> dict[str, Any]:
    """Return the settings that a step's programs depend on. config: resolved."""
    return {name: getattr(config, name) for name in PROGRAM_FIELDS}


def dense_products(model: ModelConfig, weights: dict[str, Any]) -> dict[str, Product]:
    """Return the one-row GEMM of each dense op of the first layer and of the head, on one device.

    weights: of the model, or of its last pipeline stage.
    """
    named = {op: weights["layers"][0].get(op) for op in ("qkv", "out_proj", "up_gate", "down")}
    named["logits"] = head_table(weights)
    gates = {"up_gate": model.gate_block if model.gated_mlp else 0}
    shapes = {
        op: shape_of(_one_shard(w), gates.get(op, 0), _input_scales(op, w))
        for op, w in named.items()
        if w is not None
    }
    results = {
        "logits": "float32",
        "up_gate": "float8_e4m3fn" if isinstance(named["down"], Quantized | BlockFp8) else "bfloat16",
    }
    return {op: product_of(shape, 1, results.get(op, "bfloat16")) for op, shape in shapes.items()}


def _input_scales(op: str, weight: Any) -> str:
    """Return the form of the scales of a dense op's input, as `shape_of` takes it."""
    if isinstance(weight, BlockFp8):
        return "blocks"
    if isinstance(weight, Quantized):
        return "blocks" if op == "down" else "rows"
    return ""


def _one_shard(weight: Any) -> Any:
    """Return the shapes of one device's shard of a weight."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype), weight)


def _calibrated(
    config: EngineConfig, checkpoint: Checkpoint, weights: Weights, mesh: Mesh, stage: Stage
) -> Weights:
    """Return the weights with the unified max value of each layer of a stage, if the model qualifies.

    With an e4m3 cache the running maximum stays: e4m3 attention weights lack the range for a maximum that
    differs from the row's, and decodes gain nothing.
    """
    path = Path(config.calibration) if config.calibration else None
    if config.calibration is None and checkpoint.source is not None:
        path = softmax_range.default_path(checkpoint.source.path)
        path = path if path.exists() else None
    if path is None:
        return weights
    found = softmax_range.read(path, checkpoint.model_config.num_layers)
    if not found.qualifies:
        log.info("softmax: running maximum: the model does not qualify for a unified max value (%s)", path)
        return weights
    if jnp.dtype(config.kv_cache_dtype) == jnp.float8_e4m3fn:
        say = log.warning if config.calibration else log.info
        say("softmax: running maximum: an e4m3 cache does not use a unified max value (%s)", path)
        return weights
    log.info("softmax: unified max value (%s)", path)
    return softmax_range.with_unified_max(weights, found.layers[stage.first : stage.stop], mesh)


def make_loop(
    config: EngineConfig,
    model: ModelConfig,
    executor: Executor | StagedExecutor,
    tier: HostTier | None = None,
    *,
    policy: StepPolicy | None = None,
    **changes: Any,
) -> Loop:
    """Return a loop over an executor.

    Args:
      config: resolved.
      tier: the host tier, which the loop closes; None without one.
      policy: see `Scheduler`; None for `BatchBudget` with the limit of the settings.
      changes: fields of the `SchedulerConfig` to replace.

    Raises:
      ConfigError: for a config with several data-parallel ranks.
    """
    check_one_rank(config)
    scheduling = _scheduling(config, model, executor)
    if executor.num_stages > 1:  # only micro-batches need the cost of a decode
        cost = decode_cost(model, config.tensor_parallel_size)
        scheduling = dataclasses.replace(scheduling, stages=executor.num_stages, decode_cost=cost)
    scheduling = dataclasses.replace(scheduling, **changes)
    offload = None
    if tier is not None:
        offload = tier.offload(make_page_tables(scheduling, record_named=True), executor)
    step_time = None
    if policy is None:
        if config.batch_tpot_ms is None:
            policy = BatchBudget()
        else:
            assert isinstance(executor, Executor)
            step_time = predict_step_time(config, model, executor)
            policy = BatchBudget(config.batch_tpot_ms / 1000, step_time)
    scheduler = Scheduler(scheduling, None if offload is None else offload.policy, policy)
    return Loop(
        scheduler,
        executor,
        eos_token_ids=model.eos_token_ids,
        offload=offload,
        step_time=step_time,
        eplb_step_interval=config.eplb_step_interval if config.enable_eplb else None,
    )


def check_one_rank(config: EngineConfig) -> None:
    """Refuse data-parallel ranks in a command that runs the steps of one. Raises: ConfigError."""
    if config.data_parallel_size != 1:
        raise ConfigError("data_parallel_size", config.data_parallel_size, "1 for this command")


def make_ranked_loop(
    config: EngineConfig,
    model: ModelConfig,
    executor: Executor,
    tiers: Sequence[HostTier] = (),
    **changes: Any,
) -> RankedLoop:
    """Return the loop of data-parallel ranks over an executor. Arguments: see `make_loop`.

    tiers: the host tier of each rank, which the loop closes; () without one.
    """
    scheduling = dataclasses.replace(_scheduling(config, model, executor), **changes)
    seeds = random.Random(scheduling.seed)  # requests without a seed get those of one rank
    offloads: list[KvOffload | None] = [
        tier.offload(make_page_tables(scheduling, record_named=True), pages)
        for tier, pages in zip(tiers, executor.rank_pages(), strict=bool(tiers))
    ] or [None] * executor.ranks
    ranks = [
        Loop(
            Scheduler(
                scheduling, None if offload is None else offload.policy, policy=BatchBudget(), seeds=seeds
            ),
            executor,
            eos_token_ids=model.eos_token_ids,
            offload=offload,
            first_slot=rank * executor.slots,
        )
        for rank, offload in enumerate(offloads)
    ]
    return RankedLoop(
        ranks, executor, eplb_step_interval=config.eplb_step_interval if config.enable_eplb else None
    )


def _scheduling(
    config: EngineConfig, model: ModelConfig, executor: Executor | StagedExecutor
) -> SchedulerConfig:
    """Return the settings of a scheduler, of one rank. config: resolved."""
    assert config.max_num_seqs and config.max_num_batched_tokens and config.max_model_len
    return SchedulerConfig(
        token_budget=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        windows=model.windows,
        num_pages=executor.num_pages,
        max_model_len=config.max_model_len,
        buckets=tuple(sorted(executor.layouts)),
        enable_prefix_caching=config.enable_prefix_caching,
        max_waiting=config.max_waiting,
        seed=config.seed,
    )


def decode_cost(model: ModelConfig, tp: int) -> tuple[float, float]:
    """Return the predicted seconds of a decode: without its KV, and of each KV token that it reads."""
    graph, rates = model_graph(model, tp), cost_device().rates
    several, keys = 64.0, 1024.0  # a step with so many decodes, where an op's fixed weights count little

    def seconds(step: Composition) -> float:
        return sum(op_times(op, step, rates).longest_s for op in graph.ops())

    short = seconds(Composition(decode_tokens=several, decode_keys=several))
    long = seconds(Composition(decode_tokens=several, decode_keys=several * keys))
    return short / several, (long - short) / (several * (keys - 1))


def prefill_seconds_per_token(executor: Executor | StagedExecutor) -> float:
    """Measure the time of a token's prefill in the largest step, without attention.

    The chunks of a prompt follow each other on P stages of equal time, so a
    chunk takes the time of one stage.
    """
    layout = executor.layouts[max(executor.layouts)][0]
    stage_times = executor.num_stages + 1  # the stages' times in a rehearsal of two steps
    return best_seconds(lambda: rehearse(executor, layout)) / stage_times / layout.tokens


def _advance(bar: tqdm) -> Callable[[int, int], None]:
    def on_progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(max(0, done - bar.n))

    return on_progress
