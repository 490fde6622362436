"""Tokens of the fast path are reported as tokens of the full path are."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflow.bench.engine.host import InstantExecutor
from jaxflow.engine.executor import Pending
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.loop import Loop
from jaxflow.request import Delta, Finished, Request, SamplingParams
from jaxflow.scheduler.config import SchedulerConfig
from jaxflow.scheduler.scheduler import Scheduler

SLOTS, BUCKETS, SIDES, END, NEVER = 6, (8, 16), 20, 0, 99


class Dice(InstantExecutor):
    """Throws a token for each row; one side ends."""

    def __init__(self, seed):
        super().__init__([StepLayout(tokens, min(tokens, SLOTS), SLOTS, 4) for tokens in BUCKETS])
        self._rng = np.random.default_rng(seed)

    def run(self, layout, buffer, appends, *, full, targets=None):
        return Pending(self._rng.integers(0, SIDES, layout.rows, np.int32), None, None, 0.0)


def told(requests, seed, pages, preempt):
    """Return the tokens, the end and the charged tokens of each sequence."""
    config = SchedulerConfig(
        token_budget=16,
        max_num_seqs=SLOTS,
        block_size=4,
        windows=(None,),
        num_pages=(pages,),
        max_model_len=40,
        buckets=BUCKETS,
        enable_prefix_caching=False,
        max_waiting=99,
    )
    loop = Loop(Scheduler(config), Dice(seed), eos_token_ids=[END])  # type: ignore[arg-type]
    for request in requests:
        loop.add(request, 0.0)
    found, step = {}, 0
    while loop.has_work:
        step += 1
        if step in preempt and loop.scheduler.num_running > 1:
            loop.scheduler.preempt_youngest()
        for event in loop.step():
            if isinstance(event, Delta):
                found.setdefault((event.request_id, event.index), []).extend(event.token_ids)
            elif isinstance(event, Finished):
                found[event.request_id, event.index] += [
                    event.reason,
                    event.stop_token_id,
                    event.usage.completion_tokens,
                ]
    assert loop.stats(0).completion_tokens == sum(len(one) - 3 for one in found.values())
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 25), st.booleans(), st.integers(1, 3)),
        min_size=1,
        max_size=10,
    ),
    st.integers(0, 2**32),
    st.sets(st.integers(2, 40), max_size=6),
)
def test_the_same_is_told_with_and_without_a_look(drawn, seed, preempt):
    def requests(stops):
        return [
            Request(
                f"r{i}",
                np.ones(prompt, np.int32),
                SamplingParams(max_tokens=most, ignore_eos=deaf, n=n, stop_token_ids=stops),
            )
            for i, (prompt, most, deaf, n) in enumerate(drawn)
        ]

    ours, looked_at = (told(requests(stops), seed, 60, preempt) for stops in ([], [NEVER]))
    assert ours == looked_at
    for tokens in ours.values():
        *said, reason, _, charged = tokens
        assert len(said) == charged
        if reason.name == "STOP":
            assert said[-1] == END
