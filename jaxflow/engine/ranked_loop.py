"""The loop of data-parallel ranks: each rank has requests, pages and a scheduler of
its own, and all step together.

Each step takes one step of every rank. All ranks run the layout that the largest of their steps needs,
because the experts' all-to-alls are part of the step. A rank without work runs an empty step.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxflow.engine.executor import Executor, Pending
from jaxflow.engine.expert_balancer import ExpertBalancer
from jaxflow.engine.expert_load import ExpertCounter
from jaxflow.engine.layout import StepLayout, empty_buffer
from jaxflow.engine.loop import InFlight, Inputs, Loop, Stats, first_ready, larger_layouts
from jaxflow.engine.step_log import StepLog, StepRecord
from jaxflow.kv import prefix
from jaxflow.kv.tiers.offload import KvOffload
from jaxflow.request import Event, Request
from jaxflow.scheduler.config import SchedulerConfig, prefix_salt
from jaxflow.scheduler.state import StepWork


@dataclasses.dataclass(frozen=True)
class RankedStep:
    """An enqueued step of all ranks; its tokens are not read yet. works: None for a rank without work."""

    works: tuple[StepWork | None, ...]
    layout: StepLayout
    pending: Pending
    enqueued_s: float


class RankedLoop:
    """The loops of several ranks, which step together. It has the calls of `Loop` that a `Driver` uses.

    A request belongs to one rank. Its rank is the one with the fewest tokens, running and waiting, less the
    tokens of the request's prompt that the rank's prefix cache has, on its device or in its host memory.
    """

    def __init__(
        self,
        ranks: Sequence[Loop],
        executor: Executor,
        *,
        eplb_step_interval: int | None = None,
        clock=time.monotonic,
    ):
        """Return a loop. eplb_step_interval: see `Loop`."""
        self.ranks, self.executor = tuple(ranks), executor
        self._clock = clock
        # The last calls of `schedule`; None where no rank found work. Steps are
        # enqueued one before they are read.
        self._before: RankedStep | None = None
        self._counts: collections.Counter[str] = collections.Counter()  # steps by plan
        self.log = StepLog()
        self.expert_counter = ExpertCounter(executor.expert_layers, len(self.ranks))
        self.balancer: ExpertBalancer | None = None
        if eplb_step_interval is not None:
            self.balancer = ExpertBalancer(executor, self.expert_counter, eplb_step_interval)
        self.advances = 0  # steps enqueued plus steps read

    # ---- requests

    def add(self, request: Request, now: float) -> None:
        """Queue a request on a rank. Raises: InvalidRequest, QueueFull."""
        names = reusable_page_names(self.scheduling, request)

        def cost(rank: Loop) -> int:
            return rank.scheduler.num_tokens - rank.scheduler.num_cached_tokens(names)

        min(self.ranks, key=cost).add(request, now)

    def abort(self, request_id: str) -> list[Event]:
        """End the unfinished sequences of a request, and return their last events."""
        return [event for rank in self.ranks for event in rank.abort(request_id)]

    def end_all(self, fault: BaseException | None) -> list[Event]:
        """Return the last events of every request, when no more steps run."""
        return [event for rank in self.ranks for event in rank.end_all(fault)]

    def is_live(self, request_id: str) -> bool:
        return any(rank.is_live(request_id) for rank in self.ranks)

    @property
    def request_ids(self) -> list[str]:
        return [request_id for rank in self.ranks for request_id in rank.request_ids]

    @property
    def scheduling(self) -> SchedulerConfig:
        """Return the settings of a rank's scheduler, with the limits of a request."""
        return self.ranks[0].scheduling

    def accept(self, request: Request) -> Request:
        """Return the request with its limit, which is the same on all ranks. Raises: InvalidRequest."""
        return self.ranks[0].accept(request)

    @property
    def has_work(self) -> bool:
        return self._before is not None or any(rank.has_work for rank in self.ranks)

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return sum(rank.waiting for rank in self.ranks)

    @property
    def max_waiting(self) -> int:
        """The most requests that wait on all ranks together."""
        return self.scheduling.max_waiting

    def seconds_until_room(self) -> float:
        return min(rank.seconds_until_room() for rank in self.ranks)

    def stats(self, queued: int) -> Stats:
        """Return the counters as of the last step, those of the ranks added up. Any thread may call it.

        `queued`: requests that have not reached the loop.
        """
        each = [rank.stats(0) for rank in self.ranks]

        def total(field: str) -> int:
            return sum(getattr(one, field) for one in each)

        return Stats(
            running_requests=total("running_requests"),
            waiting_requests=total("waiting_requests") + queued,
            kv_pages=total("kv_pages"),
            kv_pages_free=total("kv_pages_free"),
            steps=self._counts.total(),
            prompt_tokens=total("prompt_tokens"),
            completion_tokens=total("completion_tokens"),
            cached_prompt_tokens=total("cached_prompt_tokens"),
            preemptions=total("preemptions"),
            compilations_after_warmup=self.executor.compilations,
            steps_by_plan=dict(self._counts),
            kv_tiers=self._tier_counters(),
        )

    @property
    def _offloads(self) -> list[KvOffload]:
        """Return the offloading of each rank; [] without tiers."""
        return [rank.offload for rank in self.ranks if rank.offload is not None]

    def _tier_counters(self) -> dict[str, int]:
        """Return the counts of the ranks' tiers together. The ranks share the disk."""
        counts: collections.Counter[str] = collections.Counter()
        for offload in self._offloads:
            counts.update(offload.host_counters())
        return dict(counts) | (self._offloads[0].disk_counters() if self._offloads else {})

    def begin(self) -> None:
        """Prepare the thread that will call `step`."""
        for rank in self.ranks:
            rank.begin()

    def close(self) -> None:
        """End what runs concurrently, after the last step."""
        for rank in self.ranks:
            rank.close()
        if self.balancer is not None:
            self.balancer.close()

    # ---- steps

    def step(self) -> list[Event]:
        """Enqueue the next step of all ranks, then read the one before. Return its events."""
        offloads, now = self._offloads, self._clock()
        for offload in offloads:
            offload.receive()
        works = tuple(rank.scheduler.schedule(now) for rank in self.ranks)
        for offload in offloads:
            offload.send()
        before = self._before
        read = functools.cache(lambda: None if before is None else self._read(before))
        self._before = self._enqueue(works, read) if any(work is not None for work in works) else None
        if before is not None:
            read()
            if self.balancer is not None:
                self.balancer.after_step()
        elif self._before is None:
            for offload in [one for one in offloads if one.busy][:1]:
                offload.wait()  # only page copies are in progress
        return [event for rank in self.ranks for event in rank.take_events()]

    def _enqueue(self, works: tuple[StepWork | None, ...], read_before: Callable[[], object]) -> RankedStep:
        """Enqueue a step of all ranks. Arguments: see `Loop._enqueue`."""
        own = [(rank, work) for rank, work in zip(self.ranks, works, strict=True) if work is not None]
        needs_full = [rank.admit(work) for rank, work in own]
        rows = [
            [] if work is None else rank.constrained_rows(work)
            for rank, work in zip(self.ranks, works, strict=True)
        ]
        masked = any(rows)
        layout = self._choose(
            [work for _, work in own],
            any(needs_full) or masked,
            any(rank.wants_prompt(work) for rank, work in own),
            masked,
        )
        inputs = [
            _without_work(layout) if work is None else rank.prepare(work, layout)
            for rank, work in zip(self.ranks, works, strict=True)
        ]
        buffer, appends, targets = _together(layout, inputs)

        def late_masks() -> np.ndarray:
            read_before()
            every = zip(self.ranks, rows, strict=True)
            return np.concatenate([rank.masks(layout, of_rank) for rank, of_rank in every])

        more = {"masks": late_masks} if masked else {}
        pending = self.executor.run(layout, buffer, appends, full=any(needs_full), targets=targets, **more)
        self._counts[layout.plan] += 1
        self.advances += 1
        return RankedStep(works, layout, pending, time.monotonic())

    def _choose(self, works: list[StepWork], full: bool, prompt: bool, masked: bool) -> StepLayout:
        """Return the smallest layout that is ready and holds the step of every rank,
        without chunks if no rank has one.

        full, prompt, masked: see `first_ready`.
        """
        bucket, alone = max(work.bucket for work in works), not any(work.chunks for work in works)
        larger = larger_layouts(self.executor, bucket, alone=alone)
        return first_ready(self.executor, larger, full, prompt, masked)

    def _read(self, step: RankedStep) -> None:
        """Wait for the tokens of a step, and let each rank take its own."""
        asked_s = time.monotonic()
        step = dataclasses.replace(step, pending=_on_host(step.pending))
        read_s = time.monotonic()
        self.expert_counter.put(step.pending.expert_counts)
        self.advances += 1
        records = [
            rank.read(
                InFlight(work, _of_rank(step, number), step.layout.plan, step.layout.tokens, step.enqueued_s)
            )
            for number, (rank, work) in enumerate(zip(self.ranks, step.works, strict=True))
            if work is not None
        ]
        self.log.steps.append(
            StepRecord(
                step.layout.plan,
                step.layout.tokens * len(self.ranks),
                sum(record.decode_tokens for record in records),
                sum(record.prefill_tokens for record in records),
                sum(record.new_tokens for record in records),
                sum(record.new_decode_tokens for record in records),
                step.enqueued_s,
                read_s - asked_s,
                read_s,
            )
        )


