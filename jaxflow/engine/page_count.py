"""The number of KV pages that fit the memory beside the weights and the programs.

On a GPU the number depends on the temporary arrays of the largest step, and a program depends on the number.
So the programs are prepared for a guess, and the guess is checked against the first programs.
"""

import logging
from collections.abc import Collection, Iterable, Sequence

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxflow.config import ConfigError, EngineConfig, ModelConfig, Window
from jaxflow.engine.default_seqs import TOKENS_OF_SEQ
from jaxflow.engine.executor import Executor
from jaxflow.engine.first_layouts import first_layouts
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.lowering_processes import LoweringProcesses
from jaxflow.engine.program_memory import IN_FLIGHT, SPARE
from jaxflow.engine.team import Team
from jaxflow.kv.device_cache import fit_pages, page_bytes
from jaxflow.kv.tiers.host_machine import free_host_bytes
from jaxflow.kv.tiers.start import device_bytes
from jaxflow.parallel.mesh import TP, on_gpu

log = logging.getLogger(__name__)
GOOD_GUESS = 0.99  # least share of the pages that fit
STEP_MARGIN = 1.7  # temporary arrays of a step, over the values of its widest layer
SAMPLER_LOGITS, SAMPLER_BYTES = 2.4, 64 << 20  # temporary copies of a sampler's logits, and its other arrays
NO_LIMIT = 1 << 62  # pages of a layer group without a layer in this process
POOL_TOKENS = 32768  # tokens of KV in a CPU's default pool, at least


def count_pages(
    config: EngineConfig, model: ModelConfig, stages: Sequence[Executor], team: Team | None
) -> tuple[int, ...]:
    """Return the pages of each layer group: as configured, or all that fit in
    the free memory of each stage.
    """
    pages = _own_num_pages(config, model, stages, team)
    return pages if team is None else team.least("pages", pages)


def _own_num_pages(
    config: EngineConfig, model: ModelConfig, stages: Sequence[Executor], team: Team | None
) -> tuple[int, ...]:
    """Return the pages that fit in the memory of this process's devices and host. See `count_pages`."""
    stages = [stage for stage in stages if stage.is_here]
    if config.num_kv_pages is not None:
        most = min(_most_pages(config, executor, len(stages)) for executor in stages)
        if config.num_kv_pages > most:
            raise ConfigError(
                "num_kv_pages",
                config.num_kv_pages,
                f"at most {most} pages, which fit the memory",
            )
        return (config.num_kv_pages,) * len(model.windows)
    if not on_gpu():
        return _least_pages(model, stages, [_pages_on_cpu(config, stage, len(stages)) for stage in stages])
    free = [memory_budget(stage.programs.mesh, config) - stage.state_bytes() for stage in stages]
    if config.enforce_eager or team is not None:
        return _compiled_pages(config, model, stages, free, team)
    if (early := stages[0].compiler.early_pages) is not None:
        needs = [stage.compiler.need_of_largest() for stage in stages]
        if _is_good(early, _pages_beside(config, model, stages, free, needs)):
            return early
    found = _guessed_pages(config, model, stages, free)
    if found is not None:
        return found
    return _measured_pages(config, model, stages, free, None)


def memory_budget(mesh: Mesh, config: EngineConfig) -> int:
    """Return the free bytes of one device for the KV cache and the steps' temporary space."""
    stats = [device.memory_stats() for device in mesh.local_devices]
    if all(stats):
        free = min(s["bytes_limit"] - s["bytes_in_use"] for s in stats)
        return int(free - SPARE * stats[0]["bytes_limit"])
    return int(
        free_host_bytes() * config.gpu_memory_utilization / 2 / mesh.size
    )  # CPU: half of the free memory


def ask_for_programs(
    stages: Sequence[Executor], first: Collection[StepLayout], guess: tuple[int, ...]
) -> None:
    """Let processes prepare the first programs of all stages, and then the others, for guessed pages."""
    for stage in stages:
        stage.compiler.prepare_first(first, guess)
    for stage in stages:
        stage.compiler.prepare_later(guess)


