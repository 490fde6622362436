"""Tool calls over HTTP: an answer and its stream have the same calls, and a forced call is refused."""

import json

import openai
import pytest
from fake_llm import FakeLLM
from http_harness import CHAT, running_server

CALLS = (("weather", {"city": "Paris", "days": [1, 2]}), ("now", {}))
ANSWER = "I look.\n" + "\n".join(
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    for name, arguments in CALLS
)
# The fake model repeats its prompt, and its tokenizer begins a text with a space.
TEMPLATE = "{{ messages[-1].content }}{% if tools %}{{ tools[0].function.name }}<tool_call>{% endif %}"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, "strict": True}}
    for name, _ in CALLS
]
ASKED = {"model": "", "tools": TOOLS, "max_tokens": 400, "stop": "END", "n": 2}


@pytest.fixture(scope="module")
def shared():
    with running_server(FakeLLM(chat_template=TEMPLATE)) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(shared):
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def said(content):
    return [{"role": "user", "content": content + "END"}]


def called(calls):
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls or ()]


@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"parallel_tool_calls": False}], ids=str)
def test_an_answer_and_its_stream_have_the_same_calls(client, more):
    whole = client.chat.completions.create(messages=said(ANSWER), **ASKED, **more)
    chunks = list(client.chat.completions.create(messages=said(ANSWER), **ASKED, **more, stream=True))
    expected = list(CALLS)[: 1 if "parallel_tool_calls" in more else 2]
    for choice in whole.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", " I look.\n")
        assert called(choice.message.tool_calls) == expected
        assert all(len(call.id) == 9 and call.type == "function" for call in choice.message.tool_calls)
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        parts = [call for c in mine for call in c.delta.tool_calls or ()]
        assert called(parts) == expected and [part.index for part in parts] == list(range(len(parts)))
        assert "".join(c.delta.content or "" for c in mine) == " I look.\n"
        assert [c.finish_reason for c in mine if c.finish_reason] == ["tool_calls"]


@pytest.mark.parametrize("answer", ["No call.", "a <tool_call>broken</tool_call> b", "Cut <tool_call>{"])
def test_an_answer_without_calls_is_text(client, answer):
    whole = client.chat.completions.create(messages=said(answer), **ASKED)
    chunks = client.chat.completions.create(messages=said(answer), **ASKED, stream=True)
    streamed = [c for chunk in chunks for c in chunk.choices if c.index == 1]
    assert whole.choices[1].message.content == f" {answer}" and whole.choices[1].message.tool_calls is None
    assert "".join(c.delta.content or "" for c in streamed) == f" {answer}"
    assert whole.choices[0].finish_reason == streamed[-1].finish_reason == "stop"


def test_only_a_choice_of_auto_shows_the_tools(shared, client):
    def tokens(**body):
        return shared.post("/tokenize", {"messages": said(ANSWER), **body}).json()["count"]

    assert tokens(tools=TOOLS) > tokens()
    whole = client.chat.completions.create(messages=said(ANSWER), **ASKED, tool_choice="none")
    assert whole.choices[0].message.content == f" {ANSWER}" and whole.usage.prompt_tokens == tokens()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "now"}}),
        ("tools", TOOLS * 65),
        ("tools[0].function.name", [{"type": "function", "function": {"name": "a b"}}]),
        ("tools[0].type", [{"type": "custom", "function": {"name": "f"}}]),
        ("functions", [{"name": "f"}]),
    ],
)
def test_what_cannot_be_called_is_refused(shared, field, value):
    body = {"messages": said("hi"), "tools": TOOLS, field.partition("[")[0]: value}
    answer = shared.post(CHAT, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_a_template_without_tools_refuses_them():
    with running_server() as opened:
        answer = opened.post(CHAT, {"messages": said("hi"), "tools": TOOLS})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
