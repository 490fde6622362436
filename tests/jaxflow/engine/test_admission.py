import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.engine.admission import Forecast, OutputLengths, _count_at_least

sizes = st.sampled_from([1, 2, 4, 7])
decodes = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=12)  # (computed, remaining)
prefills = st.lists(st.tuples(st.integers(1, 15), st.integers(0, 12), st.integers(0, 10)), max_size=4)  # (begin, growth, delay)


def forecast(rows, size, common=0):
    computed, remaining = (np.array([row[i] for row in rows], np.int32) for i in (0, 1))
    return Forecast(computed, remaining, np.zeros(len(rows), np.int32), common, size)


def pages(positions: int, size: int) -> int:
    return -(-positions // size)


def played(rows, late, size):
    """The peak when steps are played one by one; late rows (begin, growth, delay) begin and end when they do."""
    peak = 0
    for t in range(1, 60):
        use = sum(pages(c + t, size) for c, r in rows if t <= r)
        use += sum(pages(begin + max(0, t - delay), size) for begin, growth, delay in late if t <= delay + growth)
        peak = max(peak, use)
    return peak


@given(decodes, sizes, st.integers(0, 5))
def test_the_peak_of_decodes_is_exact(rows, size, common):
    # A sequence of no pages changes nothing.
    assert forecast(rows, size, common).peak_with(0, 0, 0) == played(rows, [], size) + common


@given(decodes, prefills, sizes)
def test_prefills_stay_within_the_forecast_whenever_they_begin_to_grow(rows, late, size):
    f = forecast(rows, size)
    for begin, growth, _ in late[:-1]:
        f.add(begin, begin + growth, 0)
    begin, growth, _ = late[-1] if late else (0, 0, 0)
    peak = f.peak_with(begin, begin + growth, 0)
    assert played(rows, late, size) <= peak
    # and the forecast never asks for more than everyone's last page at once
    assert peak <= sum(pages(c + r, size) for c, r in rows) + sum(pages(b + g, size) for b, g, _ in late)


@given(decodes, sizes, st.integers(0, 9))
def test_shared_pages_count_once(rows, size, shared):
    discounts = [min(shared, pages(c, size)) for c, _ in rows]
    computed, remaining = (np.array([row[i] for row in rows], np.int32) for i in (0, 1))
    f = Forecast(computed, remaining, np.array(discounts, np.int32), shared, size)
    played_peak = max(
        shared + sum(pages(c + t, size) - d for (c, r), d in zip(rows, discounts, strict=True) if t <= r) for t in range(1, 60)
    )
    assert f.peak_with(0, 0, 0) == played_peak
    assert f.peak_with(size * 3, size * 3, 2) == played_peak + 1


@given(st.data(), st.integers(1, 9), st.integers(1, 5))
def test_counting_agrees_with_the_definition(data, size, block):
    values = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    floors = data.draw(st.lists(st.integers(1, size), min_size=len(values), max_size=len(values)))
    counted = _count_at_least(np.array(values, np.int32), np.array(floors, np.int32), size, block)
    assert counted.tolist() == [sum(v >= floor for v in values[: k + 1]) for k, floor in enumerate(floors)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(0, 60))
def test_the_expected_length_is_the_mean_of_the_lengths_that_exceed_what_there_is(lengths, produced):
    recent = OutputLengths(prior=999)
    for length in lengths:
        recent.record(length)
    longer = [length for length in lengths if length > produced]
    [expected] = recent.expect(np.array([produced]))
    assert expected > produced
    assert expected == (-(-sum(longer) // len(longer)) if longer else 2 * produced + 1)


def test_old_lengths_are_forgotten_and_the_prior_with_the_first():
    recent = OutputLengths(prior=100, remembered=3)
    assert recent.expect(np.array([0, 99, 100])).tolist() == [100, 100, 201]
    for length in (4, 5, 6, 7):
        recent.record(length)
    assert recent.expect(np.array([0, 5])).tolist() == [6, 7]


def test_many_decodes_are_counted_exactly():
    rng = np.random.default_rng(0)
    rows = list(zip(rng.integers(0, 500, 700).tolist(), rng.integers(1, 50, 700).tolist(), strict=True))
    assert forecast(rows, 16).peak_with(0, 0, 0) == played(rows, [], 16)


@pytest.mark.parametrize("end", [8, 9])
def test_a_sequence_alone_needs_the_pages_of_its_end(end):
    assert forecast([], 4).peak_with(5, end, 0) == pages(end, 4)
