"""Harmony answers: any parts of a text are read alike, and nothing is lost or doubled."""

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.text.harmony import HarmonyReader, is_harmony
from jaxflow.text.tool_calls import ToolCall, whole_calls

WORDS = st.text(alphabet="ab<|> \n{}é", max_size=12)
MESSAGE = st.one_of(
    st.tuples(st.sampled_from(("analysis", "final", "commentary")), WORDS),
    st.tuples(st.just("call"), st.dictionaries(WORDS, WORDS, max_size=2)),
)
PIECES = st.lists(
    st.one_of(
        st.sampled_from(
            [f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call", "return")]
        ),
        st.sampled_from(["analysis", "final", "commentary", "assistant", " to=functions.f ", "{}", "<|"]),
        WORDS,
    ),
    max_size=12,
).map("".join)


def read(text, cuts=(), **more):
    reader = HarmonyReader(**{"tools": True, **more})
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    said = [reader.push(text[a:b]) for a, b in itertools.pairwise(bounds)] + [reader.finish()]
    return (
        "".join(part.content for part in said),
        "".join(part.reasoning for part in said),
        whole_calls(call for part in said for call in part.calls),
    )


def written(messages):
    parts = []
    for channel, body in messages:
        if channel == "call":
            header = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
            parts.append(f"{header}{json.dumps(body)}<|call|>")
        else:
            parts.append(f"<|channel|>{channel}<|message|>{body}<|end|>")
    return "<|start|>assistant".join(parts)


@given(PIECES, st.lists(st.integers(0, 100), max_size=8), st.booleans())
def test_the_parts_of_a_text_do_not_matter(text, cuts, tools):
    whole = read(text, tools=tools)
    assert read(text, cuts, tools=tools) == read(text, range(len(text)), tools=tools) == whole


@given(st.lists(MESSAGE, max_size=5))
def test_every_message_is_read_once(messages):
    content, reasoning, calls = read(written(messages))
    assert content == "".join(body for channel, body in messages if channel in ("final", "commentary"))
    assert reasoning == "".join(body for channel, body in messages if channel == "analysis")
    assert [json.loads(call.arguments) for call in calls] == [b for c, b in messages if c == "call"]


@given(st.lists(MESSAGE, min_size=1, max_size=4), st.integers(0, 200))
def test_an_answer_that_is_cut_keeps_its_beginning(messages, length):
    text = written(messages)
    whole, cut = read(text), read(re.sub(r"<(\|[a-z]*\|?)?\Z", "", text[:length]))  # a special token is whole
    assert whole[1].startswith(cut[1]) and cut[2] == whole[2][: len(cut[2])]
    if not any(channel == "call" for channel, _ in messages):
        assert whole[0].startswith(cut[0])


@given(WORDS)
def test_text_without_marks_is_content(text):
    assert read(text) == (text, "", [])


@pytest.mark.parametrize("end", ["", "<|call|>"])
def test_a_recipient_may_lead_the_answer(end):
    text = ' to=functions.now<|channel|>commentary json<|message|>{"a": 1}' + end
    assert read(text, range(len(text))) == ("", "", [ToolCall("now", '{"a": 1}')])


def test_a_cut_call_is_content_and_only_so_many_calls_are_returned():
    assert read(written([("call", {"a": "b"})])[:-12])[2] == []
    assert len(read(written([("call", {})] * 3), most=1)[2]) == 1


def test_the_format_is_known_by_its_marks():
    assert is_harmony("<|start|>assistant<|channel|>final<|message|>") and not is_harmony("<|start|>")
