"""Programs that are compiled, asked for or read while the weights are loaded."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError

from jaxflow.config import EngineConfig, ModelConfig
from jaxflow.engine.ahead_of_time import is_timed
from jaxflow.engine.beside_loading import device_bytes_of
from jaxflow.engine.executor import Executor
from jaxflow.engine.first_layouts import first_layouts
from jaxflow.engine.page_count import ask_for_programs, first_guess
from jaxflow.engine.stage_programs import untimed_options
from jaxflow.engine.team import Team
from jaxflow.parallel.links import fault_text
from jaxflow.parallel.mesh import on_gpu
from jaxflow.pipeline.plan import Plan

log = logging.getLogger(__name__)


def compiles_early(config: EngineConfig, team: Team | None) -> bool:
    """Return True if the programs are compiled while the weights are loaded.

    A compilation that times products would meet the work of the loading. Copies of
    experts have shapes that the loading decides. config: resolved.
    """
    if not config.enforce_eager or config.enable_eplb or team is not None:
        return False
    return bool(untimed_options(config)) if on_gpu() else config.num_kv_pages is not None


def compile_early(
    config: EngineConfig,
    model: ModelConfig,
    stages: Sequence[Executor],
    free: Sequence[int],
    check: Callable[..., None],
) -> None:
    """Compile the first programs of stages that have the shapes of their weights, for a number of pages.

    `count_pages` checks the number once the weights are loaded.

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
        stage.compiler.compile_early(pages, check, first_layouts(config, model, stage.layouts))


def ask_early(
    config: EngineConfig, model: ModelConfig, stages: Sequence[Executor], free: Sequence[int]
) -> None:
    """Let processes prepare programs while the weights are loaded, for the pages of `first_guess`.

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
        if stage.compiler.lowering is not None:
            stage.compiler.lowering.guess = guess


def reads_early(config: EngineConfig, plans: Mapping[int, Sequence[Plan]]) -> bool:
    """Return True if a start whose programs are known may read the programs while the weights are loaded.

    The folder has no machine code of programs that XLA times. Copies of experts have
    shapes that the loading decides. config: resolved.
    """
    tp = config.tensor_parallel_size
    timed = on_gpu() and (
        not untimed_options(config) or any(is_timed(first, tp) for first, *_ in plans.values())
    )
    return not timed and not config.enable_eplb


def read_early(
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
    kept = [stage.lower.lowered for stage in stages]
    try:
        for stage in stages:
            assert stage.lower.lowered is not None
            check()
            stage.lower.lowered = dataclasses.replace(stage.lower.lowered, only_reads=True)
            stage.compiler.compile_early(pages, check, first_layouts(config, model, stage.layouts))
    except CancelledError:
        raise
    except Exception as error:  # the start meets a fault of a program again
        log.info("start: no programs are read while the weights are loaded: %s", fault_text(error))
        return False
    for stage, lowered in zip(stages, kept, strict=True):
        stage.lower.lowered = lowered
    return True
