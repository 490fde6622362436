"""The owner of the weights and the KV cache on the device, which runs compiled steps.

An executor runs a model, or one pipeline stage of a model (`jaxflow.engine.staged_executor`).

All that a plain request needs is compiled before the first request. `warm_up` compiles one forward for each
token bucket and each of its plans, two samplers for each number of rows, and a few small programs. On a CPU
the full samplers, the prompt log-probabilities and some steps of a deep model are compiled on a thread, soon
after the start, or by the first request that needs one. On a GPU most layouts become ready while the engine
serves (`jaxflow.engine.first_layouts`). No shape of a request causes another compilation. `run` returns as
soon as the step is enqueued.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxflow.engine import program_memory as temporary
from jaxflow.engine.ahead_of_time import needs_no_gpu
from jaxflow.engine.deferred import (
    DELAY_S,
    DeferredProgram,
    Turns,
    compile_in_background,
    wait_for,
    while_it_lives,
)
from jaxflow.engine.expert_balancer import MovedLayer
from jaxflow.engine.expert_slots import expert_arrays, placed_experts, source_slots
from jaxflow.engine.heap import collector_paused, freeze_later_objects
from jaxflow.engine.kernel_threads import kernels_of, start_kernels
from jaxflow.engine.layered_step import Begun, LayeredStep, LoweredStep
from jaxflow.engine.layout import StepLayout, empty_buffer
from jaxflow.engine.lowered_cache import LoweredPrograms, compile_program
from jaxflow.engine.lowering_processes import LoweringProcesses, Wanted
from jaxflow.engine.program_lowering import APPENDS, COUNTED, ProgramLowering
from jaxflow.engine.programs import REPLICATED, Programs, Rows, head, prompt_head
from jaxflow.engine.start_times import StartTimes, num_compiled
from jaxflow.kv.device_cache import make_cache
from jaxflow.kv.tiers.page import Page
from jaxflow.kv.tiers.page_copies import PageCopies
from jaxflow.kv.tiers.rank_copies import RankCopies
from jaxflow.model.expert_copies import copy_map
from jaxflow.model.expert_tokens import mixture_layers
from jaxflow.model.logprobs import LogprobsOut
from jaxflow.model.slot_params import NO_TOKEN, SlotParams, slot_values
from jaxflow.parallel.mesh import by_rank, is_here, on_gpu, place

SHORT_PROMPT = 64  # tokens
# Of deferred programs, one is lowered at a time: lowering is Python, so two would only take
# turns. One times its products at a time while steps may run: the memory beside the cache has
# room for the products of one program.
_lowering, _timing = threading.Lock(), Turns()


@dataclasses.dataclass(frozen=True)
class Pending:
    """The results of an enqueued step. Reading an array waits for the device."""

    tokens: jax.Array  # [R] int32
    logprobs: LogprobsOut | None  # of the sampled tokens, if the full sampler ran
    prompt: LogprobsOut | None  # of all T tokens, if prompt log-probabilities were requested
    enqueued_s: float
    # The tokens at each expert after the step, [mixture layers, E] uint32, one
    # array a stage with mixture layers.
    expert_counts: tuple[jax.Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class Job:
    """A program to compile.

    Attributes:
      name: unique in its executor.
      table, key: the place of the compiled program.
      lower: lowers the program for the present number of pages.
      options: XLA's.
      small: the program is lowered in less time than another process takes to answer.
      layered: `lower` may have an argument, a function that takes each program of the step once lowered,
        and returns the program or a `Begun` one.
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


class Recorder(Protocol):
    """The receiver of the calls that change the devices, in their order. Arguments: see `Executor`."""

    def run(
        self,
        layout: StepLayout,
        buffer: np.ndarray,
        appends: np.ndarray,
        full: bool,
        targets: np.ndarray | None,
        masks: np.ndarray | None = None,
    ) -> None:
        """Take a call of `run`."""
        ...

    def set_slot(self, slot: int, values: SlotParams, token_ids: np.ndarray, num_prompt: int) -> None:
        """Take a call of `set_slot`."""
        ...

    def gathered(self, group: int, pages: Sequence[int], found: Sequence[Page]) -> None:
        """Take a call of `gather_pages` and its results."""
        ...

    def scatter_pages(self, group: int, pages: Sequence[int], data: Sequence[Page]) -> None:
        """Take a call of `scatter_pages`."""
        ...

    def move_experts(self, layer: int, placed: np.ndarray) -> None:
        """Take a call of `move_experts`."""
        ...

    def switch_experts(self, layer: int) -> None:
        """Take a call of `switch_experts`, for the latest move of a layer."""
        ...


