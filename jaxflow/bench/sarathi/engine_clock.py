"""Times on the engine: steps on its executor back to back, and runs through its scheduler and loop."""

import dataclasses
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxflow.bench.plans.steady import (
    SteadyStep,
    StepWorkload,
    fill_cache,
    page_appends,
    rows_of,
    step_work,
)
from jaxflow.bench.sarathi.clock import EqualRequests
from jaxflow.bench.workload.drive import greedy_requests, run_loop
from jaxflow.bench.workload.lengths import prompts
from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.engine.executor import Executor
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.loop_start import make_loop
from jaxflow.engine.settings import resolve
from jaxflow.engine.start import prepare_process
from jaxflow.engine.step_plans import choose_plans
from jaxflow.engine.stored_format import with_stored_format
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.parallel.mesh import on_gpu
from jaxflow.scheduler.scheduler import Chunks, Scheduler
from jaxflow.scheduler.state import StepWork
from pallas_kernels.measure.timing import interleaved

DECODE_SIZES = (8, 32, 64, 128, 256, 512)  # few sizes of steps with decodes only, because each one compiles
# A step of another number of tokens runs in the next larger step, as a chunk without its decodes does.
ROUND = 8


class Separate:
    """Prefill-only and decode-only steps of batches that start and end together, SARATHI's baseline.

    Prompts are cut at the step's budget. Uncut prompts would leave the compiled steps partly empty, and the
    baseline would lose by padding.
    """

    min_tokens = 0

    def __init__(self) -> None:
        self._open = True

    def fill(self, scheduler: Scheduler, now: float) -> tuple[np.ndarray, Chunks]:
        """See `StepPolicy.fill`."""
        self._open = self._open or not scheduler.num_running
        chunks = scheduler.prefill(now, admit=self._open)
        self._open = bool(chunks) and self._open
        return np.zeros(0, np.int32) if chunks else scheduler.decode(), chunks


class EngineClock:
    """Measured times. Every step and every run is measured once; later questions get the same answer.

    Attributes:
      config: resolved.
      programs: number of compiled steps.
      spreads: relative spread of the windows of each measured step.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        executor: Executor,
        *,
        seconds: float,
        repeats: int,
    ):
        """`seconds`: of measurement of a step, in three windows. `repeats`: runs, for the median."""
        self.config, self.model, self.executor = config, model, executor
        self._seconds, self._repeats = seconds, repeats
        self._steps: dict[Composition, float] = {}
        self._runs: dict[EqualRequests, float] = {}
        self.spreads: list[float] = []
        self.programs = sum(map(len, executor.layouts.values())) + len(executor.decode_layouts)
        windows = zip(executor.num_pages, model.windows, strict=True)
        whole = [pages for pages, window in windows if window is None]
        self._pages = min(whole or executor.num_pages)

    # ---- limits

    def fits(self, step: Composition) -> bool:
        """Return True if pages, rows and the longest sequence allow the step."""
        lengths = _lengths(step)
        longest = max(lengths, default=0) <= (self.config.max_model_len or 0)
        return longest and rows_of(step) <= self.executor.slots and self._used(lengths) < self._pages

    def run_fits(self, run: EqualRequests) -> bool:
        """Return True if pages, slots and the longest sequence allow the run."""
        length = run.prompt_tokens + run.output_tokens
        enough = self._used([length] * run.slots) + run.slots < self._pages
        return enough and length <= (self.config.max_model_len or 0) and run.slots <= self.executor.slots

    def _used(self, lengths: Iterable[int]) -> int:
        return sum(-(-length // self.config.block_size) for length in lengths)

    # ---- steps

    def steps_s(self, steps: Mapping[str, Composition]) -> dict[str, float]:
        """Return the median seconds of each step, measured in turns."""
        new = [step for step in dict.fromkeys(steps.values()) if step not in self._steps]
        for group in self._groups(new):
            self._measure(group)
        return {name: self._steps[step] for name, step in steps.items()}

    def _groups(self, steps: Sequence[Composition]) -> Iterator[list[Composition]]:
        """Yield the steps in groups that share one page table: row i has the
        pages of its longest sequence.
        """
        group: list[Composition] = []
        lengths: list[int] = []
        for step in steps:
            joined = _longest(lengths, _lengths(step))
            if group and self._used(joined) >= self._pages:
                yield group
                group, joined = [], _lengths(step)
            group, lengths = [*group, step], joined
        if group:
            yield group

    def _measure(self, steps: Sequence[Composition]) -> None:
        executor, ready = self.executor, {}
        lengths: list[int] = []
        for step in steps:
            layout = self._layout(step)
            keys = StepWorkload(max(1, round(step.decode_keys)), 0, decodes=int(step.decode_tokens))
            work = step_work(keys, step, layout, self.model.vocab_size)
            ready[step] = SteadyStep.of(executor, layout, work)
            lengths = _longest(lengths, _lengths(step))
        table = page_appends(
            _decodes(lengths), executor.num_pages, self.model.windows, self.config.block_size
        )
        ready[steps[0]].place(table)
        names = {str(i): step for i, step in enumerate(ready)}
        timings = interleaved(
            {name: ready[step].enqueue for name, step in names.items()}, seconds=self._seconds
        )
        for name, step in names.items():
            self._steps[step] = 1e-6 * timings[name].us
            self.spreads.append(timings[name].spread)

    def _layout(self, step: Composition) -> StepLayout:
        """Return the smallest layout that holds the step, as the engine's loop chooses it."""
        size = min(size for size in self.executor.layouts if size >= step.tokens)
        alone = None if step.chunks else self.executor.decode_layouts.get(size)
        return alone or self.executor.layouts[size][0]

    # ---- runs

    def runs_s(self, runs: Mapping[str, EqualRequests]) -> dict[str, float]:
        """Return the median seconds of each run, measured in turns."""
        new = [run for run in dict.fromkeys(runs.values()) if run not in self._runs]
        found: dict[EqualRequests, list[float]] = {run: [] for run in new}
        for _ in range(self._repeats if new else 0):
            for run in new:
                found[run].append(self._once(run))
        self._runs |= {run: statistics.median(seconds) for run, seconds in found.items()}
        return {name: self._runs[run] for name, run in runs.items()}

    def _once(self, run: EqualRequests) -> float:
        loop = make_loop(
            dataclasses.replace(self.config, max_waiting=max(self.config.max_waiting, run.requests)),
            self.model,
            self.executor,
            policy=Separate() if run.separate else None,
            token_budget=run.budget,
            max_num_seqs=run.slots,
        )
        return run_loop(loop, greedy_requests(run.items, prompts(run.items, self.model.vocab_size, 0)))


