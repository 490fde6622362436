"""Replicas on virtual clocks behind a router: the engine's scheduler decides each
step, the cost model its time.

Requests arrive at their times. The router sees a replica's load only in the reports, which are old by up to
`Cluster.report_s`.
"""

import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from jaxflow.bench.pipeline.stage_time import counts_of
from jaxflow.bench.workload.lengths import Item
from jaxflow.kv import prefix
from jaxflow.request import Request, SamplingParams
from jaxflow.scheduler.config import SchedulerConfig
from jaxflow.scheduler.scheduler import Scheduler
from jaxflow.scheduler.state import Sequence as Row
from jaxflow.scheduler.state import StepWork
from serving.cluster.router import Router

BLOCK_SIZE = 64
BUSY_SHARE = 0.9
STEP_SIZES = tuple(sorted({2**i for i in range(12)} | {3 * 2**i for i in range(10)}))


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Equal replicas.

    Attributes:
      slots: running sequences of a replica. pages: KV pages of a replica, of 64 tokens.
      token_budget: most tokens of a step.
      report_s: seconds between two reports of a replica to the router.
      speed: how many times faster a replica is than `step_s` says. One engine with all devices
        has the speed of all replicas.
    """

    replicas: int
    slots: int
    pages: int
    token_budget: int = 2048
    report_s: float = 0.25
    speed: float = 1.0

    def joined(self) -> "Cluster":
        """Return one engine with all memory and the speed of all replicas."""
        n = self.replicas
        return dataclasses.replace(
            self, replicas=1, slots=n * self.slots, pages=n * self.pages, speed=n * self.speed
        )


@dataclasses.dataclass(frozen=True)
class ClusterRun:
    """The result of a simulation.

    Attributes:
      seconds: from the first arrival to the end of `BUSY_SHARE` of the requests. The tail, in which
        replicas run dry, is left out.
      tokens: prompt and output tokens of the requests that ended in these seconds.
      total_tokens: prompt and output tokens of all requests.
      cached_tokens: prompt tokens found in a replica's prefix cache.
      ttft_s: seconds to the first token of each request, [n].
      computed: tokens that each replica computed, [replicas].
      outstanding: mean tokens that each replica still had to compute while requests arrived, [replicas].
    """

    seconds: float
    tokens: int
    total_tokens: int
    cached_tokens: int
    ttft_s: np.ndarray
    computed: np.ndarray
    outstanding: np.ndarray

    @property
    def tokens_per_s(self) -> float:
        """Return the throughput, cached tokens included."""
        return self.tokens / self.seconds


class SpreadRule(Protocol):
    """A rule that spreads requests over replicas."""

    def report(self, replica: int, outstanding_tokens: float, last_request: int) -> None:
        """Take a replica's report, see `Router.report`."""
        ...

    def ended(self, replica: int) -> None:
        """Note that a request of a replica has ended."""
        ...

    def replica(self, index: int, prompt: np.ndarray, output_tokens: float) -> int:
        """Return the replica of request `index`."""
        ...


