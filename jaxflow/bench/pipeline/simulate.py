"""Pipelines on virtual clocks: the engine's scheduler decides each micro-batch, the cost model its time.

A pipeline of P stages has M micro-batches in flight. The next step of a micro-batch is scheduled when its
previous step has left the last stage. A stage runs micro-batches in the order in which they arrive. Requests
wait in one queue; a scheduler with free slots takes the first of them when it schedules.

A micro-batch has its own scheduler, so that a request stays in its micro-batch until the request ends. With
`ReplicaLayout.moving` one scheduler serves all micro-batches of a pipeline by the engine's rule
(`jaxflow.scheduler.micro_batch`), and a request may change its micro-batch between two steps.
"""

import dataclasses
import heapq
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from jaxflow.bench.pipeline.stage_time import COUNTS, StageLink, counts_of
from jaxflow.bench.workload.lengths import Item
from jaxflow.request import Request, SamplingParams
from jaxflow.scheduler.scheduler import Scheduler, SchedulerConfig, StepPolicy
from jaxflow.scheduler.state import Sequence

BLOCK_SIZE = 64


@dataclasses.dataclass(frozen=True)
class ReplicaLayout:
    """Replicas of a pipeline, and the batch that each one holds.

    Attributes:
      replicas: number of pipelines; requests go to the first one with free slots.
      micro_batches: micro-batches in flight in each pipeline.
      slots: running sequences of each micro-batch.
      token_budget: tokens of a step.
      moving: True if requests may change their micro-batch between two steps.
    """

    replicas: int
    micro_batches: int
    slots: int
    token_budget: int
    moving: bool = False


@dataclasses.dataclass(frozen=True)
class PipelineRun:
    """The result of a simulation.

    Attributes:
      finished_s: time at which each request ended, [n].
      bubble_s: bubble time of each request, [n]: idle time of each stage between two micro-batches, summed
        over the micro-batches and steps of the request (SARATHI §5.3).
      busy_s: busy time of each stage, [replicas, stages].
      steps: number of micro-batch steps.
      tokens: prompt and output tokens of all requests.
      last_start_s: time at which the last request got its slot.
      tokens_until_last_start: rows of the steps that began before.
      counts: the counts of all steps together, [8], see `jaxflow.bench.pipeline.stage_time.COUNTS`.
    """

    finished_s: np.ndarray
    bubble_s: np.ndarray
    busy_s: np.ndarray
    steps: int
    tokens: int
    last_start_s: float
    tokens_until_last_start: float
    counts: np.ndarray

    @property
    def duration_s(self) -> float:
        """Time of the last end."""
        return float(self.finished_s.max())

    @property
    def busy_share(self) -> float:
        """Mean share of the time in which a stage is busy."""
        return float(self.busy_s.mean()) / self.duration_s


