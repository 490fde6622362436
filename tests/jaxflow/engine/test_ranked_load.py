"""Hundreds of requests on data-parallel ranks, with a device that takes no time: every request ends, in no
more steps than the busiest rank needs alone.
"""

import collections
import itertools
import random
from typing import Any

import numpy as np
import pytest

from jaxflow.bench.engine.host import InstantExecutor
from jaxflow.engine.executor import Pending
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.loop import Loop
from jaxflow.engine.ranked_loop import RankedLoop
from jaxflow.request import Delta, Finished, Request, SamplingParams
from jaxflow.scheduler.batch_budget import BatchBudget
from jaxflow.scheduler.config import SchedulerConfig
from jaxflow.scheduler.scheduler import Scheduler

RANKS, SLOTS, BUCKETS = 3, 16, (16, 64, 128)
FEW = 24  # pages; with so few the youngest sequence is pre-empted in every seventh step
SHARED = np.arange(3, 67)  # the beginning of some prompts: four pages


class Ranks(InstantExecutor):
    """An executor of several ranks."""

    def __init__(self) -> None:
        super().__init__([StepLayout(tokens, min(tokens, SLOTS), SLOTS, 16) for tokens in BUCKETS])

    def run(self, layout: StepLayout, buffer: np.ndarray, *args: Any, **more: Any) -> Pending:
        ranks = len(buffer) // layout.size
        self.calls.append((0.0, 0.0, 0, layout.tokens))
        return Pending(np.zeros(ranks * layout.rows, np.int32), None, None, 0.0)  # type: ignore[arg-type]


def make_rank(executor: Ranks, pages: int) -> Loop:
    config = SchedulerConfig(
        token_budget=128, max_num_seqs=SLOTS, block_size=16, windows=(None,), num_pages=(pages,),
        max_model_len=256, buckets=BUCKETS, max_waiting=1000,
    )  # fmt: skip
    scheduler = Scheduler(config, policy=BatchBudget(), seeds=random.Random(0))
    calls, schedule = itertools.count(1), scheduler.schedule

    def pre_empting(now: float) -> Any:
        if pages == FEW and next(calls) % 7 == 0 and scheduler.num_running > 1:
            scheduler.preempt_youngest()
        return schedule(now)

    scheduler.schedule = pre_empting
    return Loop(scheduler, executor, eos_token_ids=())  # type: ignore[arg-type]


def drawn(number: int) -> list[Request]:
    """Return requests of uneven lengths, a third of them with a common beginning."""
    rng = np.random.default_rng(number)
    prompts = [rng.integers(100, 1000, int(rng.integers(1, 120))) for _ in range(number)]
    return [
        Request(
            f"r{i}",
            np.concatenate([SHARED, prompt[:9]]) if i % 3 == 0 else prompt,
            SamplingParams(temperature=0.0, max_tokens=int(rng.integers(1, 90)), ignore_eos=True),
        )
        for i, prompt in enumerate(prompts)
    ]


def run(loop: Any, requests: list[Request]) -> None:
    """Run queued requests to their end, and check that each has all its tokens and one end."""
    tokens: collections.Counter[str] = collections.Counter()
    ends: list[str] = []
    while loop.has_work:
        for event in loop.step():
            if isinstance(event, Delta):
                tokens[event.request_id] += len(event.token_ids)
            ends += [event.request_id] if isinstance(event, Finished) else []
        assert len(loop.executor.calls) < 20_000
    assert sorted(ends) == sorted(request.request_id for request in requests)
    assert all(tokens[one.request_id] == one.sampling.max_tokens for one in requests)


@pytest.mark.parametrize("pages", [400, FEW])
@pytest.mark.parametrize("placing", ["by load", "an idle rank", "one rank has all"])
def test_all_end_in_the_steps_of_the_busiest_rank(placing, pages):
    executor, given = Ranks(), drawn(90)
    ranked = RankedLoop([make_rank(executor, pages) for _ in range(RANKS)], executor)  # type: ignore[arg-type]
    places = {"by load": [ranked], "an idle rank": ranked.ranks[:2], "one rank has all": ranked.ranks[:1]}
    for place, request in zip(itertools.cycle(places[placing]), given, strict=False):
        place.add(request, 0.0)
    of_rank = [set(rank.request_ids) for rank in ranked.ranks]
    run(ranked, given)
    preempted = [rank.scheduler.num_preemptions > 0 for rank in ranked.ranks]
    assert preempted == [bool(own) and pages == FEW for own in of_rank]
    alone = []
    for own in of_rank:
        single, requests = make_rank(Ranks(), pages), [one for one in given if one.request_id in own]
        for request in requests:
            single.add(request, 0.0)
        run(single, requests)
        alone.append(len(single.executor.calls))  # type: ignore[attr-defined]
    assert len(executor.calls) == max(alone)
