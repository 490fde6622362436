"""Pipelines on virtual clocks: the engine's scheduler decides each micro-batch, the cost model its time.

A pipeline of P stages has M micro-batches. Each micro-batch has its own scheduler with a fixed number of slots,
and its next step is scheduled when its previous step has left the last stage. A stage runs micro-batches in the
order in which they arrive. Requests wait in one queue; a micro-batch with free slots takes the first of them
when it is scheduled.
"""

import dataclasses
import heapq
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from jaxflow.bench.pipeline.stage_time import Link, counts_of
from jaxflow.bench.workload.lengths import Item
from jaxflow.request import Request, SamplingParams
from jaxflow.scheduler.scheduler import Scheduler, SchedulerConfig, StepPolicy

BLOCK_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Layout:
    """Replicas of a pipeline, and the batch that each one holds.

    Attributes:
      replicas: number of pipelines; requests go to the first one with free slots.
      micro_batches: micro-batches in flight in each pipeline.
      slots: running sequences of each micro-batch.
      token_budget: tokens of a step.
    """

    replicas: int
    micro_batches: int
    slots: int
    token_budget: int


@dataclasses.dataclass(frozen=True)
class PipelineRun:
    """The result of a simulation.

    Attributes:
      finished_s: time at which each request ended, [n].
      bubble_s: bubble time of each request, [n]: idle time of each stage between two micro-batches, summed over
        the micro-batches and steps of the request (SARATHI §5.3).
      busy_s: busy time of each stage, [replicas, stages].
      steps: number of micro-batch steps.
      tokens: prompt and output tokens of all requests.
    """

    finished_s: np.ndarray
    bubble_s: np.ndarray
    busy_s: np.ndarray
    steps: int
    tokens: int

    @property
    def duration_s(self) -> float:
        """Time of the last end."""
        return float(self.finished_s.max())

    @property
    def busy_share(self) -> float:
        """Mean share of the time in which a stage is busy."""
        return float(self.busy_s.mean()) / self.duration_s


class _MicroBatch:
    """One micro-batch: its scheduler, and the item of each slot."""

    def __init__(self, layout: Layout, policy: StepPolicy, longest: int):
        pages = layout.slots * (-(-longest // BLOCK_SIZE) + 1)
        self.scheduler = Scheduler(
            SchedulerConfig(
                token_budget=layout.token_budget,
                max_num_seqs=layout.slots,
                block_size=BLOCK_SIZE,
                windows=(None,),
                num_pages=(pages,),
                max_model_len=longest,
                buckets=tuple(range(1, layout.token_budget + 1)),
                enable_prefix_caching=False,
                max_waiting=layout.slots + 1,
            ),
            policy=policy,
        )
        self.items = np.zeros(layout.slots, np.int64)

    @property
    def has_room(self) -> bool:
        """True if another request may wait here for a slot."""
        scheduler = self.scheduler
        return scheduler.num_running + scheduler.num_waiting < scheduler.config.max_num_seqs


def simulate(
    items: Sequence[Item],
    layout: Layout,
    make_policy: Callable[[], StepPolicy],
    stage_s: Callable[[np.ndarray], np.ndarray],
    link: Link | None = None,
    send_bytes: float = 0.0,
) -> PipelineRun:
    """Simulate requests that all wait from the start.

    Args:
      make_policy: returns the step policy of a micro-batch.
      stage_s: returns the seconds of each stage for a step's counts (`StageTimer`).
      link: the link between two stages; None if sending takes no time.
      send_bytes: bytes that one token sends over the link.
    """
    longest = max(item.prompt_tokens + item.output_tokens for item in items)
    zeros = [0] * longest
    queue = deque(range(len(items)))
    left = np.array([item.output_tokens for item in items], np.int64)
    finished, bubbles = np.zeros(len(items)), np.zeros(len(items))
    stages = len(stage_s(np.zeros(8)))
    free = [[-1.0] * stages for _ in range(layout.replicas)]  # end of each stage's last micro-batch; -1: none
    busy = np.zeros((layout.replicas, stages))
    batches = [
        [_MicroBatch(layout, make_policy(), longest) for _ in range(layout.micro_batches)]
        for _ in range(layout.replicas)
    ]
    events = [(0.0, m, r) for r in range(layout.replicas) for m in range(layout.micro_batches)]
    heapq.heapify(events)
    steps = 0
    while events:
        now, m, r = heapq.heappop(events)
        batch = batches[r][m]
        scheduler = batch.scheduler
        while queue and batch.has_room:
            i = queue.popleft()
            sampling = SamplingParams(
                temperature=0.0, max_tokens=items[i].output_tokens, ignore_eos=True, seed=0
            )
            request = Request(str(i), zeros[: items[i].prompt_tokens], sampling)
            scheduler.add(scheduler.accept(request), now)
        work = scheduler.schedule(now)
        if work is None:
            continue  # this micro-batch has ended: no request waits
        steps += 1
        for seq in work.admitted:
            batch.items[seq.slot] = int(seq.request.request_id)
        seconds = stage_s(counts_of(work))
        send_s = link.latency_s + send_bytes * work.bucket / link.bytes_per_s if link else 0.0
        arrival, bubble = now, 0.0
        ends = free[r]
        for stage, taken in enumerate(seconds.tolist()):
            start = max(arrival, ends[stage])
            if ends[stage] >= 0:
                bubble += start - ends[stage]
            ends[stage] = start + taken
            arrival = ends[stage] + send_s
        busy[r] += seconds
        end = ends[-1]
        bubbles[batch.items[work.slots]] += bubble
        sampled = work.sampled
        scheduler.commit(sampled, np.zeros(len(sampled), np.int32))
        ids = batch.items[[seq.slot for seq in sampled]] if sampled else np.zeros(0, np.int64)
        left[ids] -= 1
        for k in np.flatnonzero(left[ids] == 0).tolist():
            finished[ids[k]] = end
            scheduler.finish(sampled[k])
        heapq.heappush(events, (end, m, r))
    tokens = sum(item.prompt_tokens + item.output_tokens for item in items)
    return PipelineRun(finished, bubbles, busy, steps, tokens)
