"""Experts are placed so that each has a slot, all slots are used, and no
device has much more than the mean.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.model.expert_placement import count_copies, device_loads, place_experts


@st.composite
def problems(draw) -> tuple[np.ndarray, int, int]:
    """Return (loads [L, E], devices, slots a device)."""
    devices, layers, experts = draw(st.integers(1, 6)), draw(st.integers(1, 2)), draw(st.integers(1, 24))
    slots = -(-experts // devices) + draw(st.integers(0, 4))
    load = st.one_of(st.just(0.0), st.floats(0, 1e9))
    loads = draw(
        st.lists(st.lists(load, min_size=experts, max_size=experts), min_size=layers, max_size=layers)
    )
    return np.array(loads), devices, slots


@given(problems())
def test_every_expert_has_a_slot_and_every_slot_an_expert(problem):
    loads, devices, slots = problem
    found = place_experts(loads, devices, slots)
    assert found.shape == (len(loads), devices * slots) and found.dtype == np.int32
    for layer in found:
        assert set(layer) == set(range(loads.shape[1]))
    np.testing.assert_array_equal(found, place_experts(loads.copy(), devices, slots))


@given(problems())
def test_copies_of_an_expert_lie_apart_and_none_is_worth_less_than_a_missing_one(problem):
    (load, *_), devices, slots = problem
    copies = count_copies(load, devices * slots, devices)
    assert copies.sum() == devices * slots and copies.min() >= 1
    for one, other in itertools.permutations(range(len(load)), 2):
        if copies[one] > 1 and copies[other] < devices:  # the last copy of `one` was worth more
            assert load[one] / (copies[one] - 1) >= load[other] / copies[other] or copies[one] > devices


@given(st.integers(0, 2**32), st.sampled_from([2, 4, 8]))
def test_a_device_has_little_more_than_the_mean(seed, devices):
    """The loads of Zipf's law with a quarter more slots, in any order."""
    load = np.random.default_rng(seed).permutation(1 / np.arange(1, 129))
    (placed,) = place_experts(load[None], devices, 160 // devices)
    found = device_loads(load, placed, devices)
    assert found.sum() == pytest.approx(load.sum())
    assert found.mean() / found.max() > 0.99


def test_the_best_of_all_placements_of_a_small_problem():
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(20):
        load = rng.integers(1, 20, 6).astype(float)
        (placed,) = place_experts(load[None], 2, 3)
        best = min(
            device_loads(load, np.array([*group, *sorted(set(range(6)) - set(group))]), 2).max()
            for group in itertools.combinations(range(6), 3)
        )
        ratios.append(device_loads(load, placed, 2).max() / best)
    assert min(ratios) == 1 and max(ratios) < 1.15


@given(problems(), st.integers(0, 2**32))
def test_a_new_placement_keeps_the_law_and_what_is_good_enough(problem, seed):
    loads, devices, slots = problem
    before = place_experts(np.random.default_rng(seed).random(loads.shape), devices, slots)
    for layer in place_experts(loads, devices, slots, before):
        assert set(layer) == set(range(loads.shape[1]))
    alike = place_experts(loads, devices, slots)
    np.testing.assert_array_equal(place_experts(loads, devices, slots, alike), alike)


@given(st.integers(0, 2**32), st.sampled_from([2, 4, 8]))
def test_a_small_change_of_the_loads_moves_few_experts(seed, devices):
    rng = np.random.default_rng(seed)
    load = rng.permutation(1 / np.arange(1, 129))
    before = place_experts(load[None], devices, 160 // devices)
    changed = load * rng.uniform(0.95, 1.05, 128)
    (after,) = place_experts(changed[None], devices, 160 // devices, before)
    found = device_loads(changed, after, devices)
    assert found.mean() / found.max() > 0.99
    assert (after != before[0]).sum() < 40


@pytest.mark.parametrize("loads", [[[1.0, -1.0]], [[1.0, np.nan]], [[1.0] * 5]])
def test_what_cannot_be_placed_is_refused(loads):
    with pytest.raises(ValueError, match=r"slots for 5 experts|negative or not finite"):
        place_experts(np.array(loads), 2, 2)
