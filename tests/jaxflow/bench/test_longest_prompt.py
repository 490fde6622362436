"""The longest prompt that a memory holds: the search, and the arithmetic of the prediction."""

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.bench.context import longest_prompt
from jaxflow.bench.context.longest_prompt import Room, TrialClock, beside_whole, line, longest, measure
from jaxflow.bench.context.prompt_trial import ROUNDING, Outcome
from jaxflow.engine.program_memory import Need

PAGE = 64


@given(st.integers(0, 3000), st.integers(1, 3000), st.floats(0.001, 0.2))
def test_the_search_ends_near_the_border(pages, predicted, tolerance):
    border, tried = pages * PAGE, []

    def runs(length):
        tried.append(length)
        return length <= border

    found, failed = longest(predicted * PAGE, PAGE, tolerance, runs, lambda: True)
    assert found <= border < failed <= found + max(PAGE, tolerance * found)
    assert found == 0 or found in tried
    assert all(length > 0 and length % PAGE == 0 for length in tried) and len(set(tried)) == len(tried)


@given(st.integers(0, 3000), st.integers(1, 3000), st.integers(0, 6))
def test_a_search_that_ends_early_keeps_what_it_found(pages, predicted, most):
    border, tried = pages * PAGE, []

    def runs(length):
        tried.append(length)
        return length <= border

    found, failed = longest(predicted * PAGE, PAGE, 0.05, runs, lambda: len(tried) < most)
    assert len(tried) <= most
    assert found == max((length for length in tried if length <= border), default=0)
    assert failed == min((length for length in tried if length > border), default=None)


@given(st.integers(10**7, 10**9), st.integers(1, 5000), st.integers(1, 5000))
def test_a_predicted_prompt_fills_the_memory(free, per_token, page_bytes):
    needs = {n: Need(n * per_token, 0) for n in (64, 128)}
    room = Room(free, PAGE, page_bytes, needs)
    whole, chunked = room.whole(), room.chunked(64)
    assert whole <= max(chunked, 64) or whole >= 2**20 - PAGE
    assert not chunked or room.step_bytes(64) + ROUNDING + (chunked // PAGE + 1) * page_bytes <= free
    assert room.chunked(64, reserved=10**5) <= chunked


@pytest.mark.parametrize("limit_s", [0.0, 1000.0])
def test_every_mode_has_a_row_whether_there_is_time_or_not(monkeypatch, limit_s):
    needs = {n: Need(n * 1000, n * 100) for n in (64, 128)}
    room, rows = Room(10**8, PAGE, PAGE * 500, needs), []

    def attempt(config, max_position, trial, free):
        used = (trial.length // PAGE + 1) * room.page_bytes + ROUNDING + room.step_bytes(trial.tokens)
        return Outcome(True, 1.0, needs[64]) if used <= free else Outcome(False, failed_at="KV cache")

    monkeypatch.setattr(longest_prompt, "attempt_capped", attempt)
    config = types.SimpleNamespace(gpu_memory_utilization=0.9)
    measure(config, None, room, [64], 0.05, TrialClock(limit_s), rows.append, full_prompt=True)
    ordered = beside_whole(rows)
    assert [row["mode"] for row in ordered] == ["whole", "chunks", "every byte"]
    assert all(line(row) for row in ordered)
    if not limit_s:
        assert all(row["longest_tokens"] is None and not row["trials"] for row in ordered)
        return
    whole, chunks, every = (row["longest_tokens"] for row in ordered)
    assert 0 < whole < every and chunks < every
    for row in (ordered[0], ordered[2]):
        assert row["longest_tokens"] == row["predicted_tokens"] < row["shortest_failed_tokens"]
    assert ordered[2]["against_whole"] == every / whole
