"""The asynchronous loop: step n+1 is scheduled and enqueued while step n runs, then
the tokens of step n are read.

With P pipeline stages, step n+P is scheduled and enqueued before the tokens of step n are read.

The device gathers the decode inputs of a step from the step before, so sampled tokens do not wait for the
host. In return, an end token or a stop string is noticed one step late. The surplus token is dropped and
never reaches the prefix cache. A sequence that ends by length runs no surplus step, because its end is known
before.
"""

import collections
import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np

from jaxflow.engine.executor import Executor
from jaxflow.engine.expert_balancer import ExpertBalancer
from jaxflow.engine.expert_load import ExpertCounter
from jaxflow.engine.layout import SlotSampling, StepLayout, pack
from jaxflow.engine.live_request import (
    HostLogprobs,
    LiveRequest,
    PlainSlots,
    needs_full_sampler,
    slot_settings,
)
from jaxflow.engine.programs import FULL, LOGPROBS, NAN_LOGITS, PLAIN
from jaxflow.engine.stage_threads import AnyPending
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.engine.step_log import StepLog, StepRecord
from jaxflow.kv.tiers.offload import KvOffload
from jaxflow.pipeline.choice import pick
from jaxflow.request import Event, FinishReason, Request
from jaxflow.scheduler.config import SchedulerConfig
from jaxflow.scheduler.scheduler import Scheduler
from jaxflow.scheduler.state import Sequence, StepWork
from jaxflow.scheduler.step_time import StepTime

log = logging.getLogger(__name__)


class NanLogits(ArithmeticError):
    """The logits of a token are NaN: the weights are damaged, or a number overflowed."""

    def __init__(self, request_id: str, position: int):
        super().__init__(f"request {request_id}: the logits at position {position} are NaN")


class Stats(msgspec.Struct, frozen=True):
    """Counters since start, and present numbers."""

    running_requests: int
    waiting_requests: int
    kv_pages: int
    kv_pages_free: int
    steps: int
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    preemptions: int
    compilations_after_warmup: int
    steps_by_plan: dict[str, int]
    kv_tiers: dict[str, int]  # counters of the lower tiers, see `KvOffload.counters`; empty without tiers