class RouterChoice:
    """The router that JaxFlow ships: the only router of its replicas."""

    def __init__(self, cluster: Cluster, seed: int = 0):
        self._router = Router(cluster.replicas, cluster.pages, BLOCK_SIZE, seed=seed, candidates=None)

    def report(self, replica: int, outstanding_tokens: float, last_request: int) -> None:
        """See `SpreadRule.report`."""
        self._router.report(replica, outstanding_tokens, last_request)

    def ended(self, replica: int) -> None:
        """See `SpreadRule.ended`. The reports tell the router."""

    def replica(self, index: int, prompt: np.ndarray, output_tokens: float) -> int:
        """See `SpreadRule.replica`."""
        names = [prefix.root(b"shared:")]
        prefix.extend(names, prompt, len(prompt) // BLOCK_SIZE, BLOCK_SIZE)
        return self._router.route(names[1:], len(prompt), output_tokens).replica


class FewestRequests:
    """The replica with the fewest requests, counted without delay. Most load balancers do so.

    turns: each replica in turn instead, whatever its load.
    """

    def __init__(self, cluster: Cluster, *, turns: bool = False):
        self._requests = np.zeros(cluster.replicas, np.int64)
        self._turns = turns

    def report(self, replica: int, outstanding_tokens: float, last_request: int) -> None:
        """See `SpreadRule.report`. Reports are not used."""

    def ended(self, replica: int) -> None:
        """See `SpreadRule.ended`."""
        self._requests[replica] -= 1

    def replica(self, index: int, prompt: np.ndarray, output_tokens: float) -> int:
        """See `SpreadRule.replica`."""
        chosen = index % len(self._requests) if self._turns else int(np.argmin(self._requests))
        self._requests[chosen] += 1
        return chosen


class SimulatedReplica:
    """A scheduler and its clock."""

    def __init__(self, cluster: Cluster, longest: int):
        self.scheduler = Scheduler(
            SchedulerConfig(
                token_budget=cluster.token_budget,
                max_num_seqs=cluster.slots,
                block_size=BLOCK_SIZE,
                windows=(None,),
                num_pages=(cluster.pages,),
                max_model_len=longest,
                buckets=(*(size for size in STEP_SIZES if size < cluster.token_budget), cluster.token_budget),
                max_waiting=1_000_000,
            )
        )
        self.rows: dict[str, Row] = {}
        self.running: StepWork | None = None
        self.received = self.computed = 0

    @property
    def outstanding(self) -> int:
        """Return the prompt and output tokens that are not computed yet."""
        return sum(row.limit - row.num_computed for row in self.rows.values())

    def begin_step(self, now: float, step_s: Callable[[np.ndarray], np.ndarray]) -> float | None:
        """Begin the next step. Return its seconds; None without work."""
        self.running = self.scheduler.schedule(now)
        if self.running is None:
            return None
        self.computed += self.running.num_tokens
        return float(step_s(counts_of(self.running)).sum())


def simulate(
    items: Sequence[Item],
    prompts: Sequence[np.ndarray],
    cluster: Cluster,
    choice: SpreadRule,
    step_s: Callable[[np.ndarray], np.ndarray],
) -> ClusterRun:
    """Simulate requests that arrive at `Item.arrival_s`.

    Args:
      prompts: token ids of each item, int32.
      step_s: seconds of a step by its counts, as `StageTimer` returns them for one stage.
    """
    longest = max(item.prompt_tokens + item.output_tokens for item in items)
    replicas = [SimulatedReplica(cluster, longest) for _ in range(cluster.replicas)]
    order = sorted(range(len(items)), key=lambda i: items[i].arrival_s)
    mean_output = float(np.mean([item.output_tokens for item in items]))
    ttft = np.full(len(items), np.nan)
    samples: list[list[int]] = []
    cached, ends = 0, np.full(len(items), np.nan)
    begun, last_arrival = items[order[0]].arrival_s, items[order[-1]].arrival_s
    # (time, kind, number). At the same time reports come first, then arrivals, then ends of steps.
    report, arrive, end = 0, 1, 2
    events: list[tuple[float, int, int]] = [(begun, report, -1)]
    events += [(items[i].arrival_s, arrive, i) for i in order]
    heapq.heapify(events)

    def start(r: int, now: float) -> None:
        seconds = replicas[r].begin_step(now, step_s)
        if seconds is not None:
            heapq.heappush(events, (now + seconds / cluster.speed, end, r))

    while events:
        now, kind, number = heapq.heappop(events)
        if kind == report:
            loads = [one.outstanding for one in replicas]
            for r, one in enumerate(replicas):
                choice.report(r, loads[r], one.received)
            if now <= last_arrival:
                samples.append(loads)
            if events:
                heapq.heappush(events, (now + cluster.report_s, report, -1))
        elif kind == arrive:
            item, name = items[number], str(number)
            r = choice.replica(number, prompts[number], mean_output)
            one = replicas[r]
            sampling = SamplingParams(temperature=0.0, max_tokens=item.output_tokens, ignore_eos=True, seed=0)
            [one.rows[name]] = one.scheduler.add(Request(name, prompts[number].tolist(), sampling))
            one.received += 1
            if one.running is None:
                start(r, now)
        else:
            one = replicas[number]
            assert one.running is not None
            sampled = one.running.sampled
            one.scheduler.commit(sampled, np.zeros(len(sampled), np.int32))
            for row in sampled:
                name = row.request.request_id
                if row.num_known == row.num_prompt + 1:
                    ttft[int(name)] = now - items[int(name)].arrival_s
                if row.num_known == row.limit:
                    cached += row.cached_tokens
                    ends[int(name)] = now
                    one.scheduler.finish(row)
                    del one.rows[name]
                    choice.ended(number)
            start(number, now)
    totals = np.array([item.prompt_tokens + item.output_tokens for item in items])
    busy_until = float(np.quantile(ends, BUSY_SHARE))
    return ClusterRun(
        busy_until - begun,
        int(totals[ends <= busy_until].sum()),
        int(totals.sum()),
        cached,
        ttft,
        np.array([one.computed for one in replicas]),
        np.mean(np.array(samples, np.float64), axis=0),
    )
