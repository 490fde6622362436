"""Harmony answers over HTTP: an answer and its stream have the same content, reasoning and calls."""

import json

import openai
import pytest
from fake_llm import FakeLLM
from http_harness import running_server

# The fake model repeats its prompt.
TEMPLATE = "{{ messages[-1].content }}{% if false %}<|start|><|channel|><|message|>{{ tools }}{% endif %}"
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
THOUGHT = "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}<|call|>'


@pytest.fixture(scope="module")
def client():
    with (
        running_server(FakeLLM(chat_template=TEMPLATE)) as opened,
        openai.OpenAI(base_url=f"{opened.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


@pytest.mark.parametrize(
    ("answer", "content", "reasoning", "calls", "more"),
    [
        (f"{THOUGHT}<|channel|>final<|message|>Yes.", "Yes.", "I think.", [], {}),
        (f"{THOUGHT}<|channel|>final<|message|>Yes.", "Yes.", "I think.", [], {"logprobs": True}),
        (f"{THOUGHT}{CALL}", None, "I think.", [("now", {"a": 1})], {"tools": TOOLS}),
        (f"{THOUGHT}{CALL}", '{"a": 1}', "I think.", [], {}),
        ("<|channel|>analysis<|message|>I th", None, "I th", [], {}),
        ("No channel.", "No channel.", None, [], {}),
    ],
)
def test_an_answer_and_its_stream_say_the_same(client, answer, content, reasoning, calls, more):
    asked = {"model": "", "messages": [{"role": "user", "content": answer + "END"}], "n": 2}
    asked |= {"max_tokens": 400, "stop": "END", **more}
    whole = client.chat.completions.create(**asked)
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked))
    for choice in whole.choices:
        message = choice.message
        got = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
        assert (message.content or "").strip() == (content or "") and got == calls
        assert getattr(message, "reasoning_content", None) == reasoning
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.delta.content or "" for c in mine) == (message.content or "")
        streamed = "".join(getattr(c.delta, "reasoning_content", "") for c in mine)
        assert streamed == (reasoning or "") and mine[-1].finish_reason == choice.finish_reason
        parts = [t.function for c in mine for t in c.delta.tool_calls or ()]
        assert [part.name for part in parts if part.name] == [name for name, _ in calls]
        assert "".join(part.arguments for part in parts) == "".join(json.dumps(given) for _, given in calls)
    counted = whole.usage.completion_tokens_details.reasoning_tokens
    assert bool(counted) == bool(reasoning) and counted < whole.usage.completion_tokens
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == counted


def test_a_caller_who_keeps_special_tokens_gets_the_text(client):
    asked = {"model": "", "messages": [{"role": "user", "content": f"{THOUGHT}END"}], "stop": "END"}
    whole = client.chat.completions.create(**asked, extra_body={"skip_special_tokens": False})
    assert whole.choices[0].message.content.strip() == THOUGHT
