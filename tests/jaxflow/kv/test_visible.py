"""The pages that queries see, against a list of the keys."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.config import SPAN_UNITS, Span
from jaxflow.kv import visible

spans = st.builds(Span, st.integers(0, 9), st.integers(0, 9), st.integers(1, SPAN_UNITS))
windows = st.none() | st.integers(1, 20) | spans


def seen(position, window):
    """Return the keys that a query sees."""
    if not isinstance(window, Span):
        return [p for p in range(position + 1) if window is None or position - p < window]
    last_keys = -(-(SPAN_UNITS * window.alpha + window.beta * (position + 1)) // SPAN_UNITS)
    return [p for p in range(position + 1) if p < window.sinks or position - p < last_keys]


@given(st.integers(0, 60), windows, st.integers(1, 6))
def test_the_pages_with_a_seen_key_are_kept_and_sinks(position, window, size):
    gone = visible.unseen(position, window, size)
    keys = {p // size for p in seen(position, window)}
    assert not keys & set(gone)
    assert set(range(position // size + 1)) - set(gone) - keys <= set(range(visible.sink_pages(window, size)))


@given(st.integers(0, 60), windows, st.integers(1, 6))
def test_an_unseen_page_is_never_seen_again(position, window, size):
    now, later = (visible.unseen(p, window, size) for p in (position, position + 1))
    assert set(now) <= set(later)


@given(spans, st.integers(0, 2**20 - 1))
def test_the_window_is_alpha_and_beta_of_the_length_rounded_up(span, position):
    exact = span.alpha + span.beta * (position + 1) / SPAN_UNITS  # exact in a float64
    assert span.window(position) == int(np.ceil(exact)) >= 1
    assert span.window(np.array([position])).tolist() == [span.window(position)]


@given(st.integers(1, 60), windows, st.integers(1, 6))
def test_a_sequence_holds_at_most_the_predicted_pages(tokens, window, size):
    held = [position // size + 1 - len(visible.unseen(position, window, size)) for position in range(tokens)]
    assert max(held) <= visible.most_pages(tokens, window, size) <= -(-tokens // size)
    assert visible.most_pages(np.array([tokens]), window, size).tolist() == [
        int(visible.most_pages(tokens, window, size))
    ]
