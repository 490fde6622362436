"""Tool calls over HTTP: an answer and its stream have the same calls, and a call can be forced."""

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


# Calls as GLM-4.5 writes them, after a thought and a text. The tool's schema types the bare values.
GLM_ANSWER = (
    '<think>\nShall I?\n</think>\n\nI look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>75" P'
    "aris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now</tool_call>"
)
GLM_CALLS = [("weather", {"city": '75" Paris', "days": 3}), ("now", {})]
GLM_TEMPLATE = "{{ messages[-1].content }}{% if false %}{{ tools }}<tool_call><arg_key><think>{% endif %}"
GLM_TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": properties}}}
    for properties in [{"city": {"type": "string"}, "days": {"type": "integer"}}]
] + [{"type": "function", "function": {"name": "now"}}]


def said(content):
    return [{"role": "user", "content": content + "END"}]


def called(calls):
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls or ()]


def joined(parts):
    """Return the calls of the parts of a stream."""
    starts = [part for part in parts if part.id]
    assert [start.index for start in starts] == list(range(len(starts)))
    texts = ["".join(p.function.arguments for p in parts if p.index == start.index) for start in starts]
    return [(start.function.name, json.loads(text)) for start, text in zip(starts, texts, strict=True)]


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
        assert joined([part for c in mine for part in c.delta.tool_calls or ()]) == expected
        assert "".join(c.delta.content or "" for c in mine) == " I look.\n"
        assert [c.finish_reason for c in mine if c.finish_reason] == ["tool_calls"]


@pytest.fixture(scope="module")
def glm():
    with (
        running_server(FakeLLM(chat_template=GLM_TEMPLATE)) as opened,
        openai.OpenAI(base_url=f"{opened.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


@pytest.mark.parametrize("cut", [None, 30])
def test_calls_are_streamed_while_they_are_written(glm, cut):
    answer = GLM_ANSWER[:-cut] if cut else GLM_ANSWER
    asked = {**ASKED, "tools": GLM_TOOLS, "messages": said(answer)}
    whole = glm.chat.completions.create(**asked).choices[0]
    mine = [
        c for chunk in glm.chat.completions.create(**asked, stream=True) for c in chunk.choices if not c.index
    ]
    assert (whole.finish_reason, whole.message.reasoning) == (mine[-1].finish_reason, "Shall I?")
    assert "".join(c.delta.content or "" for c in mine) == whole.message.content
    parts = [part for c in mine for part in c.delta.tool_calls or ()]
    starts = [part for part in parts if part.id]
    joined = ["".join(p.function.arguments for p in parts if p.index == start.index) for start in starts]
    assert [(start.index, start.function.name) for start in starts] == [(0, "weather"), (1, "now")][
        : len(starts)
    ]
    assert all(not part.function.arguments for part in starts) and len(parts) > 5
    if cut is None:
        assert called(whole.message.tool_calls) == GLM_CALLS and whole.message.content == "I look.\n"
        assert [json.loads(text) for text in joined] == [given for _, given in GLM_CALLS]
    else:  # the text of a call that is cut is content, and the arguments of its stream are no JSON
        assert whole.message.tool_calls is None and whole.message.content == answer.partition("\n\n")[2]
        assert whole.finish_reason == "stop" and not joined[0].endswith("}")


OBJECTS = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in CALLS]


@pytest.mark.parametrize(
    ("parser", "answer"),
    [("mistral", f"[TOOL_CALLS][{', '.join(OBJECTS)}]"), ("llama3_json", "; ".join(OBJECTS))],
)
def test_the_message_of_the_stream_helper_can_be_sent_back(parser, answer):
    fake = FakeLLM(chat_template="{{ messages[-1].content }}{# tools #}")
    with (
        running_server(fake, tool_call_parser=parser) as opened,
        openai.OpenAI(base_url=f"{opened.url}/v1", api_key="none", max_retries=0) as made,
    ):
        asked = {**ASKED, "messages": said(answer), "logprobs": True}
        with made.chat.completions.stream(**asked) as stream:
            kinds = [event.type for event in stream]
        choices = stream.get_final_completion().choices
        assert [called(choice.message.tool_calls) for choice in choices] == [list(CALLS)] * 2
        assert kinds.count("tool_calls.function.arguments.delta") > 10
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "sun"}
            for call in choices[0].message.tool_calls or ()
        ]
        sent = [*said("hi"), choices[0].message, *results, *said(answer)]
        again = made.chat.completions.create(**{**asked, "messages": sent})
        assert called(again.choices[1].message.tool_calls) == list(CALLS)


@pytest.mark.parametrize(("parser", "calls"), [("auto", 0), ("glm45", 2), ("hermes", 0), ("openai", 0)])
def test_the_flag_names_the_form(parser, calls):
    with running_server(tool_call_parser=parser) as opened:
        opened.llm.tokenizer.chat_template = "{{ messages[-1].content }}{# tools #}"
        answer = opened.post(CHAT, {**ASKED, "model": "", "tools": GLM_TOOLS, "messages": said(GLM_ANSWER)})
        assert answer.status_code == (400 if parser == "auto" else 200)
        if parser != "auto":
            assert len(answer.json()["choices"][0]["message"].get("tool_calls", ())) == calls


def test_marks_that_are_special_tokens_stay_in_the_text_that_is_read():
    template = "{{ messages[-1].content }}{# tools <|tool_call>call: #}"
    answer = '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:[1,2]}<tool_call|>'
    with running_server(FakeLLM(chat_template=template)) as opened:
        for special in (("<|tool_call>", '<|"|>'), ()):
            opened.llm.tokenizer.special_texts = frozenset(special)
            whole = opened.post(CHAT, {**ASKED, "messages": said(answer)}).json()["choices"][0]
            [call] = whole["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == CALLS[0][1]
            assert opened.llm.driver.submitted[-1].sampling.skip_special_tokens == (not special)


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
        ("tool_choice", "must"),
        ("tool_choice.function.name", {"type": "function", "function": {"name": "later"}}),
        ("tools", TOOLS * 65),
        ("tools[0].function.name", [{"type": "function", "function": {"name": "a b"}}]),
        ("tools[0].type", [{"type": "custom", "function": {"name": "f"}}]),
        ("functions", [{"name": "f"}]),
    ],
)
def test_what_cannot_be_called_is_refused(shared, field, value):
    body = {"messages": said("hi"), "tools": TOOLS, field.partition("[")[0].partition(".")[0]: value}
    answer = shared.post(CHAT, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_a_template_without_tools_refuses_them():
    with running_server() as opened:
        answer = opened.post(CHAT, {"messages": said("hi"), "tools": TOOLS})
        error = answer.json()["error"]
        assert (
            answer.status_code == 400 and error["param"] == "tools" and "--chat_template" in error["message"]
        )