class Executor:
    """The steps of one model on one mesh. Not thread-safe: only the engine's thread uses it.

    Data-parallel ranks run each step together. Arrays of all ranks are the ranks'
    arrays, one after another on axis 0.

    Attributes:
      slots, groups, num_pages: of one rank.
      ranks: the number of data-parallel ranks.
      name: of the pipeline stage, in the names of its programs; "" without stages.
      recorder: takes the calls that other processes replay; None in an engine of one process.
      lowering: processes that lower and compile programs into the folder of
        `lowered`; None: this process does.
    """

    num_stages = 1

    def __init__(
        self,
        programs: Programs,
        weights: dict,
        layouts: Iterable[StepLayout],
        forward_of: Callable[[StepLayout], Callable],
        *,
        kv_dtype,
        max_model_len: int,
        options_of: Callable[[StepLayout], dict[str, Any]] = lambda layout: {},
        options: Mapping[str, Any] = MappingProxyType({}),
        lowered: LoweredPrograms | None = None,
        name: str = "",
        defers: bool = False,
        is_layered: Callable[[StepLayout], bool] = lambda layout: False,
        eager: bool = False,
        times: StartTimes | None = None,
    ):
        """Arguments not in the class's description:

        options: XLA's, of all programs but steps. options_of: those of a step.
        defers: compile the programs that plain requests do not need after the start, see `DeferredProgram`.
        is_layered: returns True if a layout's step is a program a layer, see `LayeredStep`.
        eager: compile the Mosaic kernels of a program side by side before XLA compiles the program, and the
          full sampler first, because it takes longest.
        times: takes the times of `warm_up`.
        """
        self._eager = eager
        self._times = times or StartTimes()
        self.programs, self.name = programs, name
        self.take_weights(weights)
        self.layouts: dict[int, tuple[StepLayout, ...]] = {}  # the layouts of each bucket, one a plan
        # By tokens: the layouts of steps of decodes alone that have a program of their own.
        self.decode_layouts: dict[int, StepLayout] = {}
        for layout in layouts:
            if layout.decodes:
                self.decode_layouts[layout.tokens] = layout
            else:
                self.layouts[layout.tokens] = (*self.layouts.get(layout.tokens, ()), layout)
        (any_layout, *_), *_ = self.layouts.values()
        self.lower = ProgramLowering(
            programs,
            weights,
            any_layout,
            forward_of,
            is_layered,
            kv_dtype=kv_dtype,
            max_model_len=max_model_len,
            lowered=lowered,
            name=name,
        )
        self.slots, self.page_size, self.groups = any_layout.slots, any_layout.page_size, any_layout.groups
        self.pages_per_sequence, self.mask_words = self.lower.pages_per_sequence, self.lower.mask_words
        self.page_groups, self.own_groups = self.lower.page_groups, self.lower.own_groups
        self._options, self._options_of = dict(options), options_of
        self.replicated, self.ranks = NamedSharding(programs.mesh, REPLICATED), self.lower.ranks
        self._by_rank = NamedSharding(programs.mesh, by_rank(programs.mesh))
        self._steps: dict[tuple[int, str, bool], Any] = {}  # by layouts' keys
        # The steps of `temporary_needs` for a guess of the pages, by pages and layout's key.
        self._measured: dict[tuple[tuple[int, ...], tuple[int, str, bool]], Any] = {}
        self._samplers: dict[tuple[int, str], Callable] = {}
        self._prompt: dict[int, Callable] = {}
        self._masked_samplers: dict[int, DeferredProgram] = {}  # by rows
        self._masks_lock, self._masks_asked = threading.Lock(), False
        self._small: dict[str, Callable] = {}
        self.defers = defers
        self._first: tuple[StepLayout, ...] | None = None  # see `compile`
        self.recorder: Recorder | None = None
        self.lowering: LoweringProcesses | None = None
        self.copies: PageCopies | RankCopies | None = None
        self._warm = False
        self._compiled_at_warm_up = 0

    @property
    def expert_layers(self) -> list[int]:
        """Return the layer of each row of `Pending.expert_counts`."""
        return mixture_layers(self.programs.context.config)

    @property
    def is_here(self) -> bool:
        """Return True if this process has devices of the executor.

        Otherwise the weights are shapes, and nothing runs.
        """
        return is_here(self.programs.mesh)

    # ---- before serving

    def take_weights(self, weights: dict) -> None:
        """Set the weights: arrays, or the shapes of arrays to come. Compiled programs
        run on arrays of the same shapes.
        """
        self.weights = weights
        # The expert of each slot in each mixture layer, [L, S]; None for experts without copies.
        self.placed = placed_experts(weights)
        self._head = head(weights) if self.programs.samples else {}
        self._prompt_head = prompt_head(weights)

    def prepare_first(self, first: Collection[StepLayout], num_pages: tuple[int, ...]) -> None:
        """Let other processes prepare the programs of some layouts, for a number of pages that is a guess.

        first: see `compile`.
        """
        self._first = tuple(first)
        self._ask([job for job in self.jobs() if self._is_first(job.table, job.key)], num_pages)

    def prepare_later(self, num_pages: tuple[int, ...]) -> None:
        """Let processes without a program of `prepare_first` prepare the others. num_pages: as there."""
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
        pages = num_pages or (self.pages_per_sequence + 1,) * self.groups
        table: dict = {} if num_pages is None else self._measured
        step = functools.partial(self.lower.whole_step, layout, pages)
        key = pages, layout.key
        jobs = {"step": Job(f"step {layout.key}", table, key, step, self._options_of(layout))}
        if self.programs.samples:
            jobs["full"] = self._sampler_job(layout.rows, "full")
            jobs["prompt"] = self._prompt_job(tokens)
            jobs["plain"] = self._sampler_job(layout.rows, "plain")
        names = {job.name: name for name, job in jobs.items()}
        made = {}
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
            in_turn = self._in_turn([*jobs.values()], pages)
            if self.lowering is not None:  # the other programs need no number of pages
                self._ask([job for job in self.jobs() if job.table is not self._steps], (), urgent=False)
            for job in in_turn:
                made[names[job.name]] = pool.submit(self._compile, job.lower(), job.options)
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
        the programs if the number is right. on_progress: see `warm_up`. first: see `compile`.
        """
        self.num_pages = num_pages
        self.compile(on_progress, first)
        self._warm = False
        self._measured = {
            (num_pages, key): step
            for key, step in self._steps.items()
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
        programs = [table[key] for table, key in self._programs_of(largest)]
        return temporary.together(
            one.need() if isinstance(one, LayeredStep) else temporary.Need.of(one) for one in programs
        )

    def state_bytes(self) -> int:
        """Return the device memory of the page tables, the sampling settings and the token counts."""
        sampling = jax.eval_shape(self.lower.empty_slots)
        table = self.groups * self.slots * self.pages_per_sequence * 4
        state = sampling, self.programs.expert_counts
        return table + sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state)) + self._moved_bytes()

    def _moved_bytes(self) -> int:
        """Return a device's memory of a layer's experts, which a move makes
        anew; 0 without copies of experts.
        """
        if self.placed is None:
            return 0
        own = expert_arrays(self.weights["layers"][self.expert_layers[0]])
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(own)) // self.programs.mesh.size

    def allocate(self, num_pages: tuple[int, ...]) -> None:
        """Allocate the KV cache and the per-slot state. `num_pages`: pages of each layer group."""
        mesh = self.programs.mesh
        self.num_pages = num_pages
        self.kv = make_cache(self.page_groups, self.lower.pages_of_ranks(num_pages), self.page_size, mesh)
        ranks, counts = self.ranks, self.programs.expert_counts
        make = jax.jit(
            lambda: (
                jnp.zeros((ranks * self.groups, self.slots, self.pages_per_sequence), jnp.int32),
                jnp.zeros((ranks * self.slots,), jnp.int32),
                tuple(jnp.zeros((ranks * a.shape[0], *a.shape[1:]), a.dtype) for a in counts),
                *self.lower.empty_slots(ranks),
            ),
            out_shardings=self._by_rank,
        )
        self.page_table, self.last_tokens, self.expert_counts, self.params, self.counts = make()

    def warm_up(
        self,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        on_compiled: Callable[[], None] = lambda: None,
        first: Collection[StepLayout] | None = None,
    ) -> float:
        """Compile the programs, several at a time, and run those of `rehearsed`. Return the seconds.

        on_compiled: called before the first program runs. first: see `compile`.
        """
        start = time.perf_counter()
        self.compile(on_progress, first)
        on_compiled()
        with self._times.phase("rehearsal"):
            for layout in rehearsed(self):
                rehearse(self, layout)
            self.set_slot(0, slot_values(), np.zeros(1, np.int32), 0)
            self.count_compilations()
        return time.perf_counter() - start

    def count_compilations(self) -> None:
        """Begin to count `compilations`, once every program has run."""
        jax.block_until_ready(self.kv)
        self._compiled_at_warm_up = num_compiled()

    @collector_paused()
    def compile(
        self,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        first: Collection[StepLayout] | None = None,
    ) -> None:
        """Compile the programs, several at a time.

        first: the layouts to compile now, the largest layout among them; None for all. The
          other layouts are not ready then. Only the largest layout has the full sampler and the
          prompt log-probabilities at once.
        """
        self._first = None if first is None else tuple(first)
        # `temporary_needs` has compiled samplers. Steps depend on the number of pages, which is known now.
        measured = {key: step for (pages, key), step in self._measured.items() if pages == self.num_pages}
        self._steps.update(measured)
        self._measured.clear()
        done = [(self._steps, key) for key in measured]
        every = [
            job
            for job in self.jobs()
            if not any(job.table is table and job.key == key for table, key in done)
            and (job.table is self._steps or not _is_made(job))
        ]
        later = [job for job in every if self._is_deferred(job.table, job.key)]
        jobs = [job for job in every if not self._is_deferred(job.table, job.key)]
        if self._eager:
            jobs.sort(key=lambda job: job.table is not self._samplers)
        with concurrent.futures.ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1))) as pool:
            # Lowering is Python and runs one program at a time; XLA compiles at the same time, on threads.
            futures: dict[concurrent.futures.Future, tuple[Job, Any]] = {}
            crowded: list[tuple[Job, Any]] = []
            with self._times.phase("lowering"):
                in_turn = self._in_turn(jobs, self.num_pages)
                # An engine on a CPU may never need its later programs. The background
                # takes the smallest layouts first.
                asked = {}
                if self._first is not None:
                    asked = self._ask(later[::-1], self.num_pages, urgent=False)
                for job in in_turn:
                    if job.layered and not _is_timed(job.options):
                        lowered = job.lower(functools.partial(self._begin, pool, job.options))
                    else:
                        lowered = job.lower()
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
                lowered = job.lower() if job.layered else lowered  # a `Begun` program has failed
                job.table[job.key] = self._compile(lowered, job.options)
        if self.copies is not None:
            self.kv = self.copies.warm_up(self.kv)
        self._warm = True
        prepared = {job.name: future for future, job in asked.items()}
        for job in later:
            make = functools.partial(self._lower_and_compile, job, prepared.get(job.name))
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
                Wanted(job.name + self.name, num_pages if job.name.startswith("step") else ()), urgent
            ): job
            for job in jobs
            if not job.small
        }

    def jobs(self) -> list[Job]:
        """Return the programs of the executor, those of the largest steps first."""
        every = self._every_layout()
        rows = sorted({layout.rows for layout in every})
        full = {layout.rows for layout in every if layout.full}
        jobs: list[Job] = []
        for bucket, layouts in sorted(self.layouts.items(), reverse=True):
            alone = [self.decode_layouts[bucket]] if bucket in self.decode_layouts else []
            jobs += [self._step_job(layout) for layout in (*layouts, *alone)]
            if self.programs.samples:
                jobs.append(self._prompt_job(bucket))
        jobs += [
            self._step_job(layout)
            for tokens, layout in self.decode_layouts.items()
            if tokens not in self.layouts
        ]
        jobs += [
            self._sampler_job(r, kind)
            for r in rows
            for kind in (("plain", "full") if self.programs.samples else ())
            if kind == "plain" or r in full
        ]
        small: dict[str, Callable] = {"append_pages": lambda: self.lower.append_pages(self.num_pages)}
        if self.placed is not None:
            small["move_experts"] = self.lower.move_experts
        if self.programs.samples:
            small |= {"set_slot": self.lower.set_slot, "count_tokens": self.lower.count_tokens}
        return jobs + [Job(name, self._small, name, lower, small=True) for name, lower in small.items()]

    def _every_layout(self) -> list[StepLayout]:
        return [*itertools.chain(*self.layouts.values()), *self.decode_layouts.values()]

    def _step_job(self, layout: StepLayout) -> Job:
        def lower(*begin: Callable) -> Any:
            return self.lower.step(layout, self.num_pages, *begin)

        options, layered = self._options_of(layout), self.lower.is_layered(layout)
        return Job(f"step {layout.key}", self._steps, layout.key, lower, options, layered=layered)

    def _sampler_job(self, rows: int, kind: str) -> Job:
        lower = functools.partial(self.lower.sampler, rows, kind)
        return Job(f"{kind} {rows}", self._samplers, (rows, kind), lower, self._options)

    def _prompt_job(self, tokens: int) -> Job:
        lower = functools.partial(self.lower.prompt, tokens)
        return Job(f"prompt {tokens}", self._prompt, tokens, lower, self._options)

    def _is_deferred(self, table: dict, key: Any) -> bool:
        """Return True for a program that is compiled after the start.

        These are the full samplers and the prompt log-probabilities, which plain requests do not need, and
        the steps of a deep model that a short request alone does not need.
        """
        if self._first is not None:
            return not self._is_first(table, key)
        if not self.defers:
            return False
        if table is self._steps:
            return key not in [layout.key for layout in self._first_steps()]
        if table is self._samplers:
            rows, kind = key
            return kind == "full" or rows not in [layout.rows for layout in self._first_steps()]
        return table is self._prompt

    def _is_first(self, table: dict, key: Any) -> bool:
        """Return True for a program of the layouts that are compiled before serving, see `compile`."""
        assert self._first is not None
        largest = max(self._first, key=lambda layout: layout.tokens)
        needed: list[tuple[dict, Any]] = [(self._steps, layout.key) for layout in self._first]
        needed += [(self._samplers, (layout.rows, "plain")) for layout in self._first]
        needed += [(self._samplers, (largest.rows, "full")), (self._prompt, largest.tokens)]
        return table is self._small or any(table is owner and key == one for owner, one in needed)

    def _first_steps(self) -> list[StepLayout]:
        """Return the layouts that a start compiles: all, or of a deep model those of a short request alone.

        Those are the layouts of a decode, and of a prompt of `SHORT_PROMPT` tokens.
        """
        every = self._every_layout()
        prompt = min((tokens for tokens in self.layouts if tokens >= SHORT_PROMPT), default=max(self.layouts))
        first = {min(self.layouts), prompt, *self.decode_layouts}
        return [layout for layout in every if layout.tokens in first or not self.lower.is_layered(layout)]

    def _lower_and_compile(self, job: Job, prepared: concurrent.futures.Future | None = None) -> Any:
        """Return a deferred program. prepared: ends when another process has prepared the program."""
        if prepared is not None:
            wait_for(prepared)
        with _lowering, collector_paused():
            lowered = job.lower()
            freeze_later_objects()
        timed = _is_timed(job.options)
        programs = lowered.programs if isinstance(lowered, LoweredStep) else (lowered,)
        times = timed and any(map(temporary.has_products, programs))
        with _timing.take() if times else contextlib.nullcontext():
            return self._compile(lowered, job.options)

    def compile_deferred(self) -> None:
        """Compile the deferred programs on a thread, a little later, as long as the engine exists."""
        tables: tuple[dict, ...] = (self._steps, self._samplers, self._prompt)
        programs = (one for table in tables for one in table.values() if isinstance(one, DeferredProgram))
        if jobs := [while_it_lives(program.ready) for program in programs]:
            compile_in_background(jobs, DELAY_S)

    # ---- masked samplers, which the first request with a constraint compiles

    def prepare_masks(self) -> None:
        """Compile the masked sampler of the most rows, and the others on a thread. Any thread may call it.

        A later call returns at once.
        """
        rows = sorted({layout.rows for layout in self._every_layout() if layout.full})
        self._masked(rows[-1]).ready()
        with self._masks_lock:
            others, self._masks_asked = [] if self._masks_asked else rows[:-1], True
        if others:
            compile_in_background([while_it_lives(self._masked(one).ready) for one in others])

    def masks_ready(self, layout: StepLayout) -> bool:
        """Return True if a step of the layout runs the masked sampler without a compilation."""
        return self._masked(layout.rows).is_made

    def _masked(self, rows: int) -> DeferredProgram:
        job = self._sampler_job(rows, "masked")
        made = DeferredProgram(functools.partial(self._lower_and_compile, job))
        return self._masked_samplers.setdefault(rows, made)

    # ---- layouts that become ready while the engine serves

    @property
    def substitutes(self) -> bool:
        """Return True if steps must ask `is_ready`.

        Otherwise a step of any layout runs, if need be after a compilation.
        """
        return self._first is not None

    def is_ready(self, layout: StepLayout, *, full: bool, prompt: bool) -> bool:
        """Return True if a step of the layout runs without a compilation.

        full, prompt: with these samplers.
        """
        needed: list[Any] = [self._steps.get(layout.key), self._samplers.get((layout.rows, "plain"))]
        if full:
            needed.append(self._samplers.get((layout.rows, "full")))
        if prompt:
            needed.append(self._prompt.get(layout.tokens))
        return not any(isinstance(program, DeferredProgram) for program in needed)

    def unready(self) -> list[StepLayout]:
        """Return the layouts that have a deferred program, the smallest first, of
        equal ones those of decodes first.
        """
        every = self._every_layout()
        found = [layout for layout in every if not self.is_ready(layout, full=True, prompt=True)]
        return sorted(found, key=lambda layout: (layout.tokens, not layout.decodes))

    def compile_layout(self, layout: StepLayout) -> None:
        """Compile the deferred programs of a layout. Any thread may call it."""
        for table, key in self._programs_of(layout):
            if isinstance(program := table[key], DeferredProgram):
                program.ready()

    def set_ready(self, layout: StepLayout) -> None:
        """Let steps run the compiled programs of a layout."""
        for table, key in self._programs_of(layout):
            if isinstance(program := table[key], DeferredProgram):
                table[key] = program.ready()

    def _programs_of(self, layout: StepLayout) -> list[tuple[dict, Any]]:
        """Return the table and the key of each program that a step of a layout may run."""
        keys: list[tuple[dict, Any]] = [(self._steps, layout.key)]
        keys += [(self._samplers, (layout.rows, kind)) for kind in ("plain", "full")]
        keys.append((self._prompt, layout.tokens))
        return [(table, key) for table, key in keys if key in table]

    @property
    def compilations(self) -> int:
        """The number of backend compilations since warm-up, which must be 0."""
        return num_compiled() - self._compiled_at_warm_up

    def program(self, layout: StepLayout) -> jax.stages.Compiled:
        """Return the compiled step of a layout, after warm-up. The step must be one program."""
        program = self._steps[layout.key]
        assert not isinstance(program, LayeredStep | DeferredProgram)
        return program

    def forward_of(self, layout: StepLayout) -> tuple[Callable, dict[str, Any]]:
        """Return the function that the step of a layout traces, and XLA's options of the step."""
        return self.lower.forward_of(layout), self._options_of(layout)

    # ---- serving

    def run(
        self,
        layout: StepLayout,
        buffer: np.ndarray,
        appends: np.ndarray,
        *,
        full: bool,
        targets: np.ndarray | None = None,
        masks: Callable[[], np.ndarray] | None = None,
    ) -> Pending:
        """Enqueue a step.

        Args:
          buffer: [layout.size] int32, from `layout.pack`; of all ranks.
          appends: [n, 4] int32, page-table entries that do not fit in the buffer;
            of several ranks [ranks, n, 4].
          full: True if a row needs the full sampler.
          targets: [T] int32, each token's successor in its prompt, for prompt
            log-probabilities; of all ranks.
          masks: returns the tokens that each row may draw, as bits, [R, mask_words] int32; of
            all ranks. The step then runs the masked sampler. The call comes once the forward is
            enqueued, so the host finds the masks while the device runs. With a recorder it comes
            first, because the other processes need the masks.
        """
        found = None
        if self.recorder is not None:
            found = None if masks is None else masks()
            self.recorder.run(layout, buffer, appends, full, targets, found)
        enqueued_s = time.perf_counter()
        hidden, x, rows = self.advance(layout, buffer, appends, self.last_tokens)
        if masks is not None and found is None:
            found = masks()
        return self.draw(layout, hidden, x, rows, enqueued_s, full=full, targets=targets, masks=found)

    def advance(
        self, layout: StepLayout, buffer: np.ndarray, appends: np.ndarray, source: jax.Array
    ) -> tuple[jax.Array, jax.Array, Rows]:
        """Enqueue the forward of a step. Arguments and results: see `run` and `run_program`."""
        for i in range(0, appends.shape[-2], APPENDS):
            piece, some = (
                np.full((self.ranks, APPENDS, 4), self.groups, np.int32),
                appends[..., i : i + APPENDS, :],
            )
            piece[:, : some.shape[-2]] = some
            piece = place(piece.reshape(-1, 4), self._by_rank)
            self.page_table = self._small["append_pages"](self.page_table, piece)
        return self.run_program(self._steps[layout.key], place(buffer, self._by_rank), source)

    def draw(
        self,
        layout: StepLayout,
        hidden: jax.Array,
        x: jax.Array,
        rows: Rows,
        enqueued_s: float,
        *,
        full: bool,
        targets: np.ndarray | None,
        masks: np.ndarray | None = None,
    ) -> Pending:
        """Enqueue the sampler of a step whose forward is enqueued. Arguments: see `run`."""
        found = None
        if full or masks is not None:
            more = () if masks is None else (place(masks, self._by_rank),)
            sampler = self._samplers[layout.rows, "full"] if masks is None else self._masked(layout.rows)
            tokens, found, self.last_tokens, recent, self.counts = sampler(
                self._head, hidden, rows, self.last_tokens, self.params, self.counts, *more
            )
            found = found if full else None
            self.params = dataclasses.replace(self.params, recent=recent)
        else:
            tokens, self.last_tokens = self._samplers[layout.rows, "plain"](
                self._head, hidden, rows, self.last_tokens
            )
        prompt = None
        if targets is not None:
            prompt = self._prompt[layout.tokens](self._prompt_head, x, place(targets, self._by_rank))
        for array in jax.tree.leaves((tokens, found, prompt)):
            array.copy_to_host_async()
        return Pending(tokens, found, prompt, enqueued_s, self.expert_counts)

    def run_program(
        self, program: Callable, buffer: jax.Array, source: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, Rows]:
        """Enqueue a compiled step (`Programs.step`) on the weights, the KV cache and the page table.

        Args:
          buffer: [layout.size] int32 on the device, see `layout.pack`.
          source: [Q] int32, each slot's last token, or the residual stream that a later pipeline stage reads.
            None takes the tokens that the samplers drew.

        Returns:
          The hidden states of the rows that sample, of all tokens, and the samplers' rows.
        """
        source = self.last_tokens if source is None else source
        hidden, x, rows, self.kv, self.page_table, *counts = program(
            self.weights, self.kv, self.page_table, source, buffer, *self.expert_counts
        )
        self.expert_counts = tuple(counts)
        return hidden, x, rows

    # ---- experts in slots

    def move_experts(self, layer: int, placed: np.ndarray) -> MovedLayer:
        """Enqueue copies of a layer's experts to new slots. Steps read the
        present ones until `switch_experts`.

        placed: the expert of each new slot, [S].
        """
        assert self.placed is not None
        if self.recorder is not None:
            self.recorder.move_experts(layer, placed)
        source = source_slots(self.placed[self.expert_layers.index(layer)], placed)
        own = expert_arrays(self.weights["layers"][layer])
        arrays, before, after = self._small["move_experts"](own, self._put(source))
        return MovedLayer(layer, placed, source, arrays, before, after)

    def switch_experts(self, moved: MovedLayer) -> None:
        """Let the next step read the moved experts and their map."""
        assert self.placed is not None
        if self.recorder is not None:
            self.recorder.switch_experts(moved.layer)
        made = copy_map(moved.placed, self.programs.context.config.num_experts, self.programs.mesh.size)
        layers = list(self.weights["layers"])
        layers[moved.layer] = layers[moved.layer] | moved.arrays | jax.tree.map(self._put, made)
        self.weights = self.weights | {"layers": layers}
        self.placed = self.placed.copy()
        self.placed[self.expert_layers.index(moved.layer)] = moved.placed

    # ---- pages of the KV cache

    def add_page_copies(self, copies: PageCopies | RankCopies) -> None:
        """Add the programs of `gather_pages` and `scatter_pages`. Several ranks run them by `RankPages`.

        `warm_up` compiles them; on a warm executor they are compiled at once.
        """
        self.copies = copies
        if self._warm:
            self.kv = copies.warm_up(self.kv)

    def page_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shape of a page of each layer group, as `gather_pages` returns it."""
        assert isinstance(self.copies, PageCopies), "add_page_copies comes first"
        return [programs.page_shape() for programs in self.copies.programs]

    def gather_pages(self, group: int, pages: Sequence[int]) -> list[jax.Array]:
        """Enqueue a read of pages of one layer group, after the steps that are enqueued already.

        Returns:
          One array a page: uint32 [tp, W] on the device, W words of each shard.
        """
        assert isinstance(self.copies, PageCopies), "add_page_copies comes first"
        found = self.copies.gather(self.kv, group, pages)
        if self.recorder is not None:
            self.recorder.gathered(group, pages, found)
        return found

    def scatter_pages(self, group: int, pages: Sequence[int], data: Sequence[jax.Array]) -> None:
        """Enqueue a write of `data` (see `gather_pages`) to pages of one layer group, all different.

        Steps that are enqueued later read the new content.
        """
        assert isinstance(self.copies, PageCopies), "add_page_copies comes first"
        if self.recorder is not None:
            self.recorder.scatter_pages(group, pages, data)
        self.kv = self.copies.scatter(self.kv, group, pages, data)

    @property
    def rank_copies(self) -> RankCopies:
        """Return the programs that copy the pages of several ranks."""
        assert isinstance(self.copies, RankCopies), "add_page_copies comes first"
        return self.copies

    def scatter_to_rank(self, rank: int, group: int, pages: Sequence[int], data: Sequence[jax.Array]) -> None:
        """Enqueue a write of a rank's pages, see `scatter_pages`."""
        self.kv = self.rank_copies.scatter(self.kv, rank, group, pages, data)

    def rank_pages(self) -> list["RankPages"]:
        """Return the pages of each rank, of an executor with `RankCopies`."""
        return [RankPages(self, rank) for rank in range(self.ranks)]

    def fill_kv(self, fill: Callable[[int, jax.Array], jax.Array]) -> None:
        """Replace each array of the KV cache by `fill(index, array)`, for measurements.

        `fill` may donate the array. Arrays are replaced one by one, because two caches do not fit.
        """
        arrays, tree = jax.tree.flatten(self.kv)
        self.kv: Any = None
        for i in range(len(arrays)):
            arrays[i] = fill(i, arrays[i])
        self.kv = jax.tree.unflatten(tree, arrays)

    def set_slot(self, slot: int, values: SlotParams, token_ids: np.ndarray, num_prompt: int) -> None:
        """Store a sequence's sampling settings and the tokens that its penalties count, for a slot.

        Args:
          slot: among the slots of all ranks.
          token_ids: [n] int32, all known tokens, the prompt's `num_prompt` tokens first; empty without
            penalties.
        """
        if self.recorder is not None:
            self.recorder.set_slot(slot, values, token_ids, num_prompt)
        index = self._put(np.int32(slot))
        self.params, self.counts = self._small["set_slot"](
            self.params, self.counts, index, jax.tree.map(self._put, values)
        )
        for i in range(0, len(token_ids), COUNTED):
            ids, outputs = np.full(COUNTED, NO_TOKEN, np.int32), np.zeros(COUNTED, bool)
            n = len(token_ids[i : i + COUNTED])
            ids[:n] = token_ids[i : i + n]
            outputs[:n] = np.arange(i, i + n) >= num_prompt
            self.counts = self._small["count_tokens"](self.counts, index, self._put(ids), self._put(outputs))

    # ---- compiling

    def _put(self, x) -> jax.Array:
        return place(x, self.replicated)

    @property
    def own_num_pages(self) -> tuple[int, ...]:
        """Return the pages of each of this stage's layer groups, once they are allocated."""
        return tuple(self.lower.own_pages(self.num_pages))

    def _compile(self, lowered: Any, options: dict[str, Any] | None = None) -> Any:
        if isinstance(lowered, LoweredStep):
            return lowered.compile(lambda one: self._compile(one, options))
        if self._eager:
            kernels = kernels_of(lowered.compiler_ir("stablehlo"))
            start_kernels(self.programs.mesh, kernels, options or {})
        return compile_program(lowered, options)

    def _begin(
        self, pool: concurrent.futures.Executor, options: dict[str, Any], lowered: jax.stages.Lowered
    ) -> Begun:
        """Begin the compilation of a step's program while Python lowers the next one."""
        return Begun(lowered, pool.submit(self._compile, lowered, options))


class RankPages:
    """The pages of a data-parallel rank, with the calls of an executor of this rank alone."""

    def __init__(self, executor: Executor, rank: int):
        self._executor, self._rank = executor, rank

    def page_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shape of a page of each layer group, see `Executor.page_shapes`."""
        return self._executor.rank_copies.page_shapes(self._rank)

    def gather_pages(self, group: int, pages: Sequence[int]) -> list[jax.Array]:
        """Enqueue a read of the rank's pages, see `Executor.gather_pages`."""
        return self._executor.rank_copies.gather(self._executor.kv, self._rank, group, pages)

    def scatter_pages(self, group: int, pages: Sequence[int], data: Sequence[jax.Array]) -> None:
        """Enqueue a write of the rank's pages, see `Executor.scatter_pages`."""
        self._executor.scatter_to_rank(self._rank, group, pages, data)


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
