"""The stop string that is complete first, and what may be said before it is known, against a search by brute
force.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.text.detokenizer import StopMatcher

CUTS = st.lists(st.integers(0, 40), max_size=6)


@st.composite
def texts_and_stops(draw) -> tuple[str, list[str]]:
    """Stop strings, and a text of beginnings of them: where a search that forgets or remembers too much goes
    wrong.
    """
    stops = draw(
        st.lists(
            st.one_of(st.text("ab", min_size=1, max_size=4), st.text("ab", min_size=6, max_size=12)),
            min_size=1,
            max_size=4,
        )
    )
    pieces = draw(st.lists(st.tuples(st.sampled_from(stops), st.integers(0, 11)), max_size=6))
    return "".join(stop[:length] for stop, length in pieces), stops


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Return the end of the first complete stop string, and the longest stop string with this end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def could_begin(text: str, stops: list[str]) -> int:
    """Return the number of trailing characters that could begin a stop string."""
    return max(
        n
        for n in range(len(text) + 1)
        if n == 0 or any(len(stop) > n and stop.startswith(text[len(text) - n :]) for stop in stops)
    )


def parts(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]


@given(case=texts_and_stops(), cuts=CUTS, include=st.booleans())
def test_the_text_before_the_first_stop_string(case, cuts, include):
    text, stops = case
    matcher = StopMatcher(stops, include_stop=include)
    told = "".join(matcher.push(part) for part in parts(text, cuts)) + matcher.finish()
    found = first_stop(text, stops)
    if found is None:
        assert (told, matcher.found) == (text, None)
    else:
        end, stop = found
        assert (told, matcher.found) == (text[: end if include else end - len(stop)], stop)


@given(case=texts_and_stops(), cuts=CUTS)
def test_only_what_could_begin_a_stop_string_is_held_back(case, cuts):
    text, stops = case
    matcher, seen, told = StopMatcher(stops), "", ""
    for part in parts(text, cuts):
        seen, told = seen + part, told + matcher.push(part)
        if matcher.found is None:
            assert told == seen[: len(seen) - could_begin(seen, stops)]


def test_a_beginning_within_a_beginning_is_remembered():
    matcher = StopMatcher(["aabaaac"])
    assert matcher.push("aabaaa") == ""
    assert matcher.push("b") == "aaba"
    assert matcher.push("aaac") == ""
    assert matcher.found == "aabaaac"


def test_a_stop_string_within_another_ends_first():
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("xabcd") == "xa"
    assert matcher.found == "bc"


def test_nothing_comes_after_a_stop_string():
    matcher = StopMatcher(["\n\n"], include_stop=True)
    assert [matcher.push(part) for part in ("a\n", "b\n", "\nc\n\n", "d")] == ["a", "\nb", "\n\n", ""]
    assert matcher.finish() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopMatcher(["a", ""])


def test_the_longest_lists_of_stop_strings_work():
    stops = ["a" * n + "b" for n in range(960, 1024)]
    matcher = StopMatcher(stops)
    assert sum(len(matcher.push("a" * 100)) for _ in range(30)) == 3000 - 1023
    assert matcher.push("b") == ""
    assert matcher.found == stops[-1]
