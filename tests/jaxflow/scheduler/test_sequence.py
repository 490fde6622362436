"""Tokens of a running sequence are stored in its slot, with the same properties as a waiting sequence."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.request import Request
from jaxflow.scheduler.state import Sequence, SlotTable


def sequence(prompt: list[int]) -> Sequence:
    return Sequence(Request("a", prompt), 0, seed=0, limit=200, arrival=0, now=0.0, salt=b"")


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["", "", "read", "retake", "late"])), max_size=40),
    st.integers(1, 5),
)
def test_the_tokens_are_those_of_the_prompt_and_all_that_came_whenever_one_looks(prompt, later, size):
    by_slot, seq, other = SlotTable(2, size), sequence(prompt), sequence([7])
    by_slot.take_slot(other, 0)
    by_slot.take_slot(seq, 0)
    expected = list(prompt)
    for token, then in later:
        expected.append(token)
        if then == "late":  # the sequence lost its slot before the token came
            by_slot.free_slot(seq)
            seq.append(token)
            by_slot.take_slot(seq, 0)
        else:
            by_slot.append(np.array([other.slot, seq.slot]), np.array([8, token]))
        if then == "read":
            assert seq.token_ids.tolist() == expected
        if then == "retake":
            by_slot.free_slot(seq)
            assert seq.token_ids.tolist() == expected
            by_slot.take_slot(seq, 0)
        assert seq.num_known == len(expected)
    assert seq.token_ids.tolist() == expected
    assert set(other.token_ids[1:].tolist()) <= {8}


def test_a_seat_left_is_as_new():
    fresh, used = SlotTable(1, 4), SlotTable(1, 4)
    seq = sequence([1, 2, 3])
    used.take_slot(seq, 0)
    used.append(np.array([0]), np.array([5]))
    used.decoding[0] = True
    used.free_slot(seq)
    counts = (
        "num_prompt",
        "limit",
        "num_known",
        "num_total",
        "num_computed",
        "registered",
        "exact",
        "taken",
        "decoding",
        "sequences",
    )
    assert all((getattr(fresh, name) == getattr(used, name)).all() for name in counts)
    assert (fresh.free, fresh.num_taken) == (used.free, used.num_taken)
