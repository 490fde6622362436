"""The decodes of a micro-batch: at most one token of a sequence in the
pipeline, and equal predicted times.
"""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.scheduler.config import SchedulerConfig
from jaxflow.scheduler.micro_batch import micro_batch
from jaxflow.scheduler.state import SlotTable

CONFIG = SchedulerConfig(
    token_budget=64,
    max_num_seqs=64,
    block_size=16,
    windows=(None,),
    num_pages=(1024,),
    max_model_len=4096,
    buckets=(64,),
)
CONTEXTS = st.lists(st.integers(1, 4096), min_size=1, max_size=40)
STAGES = st.integers(2, 8)
COSTS = st.sampled_from([(1.0, 0.0), (1.0, 0.001), (1.0, 0.1), (0.0, 1.0)])


def calls(contexts, stages, cost, count):
    """Yield each call's index, ready slots, chosen slots and share, while every sequence decodes."""
    config = dataclasses.replace(CONFIG, stages=stages, decode_cost=cost)
    table = SlotTable(64, 16)
    decoding = np.arange(len(contexts), dtype=np.int32)
    table.num_computed[decoding] = contexts
    table.sampled_at[decoding] = -stages
    each = cost[0] + cost[1] * np.array(contexts)
    for index in range(count):
        ready = np.flatnonzero(table.sampled_at[decoding] <= index - stages)
        chosen = micro_batch(decoding, table, index, config)
        yield index, ready, chosen, each, table.sampled_at.copy()
        table.sampled_at[chosen] = index


@given(CONTEXTS, STAGES, COSTS)
def test_each_call_takes_a_share_of_those_that_waited_longest(contexts, stages, cost):
    for _, ready, chosen, each, sampled_at in calls(contexts, stages, cost, 6 * stages):
        assert set(chosen) <= set(ready) and list(chosen) == sorted(chosen)
        assert len(chosen) > 0 or not len(ready)
        if not len(ready):
            continue
        left = np.setdiff1d(ready, chosen)
        assert not len(left) or sampled_at[chosen].max() <= sampled_at[left].min()
        share, took = each.sum() / stages, each[chosen].sum()
        assert took <= share + each.max()
        assert not len(left) or took >= share - each.max()


@given(CONTEXTS, STAGES, COSTS)
def test_no_sequence_starves(contexts, stages, cost):
    last = np.full(len(contexts), -1)
    for index, _, chosen, _, _ in calls(contexts, stages, cost, 8 * stages):
        last[chosen] = index
        if index >= 2 * stages:
            assert last.min() >= index - 2 * stages


@given(st.integers(1, 4096), STAGES, st.integers(1, 5))
def test_equal_sequences_make_equal_micro_batches(context, stages, each):
    sizes = [
        len(chosen)
        for _, _, chosen, _, _ in calls([context] * (each * stages), stages, (1.0, 0.01), 4 * stages)
    ]
    assert sizes == [each] * len(sizes)