class _Requests:
    """The scheduler of one micro-batch, or of all moving micro-batches, and the item of each slot."""

    def __init__(self, layout: ReplicaLayout, policy: StepPolicy, longest: int):
        stages = layout.micro_batches if layout.moving else 1
        slots = layout.slots * stages
        self.scheduler = Scheduler(
            SchedulerConfig(
                token_budget=layout.token_budget,
                max_num_seqs=slots,
                block_size=BLOCK_SIZE,
                windows=(None,),
                num_pages=(slots * (-(-longest // BLOCK_SIZE) + 1),),
                max_model_len=longest,
                buckets=tuple(range(1, layout.token_budget + 1)),
                enable_prefix_caching=False,
                max_waiting=slots + 1,
                stages=stages,
            ),
            policy=policy,
        )
        self.items = np.zeros(slots, np.int64)

    @property
    def has_room(self) -> bool:
        """True if another request may wait here for a slot."""
        scheduler = self.scheduler
        return scheduler.num_running + scheduler.num_waiting < scheduler.config.max_num_seqs


@dataclasses.dataclass(frozen=True)
class _Flight:
    """The step of a micro-batch in flight: its sampled sequences, their items,
    and the end of the last stage.
    """

    sampled: list[Sequence]
    ids: np.ndarray
    end_s: float


def simulate(
    items: Seq[Item],
    layout: ReplicaLayout,
    make_policy: Callable[[], StepPolicy],
    stage_s: Callable[[np.ndarray], np.ndarray],
    link: StageLink | None = None,
    send_bytes: float = 0.0,
    *,
    host_s: float = 0.0,
    arrivals_s: np.ndarray | None = None,
) -> PipelineRun:
    """Simulate the serving of requests.

    Args:
      make_policy: returns the step policy of a scheduler.
      stage_s: returns the seconds of each stage for a step's counts (`StageTimer`).
      link: the link between two stages; None if sending takes no time.
      send_bytes: bytes that one token sends over the link.
      host_s: seconds between the end of a micro-batch's step and the begin of its next step.
      arrivals_s: rising times at which the requests arrive, [n]; None: all wait from the start.
    """
    longest = max(item.prompt_tokens + item.output_tokens for item in items)
    zeros = [0] * longest
    arrivals = np.zeros(len(items)) if arrivals_s is None else arrivals_s
    queue = deque(range(len(items)))
    left = np.array([item.output_tokens for item in items], np.int64)
    finished, bubbles = np.zeros(len(items)), np.zeros(len(items))
    stages = len(stage_s(np.zeros(8)))
    free = [[-1.0] * stages for _ in range(layout.replicas)]  # end of each stage's last micro-batch; -1: none
    busy = np.zeros((layout.replicas, stages))
    groups = 1 if layout.moving else layout.micro_batches
    held = [
        [_Requests(layout, make_policy(), longest) for _ in range(groups)] for _ in range(layout.replicas)
    ]
    flights: dict[tuple[int, int], _Flight] = {}
    events = [(0.0, m, m, r) for r in range(layout.replicas) for m in range(layout.micro_batches)]
    heapq.heapify(events)
    steps, counted, last_start = 0, np.zeros(len(COUNTS)), (0.0, 0.0)
    order = layout.micro_batches  # of events at equal times
    while events:
        now, _, m, r = heapq.heappop(events)
        batch = held[r][m % groups]
        scheduler = batch.scheduler
        if flight := flights.pop((r, m), None):
            scheduler.commit(flight.sampled, np.zeros(len(flight.sampled), np.int32))
            left[flight.ids] -= 1
            for k in np.flatnonzero(left[flight.ids] == 0).tolist():
                finished[flight.ids[k]] = flight.end_s
                scheduler.finish(flight.sampled[k])
        while queue and arrivals[queue[0]] <= now and batch.has_room:
            i = queue.popleft()
            sampling = SamplingParams(
                temperature=0.0, max_tokens=items[i].output_tokens, ignore_eos=True, seed=0
            )
            request = Request(str(i), zeros[: items[i].prompt_tokens], sampling)
            scheduler.add(scheduler.accept(request))
        work = scheduler.schedule(now)
        order += 1
        if work is None:
            # The micro-batch tries again at the next arrival, or when moving requests return from their step.
            again = [arrivals[queue[0]]] if queue and arrivals[queue[0]] > now else []
            again += [
                event[0] for event in events if layout.moving and event[3] == r and (r, event[2]) in flights
            ]
            if again:
                heapq.heappush(events, (max(now, min(again)), order, m, r))
            continue
        steps += 1
        counts = counts_of(work)
        if work.admitted:
            last_start = (now, float(counted[COUNTS.index("tokens")]))
        counted += counts
        for seq in work.admitted:
            batch.items[seq.slot] = int(seq.request.request_id)
        send_s = link.latency_s + send_bytes * work.bucket / link.bytes_per_s if link else 0.0
        holds_s = send_s if link and link.holds_stage else 0.0
        arrival, bubble = now, 0.0
        ends = free[r]
        for stage, taken in enumerate(stage_s(counts).tolist()):
            start = max(arrival, ends[stage])
            if ends[stage] >= 0:
                bubble += start - ends[stage]
            arrival = start + taken + (send_s if stage < stages - 1 else 0.0)
            ends[stage] = start + taken + (holds_s if stage < stages - 1 else 0.0)
            busy[r, stage] += ends[stage] - start
        bubbles[batch.items[work.slots]] += bubble
        sampled = work.sampled
        ids = batch.items[[seq.slot for seq in sampled]] if sampled else np.zeros(0, np.int64)
        flights[r, m] = _Flight(sampled, ids, ends[-1])
        heapq.heappush(events, (ends[-1] + host_s, order, m, r))
    tokens = sum(item.prompt_tokens + item.output_tokens for item in items)
    return PipelineRun(finished, bubbles, busy, steps, tokens, *last_start, counted)
