"""Reasoning over HTTP: an answer and its stream have the same reasoning, content and calls."""

import openai
import pytest
from fake_llm import FakeLLM
from http_harness import CHAT, running_server

# The fake model repeats its prompt. The end of the prompt, where a template opens or closes the reasoning,
# is the start of the next round, and comes after the stop string.
TEMPLATE = (
    "{{ messages[-1].content }}{% if false %}{{ tools }}<tool_call><think>{% endif %}"
    "{% if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
OPENED = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
CLOSED = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
THOUGHT = "<think>\nI think.\n</think>\n\n"


@pytest.fixture(scope="module")
def server():
    with running_server(FakeLLM(chat_template=TEMPLATE)) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def body(answer, more):
    asked = {"model": "", "messages": [{"role": "user", "content": answer + "END"}]}
    return {**asked, "max_tokens": 400, "stop": "END", **more}


@pytest.mark.parametrize(
    ("answer", "content", "reasoning", "calls", "more"),
    [
        (f"{THOUGHT}Yes.", "Yes.", "I think.", 0, {}),
        (f"{THOUGHT}Yes.", "Yes.", "I think.", 0, {"logprobs": True, "tools": TOOLS}),
        (f"{THOUGHT}{CALL}", None, "I think.", 1, {"tools": TOOLS}),
        (f"<think>Shall I {CALL}?</think>No.", "No.", f"Shall I {CALL}?", 0, {"tools": TOOLS}),
        ("I think.\n</think>\n\nYes.", "Yes.", " I think.", 0, OPENED),
        (f"I think.</think>{CALL}", None, " I think.", 1, {"tools": TOOLS, **OPENED}),
        ("I am not don", None, " I am not don", 0, OPENED),
        ("<think>I am not don", None, "I am not don", 0, {}),
        ("<think>\n\n</think>\n\nYes.", "Yes.", None, 0, {}),
        ("<think>a</think>b", " <think>a</think>b", None, 0, CLOSED),
        ("A <think>a</think>b", " A <think>a</think>b", None, 0, {}),
        (f"{THOUGHT}Yes.", "Yes.", None, 0, {"extra_body": {"include_reasoning": False}}),
        (f"{THOUGHT}Yes.", f" {THOUGHT}Yes.", None, 0, {"extra_body": {"separate_reasoning": False}}),
    ],
)
def test_an_answer_and_its_stream_say_the_same(client, answer, content, reasoning, calls, more):
    asked = body(answer, {"n": 2, **more})
    whole = client.chat.completions.create(**asked)
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked))
    for choice in whole.choices:
        message = choice.message
        assert message.content == content and len(message.tool_calls or ()) == calls
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.delta.content or "" for c in mine) == (content or "")
        assert sum(bool(call.id) for c in mine for call in c.delta.tool_calls or ()) == calls
        for name in ("reasoning", "reasoning_content"):
            assert getattr(message, name, None) == reasoning
            assert "".join(getattr(c.delta, name, "") for c in mine) == (reasoning or "")
    counted = whole.usage.completion_tokens_details.reasoning_tokens
    read = content is None or not content.startswith(" ")  # the fake model's text begins with a space
    assert bool(counted) == read and counted <= whole.usage.completion_tokens
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == counted


def test_an_answer_that_is_cut_within_the_reasoning_has_no_content(client):
    answer = client.chat.completions.create(**body("<think>" + "long " * 20, {"max_tokens": 30}))
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "length" and message.content is None and message.reasoning


def test_an_answer_continues_the_reasoning_of_its_message(client):
    asked = body("", {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}})
    asked["messages"] = [{"role": "assistant", "content": "<think>I see</think>Yes<think>"}]
    assert client.chat.completions.create(**asked | {"max_tokens": 9}).choices[0].message.content
    asked["messages"] = [{"role": "assistant", "content": "<think>I"}]
    message = client.chat.completions.create(**asked | {"max_tokens": 9}).choices[0].message
    assert message.content is None and message.reasoning


@pytest.mark.parametrize(
    ("effort", "more", "end"),
    [
        ("high", {}, "<think>\nhigh"),
        ("none", {}, "</think>\n\nnone"),
        ("low", {"chat_template_kwargs": {"enable_thinking": False}}, "</think>\n\nlow"),
    ],
)
def test_the_effort_is_a_variable_of_the_template(server, effort, more, end):
    answer = server.post(
        CHAT, body("x", {"reasoning_effort": effort, "return_token_ids": True, **more})
    ).json()
    assert server.llm.tokenizer.decode(answer["prompt_token_ids"]).endswith(end)


def test_an_unknown_effort_is_refused(server):
    answer = server.post(CHAT, body("x", {"reasoning_effort": "much"}))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "reasoning_effort"


@pytest.mark.parametrize(
    ("parser", "reasoning", "content"),
    [
        ("auto", None, " I think.</think>Yes."),
        ("qwen3", None, " I think.</think>Yes."),
        ("deepseek_r1", " I think.", "Yes."),
        ("none", None, " I think.</think>Yes."),
    ],
)
def test_the_flag_names_the_form(parser, reasoning, content):
    with running_server(reasoning_parser=parser) as opened:
        llm = opened.llm
        llm.tokenizer.chat_template = "{{ messages[-1].content }}"
        message = opened.post(CHAT, body("I think.</think>Yes.", {})).json()["choices"][0]["message"]
        assert (message.get("reasoning"), message["content"]) == (reasoning, content)


@pytest.mark.parametrize("more", [{}, {"skip_special_tokens": False}, {"skip_special_tokens": True}])
def test_special_marks_are_read_unless_the_caller_chooses_about_special_tokens(more):
    answer = "<|channel>thought\nI think.\n<channel|>Yes."
    with running_server(FakeLLM(chat_template="{{ messages[-1].content }}{# <channel|> #}")) as opened:
        opened.llm.tokenizer.special_texts = frozenset(("<|channel>", "<channel|>"))
        message = opened.post(CHAT, body(answer, more)).json()["choices"][0]["message"]
        expected = (None, f" {answer}") if more else ("I think.", "Yes.")
        assert (message.get("reasoning"), message["content"]) == expected
