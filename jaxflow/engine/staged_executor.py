"""The steps of a model over pipeline stages (SARATHI §3.2, §5.3): one executor a
stage, each on its own devices.

A step runs on the stages in turn. Each stage has a thread that enqueues its part of the step, and the
residual stream goes from stage to stage by copies that no thread waits for. While a stage runs one step, the
stages before it run the next ones. Each stage holds the KV pages of its layers and a copy of the page
tables. All stages apply the same changes in the same order, so pages can change hands as on one device. A
page that leaves for a lower tier consists of the stages' parts, in each process those of its own stages.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jaxflow.engine.executor import Executor, Pending
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.programs import Rows
from jaxflow.engine.recorder import Recorder
from jaxflow.engine.rehearsal import rehearse, rehearsed
from jaxflow.engine.stage_threads import AnyPending, PendingLater, stage_threads
from jaxflow.engine.start_times import StartTimes
from jaxflow.kv.tiers.page import Parts
from jaxflow.model.slot_params import SlotParams, slot_values
from jaxflow.parallel.hand_over import ProcessHandOver, hand_over


@dataclasses.dataclass(frozen=True)
class _Forward:
    """The enqueued part of a step on one stage, see `Executor.run_program`."""

    hidden: jax.Array
    x: jax.Array
    rows: Rows
    expert_counts: tuple[jax.Array, ...]


class StagedExecutor:
    """The steps of one model on several stages, with the calls of `Executor` that a loop uses.

    A decode reads the token that the last stage drew for its slot. A step must not wait for steps that drew
    no token of its slots, because such a wait would empty the pipeline. So the executor keeps
    the drawn tokens after each of the last steps, and a step reads them as of the last step that
    drew one of its slots' tokens.

    The calls on a stage's devices are made by the stage's thread, in the order of this object's calls. A call
    waits only for calls of an older step, or of the same step on the stage before. So the threads never wait
    in a circle.

    Of several processes, each has some of the stages, and process 0 the last one. Every process makes all
    calls in one thread, because hand-overs between processes have one order.

    Args:
      exchange: hands over between processes; None for one process.
      times: takes the time of the rehearsal.
    """

    def __init__(
        self,
        stages: Sequence[Executor],
        exchange: ProcessHandOver | None = None,
        times: StartTimes | None = None,
    ):
        self._times = times or StartTimes()
        self.stages, self._exchange = tuple(stages), exchange
        self._here = [stage for stage in self.stages if stage.is_here]
        self.recorder: Recorder | None = None  # see `Executor`
        first = self.stages[0]
        self.ranks = 1  # stages have no data parallelism
        self.layouts, self.decode_layouts = first.layouts, first.decode_layouts
        self.slots, self.page_size, self.groups = first.slots, first.page_size, first.groups
        self._threads = stage_threads(len(self.stages), exchange is None)
        self._slots_set: list[Future[None]] = []  # since the last step
        # One entry for each of the last steps, oldest first: the slots that drew a token, bool [Q], and the
        # last token of every slot.
        self._drawn: collections.deque[tuple[np.ndarray, Future[jax.Array | None]]] = collections.deque(
            maxlen=len(self.stages) + 1
        )

    @property
    def num_stages(self) -> int:
        """Return P, the number of stages."""
        return len(self.stages)

    @property
    def expert_layers(self) -> list[int]:
        """Return the layer of each row of `Pending.expert_counts`: those of the stages of this process."""
        sizes = [stage.programs.context.config.num_layers for stage in self.stages]
        firsts = itertools.accumulate(sizes, initial=0)
        here = [(first, stage) for first, stage in zip(firsts, self.stages, strict=False) if stage.is_here]
        return [first + layer for first, stage in here for layer in stage.expert_layers]

    @property
    def compilations(self) -> int:
        """Return the number of backend compilations since warm-up, which must be 0."""
        return self._here[-1].compilations

    def allocate(self, num_pages: tuple[int, ...]) -> None:
        """Allocate each stage's KV cache and per-slot state. `num_pages`: pages of each layer group."""
        self.num_pages = num_pages
        for stage in self.stages:
            if stage.is_here:
                stage.allocate(num_pages)
            else:
                stage.num_pages = num_pages
        self._drawn.append((np.ones(self.slots, bool), self._threads[-1].submit(self._tokens_to_first)))

    def warm_up(
        self,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        on_compiled: Callable[[], None] = lambda: None,
        first: Collection[StepLayout] | None = None,
    ) -> float:
        """Compile the programs of every stage, and run those of `rehearsed`. Return the seconds.

        on_compiled: called before the first program runs. first: see `Executor.compile`.
        """
        start = time.perf_counter()
        self._compile(on_progress, first)
        on_compiled()
        with self._times.phase("rehearsal"):
            for layout in rehearsed(self):
                rehearse(self, layout)
            self.set_slot(0, slot_values(), np.zeros(1, np.int32), 0)
            self._settle()
            for stage in self._here:
                stage.count_compilations()
        return time.perf_counter() - start

    def _settle(self) -> None:
        """Wait until the threads have made all calls."""
        for made in [thread.submit(int) for thread in self._threads]:
            made.result()

    def compile_deferred(self) -> None:
        """Compile the deferred programs of all stages on threads, a little later."""
        for stage in self._here:
            stage.compile_deferred()

    # ---- layouts that become ready while the engine serves, see `Executor`

    @property
    def substitutes(self) -> bool:
        """Return True if steps must ask `is_ready`."""
        return any(stage.substitutes for stage in self._here)

    def is_ready(self, layout: StepLayout, *, full: bool, prompt: bool) -> bool:
        """Return True if a step of the layout runs on every stage without a compilation."""
        return all(stage.is_ready(layout, full=full, prompt=prompt) for stage in self._here)

    def unready(self) -> list[StepLayout]:
        """Return the layouts that have a deferred program on the last stage, which has all samplers."""
        return self._here[-1].unready()

    def compile_layout(self, layout: StepLayout) -> None:
        """Compile the deferred programs of a layout on all stages. Any thread may call it."""
        for stage in self._here:
            stage.compile_layout(layout)

    def set_ready(self, layout: StepLayout) -> None:
        """Let steps run the compiled programs of a layout."""
        for stage in self._here:
            stage.set_ready(layout)

    @property
    def mask_words(self) -> int:
        """See `Executor.mask_words`."""
        return self.stages[-1].mask_words

    def prepare_masks(self) -> None:
        """See `Executor.prepare_masks`. A process without the last stage draws no token."""
        if self.stages[-1].is_here:
            self.stages[-1].prepare_masks()

    def masks_ready(self, layout: StepLayout) -> bool:
        """See `Executor.masks_ready`."""
        return self.stages[-1].masks_ready(layout)

    def run(
        self,
        layout: StepLayout,
        buffer: np.ndarray,
        appends: np.ndarray,
        *,
        full: bool,
        targets: np.ndarray | None = None,
        masks: Callable[[], np.ndarray] | None = None,
    ) -> AnyPending:
        """Let the threads enqueue a step on all stages. Arguments: see `Executor.run`.

        The call of `masks` comes first.
        """
        found = None if masks is None else masks()
        if self.recorder is not None:
            self.recorder.run(layout, buffer, appends, full, targets, found)
        enqueued_s = time.perf_counter()
        fields = layout.views(buffer)
        row_slots = fields["row_slots"]
        before: Future[Any] = self._tokens_for(row_slots[: fields["num_decodes"].item()])
        parts: list[Future[_Forward | None]] = []
        for number, thread in enumerate(self._threads):
            before = thread.submit(self._advance, number, before, layout, buffer, appends)
            parts.append(before)
        draw = functools.partial(self._draw, layout, enqueued_s, full=full, targets=targets, masks=found)
        slots_set, self._slots_set = self._slots_set, []
        pending = self._threads[-1].submit(draw, parts, slots_set)
        drawn = np.zeros(self.slots, bool)
        drawn[row_slots[fields["samples"] > 0]] = True
        self._drawn.append((drawn, self._threads[-1].submit(self._tokens_to_first, pending)))
        return pending.result() if self._exchange is not None else PendingLater(pending, enqueued_s)

    def _advance(
        self, number: int, before: Future[Any], layout: StepLayout, buffer: np.ndarray, appends: np.ndarray
    ) -> _Forward | None:
        """Enqueue a step's forward on a stage; None if the stage lies in another process.

        before: the drawn tokens for the first stage, the `_Forward` of the stage before for the others.
        """
        stage, x = self.stages[number], before.result()
        if number > 0:
            x = None if x is None else x.x
            x = self._hand_over(x, self.stages[number - 1], stage, stage.lower.hidden(layout.tokens))
        if not stage.is_here:
            return None
        assert x is not None
        return _Forward(*stage.advance(layout, buffer, appends, x), stage.expert_counts)

    def _draw(
        self,
        layout: StepLayout,
        enqueued_s: float,
        parts: Sequence[Future[_Forward | None]],
        slots_set: Sequence[Future[None]],
        **more: Any,
    ) -> Pending:
        """Enqueue the sampler of a step on the last stage. Another process waits for its own part."""
        for each in slots_set:
            each.result()
        here = [part for future in parts if (part := future.result()) is not None]
        last, own = self.stages[-1], here[-1]
        if not last.is_here:
            return Pending(own.hidden, None, None, enqueued_s)
        pending = last.draw(layout, own.hidden, own.x, own.rows, enqueued_s, **more)
        counts = itertools.chain.from_iterable(part.expert_counts for part in here)
        return dataclasses.replace(pending, expert_counts=tuple(counts))

    def set_slot(self, slot: int, values: SlotParams, token_ids: np.ndarray, num_prompt: int) -> None:
        """Store a sequence's sampling settings on the stage that samples.

        Arguments: see `Executor.set_slot`.
        """
        if self.recorder is not None:
            self.recorder.set_slot(slot, values, token_ids, num_prompt)
        if self.stages[-1].is_here:
            ids = token_ids.copy()  # the sequence may get more tokens before the call
            made = self._threads[-1].submit(self.stages[-1].set_slot, slot, values, ids, num_prompt)
            self._slots_set.append(made)

    # ---- pages of the KV cache

    def page_shapes(self) -> list[Parts]:
        """Return the shapes of the parts of a page of each layer group, over all processes."""
        return [
            Parts(tuple(self.stages[number].page_shapes()[own] for number, own in self._holders(group)))
            for group in range(self.groups)
        ]

    def gather_pages(self, group: int, pages: Sequence[int]) -> list[Parts]:
        """Enqueue a read of pages of one layer group on its stages, each after the stage's enqueued steps.

        Returns:
          The parts of each page that lie in this process, see `Executor.gather_pages`.
        """
        made = [
            self._threads[number].submit(self.stages[number].gather_pages, own, pages)
            for number, own in self._holders(group)
            if self.stages[number].is_here
        ]
        by_stage = [each.result() for each in made]
        found = [Parts(tuple(pages_of[i] for pages_of in by_stage)) for i in range(len(pages))]
        if self.recorder is not None:
            self.recorder.gathered(group, pages, found)
        return found

    def scatter_pages(self, group: int, pages: Sequence[int], data: Sequence[Parts]) -> None:
        """Enqueue a write of the parts of pages on the group's stages.

        Arguments: see `Executor.scatter_pages`.
        """
        if self.recorder is not None:
            self.recorder.scatter_pages(group, pages, data)
        here = [(number, own) for number, own in self._holders(group) if self.stages[number].is_here]
        made = [
            self._threads[number].submit(
                self.stages[number].scatter_pages, own, pages, [page.parts[at] for page in data]
            )
            for at, (number, own) in enumerate(here)
        ]
        for each in made:
            each.result()

    def _holders(self, group: int) -> list[tuple[int, int]]:
        """Return the numbers of the stages with layers of a group, and the group's number in each stage."""
        return [
            (number, stage.own_groups.index(group))
            for number, stage in enumerate(self.stages)
            if group in stage.own_groups
        ]

    def _compile(self, on_progress: Callable[[int, int], None], first: Collection[StepLayout] | None) -> None:
        """Compile the stages at the same time: XLA compiles one stage while another is lowered."""
        counts = [(0, 0)] * len(self._here)

        def compile_stage(number: int) -> None:
            def count(done: int, total: int) -> None:
                counts[number] = done, total
                on_progress(sum(done for done, _ in counts), sum(total for _, total in counts))

            self._here[number].compile(count, first)

        with concurrent.futures.ThreadPoolExecutor(self.num_stages) as pool:
            list(pool.map(compile_stage, range(len(self._here))))

    def _tokens_for(self, slots: np.ndarray) -> Future[jax.Array | None]:
        """Return the last tokens after the newest step that drew a token of one of the slots, int32 [n].

        None in a process without the first stage.
        """
        for drawn, tokens in reversed(self._drawn):
            if drawn[slots].any():
                return tokens
        return self._drawn[0][1]  # older tokens are in every one of the arrays

    def _tokens_to_first(self, after: Future[Pending] | None = None) -> jax.Array | None:
        """Return the last tokens on the first stage. after: the step that drew them; a fault of it raises."""
        if after is not None:
            after.result()
        first, last = self.stages[0], self.stages[-1]
        like = jax.ShapeDtypeStruct((self.slots,), np.int32, sharding=first.replicated)
        return self._hand_over(last.last_tokens if last.is_here else None, last, first, like)

    def _hand_over(
        self, array: jax.Array | None, sender: Executor, receiver: Executor, like: jax.ShapeDtypeStruct
    ) -> jax.Array | None:
        """Return a stage's array on the devices of another stage. None: the stage lies in another process.

        like: the result's shape.
        """
        if self._exchange is None:
            assert array is not None
            return hand_over(array, receiver.replicated)
        return self._exchange.hand_over(array if sender.is_here else None, sender.programs.mesh, like)