# The arguments of `Executor.run` after the layout: buffer, appends, targets.
Inputs = tuple[np.ndarray, np.ndarray, np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class InFlight:
    """An enqueued step; its tokens are not read yet."""

    work: StepWork
    pending: AnyPending
    plan: str
    tokens: int  # of the compiled step, padding included
    enqueued_s: float


def larger_layouts(executor: Executor | StagedExecutor, tokens: int, *, alone: bool) -> Iterator[StepLayout]:
    """Yield the layouts that can run a step of so many tokens, the smallest first. All give the same tokens.

    alone: the step has no chunk, so layouts without chunks can run it.
    """
    for size in sorted(executor.layouts):
        if size >= tokens:
            if alone and size in executor.decode_layouts:
                yield executor.decode_layouts[size]
            yield from executor.layouts[size]


def first_ready(
    executor: Executor | StagedExecutor,
    layouts: Iterable[StepLayout],
    full: bool,
    prompt: bool,
    masked: bool = False,
) -> StepLayout:
    """Return the first layout that runs without a compilation. full, prompt, masked: with these samplers.

    Without substitutes the first layout runs, if need be after a compilation of another
    sampler than the masked one.
    """
    every = not executor.substitutes
    ready = (layout for layout in layouts if every or executor.is_ready(layout, full=full, prompt=prompt))
    if not masked:
        return next(ready)
    found = [layout for layout in ready if layout.full]
    return next((layout for layout in found if executor.masks_ready(layout)), found[0])


class Loop:
    """The loop of steps: schedule, enqueue, read. Not thread-safe: only one thread uses it."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor | StagedExecutor,
        *,
        eos_token_ids: Iterable[int],
        offload: KvOffload | None = None,
        step_time: StepTime | None = None,
        eplb_step_interval: int | None = None,
        first_slot: int = 0,
        clock=time.monotonic,
    ):
        """Return a loop.

        Args:
          offload: executes the copies that the scheduler's tier policy decides; None without tiers.
          step_time: learns the measured time of each step.
          eplb_step_interval: steps between two placements of the experts; None for experts that stay.
          first_slot: the executor's number of the scheduler's slot 0, where the loop is one of several ranks
            (`jaxflow.engine.ranked_loop`).
        """
        self.scheduler, self.executor, self.offload = scheduler, executor, offload
        self._step_time, self._last_read_s = step_time, 0.0
        self._eos = frozenset(eos_token_ids)
        self._clock, self._first_slot = clock, first_slot
        self._gains = {
            bucket: [layout.gain for layout in layouts] for bucket, layouts in executor.layouts.items()
        }
        self._live: dict[str, LiveRequest] = {}
        self._slots = SlotSampling.empty(executor.slots)
        self._plain = PlainSlots(executor.slots, self._eos)
        # The last calls of `schedule`, oldest first; None where a call found no work.
        self._in_flight: collections.deque[InFlight | None] = collections.deque()
        self._events: list[Event] = []  # of the step being read, kept here so that a fault loses no end
        self._counts = collections.Counter()
        self._steps_by_plan = collections.Counter()
        self.log = StepLog()
        self.expert_counter = ExpertCounter(executor.expert_layers)
        self.balancer: ExpertBalancer | None = None
        if eplb_step_interval is not None:
            self.balancer = ExpertBalancer(executor, self.expert_counter, eplb_step_interval)
        self.advances = 0  # steps enqueued plus steps read

    # ---- requests

    def add(self, request: Request, now: float) -> None:
        """Queue a request. Raises: InvalidRequest, QueueFull."""
        sequences = self.scheduler.add(request)
        try:
            self._live[request.request_id] = LiveRequest(request, sequences, self._eos, now)
        except Exception:  # the request's text decoders are made here
            for seq in sequences:
                self.scheduler.abort(seq)
            raise

    def abort(self, request_id: str) -> list[Event]:
        """End the unfinished sequences of a request, and return their last events."""
        live = self._live.get(request_id)
        if live is None:
            return []
        events: list[Event] = []
        for seq in live.unfinished():
            self._free(seq, FinishReason.ABORT)
            events.append(live.finished(seq, FinishReason.ABORT, None, self._clock()))
        return events

    def end_all(self, fault: BaseException | None) -> list[Event]:
        """Return the last events of every request, when no more steps run.

        The scheduler is not used, because after a fault its state is unknown.
        """
        every, self._live = list(self._live.values()), {}
        now = self._clock()
        ends = [
            live.finished(seq, FinishReason.ABORT, None, now, fault)
            for live in every
            for seq in live.unfinished()
        ]
        return [*self._events, *ends]

    def is_live(self, request_id: str) -> bool:
        return request_id in self._live

    @property
    def request_ids(self) -> list[str]:
        return list(self._live)

    @property
    def scheduling(self) -> SchedulerConfig:
        """Return the scheduler's settings, with the limits of a request."""
        return self.scheduler.config

    def accept(self, request: Request) -> Request:
        """Return the request with its limit. Any thread may call it. Raises: InvalidRequest."""
        return self.scheduler.accept(request)

    @property
    def has_work(self) -> bool:
        return (
            bool(self._live)
            or any(step is not None for step in self._in_flight)
            or (self.offload is not None and self.offload.busy)
        )

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return self.scheduler.num_waiting

    @property
    def max_waiting(self) -> int:
        return self.scheduler.config.max_waiting

    def seconds_until_room(self) -> float:
        return self.scheduler.seconds_until_room()

    def stats(self, queued: int) -> Stats:
        """Return the counters as of the last step. Any thread may call it.

        `queued`: requests that have not reached the loop.
        """
        scheduler, counts = self.scheduler, self._counts
        return Stats(
            running_requests=max(0, len(self._live) - scheduler.num_waiting),
            waiting_requests=scheduler.num_waiting + queued,
            kv_pages=sum(scheduler.config.num_pages),
            kv_pages_free=scheduler.pages_free,
            steps=counts["steps"],
            prompt_tokens=counts["prompt_tokens"],
            completion_tokens=counts["completion_tokens"],
            cached_prompt_tokens=counts["cached_prompt_tokens"],
            preemptions=scheduler.num_preemptions,
            compilations_after_warmup=self.executor.compilations,
            steps_by_plan=dict(self._steps_by_plan),
            kv_tiers={} if self.offload is None else self.offload.counters(),
        )

    def begin(self) -> None:
        """Prepare the thread that will call `step`."""
        if self.offload is not None:
            self.offload.begin()

    def close(self) -> None:
        """End the copies that run concurrently, after the last step."""
        if self.offload is not None:
            self.offload.close()
        if self.balancer is not None:
            self.balancer.close()

    # ---- steps

    def step(self) -> list[Event]:
        """Enqueue the next step, then read the oldest one in flight. Return its events."""
        if self.offload is not None:
            self.offload.receive()
        work = self.scheduler.schedule(self._clock())
        if self.offload is not None:
            self.offload.send()
        full = len(self._in_flight) >= self.executor.num_stages
        before = self._in_flight.popleft() if full else None
        read = functools.cache(lambda: None if before is None else self.log.steps.append(self.read(before)))
        self._in_flight.append(None if work is None else self._enqueue(work, read))
        if before is not None:
            read()
            if self.balancer is not None:
                self.balancer.after_step()
        elif self.offload is not None and self.offload.busy and not any(self._in_flight):
            self.offload.wait()  # only page copies are in progress
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Return the events of the steps that were read since the last call."""
        events, self._events = self._events, []
        return events

    def _enqueue(self, work: StepWork, read_before: Callable[[], object]) -> InFlight:
        """Enqueue a step.

        read_before: reads the step before. It is called while the device runs the forward of this step, if
          the masks of this step need the tokens of that one.
        """
        full, rows = self.admit(work), self.constrained_rows(work)
        masked = bool(rows)
        layout = self._choose(work, full or masked, masked)
        buffer, appends, targets = self.prepare(work, layout)
        self._counts["steps"] += 1
        self._steps_by_plan[layout.plan] += 1
        enqueued_s = None

        def late_masks() -> np.ndarray:
            nonlocal enqueued_s
            enqueued_s = time.monotonic()
            if self.executor.num_stages == 1:
                read_before()
            return self.masks(layout, rows)

        more = {"masks": late_masks} if masked else {}
        pending = self.executor.run(layout, buffer, appends, full=full, targets=targets, **more)
        self.advances += 1
        enqueued_s = enqueued_s or time.monotonic()
        return InFlight(work, pending, layout.plan, max(work.bucket, layout.tokens), enqueued_s)

    def admit(self, work: StepWork) -> bool:
        """Give the step's new sequences their slots.

        Return True if a row of the step needs the full sampler.
        """
        for seq in work.admitted:
            self._take_slot(seq)
        return bool((self._slots.sampler[work.slots] >= FULL).any())

    def prepare(self, work: StepWork, layout: StepLayout) -> Inputs:
        """Return the inputs of a step whose sequences have slots."""
        buffer, appends = pack(layout, work, self._slots)
        self._counts["prompt_tokens"] += sum(chunk.tokens for chunk in work.chunks)
        return buffer, appends, self._targets(layout, work)

    def constrained_rows(self, work: StepWork) -> list[tuple[int, Sequence]]:
        """Return each row that draws a token of a constrained sequence, with the sequence."""
        constrained = self.scheduler.running.slots.constrained
        if not constrained.any():
            return []
        rows = [(row, work.decodes.item(row)) for row in constrained[work.decode_slots].nonzero()[0].tolist()]
        chunks = enumerate(work.chunks, start=len(work.decode_slots))
        return rows + [(row, chunk.seq) for row, chunk in chunks if chunk.samples and constrained[chunk.slot]]

    def masks(self, layout: StepLayout, rows: Iterable[tuple[int, Sequence]]) -> np.ndarray:
        """Return the tokens that each row may draw, int32 [R, words] of bits.

        rows: see `constrained_rows`. The host knows all tokens of their sequences. Those that have finished
          may draw any token, which nobody reads.
        """
        masks = np.full((layout.rows, self.executor.mask_words), -1, np.int32)
        growing = [
            (self._live[s.request.request_id].constraints[s.index], r) for r, s in rows if not s.finished
        ]
        if growing:
            growing[0][0].fill(growing, masks)
        return masks

    def wants_prompt(self, work: StepWork) -> bool:
        """Return True if a request of the step wants prompt log-probabilities."""
        return any(self._wants_prompt(chunk.seq) for chunk in work.chunks)

    def _choose(self, work: StepWork, full: bool, masked: bool) -> StepLayout:
        """Return the layout of the step: its own, or the next larger one that is ready.

        full: a row needs the full or the masked sampler. masked: a row needs the masked one.
        """
        own, executor = self._own_layout(work, full), self.executor
        if not executor.substitutes and not masked:
            return own
        larger = larger_layouts(executor, work.bucket, alone=not work.chunks)
        return first_ready(executor, itertools.chain((own,), larger), full, self.wants_prompt(work), masked)

    def _own_layout(self, work: StepWork, full: bool) -> StepLayout:
        """Return the layout of the bucket's best plan for the step, without chunks if the step has none."""
        layouts = self.executor.layouts[work.bucket]
        one = len(layouts) == 1
        chosen = layouts[
            0 if one else pick(self._gains[work.bucket], len(work.decode_slots), work.mean_context_tokens)
        ]
        if work.chunks:
            return chosen
        fitting = range(len(work.decode_slots), work.bucket + 1)
        few = self.executor.decode_layouts
        alone = min(
            (layout for size, layout in few.items() if size in fitting and (layout.full or not full)),
            key=lambda layout: layout.tokens,
            default=None,
        )
        return alone if alone is not None and alone.plan == chosen.plan else chosen

    def _take_slot(self, seq: Sequence) -> None:
        """Store the sampling settings of a newly admitted sequence for its slot."""
        sampling = seq.request.sampling
        full = needs_full_sampler(sampling)
        sampler = LOGPROBS if sampling.logprobs is not None else FULL if full else PLAIN
        self._plain.close(seq.slot)
        self._slots.set(seq.slot, sampling.temperature, seq.seed, sampler)
        if full:
            self.executor.set_slot(self._first_slot + seq.slot, *slot_settings(seq, self._eos))

    def _targets(self, layout: StepLayout, work: StepWork) -> np.ndarray | None:
        """Return each token's successor in its prompt, [T], if a request wants prompt log-probabilities."""
        targets, token = None, len(work.decodes)
        for chunk in work.chunks:
            if self._wants_prompt(chunk.seq):
                targets = np.zeros(layout.tokens, np.int32) if targets is None else targets
                following = chunk.seq.token_ids[
                    chunk.start + 1 : min(chunk.start + chunk.tokens + 1, chunk.seq.num_prompt)
                ]
                targets[token : token + len(following)] = following
            token += chunk.tokens
        return targets

    def _wants_prompt(self, seq: Sequence) -> bool:
        live = self._live.get(seq.request.request_id)
        return seq.index == 0 and live is not None and live.wants_prompt_logprobs

    # ---- results

    def read(self, step: InFlight) -> StepRecord:
        """Wait for the tokens of a step, commit them, and add their events."""
        work, pending = step.work, step.pending
        asked_s = time.monotonic()
        tokens = np.asarray(pending.tokens)
        read_s = time.monotonic()
        self.expert_counter.put(pending.expert_counts)
        if self._step_time is not None:
            # The device begins a step once the step is enqueued and the previous step has ended.
            self._step_time.observe(work, read_s - max(self._last_read_s, step.enqueued_s))
        self._last_read_s = read_s
        self.advances += 1
        found = None if pending.logprobs is None else HostLogprobs.of(pending.logprobs)
        now = self._clock()
        if pending.prompt is not None:
            self._read_prompt(work, HostLogprobs.of(pending.prompt))
        slots, decoded = work.decode_slots, tokens[: len(work.decode_slots)]
        plain = self._plain.pass_through(slots, decoded) & self.scheduler.in_slot(work)
        self.scheduler.commit_in_slot(slots[plain], decoded[plain])
        self._events.extend(self._plain.deltas(slots[plain], decoded[plain]))
        rows = [(row, work.decodes.item(row)) for row in (~plain).nonzero()[0].tolist()]
        rows += [(row, chunk.seq) for row, chunk in enumerate(work.chunks, start=len(slots)) if chunk.samples]
        drawn = [(row, seq, tokens.item(row)) for row, seq in rows if not seq.finished]
        for _, seq, token in drawn:
            if token == NAN_LOGITS:
                self._fail(seq, now)
        drawn = [each for each in drawn if not each[1].finished]
        if drawn:
            self.scheduler.commit([seq for _, seq, _ in drawn], [token for _, _, token in drawn])
        for row, seq, token in drawn:
            self._take(seq, token, found, row, now)
        kept = int(np.count_nonzero(plain))
        new_tokens = kept + len(drawn)
        new_decode_tokens = kept + sum(row < len(slots) for row, _, _ in drawn)
        self._counts["completion_tokens"] += new_tokens
        return StepRecord(
            step.plan,
            step.tokens,
            len(slots),
            work.num_tokens - len(slots),
            new_tokens,
            new_decode_tokens,
            step.enqueued_s,
            read_s - asked_s,
            read_s,
        )

    def _fail(self, seq: Sequence, now: float) -> None:
        """End a sequence without a token, because its logits are NaN."""
        fault = NanLogits(seq.request.request_id, seq.num_known)
        log.error("%s", fault)
        live = self._live[seq.request.request_id]
        self._free(seq, FinishReason.ABORT)
        self._events.append(live.finished(seq, FinishReason.ABORT, None, now, fault))

    def _take(self, seq: Sequence, token: int, found: HostLogprobs | None, row: int, now: float) -> None:
        """Add the events of one committed token."""
        live = self._live[seq.request.request_id]
        self._events.extend(live.take(seq, token, found, row, now, self._free))
        if not seq.finished and live.is_plain and seq.slot >= 0:
            self._plain.open(seq, heeds_eos=not seq.request.sampling.ignore_eos)

    def _read_prompt(self, work: StepWork, found: HostLogprobs) -> None:
        """Give each prompt the log-probabilities of its chunk."""
        token = len(work.decodes)
        for chunk in work.chunks:
            if self._wants_prompt(chunk.seq):
                self._live[chunk.seq.request.request_id].add_prompt_logprobs(chunk, token, found)
            token += chunk.tokens

    def _free(self, seq: Sequence, reason: FinishReason) -> None:
        """End one sequence, and forget its request after its last sequence.

        The pages and the slot are free at once, because steps run in the order of their enqueueing.
        """
        if reason is FinishReason.ABORT:
            self.scheduler.abort(seq)
        else:
            self.scheduler.finish(seq)
        live = self._live[seq.request.request_id]
        if not live.unfinished():
            del self._live[seq.request.request_id]
        self._counts["cached_prompt_tokens"] += seq.cached_tokens
