"""Executors with their weights and KV cache, from settings and a checkpoint, and their warm-up."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence

import jax
from tqdm import tqdm

from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.engine.ahead_of_time import target_of
from jaxflow.engine.beside_loading import have_same_shapes, load_and_prepare, open_pools
from jaxflow.engine.dense_products import dense_products
from jaxflow.engine.early_programs import ask_early, compile_early, compiles_early, read_early, reads_early
from jaxflow.engine.executor import Executor
from jaxflow.engine.expert_slots import check_slots
from jaxflow.engine.first_layouts import first_layouts
from jaxflow.engine.kernel_choice import choose_kernels, tell_kernels
from jaxflow.engine.lowering_processes import Description, LoweringProcesses
from jaxflow.engine.lowering_start import end_lowering, make_lowering, start_unless_known
from jaxflow.engine.page_count import count_pages, memory_budget
from jaxflow.engine.stage_programs import make_stage, stage_names, untimed_options
from jaxflow.engine.stage_weights import absent_stage, load_stage
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.engine.start_times import StartTimes
from jaxflow.engine.step_plans import choose_plans, one_alone, stage_layers
from jaxflow.engine.stored_format import with_stored_format
from jaxflow.engine.team import Team
from jaxflow.engine.weight_shapes import to_values
from jaxflow.kv.tiers.page_copies import PageCopies
from jaxflow.kv.tiers.rank_copies import RankCopies
from jaxflow.kv.tiers.start import check_host
from jaxflow.model.checkpoints.checkpoint import Checkpoint
from jaxflow.model.stage import stages_of
from jaxflow.model.weights import Weights
from jaxflow.parallel.links import fault_text
from jaxflow.parallel.mesh import is_here, make_rank_mesh, on_gpu, stage_meshes
from jaxflow.pipeline.plan import Plan
from pallas_kernels.kernel_set import KernelSet

log = logging.getLogger(__name__)


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
    start_unless_known(lowering, executor.num_pages)
    _add_page_copies(config, executor)
    return executor


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
    start_unless_known(lowering, executor.num_pages)
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
        lowering = make_lowering(config, model, plans, waits=True)
        if lowering is not None:
            end.callback(lowering.close)
        executor = make(config, checkpoint, plans, progress=progress, times=times, lowering=lowering)
        with _bar(progress) as bar:
            executor.warm_up(_advance(bar))
        end_lowering(executor)
    return executor


def warm_up(
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


def _advance(bar: tqdm) -> Callable[[int, int], None]:
    def on_progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(max(0, done - bar.n))

    return on_progress


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
                load_stage(config, checkpoint, mesh, stage, progress)
                if is_here(mesh)
                else absent_stage(config, model, mesh, stage)
                for stage, mesh in zip(stages, meshes, strict=True)
            ]
            jax.block_until_ready(loaded)
        if team is None:  # else a process reads a part of the files
            times.count_read(checkpoint.stored_bytes())
        return loaded

    def is_one_alone(weights: Sequence[Weights]) -> bool:  # ranks with one decode each are rare
        return ranks == 1 and one_alone(dense_products(model, weights[-1]).values(), kernels)

    target = target_of(meshes[0]) if lowering is not None and on_gpu() and untimed_options(config) else None

    def make(weights: Sequence[Weights], one: bool, memory: int) -> list[Executor]:
        names = stage_names(model, stages, list(map(to_values, weights)))
        rest = (kernels, is_own, one, graphs, memory, times, folder)
        made = [
            make_stage(config, model, plans, stage, mesh, each, *rest, name=name)
            for stage, mesh, each, name in zip(stages, meshes, weights, names, strict=True)
        ]
        for executor in made if lowering is not None else ():
            assert executor.lower.lowered is not None
            executor.lower.lowered = dataclasses.replace(executor.lower.lowered, target=target)
            executor.compiler.lowering = lowering
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
    reads = known is not None and reads_early(config, plans)
    if reads or compiles_early(config, team):
        expected = [
            absent_stage(config, model, mesh, stage) for stage, mesh in zip(stages, meshes, strict=True)
        ]

        def prepare(check: Callable[..., None]) -> list[Executor] | None:
            made = make(expected, is_one_alone(expected), memory)
            if known is None:
                compile_early(config, model, made, free, check)
                return made
            return made if read_early(config, model, made, known, check) else None

        loaded, made = load_and_prepare(load, prepare, functools.partial(have_same_shapes, expected), times)
        for executor, weights in zip(made or (), loaded, strict=made is not None):
            executor.take_weights(weights)
    elif lowering is not None and lowering.started:
        expected = [
            absent_stage(config, model, mesh, stage) for stage, mesh in zip(stages, meshes, strict=True)
        ]
        absent = expected

        def ask(check: Callable[..., None]) -> None:
            try:
                one = is_one_alone(absent)
                describe(absent, one, memory)
                ask_early(config, model, make(absent, one, memory), free)
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
