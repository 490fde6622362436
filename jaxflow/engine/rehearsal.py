"""The first runs of an executor's programs, before serving."""

import itertools
from typing import Any

import numpy as np

from jaxflow.engine.layout import StepLayout, empty_buffer
from jaxflow.parallel.mesh import on_gpu


def rehearsed(executor: Any) -> list[StepLayout]:
    """Return the layouts that a start runs once: all that are ready on a GPU, the smallest of them on a CPU.

    The first launch of a program on a GPU loads the program. A CPU's programs are loaded when they are
    compiled, and a run of the largest step takes a second. executor: see `rehearse`.
    """
    every = [*itertools.chain(*executor.layouts.values()), *executor.decode_layouts.values()]
    every = [layout for layout in every if executor.is_ready(layout, full=False, prompt=False)]
    return every if on_gpu() else [min(every, key=lambda layout: layout.tokens)]


def rehearse(executor: Any, layout: StepLayout) -> None:
    """Run an empty step of a layout twice, so that serving pays no first-use
    cost. Deferred programs do not run.

    executor: an `Executor`, or a `StagedExecutor`.
    """
    buffer = np.tile(empty_buffer(layout), executor.ranks)
    nothing = np.full((executor.ranks, 1, 4), executor.groups, np.int32)
    prompt = layout.tokens in executor.layouts and executor.is_ready(layout, full=False, prompt=True)
    targets = np.zeros(executor.ranks * layout.tokens, np.int32) if prompt else None
    executor.run(layout, buffer, nothing, full=False, targets=targets)
    full = layout.full and executor.is_ready(layout, full=True, prompt=False)
    np.asarray(executor.run(layout, buffer, nothing, full=full).tokens)
