"""Reasoning within `<think>`: any parts of a text are read alike, and nothing but marks is lost."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.text.reasoning import CHANNEL, MAX_BLANKS, THINK, Begin, ThinkReader, begin_of, marks_of

WORDS = st.text(alphabet="ab<>/ \né", max_size=12)
BEGINS = st.sampled_from(Begin)
PIECES = st.lists(
    st.one_of(st.sampled_from(["<think>", "</think>", "<th", "</", "\n", "\n\n", " "]), WORDS), max_size=10
).map("".join)


MARKS = st.sampled_from((THINK, CHANNEL))


def marked(text, marks):
    return text.replace(THINK.opening, marks.opening).replace(THINK.closing, marks.closing)


def read(text, begin=Begin.ANSWER, cuts=(), marks=THINK):
    reader = ThinkReader(begin, marks)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    said = [reader.push(text[a:b]) for a, b in itertools.pairwise(bounds)] + [reader.finish()]
    assert not any(part.calls for part in said)
    return "".join(part.reasoning for part in said), "".join(part.content for part in said)


@given(PIECES, BEGINS, st.lists(st.integers(0, 80), max_size=8), MARKS)
def test_the_parts_of_a_text_do_not_matter(text, begin, cuts, marks):
    text = marked(text, marks)
    whole = read(text, begin, (), marks)
    assert read(text, begin, cuts, marks) == read(text, begin, range(len(text)), marks) == whole


@given(PIECES, BEGINS)
def test_other_marks_are_read_alike(text, begin):
    text = text.replace("<th", "")
    reasoning, content = read(text, begin)
    told = read(marked(text, CHANNEL), begin, (), CHANNEL)
    assert told == (marked(reasoning, CHANNEL), marked(content, CHANNEL))


@given(PIECES, BEGINS)
def test_only_marks_and_line_ends_beside_them_are_lost(text, begin):
    reasoning, content = read(text, begin)
    left = text
    if begin is not Begin.CONTENT and left.lstrip().startswith("<think>") and left.find("<") <= MAX_BLANKS:
        begin, left = Begin.REASONING, left.lstrip().removeprefix("<think>")
    if begin is Begin.REASONING:
        thought, closed, left = left.partition("</think>")
        thought = thought.removeprefix("\n")
        assert reasoning == (thought.removesuffix("\n") if closed else thought)
        left = left.removeprefix("\n").removeprefix("\n")
    else:
        assert not reasoning
    assert content == left


@given(WORDS.filter(lambda text: text.strip() and "</think>" not in text), WORDS, BEGINS)
def test_a_written_answer_is_read_back(reasoning, content, begin):
    if reasoning.lstrip().startswith("<think>"):
        return
    mark = "" if begin is Begin.REASONING else "<think>\n"
    if begin is not Begin.CONTENT and not (begin is Begin.REASONING and reasoning.startswith("\n")):
        written = f"{mark}{reasoning}\n</think>\n\n{content}"
        assert read(written, begin) == (reasoning, content)
        cut = read(written[: len(mark + reasoning)], begin)  # no tokens are left for the rest
        assert cut == (reasoning, "")
    assert read(content) == ("", content)


@given(PIECES, BEGINS)
def test_little_is_held_back(text, begin):
    reader = ThinkReader(begin)
    said = [reader.push(character) for character in text]
    told = sum(len(part.reasoning + part.content) for part in said)
    rest = reader.finish()
    assert len(rest.reasoning + rest.content) <= MAX_BLANKS + len(THINK.opening)
    assert told + len(rest.reasoning + rest.content) == sum(map(len, read(text, begin)))


@pytest.mark.parametrize(
    ("end", "continued", "begin"),
    [
        ("<|im_start|>assistant\n", "", Begin.ANSWER),
        ("<|im_start|>assistant\n<think>\n", "", Begin.REASONING),
        ("<think>\n\n</think>\n\n", "", Begin.CONTENT),
        ("<｜Assistant｜></think>", "", Begin.CONTENT),
        ("What is <think> here?", "", Begin.ANSWER),
        ("<think>\nI think that", "<think>\nI think that", Begin.REASONING),
        ("</think>\n\nIt is", "<think>a</think>It is", Begin.CONTENT),
        ("It is <think>", "It is <think>", Begin.CONTENT),
        ("</think>\n\n", " ", Begin.CONTENT),
    ],
)
def test_a_prompt_tells_where_the_answer_begins(end, continued, begin):
    assert begin_of(end, continued, Begin.ANSWER) is begin
    if begin is not Begin.ANSWER and not continued:
        assert begin_of(end, continued, Begin.REASONING) is begin


def test_a_template_of_reasoning_has_a_mark():
    assert marks_of("{{ c.split('</think>') }}") == THINK and marks_of("{% if enable_thinking %}") is None
    assert marks_of("{{ c.split('<channel|>') }}") == CHANNEL
