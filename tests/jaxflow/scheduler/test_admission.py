import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.scheduler.admission import Forecast, OutputLengths, _count_at_least

sizes = st.sampled_from([1, 2, 4, 7])
decodes = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=12)  # (computed, remaining)
prefills = st.lists(
    st.tuples(st.integers(1, 15), st.integers(0, 12), st.integers(0, 10)), max_size=4
)  # (begin, growth, delay)


def forecast(rows, size, common=0):
    computed, remaining = (np.array([row[i] for row in rows], np.int32) for i in (0, 1))
    return Forecast(computed, remaining, np.zeros(len(rows), np.int32), common, size)


def pages(positions: int, size: int) -> int:
    return -(-positions // size)


def played(rows, late, size):
    """The peak when steps are played one by one; late rows (begin, growth,
    delay) begin and end when they do.
    """
    peak = 0
    for t in range(1, 60):
        use = sum(pages(c + t, size) for c, r in rows if t <= r)
        use += sum(
            pages(begin + max(0, t - delay), size) for begin, growth, delay in late if t <= delay + growth
        )
        peak = max(peak, use)
    return peak


@given(decodes, sizes, st.integers(0, 5))
def test_the_peak_of_decodes_is_exact(rows, size, common):
    # A sequence of no pages changes nothing.
    assert forecast(rows, size, common).use_with(0, 0).max() == played(rows, [], size) + common


@given(decodes, prefills, sizes)
def test_prefills_stay_within_the_forecast_whenever_they_begin_to_grow(rows, late, size):
    f = forecast(rows, size)
    for begin, growth, _ in late[:-1]:
        f.use = f.use_with(begin, begin + growth)
    begin, growth, _ = late[-1] if late else (0, 0, 0)
    peak = f.use_with(begin, begin + growth).max()
    assert played(rows, late, size) <= peak
    # and the forecast never asks for more than everyone's last page at once
    assert peak <= sum(pages(c + r, size) for c, r in rows) + sum(pages(b + g, size) for b, g, _ in late)


@given(decodes, sizes, st.integers(0, 9))
def test_shared_pages_count_once(rows, size, shared):
    discounts = [min(shared, pages(c, size)) for c, _ in rows]
    computed, remaining = (np.array([row[i] for row in rows], np.int32) for i in (0, 1))
    f = Forecast(computed, remaining, np.array(discounts, np.int32), shared, size)
    played_peak = max(
        shared + sum(pages(c + t, size) - d for (c, r), d in zip(rows, discounts, strict=True) if t <= r)
        for t in range(1, 60)
    )
    assert f.use_with(0, 0).max() == played_peak
    assert f.use_with(size * 3, size * 3, 2).max() == played_peak + 1


@given(decodes.filter(bool), sizes, st.data())
def test_pages_lent_by_one_that_ends_stay(rows, size, data):
    lender = data.draw(st.integers(0, len(rows) - 1))
    held, ends = rows[lender]
    lent = data.draw(st.integers(0, pages(held, size)))
    begin = lent * size + data.draw(st.integers(1, 9))
    end = begin + data.draw(st.integers(0, 30))
    peak = forecast(rows, size).use_with(begin, end, lent, {ends: lent}).max()
    times = range(1, 100)
    before = [sum(pages(c + t, size) for c, r in rows if t <= r) for t in times]
    added = [pages(min(begin + t, end), size) - (lent if t <= ends else 0) for t in times]
    assert peak == max(b + a for b, a in zip(before, added, strict=True))


@given(st.data(), st.integers(1, 9), st.integers(1, 5))
def test_counting_agrees_with_the_definition(data, size, block):
    values = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    floors = data.draw(st.lists(st.integers(1, size), min_size=len(values), max_size=len(values)))
    counted = _count_at_least(np.array(values, np.int32), np.array(floors, np.int32), size, block)
    assert counted.tolist() == [sum(v >= floor for v in values[: k + 1]) for k, floor in enumerate(floors)]


def told(lengths: list[int]) -> OutputLengths:
    recent = OutputLengths(remembered=len(lengths))
    for length in lengths:
        recent.record(length)
    return recent


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(0, 60))
def test_outputs_are_expected_to_end_like_those_that_exceeded_what_they_have(lengths, produced):
    longer = sorted(length for length in lengths if length > produced)
    ranks = (np.arange(len(longer)) + 0.5) / max(1, len(longer)) if longer else np.array([0.0, 0.99])
    expected = told(lengths).expect(np.full(len(ranks), produced), ranks)
    assert expected.tolist() == (longer or [2 * produced + 1] * 2)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
    st.lists(st.integers(0, 60), min_size=1),
    st.floats(0, 1, exclude_max=True),
)
def test_an_output_is_expected_to_go_on_and_with_every_token_to_no_earlier_end(lengths, produced, rank):
    produced = np.sort(produced)
    expected = told(lengths).expect(produced, np.full(len(produced), rank, np.float32))
    assert (expected > produced).all()
    assert (np.diff(expected) >= 0).all()


def test_lengths_that_stand_in_at_first_are_forgotten_like_the_oldest():
    recent = OutputLengths(prior=100)
    ranks = (np.arange(1000) + 0.5) / 1000
    assert abs(recent.expect(np.zeros(1000, int), ranks).mean() - 100) < 5
    for _ in range(1024):
        recent.record(7)
    assert set(recent.expect(np.zeros(1000, int), ranks).tolist()) == {7}


def test_many_decodes_are_counted_exactly():
    rng = np.random.default_rng(0)
    rows = list(zip(rng.integers(0, 500, 700).tolist(), rng.integers(1, 50, 700).tolist(), strict=True))
    assert forecast(rows, 16).use_with(0, 0).max() == played(rows, [], 16)


@pytest.mark.parametrize("end", [8, 9])
def test_a_sequence_alone_needs_the_pages_of_its_end(end):
    assert forecast([], 4).use_with(5, end).max() == pages(end, 4)
