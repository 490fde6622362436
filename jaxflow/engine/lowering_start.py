"""The beginning and the end of the processes that prepare the programs of a start."""

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxflow.config import EngineConfig, ModelConfig
from jaxflow.engine.executor import Executor
from jaxflow.engine.known_starts import KnownStarts
from jaxflow.engine.lowered_cache import lowered_folder
from jaxflow.engine.lowering_processes import LoweringProcesses, number_of_processes
from jaxflow.engine.stage_programs import program_settings
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.engine.step_plans import stage_layers
from jaxflow.pipeline.plan import Plan
from pallas_kernels.kernel_set import has_bounded
from pallas_kernels.this_device import this_device


def make_lowering(
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


def start_unless_known(lowering: LoweringProcesses | None, num_pages: tuple[int, ...]) -> None:
    """Start the processes now if the folder lacks programs for this number of pages."""
    if lowering is not None and not lowering.started and not lowering.knows(num_pages):
        lowering.start()


def end_lowering(executor: Executor | StagedExecutor) -> None:
    """End the processes of `make_lowering`, if there are any, once they have prepared all programs."""
    stages = executor.stages if isinstance(executor, StagedExecutor) else (executor,)
    lowering = stages[0].compiler.lowering
    if lowering is None:
        return
    if not (executor.substitutes and executor.unready()):
        lowering.remember(executor.num_pages)
    for stage in stages:
        stage.compiler.lowering = None
        stage.lower.lowered = stage.lower.lowered if lowered_folder() else None
    lowering.close()