def start_clock(
    config: EngineConfig,
    steps: Iterable[Composition],
    runs: Iterable[EqualRequests],
    *,
    seconds: float,
    repeats: int,
) -> EngineClock:
    """Load the model, compile the programs that the steps and runs need, and return the clock.

    Raises:
      ConfigError, CheckpointError
    """
    prepare_process(config)
    checkpoint = open_checkpoint(config.model, load_format=config.load_format)
    model = checkpoint.model_config
    config = sized(config, model, list(steps), list(runs))
    config = with_stored_format(config, checkpoint)
    config = resolve(config, model)
    executor = make_executor(config, checkpoint, choose_plans(config, model), progress=sys.stderr.isatty())
    executor.warm_up()
    fill_cache(executor)
    return EngineClock(config, model, executor, seconds=seconds, repeats=repeats)


def sized(
    config: EngineConfig, model: ModelConfig, steps: Sequence[Composition], runs: Sequence[EqualRequests]
) -> EngineConfig:
    """Return the settings with the step sizes, rows, lengths and pages that the steps and runs need.

    Raises:
      ConfigError: for settings that the measurement chooses itself.
    """
    for field in ("step_sizes", "max_num_batched_tokens", "max_num_seqs", "max_model_len"):
        if getattr(config, field) is not None:
            raise ConfigError(field, getattr(config, field), "unset: the figures decide it")
    if config.plan not in ("auto", "sequential"):
        raise ConfigError("plan", config.plan, "auto or sequential, the steps that the paper compares")
    rows = max([*(rows_of(step) for step in steps), *(run.slots for run in runs)])
    decodes = max([1, *(int(s.decode_tokens) for s in steps if not s.chunks), *(run.slots for run in runs)])
    smaller = [size for size in DECODE_SIZES if size < decodes]
    sizes = {*smaller, next((size for size in DECODE_SIZES if size >= decodes), decodes)}
    sizes |= {run.budget for run in runs} | {int(step.tokens) for step in steps if step.tokens % ROUND == 0}
    sizes.add(-(-max(int(step.tokens) for step in steps) // ROUND) * ROUND if steps else 1)
    lengths = [_lengths(step) for step in steps]
    lengths += [[run.prompt_tokens + run.output_tokens] * run.slots for run in runs]
    pages = config.num_kv_pages
    if pages is None and not on_gpu():  # a CPU's free memory would hold far more than the figures use
        pages = 2 + max(sum(1 + -(-n // config.block_size) for n in several) for several in lengths)
    return dataclasses.replace(
        config,
        plan="sequential",
        step_sizes=",".join(map(str, sorted(sizes))),
        max_num_batched_tokens=max(*sizes, rows),
        max_num_seqs=rows,
        max_model_len=min(model.max_position, 1 + max(max(several) for several in lengths)),
        num_kv_pages=pages,
        enable_prefix_caching=False,
    )


def _lengths(step: Composition) -> list[int]:
    """Return the keys of each row of a step."""
    chunks = [int(start + tokens) for tokens, start in step.chunks]
    return [max(1, round(step.decode_keys))] * int(step.decode_tokens) + chunks


def _longest(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return the longer sequence of each row."""
    rows = max(len(one), len(other))
    padded = [[*lengths, *[0] * (rows - len(lengths))] for lengths in (one, other)]
    return [max(pair) for pair in zip(*padded, strict=True)]


def _decodes(lengths: Sequence[int]) -> StepWork:
    """Return a step in which every row decodes with so many keys, for its page table."""
    nobody: Any = np.full(len(lengths), None, object)
    slots = np.arange(len(lengths), dtype=np.int32)
    positions = np.array(lengths, np.int32) - 1
    return StepWork(nobody, slots, positions, (), (), len(lengths), len(lengths), np.empty((0, 4), np.int32))
