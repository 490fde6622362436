"""Work lists of whole pairs: every pair once, to the worker that is free first."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from paged_cases import error, paged, queries

from jaxflow.bench.kernels import sparse
from jaxflow.bench.kernels.whole_pairs import assigned, whole_pairs
from pallas_kernels.attention.decode import reference
from pallas_kernels.attention.decode.api import decode_attention
from pallas_kernels.attention.tiles import DecodeTile


@given(costs=st.lists(st.integers(1, 60), min_size=1, max_size=40), workers=st.integers(1, 9))
def test_each_item_goes_to_the_worker_that_is_free_first(costs, workers):
    queues = assigned(costs, workers)
    assert sorted(item for queue in queues for item in queue) == list(range(len(costs)))
    assert all(queue == sorted(queue) for queue in queues)
    start = {item: sum(costs[i] for i in queue[:n]) for queue in queues for n, item in enumerate(queue)}
    for item in range(len(costs)):  # no other worker was free earlier
        free = [sum(costs[i] for i in queue if i < item) for queue in queues]
        assert start[item] == min(free)


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 900), min_size=4, max_size=4),
    spans=st.lists(st.integers(1, 900), min_size=3, max_size=3),
    longest_first=st.booleans(),
)
def test_a_worker_reads_its_pairs_from_start_to_end(lengths, spans, longest_first):
    work = jax.tree.map(np.asarray, whole_pairs(lengths, np.asarray(spans), 64, 5, longest_first))
    found, firsts = [], []
    for (entry, head, page, left), start in zip(work.pieces, work.starts, strict=True):
        assert (head, page) == (0, 0)
        firsts.append(work.rows[entry, 1] if left else 0)
        assert not left or start.tolist() == [*work.rows[entry], work.rows[work.rows[entry, 3], 0]]
        while left > 0:
            found.append(entry)
            left, entry = left - work.rows[entry, 1], work.rows[entry, 3]
        assert left == 0
    assert sorted(found) == list(range(12))
    if longest_first:
        assert sorted(firsts) == sorted(work.rows[:, 1])[-5:]


def test_half_of_the_keys_are_seen():
    lengths = (1024, 4096, 30_000)
    spans = sparse.half_spans(lengths)
    assert sparse.seen_keys(lengths, spans) == pytest.approx(sum(lengths) / 2, rel=1e-3)
    seen = spans + sparse.SINKS
    np.testing.assert_allclose(seen.max(1) / seen.min(1), 8, rtol=0.01)


@pytest.mark.slow
def test_the_kernel_runs_whole_pairs():
    lengths, spans = jnp.asarray([330, 5, 200], jnp.int32), jnp.asarray([30, 700], jnp.int32)
    k, v, table = paged(6, [330, 5, 200], 2, 64)
    q, how = queries(6, 3, 4, 64), {"scale": 0.1, "spans": spans, "sinks": 4}
    work = whole_pairs([330, 5, 200], np.asarray([30, 700]), 4, 4, True)
    one = functools.partial(
        decode_attention, interpret=plgpu.InterpretGPUParams(), sms=2, tile=DecodeTile(2, 4), work=work, **how
    )
    got = jax.jit(one)(q, k, v, table, lengths)
    q, k, v = (jnp.nan_to_num(x.astype(jnp.float32)) for x in (q, k, v))
    assert error(got, reference.decode_attention(q, k, v, table, lengths, **how)) < 6e-3
