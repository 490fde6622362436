"""The compiled programs of an executor. Each is compiled at a start, or later on a thread."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxflow.engine import program_memory as temporary
from jaxflow.engine.ahead_of_time import needs_no_gpu
from jaxflow.engine.deferred import DeferredProgram, Turns, wait_for
from jaxflow.engine.heap import collector_paused, freeze_later_objects
from jaxflow.engine.kernel_threads import kernels_of, start_kernels
from jaxflow.engine.layered_step import Begun, LayeredStep, LoweredStep
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.lowered_cache import compile_program
from jaxflow.engine.lowering_processes import LoweringProcesses, Wanted
from jaxflow.engine.program_lowering import ProgramLowering
from jaxflow.engine.start_times import StartTimes
from jaxflow.parallel.mesh import on_gpu

SHORT_PROMPT = 64  # tokens
# Of deferred programs, one is lowered at a time: lowering is Python, so two would only take
# turns. One times its products at a time while steps may run: the memory beside the cache has
# room for the products of one program.
_lowering, _timing = threading.Lock(), Turns()


@dataclasses.dataclass(frozen=True)
class Job:
    """A program to compile.

    Attributes:
      name: unique in its executor.
      table, key: the place of the compiled program.
      lower: lowers the program for a number of pages.
      options: XLA's.
      small: the program is lowered in less time than another process takes to answer.
      layered: `lower` may have one more argument, a function that takes each program of the step
        once lowered, and returns the program or a `Begun` one.
    """

    name: str
    table: dict
    key: Any
    lower: Callable[..., Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    small: bool = False
    layered: bool = False


def _is_made(job: Job) -> bool:
    """Return True for a program that is compiled, and not only deferred."""
    return job.key in job.table and not isinstance(job.table[job.key], DeferredProgram)


def _is_timed(options: Mapping[str, Any]) -> bool:
    """Return True if XLA times products of programs with these options."""
    return on_gpu() and not needs_no_gpu(options)


class ProgramCompiler:
    """The programs of one executor: compiles them, and holds the compiled ones.

    Attributes:
      steps, samplers, prompt, small: the programs, by the keys of their jobs. A
        `DeferredProgram` is compiled later.
      layouts: of each bucket, one a plan. decode_layouts: by tokens. A layout of
        decodes alone has a program of its own.
      first: the layouts of `compile`; None for all.
      options_of: returns XLA's options of a layout's step.
      defers: see `Executor`.
      lowering: processes that lower and compile programs into the folder of
        `lower.lowered`; None: this process does.
    """

    def __init__(
        self,
        lower: ProgramLowering,
        layouts: Iterable[StepLayout],
        *,
        options: Mapping[str, Any],
        options_of: Callable[[StepLayout], dict[str, Any]],
        name: str,
        defers: bool,
        eager: bool,
        times: StartTimes,
    ):
        """Arguments not in the class's description: see `Executor`."""
        self.lower, self.defers, self.options_of = lower, defers, options_of
        self.layouts: dict[int, tuple[StepLayout, ...]] = {}
        self.decode_layouts: dict[int, StepLayout] = {}
        for layout in layouts:
            if layout.decodes:
                self.decode_layouts[layout.tokens] = layout
            else:
                self.layouts[layout.tokens] = (*self.layouts.get(layout.tokens, ()), layout)
        self.steps: dict[tuple[int, str, bool], Any] = {}  # by layouts' keys
        # The steps of `temporary_needs` for a guess of the pages, by pages and layout's key.
        self._measured: dict[tuple[tuple[int, ...], tuple[int, str, bool]], Any] = {}
        self.samplers: dict[tuple[int, str], Callable] = {}
        self.prompt: dict[int, Callable] = {}
        self._masked: dict[int, DeferredProgram] = {}  # by rows
        self.small: dict[str, Callable] = {}
        self.first: tuple[StepLayout, ...] | None = None
        self.lowering: LoweringProcesses | None = None
        self._options, self._name, self._eager, self._times = dict(options), name, eager, times

    def prepare_first(self, first: Collection[StepLayout], num_pages: tuple[int, ...]) -> None:
        """Let other processes prepare the programs of some layouts, for a number of pages that is a guess.

        first: see `compile`.
        """
        self.first = tuple(first)
        self._ask([job for job in self.jobs() if self._is_first(job.table, job.key)], num_pages)

    def prepare_later(self, num_pages: tuple[int, ...]) -> None:
        """Let processes without a program of `prepare_first` prepare the others. num_pages: a guess."""
        later = [job for job in self.jobs() if not self._is_first(job.table, job.key)]
        self._ask(later[::-1], num_pages, urgent=False)

    def temporary_bytes(self, num_pages: tuple[int, ...] | None = None) -> int:
        """Return the device memory of the largest bucket's programs, without weights and cache.

        num_pages: see `temporary_needs`.
        """
        return temporary.together(self.temporary_needs(max(self.layouts), num_pages).values())

    def temporary_needs(
        self, tokens: int, num_pages: tuple[int, ...] | None = None
    ) -> dict[str, temporary.Need]:
        """Return the device memory of each program of a bucket's step.

        num_pages: of the step. `compile` does not compile the step again if the
          number is right. None for a few.

        Only the bucket's first plan is compiled. The other plans split the same values, and compiling all of
        them twice would double the warm-up. `compile` does not compile the samplers again.
        """
        layout = self.layouts[tokens][0]
        pages = num_pages or (self.lower.pages_per_sequence + 1,) * self.lower.groups
        table: dict = {} if num_pages is None else self._measured
        step = functools.partial(self.lower.whole_step, layout)
        key = pages, layout.key
        jobs = {"step": Job(f"step {layout.key}", table, key, step, self.options_of(layout))}
        if self.lower.programs.samples:
            jobs["full"] = self._sampler_job(layout.rows, "full")
            jobs["prompt"] = self._prompt_job(tokens)
            jobs["plain"] = self._sampler_job(layout.rows, "plain")
        names = {job.name: name for name, job in jobs.items()}
        made = {}
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
            in_turn = self._in_turn([*jobs.values()], pages)
            if self.lowering is not None:  # the other programs need no number of pages
                self._ask([job for job in self.jobs() if job.table is not self.steps], (), urgent=False)
            for job in in_turn:
                made[names[job.name]] = pool.submit(self._compile, job.lower(pages), job.options)
        programs = {name: made[name].result() for name in jobs}
        for name, job in jobs.items():
            job.table[job.key] = programs[name]
        return {name: temporary.Need.of(program) for name, program in programs.items()}

    def compile_early(
        self,
        num_pages: tuple[int, ...],
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        first: Collection[StepLayout] | None = None,
    ) -> None:
        """Compile the programs for a number of pages, before there is a cache. A later `compile` uses
        the programs if the number is right. on_progress: see `Executor.warm_up`. first: see `compile`.
        """
        self.compile(num_pages, on_progress, first)
        self._measured = {
            (num_pages, key): step
            for key, step in self.steps.items()
            if not isinstance(step, DeferredProgram)
        }

    @property
    def early_pages(self) -> tuple[int, ...] | None:
        """Return the number of pages of `compile_early`; None before its call."""
        return next((pages for pages, _ in self._measured), None)

    def compile_for(self, num_pages: tuple[int, ...], first: Collection[StepLayout] | None = None) -> int:
        """Compile the programs for a number of pages, see `compile_early`. Return the device memory of the
        temporary arrays and results of the largest layout.
        """
        self.compile_early(num_pages, first=first)
        return self.need_of_largest()

    def need_of_largest(self) -> int:
        """Return the device memory of the temporary arrays and results of the largest layout, which is
        compiled.
        """
        largest = self.layouts[max(self.layouts)][0]
        programs = [table[key] for table, key in self.programs_of(largest)]
        return temporary.together(
            one.need() if isinstance(one, LayeredStep) else temporary.Need.of(one) for one in programs
        )

    @collector_paused()
    def compile(
        self,
        num_pages: tuple[int, ...],
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        first: Collection[StepLayout] | None = None,
    ) -> None:
        """Compile the programs for a number of pages, several at a time.

        first: the layouts to compile now, the largest layout among them; None for all. The
          other layouts are not ready then. Only the largest layout has the full sampler and the
          prompt log-probabilities at once.
        """
        self.first = None if first is None else tuple(first)
        # `temporary_needs` has compiled samplers. Steps depend on the number of pages, which is known now.
        measured = {key: step for (pages, key), step in self._measured.items() if pages == num_pages}
        self.steps.update(measured)
        self._measured.clear()
        done = [(self.steps, key) for key in measured]
        every = [
            job
            for job in self.jobs()
            if not any(job.table is table and job.key == key for table, key in done)
            and (job.table is self.steps or not _is_made(job))
        ]
        later = [job for job in every if self._is_deferred(job.table, job.key)]
        jobs = [job for job in every if not self._is_deferred(job.table, job.key)]
        if self._eager:
            jobs.sort(key=lambda job: job.table is not self.samplers)
        with concurrent.futures.ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1))) as pool:
            # Lowering is Python and runs one program at a time; XLA compiles at the same time, on threads.
            futures: dict[concurrent.futures.Future, tuple[Job, Any]] = {}
            crowded: list[tuple[Job, Any]] = []
            with self._times.phase("lowering"):
                in_turn = self._in_turn(jobs, num_pages)
                # An engine on a CPU may never need its later programs. The background
                # takes the smallest layouts first.
                asked = {}
                if self.first is not None:
                    asked = self._ask(later[::-1], num_pages, urgent=False)
                for job in in_turn:
                    if job.layered and not _is_timed(job.options):
                        lowered = job.lower(num_pages, functools.partial(self._begin, pool, job.options))
                    else:
                        lowered = job.lower(num_pages)
                    futures[pool.submit(self._compile, lowered, job.options)] = job, lowered
                    on_progress(sum(future.done() for future in futures), len(jobs))
            with self._times.phase("compilation"):  # XLA still compiles after the last lowering
                for done, future in enumerate(concurrent.futures.as_completed(futures), start=1):
                    job, lowered = futures.pop(future)
                    try:
                        job.table[job.key] = future.result()
                    except jax.errors.JaxRuntimeError as error:
                        if "RESOURCE_EXHAUSTED" not in str(error):
                            raise
                        crowded.append((job, lowered))
                    on_progress(done, len(jobs))
        # XLA times GEMMs in the memory that the cache leaves: room for one program (the head takes 1 GB), not
        # for as many as compile at once.
        with self._times.phase("compilation"):
            for job, lowered in crowded:
                lowered = job.lower(num_pages) if job.layered else lowered  # a `Begun` program has failed
                job.table[job.key] = self._compile(lowered, job.options)
        prepared = {job.name: future for future, job in asked.items()}
        for job in later:
            make = functools.partial(self._lower_and_compile, job, num_pages, prepared.get(job.name))
            job.table[job.key] = DeferredProgram(make)

    def _in_turn(self, jobs: Sequence[Job], num_pages: tuple[int, ...]) -> Iterator[Job]:
        """Return the jobs in the order in which other processes have prepared them for this one to lower.

        num_pages: of steps.
        """
        asked = self._ask(jobs, num_pages)
        if not asked:
            return iter(jobs)
        small = (job for job in jobs if job.small)
        return itertools.chain(small, (asked[done] for done in concurrent.futures.as_completed(asked)))

    def _ask(
        self, jobs: Sequence[Job], num_pages: tuple[int, ...], urgent: bool = True
    ) -> dict[concurrent.futures.Future, Job]:
        """Ask other processes to prepare programs. Return the job of each future; {} without such processes.

        num_pages: of steps. urgent: see `LoweringProcesses.ask`.
        """
        if self.lowering is None or not self.lowering.started:
            return {}
        return {
            self.lowering.ask(
                Wanted(job.name + self._name, num_pages if job.name.startswith("step") else ()), urgent
            ): job
            for job in jobs
            if not job.small
        }

    def jobs(self) -> list[Job]:
        """Return the programs of the executor, those of the largest steps first."""
        every = self.every_layout()
        rows = sorted({layout.rows for layout in every})
        full = {layout.rows for layout in every if layout.full}
        jobs: list[Job] = []
        for bucket, layouts in sorted(self.layouts.items(), reverse=True):
            alone = [self.decode_layouts[bucket]] if bucket in self.decode_layouts else []
            jobs += [self._step_job(layout) for layout in (*layouts, *alone)]
            if self.lower.programs.samples:
                jobs.append(self._prompt_job(bucket))
        jobs += [
            self._step_job(layout)
            for tokens, layout in self.decode_layouts.items()
            if tokens not in self.layouts
        ]
        jobs += [
            self._sampler_job(r, kind)
            for r in rows
            for kind in (("plain", "full") if self.lower.programs.samples else ())
            if kind == "plain" or r in full
        ]
        small: dict[str, Callable] = {"append_pages": self.lower.append_pages}
        if self.lower.moves_experts:
            small["move_experts"] = lambda num_pages: self.lower.move_experts()
        if self.lower.programs.samples:
            small["set_slot"] = lambda num_pages: self.lower.set_slot()
            small["count_tokens"] = lambda num_pages: self.lower.count_tokens()
        return jobs + [Job(name, self.small, name, lower, small=True) for name, lower in small.items()]

    def every_layout(self) -> list[StepLayout]:
        """Return the layouts of all steps."""
        return [*itertools.chain(*self.layouts.values()), *self.decode_layouts.values()]

    def _step_job(self, layout: StepLayout) -> Job:
        lower, layered = functools.partial(self.lower.step, layout), self.lower.is_layered(layout)
        options = self.options_of(layout)
        return Job(f"step {layout.key}", self.steps, layout.key, lower, options, layered=layered)

    def _sampler_job(self, rows: int, kind: str) -> Job:
        def lower(num_pages: tuple[int, ...]) -> Any:
            return self.lower.sampler(rows, kind)

        return Job(f"{kind} {rows}", self.samplers, (rows, kind), lower, self._options)

    def _prompt_job(self, tokens: int) -> Job:
        def lower(num_pages: tuple[int, ...]) -> Any:
            return self.lower.prompt(tokens)

        return Job(f"prompt {tokens}", self.prompt, tokens, lower, self._options)

    def _is_deferred(self, table: dict, key: Any) -> bool:
        """Return True for a program that is compiled after the start.

        These are the full samplers and the prompt log-probabilities, which plain requests do not need, and
        the steps of a deep model that a short request alone does not need.
        """
        if self.first is not None:
            return not self._is_first(table, key)
        if not self.defers:
            return False
        if table is self.steps:
            return key not in [layout.key for layout in self._first_steps()]
        if table is self.samplers:
            rows, kind = key
            return kind == "full" or rows not in [layout.rows for layout in self._first_steps()]
        return table is self.prompt

    def _is_first(self, table: dict, key: Any) -> bool:
        """Return True for a program of the layouts that are compiled before serving, see `compile`."""
        assert self.first is not None
        largest = max(self.first, key=lambda layout: layout.tokens)
        needed: list[tuple[dict, Any]] = [(self.steps, layout.key) for layout in self.first]
        needed += [(self.samplers, (layout.rows, "plain")) for layout in self.first]
        needed += [(self.samplers, (largest.rows, "full")), (self.prompt, largest.tokens)]
        return table is self.small or any(table is owner and key == one for owner, one in needed)

    def _first_steps(self) -> list[StepLayout]:
        """Return the layouts that a start compiles: all, or of a deep model those of a short request alone.

        Those are the layouts of a decode, and of a prompt of `SHORT_PROMPT` tokens.
        """
        every = self.every_layout()
        prompt = min((tokens for tokens in self.layouts if tokens >= SHORT_PROMPT), default=max(self.layouts))
        first = {min(self.layouts), prompt, *self.decode_layouts}
        return [layout for layout in every if layout.tokens in first or not self.lower.is_layered(layout)]

    def _lower_and_compile(
        self, job: Job, num_pages: tuple[int, ...], prepared: concurrent.futures.Future | None = None
    ) -> Any:
        """Return a deferred program. prepared: ends when another process has prepared the program."""
        if prepared is not None:
            wait_for(prepared)
        with _lowering, collector_paused():
            lowered = job.lower(num_pages)
            freeze_later_objects()
        timed = _is_timed(job.options)
        programs = lowered.programs if isinstance(lowered, LoweredStep) else (lowered,)
        times = timed and any(map(temporary.has_products, programs))
        with _timing.take() if times else contextlib.nullcontext():
            return self._compile(lowered, job.options)

    def programs_of(self, layout: StepLayout) -> list[tuple[dict, Any]]:
        """Return the table and the key of each program that a step of a layout may run."""
        keys: list[tuple[dict, Any]] = [(self.steps, layout.key)]
        keys += [(self.samplers, (layout.rows, kind)) for kind in ("plain", "full")]
        keys.append((self.prompt, layout.tokens))
        return [(table, key) for table, key in keys if key in table]

    def program(self, layout: StepLayout) -> jax.stages.Compiled:
        """Return the compiled step of a layout, after warm-up. The step must be one program."""
        program = self.steps[layout.key]
        assert not isinstance(program, LayeredStep | DeferredProgram)
        return program

    def masked(self, rows: int) -> DeferredProgram:
        """Return the masked sampler, which its first caller compiles."""
        if rows not in self._masked:
            make = functools.partial(self._lower_and_compile, self._sampler_job(rows, "masked"), ())
            self._masked.setdefault(rows, DeferredProgram(make))  # another thread may be as far
        return self._masked[rows]

    def _compile(self, lowered: Any, options: dict[str, Any] | None = None) -> Any:
        if isinstance(lowered, LoweredStep):
            return lowered.compile(lambda one: self._compile(one, options))
        if self._eager:
            kernels = kernels_of(lowered.compiler_ir("stablehlo"))
            start_kernels(self.lower.programs.mesh, kernels, options or {})
        return compile_program(lowered, options)

    def _begin(
        self, pool: concurrent.futures.Executor, options: dict[str, Any], lowered: jax.stages.Lowered
    ) -> Begun:
        """Begin the compilation of a step's program while Python lowers the next one."""
        return Begun(lowered, pool.submit(self._compile, lowered, options))