def reusable_page_names(config: SchedulerConfig, request: Request) -> list[bytes]:
    """Return the names of the prompt's pages that a prefix cache may have; [] without prefix caching."""
    salt = prefix_salt(config, request, 0) if config.enable_prefix_caching else None
    if salt is None or request.sampling.prompt_logprobs is not None:
        return []
    # The last token is computed at any rate, since its logits are needed.
    return prefix.page_names(request.prompt_token_ids[:-1], salt, config.block_size)


def _without_work(layout: StepLayout) -> Inputs:
    return empty_buffer(layout), np.zeros((0, 4), np.int32), None


def _together(layout: StepLayout, inputs: Sequence[Inputs]) -> Inputs:
    """Return the inputs of all ranks as those of one step, see `Executor.run`."""
    buffers, appends, targets = zip(*inputs, strict=True)
    most = max(map(len, appends))
    padded = np.full((len(inputs), most, 4), layout.groups, np.int32)  # no group: dropped
    for rank, own in zip(padded, appends, strict=True):
        rank[: len(own)] = own
    asked = any(own is not None for own in targets)
    none = np.zeros(layout.tokens, np.int32)
    of_all = np.concatenate([none if own is None else own for own in targets]) if asked else None
    return np.concatenate(buffers), padded, of_all


def _on_host(pending: Pending) -> Pending:
    """Wait for the results of a step, and return them as numpy arrays."""
    found = pending.tokens, pending.logprobs, pending.prompt
    tokens, logprobs, prompt = jax.tree.map(np.asarray, found)
    return Pending(tokens, logprobs, prompt, pending.enqueued_s, pending.expert_counts)


def _of_rank(step: RankedStep, rank: int) -> Pending:
    """Return a rank's part of the results of a step, whose arrays are on the host."""

    def part(arrays: Any, rows: int) -> Any:
        return jax.tree.map(lambda a: a[rank * rows : (rank + 1) * rows], arrays)

    pending, layout = step.pending, step.layout
    tokens, logprobs = (part(arrays, layout.rows) for arrays in (pending.tokens, pending.logprobs))
    return Pending(tokens, logprobs, part(pending.prompt, layout.tokens), pending.enqueued_s)
