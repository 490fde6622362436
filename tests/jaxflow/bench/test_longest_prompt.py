"""The longest prompt that a memory holds: the search, and the arithmetic of the prediction."""

from hypothesis import given
from hypothesis import strategies as st

from jaxflow.bench.context.longest_prompt import Room, longest
from jaxflow.engine.program_memory import Need

PAGE = 64


@given(st.integers(0, 3000), st.integers(1, 3000), st.floats(0.001, 0.2))
def test_the_search_ends_near_the_border(pages, predicted, tolerance):
    border, tried = pages * PAGE, []

    def runs(length):
        tried.append(length)
        return length <= border

    found = longest(predicted * PAGE, PAGE, tolerance, runs)
    assert found <= border < found + max(PAGE, tolerance * found) + PAGE
    assert found == 0 or found in tried
    assert all(length > 0 and length % PAGE == 0 for length in tried) and len(set(tried)) == len(tried)


@given(st.integers(10**6, 10**9), st.integers(1, 5000), st.integers(1, 5000))
def test_a_predicted_prompt_fills_the_memory(free, per_token, page_bytes):
    needs = {n: Need(n * per_token, 0) for n in (64, 128)}
    room = Room(free, PAGE, page_bytes, needs)
    whole, chunked = room.whole(), room.chunked(64)
    assert whole <= max(chunked, 64) or whole >= 2**20 - PAGE
    assert not chunked or room.step_bytes(64) + (chunked // PAGE + 1) * page_bytes <= free
    assert room.chunked(64, reserved=10**5) <= chunked
