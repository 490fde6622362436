"""Tokens and counts of a sequence, in a slot and without one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.request import Request
from jaxflow.scheduler.state import Sequence, SlotTable


def sequence(prompt: list[int]) -> Sequence:
    return Sequence(Request("a", prompt), 0, seed=0, limit=200, arrival=0, salt=b"")


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["", "", "read", "retake", "late"])), max_size=40),
    st.integers(1, 5),
)
def test_token_ids_are_the_prompt_and_all_committed_tokens(prompt, later, size):
    slots, seq, other = SlotTable(2, size), sequence(prompt), sequence([7])
    slots.take(other, 0)
    slots.take(seq, 0)
    expected = list(prompt)
    for token, then in later:
        expected.append(token)
        if then == "late":  # the sequence lost its slot before the token came
            slots.release(seq)
            seq.append(token)
            slots.take(seq, 0)
        else:
            slots.append(np.array([other.slot, seq.slot]), np.array([8, token]))
        if then == "read":
            assert seq.token_ids.tolist() == expected
        if then == "retake":
            slots.release(seq)
            assert seq.token_ids.tolist() == expected
            slots.take(seq, 0)
        assert seq.num_known == len(expected)
    assert seq.token_ids.tolist() == expected
    assert set(other.token_ids[1:].tolist()) <= {8}


def test_counts_follow_the_slot_and_stay_after_it():
    slots, seq = SlotTable(2, 4), sequence([1, 2, 3])
    slots.take(seq, 2)
    slots.num_total[seq.slot] += 1
    assert (seq.num_known, seq.num_total, seq.num_computed) == (3, 4, 2)
    slots.release(seq)
    assert (seq.num_known, seq.num_total, seq.num_computed) == (3, 4, 0)


def test_a_released_slot_equals_a_new_one():
    fresh, used = SlotTable(1, 4), SlotTable(1, 4)
    seq = sequence([1, 2, 3])
    used.take(seq, 0)
    used.append(np.array([0]), np.array([5]))
    used.decoding[0] = True
    used.release(seq)
    arrays = ["num_prompt", "limit", "counts", "registered", "ignores_eos", "taken", "decoding", "sequences"]
    assert all((getattr(fresh, name) == getattr(used, name)).all() for name in arrays)
    assert (fresh.free, fresh.num_taken) == (used.free, used.num_taken)
