"""The check of plans at full depth: its steps, its comparison of logits, and its statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import check_plan
from benchmarks.check_plan import Lengths

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12).map(
    lambda pairs: Lengths(np.array([p for p, _ in pairs]), np.array([p + o for p, o in pairs]))
)


@given(LENGTHS, st.integers(1, 64))
def test_steps_are_full_and_compute_each_position_once_in_order(lengths, tokens):
    steps = list(check_plan.steps_of(lengths, tokens))
    done = np.zeros(len(lengths.prompts), int)
    for decodes, pieces in steps:
        assert len(decodes) + sum(size for *_, size in pieces) == tokens
        for i, position in decodes:
            assert lengths.prompts[i] <= position == done[i] < lengths.totals[i]
        for i, start, size in pieces:
            assert start == done[i] and size > 0 and start + size <= lengths.prompts[i]
        for i, _ in decodes:
            done[i] += 1
        for i, _, size in pieces:
            done[i] += size
    places = check_plan.places_of(steps)
    assert sorted(places.values()) == list(range(tokens * len(steps)))
    assert set(places) == {(i, k) for i in range(len(done)) for k in range(done[i])}


def test_lengths_fit_the_longest():
    lengths = check_plan.drawn_lengths(200, 128, 64, 1500)
    assert (lengths.totals - lengths.prompts == 64).all()
    assert lengths.prompts.min() >= 1 and 500 < lengths.totals.max() <= 1500


def test_equal_logits_differ_in_nothing():
    logits = jax.random.normal(jax.random.key(0), (5, 33))
    found = check_plan.compare(logits, logits)
    assert found["same"].all() and (found["margin"] > 0).all()
    for name in ("kl", "margin_change", "mean_difference", "largest_difference"):
        np.testing.assert_allclose(found[name], 0, atol=1e-6)


def test_the_change_of_the_margin_is_of_the_first_ways_two_best():
    one = jnp.array([[3.0, 2.0, 0.0], [3.0, 2.0, 0.0]])
    other = jnp.array([[2.0, 2.5, 0.0], [3.5, 2.5, 0.5]])
    found = check_plan.compare(one, other)
    np.testing.assert_allclose(found["margin"], [1.0, 1.0])
    np.testing.assert_allclose(found["margin_change"], [1.5, 0.0], atol=1e-6)
    assert found["same"].tolist() == [False, True]
    np.testing.assert_allclose(found["largest_difference"], [1.0, 0.5])
    p, q = (np.exp(x) / np.exp(x).sum() for x in (np.array([3.0, 2, 0]), np.array([2.0, 2.5, 0])))
    np.testing.assert_allclose(found["kl"], [(p * np.log(p / q)).sum(), 0], atol=1e-6)


def test_agreement_counts_only_margins_above_the_floor():
    values = {
        "margin": np.array([0.1, 0.2, 0.5, 0.6, 0.7]),
        "same": np.array([False, True, True, False, True]),
    }
    found = check_plan.agreement(values, 0.3)
    assert (found["positions"], found["above_floor"], found["other_above_floor"]) == (5, 3, 1)
    assert found["share_above_floor"] == 0.6 and found["same_above_floor"] == 2 / 3
    chosen = np.array([True, True, False, False, False])
    assert check_plan.agreement(values, 0.3, chosen)["same_above_floor"] is None


@pytest.mark.parametrize(
    ("share", "same", "expected"),
    [(0.5, 0.999, True), (0.49, 1.0, False), (0.8, 0.998, False), (0.0, None, False)],
)
def test_a_plan_passes_by_agreement_of_enough_positions(share, same, expected):
    assert check_plan.passes({"share_above_floor": share, "same_above_floor": same}) is expected


def test_the_floor_is_the_noise_that_one_position_in_a_thousand_exceeds():
    change = np.arange(10_001) / 10_000
    assert check_plan.floor_of({"margin_change": change}) == pytest.approx(0.999)


def test_loud_rows_are_as_many_as_asked_and_evenly_spaced():
    scale = check_plan.loud_rows(1000, 16)
    assert (scale == 1).sum() == 16 and (scale < 0.1).sum() == 984
    assert set(np.diff(np.flatnonzero(scale == 1))) <= {62, 63}
