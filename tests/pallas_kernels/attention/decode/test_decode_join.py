"""The join of split pairs in decode attention: every part is added once and in a fixed order, for any order
of arrival.


"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention.decode import join as decode_join

WORKERS = 528  # four on each SM


def joined(order, first, shape, monkeypatch):
    """Return the nesting of a pair's sums, as tuples of workers, for an order of arrival."""
    ender, counts, slots, finished = first + len(order) - 1, [0] * (2 * WORKERS), {}, []

    def is_last(arrived, place, others, one_fence):
        counts[int(place)] += 1
        if counts[int(place)] <= int(others):
            return jnp.bool_(False)
        counts[int(place)] = 0
        return jnp.bool_(True)

    def add_parts(parts, levels, begin, stride, count, first, ender):
        workers = [min(int(begin) + n * int(stride), int(ender)) for n in range(int(count))]
        return tuple(slots.pop((worker, int(worker == first))) for worker in workers)

    monkeypatch.setattr(decode_join, "is_last", is_last)
    monkeypatch.setattr(decode_join, "add_parts", add_parts)
    monkeypatch.setattr(
        decode_join, "_put_group", lambda parts, levels, end, state: slots.update({(int(end), 0): state})
    )
    monkeypatch.setattr(decode_join, "_mean", lambda state: state)
    parts = types.SimpleNamespace(shape=(WORKERS, 2, *shape))
    with jax.disable_jit():
        for worker in order:
            slots[worker, int(worker == first)] = worker
            worker = jnp.int32(worker)
            decode_join.join(
                parts, None, None, worker, jnp.int32(ender), jnp.int32(ender - first), finished.append
            )
    assert not any(counts) and not slots and len(finished) == 1
    return finished[0]


def leaves(nested):
    return [leaf for part in nested for leaf in (leaves(part) if isinstance(part, tuple) else [part])]


ARRIVALS = given(
    data=st.data(),
    count=st.one_of(st.integers(2, 60), st.just(120)),
    shape=st.sampled_from([(128, 8), (64, 16), (256, 32)]),
)


def check_any_order_of_arrival(data, count, shape):
    first = data.draw(st.integers(0, WORKERS - count))
    order = data.draw(st.permutations(range(first, first + count)))
    with pytest.MonkeyPatch.context() as monkeypatch:
        sums = joined(order, first, shape, monkeypatch)
        assert leaves(sums) == list(range(first, first + count))
        assert sums == joined(range(first, first + count), first, shape, monkeypatch)


@settings(max_examples=3, deadline=None)
@ARRIVALS
def test_parts_are_added_once_and_in_one_order(data, count, shape):
    check_any_order_of_arrival(data, count, shape)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@ARRIVALS
def test_parts_are_added_once_and_in_one_order_for_many_arrivals(data, count, shape):
    check_any_order_of_arrival(data, count, shape)


@pytest.mark.parametrize("shape", [(128, 8), (64, 8), (256, 32)])
def test_few_parts_form_one_group_and_many_parts_form_square_root_groups(shape):
    together = decode_join._together(*shape)
    counts = np.arange(2, 2 * WORKERS)
    formed = jax.jit(jax.vmap(lambda parts: decode_join._groups(parts, *shape)))(
        jnp.asarray(counts, jnp.int32)
    )
    sizes, groups_of = (np.asarray(found).tolist() for found in formed)
    for parts, size, groups in zip(counts.tolist(), sizes, groups_of, strict=True):
        assert (groups - 1) * size < parts <= groups * size
        if parts <= 5 * together:
            assert groups == 1
        else:
            assert groups <= size < max(4 * groups, 2 * together + 1)
            assert size % together == 0, (
                "a read of a group holds no part of the next, which may not be written yet"
            )
