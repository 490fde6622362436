"""The layouts that a start on a GPU compiles before it serves, and the others,
which become ready while it serves.

A program costs seconds of Python and of XLA, and a step of any larger layout computes the same
tokens. So a start compiles a few layouts, and a step whose own layout is not ready runs the next
larger one that is. No step waits.
"""

import collections
import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from jaxflow.config import EngineConfig, ModelConfig
from jaxflow.engine.deferred import compile_in_background, main_runs
from jaxflow.engine.driver import EngineDead
from jaxflow.engine.executor import Executor
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.rehearsal import rehearse
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.engine.start_times import num_loaded_later
from jaxflow.engine.step_plans import cost_device
from jaxflow.engine.step_time_prediction import roofline_step_time
from jaxflow.parallel.links import fault_text
from jaxflow.parallel.mesh import on_gpu

log = logging.getLogger(__name__)
FIRST_SIZES = 2  # step sizes that are compiled before serving
MOST_WORKERS = 8  # layouts that are prepared at once
SWITCH_S = 0.0005  # after which a thread that lowers lets the engine's thread run; Python's default is 5 ms


def first_layouts(
    config: EngineConfig, model: ModelConfig, layouts: Mapping[int, Sequence[StepLayout]]
) -> list[StepLayout] | None:
    """Return the layouts to compile before serving, the largest first; None for all.

    On a CPU, requests alone decide what is compiled first. A deadline of steps
    (`batch_tpot_ms`) needs all layouts. With `enforce_eager` there is one step size,
    and its steps run decodes until the smaller layouts of decodes are ready.
    config: resolved. layouts: of each step size, one a plan; the first one of a size serves.
    """
    if not on_gpu() or config.batch_tpot_ms is not None:
        return None
    sizes = sorted(layouts)
    if config.enforce_eager:
        return [layouts[sizes[-1]][0]]
    dtype = "float8_e4m3fn" if config.quantization == "fp8" else "bfloat16"
    predicted = roofline_step_time(model, config.tensor_parallel_size, cost_device().rates, sizes, dtype)
    return [layouts[size][0] for size in first_sizes({size: predicted.seconds(size, 0, 0) for size in sizes})]


def first_sizes(seconds: Mapping[int, float], count: int = FIRST_SIZES) -> list[int]:
    """Return the step sizes to begin with: the largest one, and those with which
    the largest slowdown is smallest.

    A step runs the next larger size that is there. Its slowdown is the time of
    this size over that of its own.

    seconds: of each size; a larger size takes no less. count: of the result, or
        all sizes where there are fewer.
    """
    *smaller, largest = sorted(seconds)

    def slowdown(chosen: tuple[int, ...]) -> float:
        own = (min(one for one in (*chosen, largest) if one >= size) for size in seconds)
        return max(seconds[one] / seconds[size] for one, size in zip(own, seconds, strict=True))

    others = itertools.combinations(smaller, min(count - 1, len(smaller)))
    return [largest, *sorted(min(others, key=slowdown), reverse=True)]


def prepare_in_background(
    executor: Executor | StagedExecutor,
    on_compiled: Callable[[StepLayout], None],
    on_end: Callable[[], None] = lambda: None,
    on_fault: Callable[[StepLayout, str], None] = lambda layout, fault: None,
) -> None:
    """Compile the layouts that are not ready, several at a time, and hand over each one.

    Small layouts come first, because an engine without load runs small steps. If the compilation of a layout
    does not fit into the memory next to others, it is repeated by itself at the end. `wait_until_compiled`
    waits for all layouts.

    on_compiled: takes a layout that is compiled, on the thread that compiled it. `between_steps` makes the
        layout ready. CancelledError or EngineDead ends the preparation.
    on_end: called when no layout is left, or when the engine has ended.
    on_fault: takes a layout that stays unready, and the text of the fault.
    """
    waiting = collections.deque(executor.unready())
    crowded: collections.deque[StepLayout] = collections.deque()

    def prepare(layout: StepLayout, alone: bool = False) -> None:
        try:
            executor.compile_layout(layout)
            on_compiled(layout)
        except (EngineDead, CancelledError):
            waiting.clear()
            crowded.clear()
        except Exception as error:
            if not alone and "RESOURCE_EXHAUSTED" in str(error):
                crowded.append(layout)
            else:
                # A layout is ready if only its first launch failed.
                unready = layout in executor.unready()
                log.warning(
                    "start: the layout of %d tokens%s, plan %s, %s: %s",
                    layout.tokens,
                    " of decodes" if layout.decodes else "",
                    layout.plan,
                    "is not compiled, and larger ones run its steps"
                    if unready
                    else "failed its first launch",
                    fault_text(error),
                )
                log.debug("the traceback of this fault", exc_info=True)
                on_fault(layout, fault_text(error))

    def prepare_some() -> None:
        while main_runs() and (layout := _next(waiting)) is not None:
            prepare(layout)

    def prepare_all() -> None:
        number = max(1, min(MOST_WORKERS, (os.cpu_count() or 1), len(waiting)))
        workers = [threading.Thread(target=prepare_some, name=f"compile-{i}") for i in range(number)]
        begin_s, count, loaded = time.monotonic(), len(waiting), num_loaded_later()
        with _switching_often():
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            while main_runs() and (layout := _next(crowded)) is not None:
                prepare(layout, alone=True)
        left = len(executor.unready())
        log.info(
            "start: %d layouts more are ready %.1f s later, %d are not; processes compiled %d of the "
            "programs",
            count - left,
            time.monotonic() - begin_s,
            left,
            num_loaded_later() - loaded,
        )
        on_end()

    if waiting:
        compile_in_background([prepare_all])
    else:
        on_end()


def between_steps(
    executor: Executor | StagedExecutor, call: Callable[[Callable[[Any], None]], Future[None]]
) -> Callable[[StepLayout], None]:
    """Return a function that makes a compiled layout ready, and returns once the layout is.

    call: runs a function between two steps, on the thread that runs the steps: `Driver.call`.
    """
    return lambda layout: call(lambda _: make_ready(executor, layout)).result()


def make_ready(executor: Executor | StagedExecutor, layout: StepLayout) -> None:
    """Let steps run a layout whose programs are compiled, after a first launch.

    Only the thread of the steps may call this function.
    """
    executor.set_ready(layout)
    rehearse(executor, layout)


def _next(layouts: collections.deque[StepLayout]) -> StepLayout | None:
    """Take the first layout; None if there is none. Several threads may call it."""
    try:
        return layouts.popleft()
    except IndexError:
        return None


@contextlib.contextmanager
def _switching_often() -> Iterator[None]:
    """Let a thread that waits for the interpreter have it after `SWITCH_S`, so
    that steps go on beside lowering.
    """
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)
