"""Laws: the sum of a stream's deltas is the plain answer, for requests that Hypothesis draws."""

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from http_harness import CHAT, COMPLETIONS, events, running_server
from hypothesis import given

texts = st.text(min_size=1, max_size=30) | st.sampled_from(["Once upon a time", "a\N{SNOWMAN}b" * 9, "\0 x"])
some_ids = st.lists(st.integers(3, 250), min_size=1, max_size=12)
shared_fields = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 24), "seed": st.integers(-(2**63), 2**63 - 1)},
    optional={
        "n": st.integers(1, 3),
        "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3) | st.text(min_size=1, max_size=2),
        "stop_token_ids": st.lists(st.integers(0, 250), max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "ignore_eos": st.booleans(),
        "return_token_ids": st.booleans(),
        "return_tokens_as_token_ids": st.booleans(),
        "prompt_logprobs": st.integers(0, 2),
    },
)
completion_bodies = st.builds(
    lambda shared, own: shared | own,
    shared_fields,
    st.fixed_dictionaries(
        {
            "prompt": texts
            | some_ids
            | st.lists(texts, min_size=1, max_size=3)
            | st.lists(some_ids, min_size=1, max_size=3)
        },
        optional={"echo": st.booleans(), "logprobs": st.integers(0, 5)},
    ),
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": texts}
    ),
    min_size=1,
    max_size=3,
)
chat_bodies = st.builds(
    lambda shared, own, top: shared | own | ({"top_logprobs": top} if own.get("logprobs") and top else {}),
    shared_fields,
    st.fixed_dictionaries({"messages": messages}, optional={"logprobs": st.booleans()}),
    st.none() | st.integers(0, 5),
)


@pytest.fixture(scope="module")
def shared():
    with running_server() as opened:
        yield opened


def check_streamed_equals_plain(opened, path: str, body: dict[str, Any]) -> dict[str, Any]:
    plain = opened.post(path, body)
    assert plain.status_code == 200, plain.text
    answer = plain.json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(opened.post(path, body | options).text)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == answer["usage"]
    for choice in answer["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert text_of(choice, mine) == (choice["message"]["content"] if path == CHAT else choice["text"])
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        assert mine[-1]["finish_reason"] and mine[-1].get("stop_reason") == choice["stop_reason"]
        assert joined(mine) == joined([choice])
        if body.get("return_token_ids"):
            assert [token for c in mine for token in c.get("token_ids", ())] == choice["token_ids"]
    return answer


def text_of(choice: dict, parts: list[dict]) -> str:
    if "message" in choice:
        return "".join(part["delta"].get("content") or "" for part in parts)
    return "".join(part["text"] for part in parts)


def joined(parts: list[dict]) -> dict[str, list]:
    """Return the log-probabilities of parts, one list a field."""
    result: dict[str, list] = {}
    for part in parts:
        for field, values in (part["logprobs"] or {}).items():
            result.setdefault(field, []).extend(values or [])
    return {field: values for field, values in result.items() if values}


@given(completion_bodies)
def test_a_streamed_completion_is_the_plain_one(shared, body):
    answer = check_streamed_equals_plain(shared, COMPLETIONS, body)
    prompts = (
        body["prompt"] if isinstance(body["prompt"], list) and not isinstance(body["prompt"][0], int) else [0]
    )
    assert len(answer["choices"]) == len(prompts) * body.get("n", 1)
    tokens = sum(len(choice["token_ids"]) for choice in answer["choices"] if "token_ids" in choice)
    assert not body.get("return_token_ids") or tokens == answer["usage"]["completion_tokens"]


@given(chat_bodies)
def test_a_streamed_chat_is_the_plain_one(shared, body):
    answer = check_streamed_equals_plain(shared, CHAT, body)
    for choice in answer["choices"]:
        if choice["logprobs"]:
            data = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"] or ())
            # A character that the end of the answer cut has its bytes here, and a
            # replacement character in the text.
            text = choice["message"]["content"].replace("\N{REPLACEMENT CHARACTER}", "")
            assert data.decode("utf-8", "ignore") == text


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from([CHAT, COMPLETIONS, "/tokenize", "/detokenize"]),
    st.sampled_from(["prompt", "messages", "tokens", "stop", "n", "stream", "logit_bias", "stream_options"]),
)
def test_any_json_is_answered_or_refused(shared, value, path, field):
    base = {CHAT: {"messages": [{"role": "user", "content": "x"}]}, COMPLETIONS: {"prompt": [5]}}.get(
        path, {}
    )
    body = json.dumps(base | {"max_tokens": 1} | {field: value} if base else {field: value}).encode()
    answer = shared.post(path, body)
    assert answer.status_code in (200, 400, 404)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
