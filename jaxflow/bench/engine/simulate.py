"""Simulation of the engine's scheduler with the cost model instead of a device, to compare policies and chunk
sizes.

Each step takes the time that `jaxflow.model.cost` gives for its composition, one op after the other. Nothing
else takes time.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxflow.bench.engine.policies import step_policy
from jaxflow.bench.report.requests import Record
from jaxflow.bench.workload.lengths import Item
from jaxflow.model.composition import Composition
from jaxflow.request import Request, SamplingParams
from jaxflow.scheduler.config import SchedulerConfig
from jaxflow.scheduler.scheduler import Scheduler
from jaxflow.scheduler.state import StepWork

BLOCK_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy for filling steps.

    `chunk_size` applies to the policies that use chunks. `budget` limits the tokens of any step.
    """

    name: str
    budget: int
    chunk_size: int | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """The result of a simulation: a record of each item on the simulated clock, and the composition of each
    step."""

    records: list[Record]
    duration_s: float
    steps: list[Composition]

    @property
    def token_throughput(self) -> float:
        """Return the prompt and output tokens per second."""
        return sum(r.prompt_tokens + r.output_tokens for r in self.records) / self.duration_s


def composition(work: StepWork) -> Composition:
    """Return the composition of a scheduled step for the cost model. Padding rows count as decodes without
    keys."""
    rows = work.bucket - sum(chunk.tokens for chunk in work.chunks)
    keys = float(work.decode_positions.sum() + len(work.decode_positions)) / rows if rows else 0.0
    chunks = tuple((chunk.tokens, chunk.start) for chunk in work.chunks)
    return Composition(rows, keys, chunks, len(work.sampled))


def simulate(
    items: Sequence[Item], policy: Policy, slots: int, step_s: Callable[[Composition], float]
) -> Run:
    """Simulate all items from their arrival times, with at most `slots` running at once and unlimited KV.

    step_s: returns the seconds of a step.
    """
    longest = max(item.prompt_tokens + item.output_tokens for item in items)
    scheduler = Scheduler(
        SchedulerConfig(
            token_budget=policy.budget,
            max_num_seqs=slots,
            block_size=BLOCK_SIZE,
            windows=(None,),
            num_pages=(slots * (-(-longest // BLOCK_SIZE) + 1),),
            max_model_len=longest,
            buckets=tuple(range(1, policy.budget + 1)),  # the cost model rounds to tiles itself
            enable_prefix_caching=False,
            max_waiting=len(items),
        ),
        policy=step_policy(policy.name, policy.chunk_size),
    )
    coming = sorted(range(len(items)), key=lambda i: items[i].arrival_s, reverse=True)
    records = [Record(item.prompt_tokens, item.arrival_s) for item in items]
    now, steps = 0.0, []
    left = len(items)
    while left:
        while coming and items[coming[-1]].arrival_s <= now:
            i = coming.pop()
            sampling = SamplingParams(temperature=0.0, max_tokens=items[i].output_tokens, ignore_eos=True)
            scheduler.add(Request(str(i), np.zeros(items[i].prompt_tokens, np.int32).tolist(), sampling), now)
        work = scheduler.schedule(now)
        if work is None:
            now = items[coming[-1]].arrival_s
            continue
        steps.append(composition(work))
        now += step_s(steps[-1])
        sampled = [seq for seq in work.sampled if not seq.finished]
        scheduler.commit(sampled, [0] * len(sampled))
        for seq in sampled:
            record = records[int(seq.request.request_id)]
            record.deliveries.append((now, 1))
            if record.output_tokens == seq.request.sampling.max_tokens:
                record.finished_s = now
                scheduler.finish(seq)
                left -= 1
    return Run(records, now, steps)