def _least_pages(
    model: ModelConfig, stages: Sequence[Executor], fitting: Iterable[tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the pages of each of the model's layer groups that fit every stage.

    fitting: the pages of the groups of each stage.
    """
    by_window: dict[Window, int] = {}
    for executor, of_stage in zip(stages, fitting, strict=True):
        for group, pages in zip(executor.page_groups, of_stage, strict=True):
            by_window[group.window] = min(pages, by_window.get(group.window, pages))
    return tuple(by_window.get(window, NO_LIMIT) for window in model.windows)


def _measured_pages(
    config: EngineConfig,
    model: ModelConfig,
    stages: Sequence[Executor],
    free: Sequence[int],
    num_pages: tuple[int, ...] | None,
) -> tuple[int, ...]:
    """Return the pages that leave every stage the memory that its programs need.

    Args:
      free: bytes of each stage for the pages and the temporary arrays.
      num_pages: see `ProgramCompiler.temporary_needs`.
    """
    needs = [stage.compiler.temporary_bytes(num_pages) for stage in stages]
    return _pages_beside(config, model, stages, free, needs)


def _most_pages(config: EngineConfig, executor: Executor, stages: int) -> int:
    """Return the pages of each layer group that the free memory holds. stages: see `_pages_on_cpu`."""
    mesh = executor.programs.mesh
    size = sum(page_bytes(executor.page_groups, config.block_size, mesh.shape[TP]))
    return (
        memory_budget(mesh, config) if on_gpu() else free_host_bytes() // stages // executor.ranks
    ) // size


def _pages_on_cpu(config: EngineConfig, executor: Executor, stages: int) -> tuple[int, ...]:
    """Return the pages of a stage's layer groups that fit on a CPU. stages: the stages that share the memory.

    The other half of the memory holds the temporary arrays. The start writes each page once, and a number
    that varied with the free memory would miss caches.
    """
    mesh = executor.programs.mesh
    assert config.max_num_seqs and config.max_num_batched_tokens and config.max_model_len
    free = memory_budget(mesh, config) // stages - executor.state_bytes()
    tokens = max(POOL_TOKENS, config.max_num_seqs * TOKENS_OF_SEQ, config.max_model_len)
    pages = -(-tokens // config.block_size)
    most = pages * sum(page_bytes(executor.page_groups, config.block_size, mesh.shape[TP]))
    return _fitting_pages(config, executor, min(free, most))


def _compiled_pages(
    config: EngineConfig,
    model: ModelConfig,
    stages: Sequence[Executor],
    free: Sequence[int],
    team: Team | None = None,
) -> tuple[int, ...]:
    """Return the pages that leave every stage the memory that its programs need.

    The programs are compiled for a guess, one beside the other. They are compiled again
    if the guess is bad. The processes of a team compile for the smallest of their
    guesses. free: see `_measured_pages`.
    """
    guess = stages[0].compiler.early_pages or first_guess(config, model, stages, free)
    if team is not None:
        guess = team.least("guessed pages", guess)
    needs = [
        stage.compiler.compile_for(guess, first_layouts(config, model, stage.layouts)) for stage in stages
    ]
    found = _pages_beside(config, model, stages, free, needs)
    return guess if _is_good(guess, found) else found


def _is_good(guess: tuple[int, ...], most: tuple[int, ...]) -> bool:
    """Return True if guessed pages fit, and are nearly all that fit.

    most: the pages of each layer group that fit.
    """
    return all(GOOD_GUESS * fit <= pages <= fit for pages, fit in zip(guess, most, strict=True))


def first_guess(
    config: EngineConfig, model: ModelConfig, stages: Sequence[Executor], free: Sequence[int]
) -> tuple[int, ...]:
    """Return the pages that `_compiled_pages` compiles all programs for. free: see `_measured_pages`."""
    needs = [_guessed_temporary_bytes(config, model)] * len(stages)
    try:
        return _pages_beside(config, model, stages, free, needs)
    except ConfigError:  # the memory is small: a measurement may say that it suffices
        return (stages[0].pages_per_sequence + 1,) * stages[0].groups


def _pages_beside(
    config: EngineConfig,
    model: ModelConfig,
    stages: Sequence[Executor],
    free: Sequence[int],
    needs: Sequence[int],
) -> tuple[int, ...]:
    """Return the pages of each layer group that fit every stage.

    Args:
      free: see `_measured_pages`.
      needs: bytes of each stage's temporary arrays.
    """
    fitting = (
        _fitting_pages(config, stage, each - need)
        for stage, each, need in zip(stages, free, needs, strict=True)
    )
    return _least_pages(model, stages, fitting)


def _guessed_pages(
    config: EngineConfig, model: ModelConfig, stages: Sequence[Executor], free: Sequence[int]
) -> tuple[int, ...] | None:
    """Return a number of pages that leaves enough memory for temporary arrays, or None without a good guess.

    The number is known before the first program is compiled, so processes prepare the first programs side by
    side with the ones that are measured. The other processes prepare the other programs meanwhile.
    free: see `_measured_pages`.
    """
    if any(stage.compiler.lowering is None for stage in stages):
        return None
    first = first_layouts(config, model, stages[0].layouts)
    if first is None:
        return None
    needs = [_guessed_temporary_bytes(config, model)] * len(stages)
    try:
        guess = _pages_beside(config, model, stages, free, needs)
    except ConfigError:  # the memory is small: a measurement may say that it suffices
        return None
    guess = _early_guess(stages[0].compiler.lowering, guess)
    ask_for_programs(stages, first, guess)
    found = _measured_pages(config, model, stages, free, guess)
    if _is_good(guess, found):
        return guess
    log.info("pages: %s fit, and %s were guessed: the first steps are prepared again", found, guess)
    for stage in stages:
        if stage.compiler.lowering is not None:
            stage.compiler.lowering.withdraw(guess)
    return found


def _early_guess(lowering: LoweringProcesses | None, guess: tuple[int, ...]) -> tuple[int, ...]:
    """Return the pages that processes prepare programs for since `_ask_early`, if these are close to `guess`.

    The other programs are withdrawn.
    """
    early = None if lowering is None else lowering.guess
    if lowering is None or early is None or early == guess:
        return guess
    if all(GOOD_GUESS * each <= pages <= each / GOOD_GUESS for pages, each in zip(early, guess, strict=True)):
        return early
    lowering.withdraw(early)
    return guess


def _guessed_temporary_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return the bytes of temporary arrays and results that the largest step and its samplers may need.

    The number is 17 to 270 MB more than XLA states for the programs of five models on one and two H200s.
    Pages are lost by a larger number. A number that is too small costs a second compilation.
    """
    assert config.max_num_seqs and config.max_num_batched_tokens
    tokens, rows = config.max_num_batched_tokens, config.max_num_seqs
    tp, size, width = config.tensor_parallel_size, jnp.dtype(config.dtype).itemsize, model.hidden_size
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    inputs = model.num_layers * model.layer_input_size
    dense = 2 * width + (heads + 2 * model.widest_mlp) / tp + inputs
    # Ranks gather their tokens before the experts.
    pairs = config.data_parallel_size * model.experts_per_token
    experts = pairs * (width + 2 * model.expert_intermediate_size / tp)
    step = STEP_MARGIN * tokens * size * max(dense, experts)
    sampler = SAMPLER_LOGITS * 4 * rows * model.vocab_size + SAMPLER_BYTES
    return int(max(step, sampler) + IN_FLIGHT * (tokens + rows) * width * size)


def _fitting_pages(config: EngineConfig, executor: Executor, free: int) -> tuple[int, ...]:
    """Return the pages of each layer group that fit in some bytes, without those for copies of pages."""
    tp = executor.programs.mesh.shape[TP]
    assert config.max_num_seqs and config.max_num_batched_tokens and config.max_model_len
    if on_gpu() and config.kv_offloading_size:
        free -= device_bytes(page_bytes(executor.page_groups, config.block_size, tp), free)
    return fit_pages(
        executor.page_groups,
        free,
        block_size=config.block_size,
        tp=tp,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        memory="device" if on_gpu() else "host",
    )
