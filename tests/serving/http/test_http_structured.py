"""Structured outputs over HTTP, from the body to the answer of a small model."""

import contextlib
import json
import re

import paths
import pytest
from http_harness import CHAT, COMPLETIONS, HELLO, RunningServer, events
from hurry import OFTEN, compiled_with

from jaxflow import LLM
from serving.http.sampling import sampling_params
from serving.http.schema import read_body

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}bot:"
SCHEMA = {"type": "array", "items": {"enum": ["dog", 7]}, "minItems": 1, "maxItems": 3}
FORMATS = [
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
        }
    },
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
    {"guided_json": SCHEMA},
]


@pytest.fixture(scope="module")
def opened():
    settings = {"max_num_batched_tokens": 64, "step_sizes": "16", "plan": "sequential", "max_num_seqs": 8}
    with compiled_with(OFTEN):
        llm = LLM(
            str(paths.MODELS / "stories260K"), block_size=16, num_kv_pages=96, progress=False, **settings
        )
        llm.driver.prepare_masks()
    llm.tokenizer = llm.tokenizer.with_chat_template(TEMPLATE)
    server = RunningServer(llm)
    server.open()
    yield server
    server.close()


def ask(opened, path=CHAT, **body):
    given = {"messages": HELLO} if path == CHAT else {"prompt": "Once upon a time"}
    return opened.post(path, {**given, "max_tokens": 40, "seed": 3, **body})


@pytest.mark.parametrize("body", FORMATS, ids=lambda body: next(iter(body)))
def test_an_answer_has_the_form_by_every_name(opened, body):
    for path, key in ((CHAT, "message"), (COMPLETIONS, "text")):
        answer = ask(opened, path, n=2, **body).json()
        for choice in answer["choices"]:
            text = choice["message"]["content"] if key == "message" else choice["text"]
            assert choice["finish_reason"] == "stop"
            assert set(json.loads(text)) <= {"dog", 7} and json.loads(text)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "ab" | "cd"'}, "ab|cd"),
        ({"guided_regex": "x?y"}, "x?y"),
    ],
)
def test_a_stream_has_the_form(opened, form, pattern):
    chunks = events(ask(opened, stream=True, **form).text)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert re.fullmatch(pattern, text)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_an_object_that_is_cut_ends_by_length(opened):
    answer = ask(opened, response_format={"type": "json_object"}, max_tokens=2).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"].startswith("{")


REFUSED = [
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format.schema"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": {"$ref": "#/x"}}}, "structured_outputs.json"),
    ({"guided_json": {"uniqueItems": True, "type": "array"}}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "start: x"}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize(("body", "field"), REFUSED, ids=[field for _, field in REFUSED])
def test_a_wrong_form_is_refused_by_the_name_of_its_field(opened, body, field):
    for path in (CHAT, COMPLETIONS):
        answer = ask(opened, path, **body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text


def test_the_form_begins_after_the_reasoning(opened):
    llm, plain = opened.llm, opened.llm.tokenizer
    try:
        for end, shown in (("<think>\n", ""), ("<think>\n\n</think>\n\n", "7")):
            llm.tokenizer = plain.with_chat_template(TEMPLATE + end)
            message = ask(opened, guided_choice=["7"], max_tokens=12).json()["choices"][0]["message"]
            assert (message["content"] or "") == shown and bool(message.get("reasoning")) != bool(shown)
    finally:
        llm.tokenizer = plain


def test_harmony_has_no_forms(opened):
    llm, plain = opened.llm, opened.llm.tokenizer
    try:
        llm.tokenizer = plain.with_chat_template(TEMPLATE + "{# <|start|><|channel|><|message|> #}")
        answer = ask(opened, guided_choice=["7"])
    finally:
        llm.tokenizer = plain
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "guided_choice"


PLACE = {
    "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 5}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now", "parameters": NOTHING}},
]
HERMES = TEMPLATE + "{% if false %}{{ tools }}<tool_call>{% endif %}"
LLAMA = TEMPLATE + '{% if false %}{{ tools }}"parameters": dictionary of{% endif %}'


@contextlib.contextmanager
def template(opened, source):
    """Serve with another chat template."""
    llm, plain = opened.llm, opened.llm.tokenizer
    llm.tokenizer = plain.with_chat_template(source)
    try:
        yield
    finally:
        llm.tokenizer = plain


@pytest.mark.parametrize("source", [HERMES, LLAMA], ids=["hermes", "llama"])
def test_a_forced_call_is_a_call_of_a_tool(opened, source):
    named = {"type": "function", "function": {"name": "weather"}}
    with template(opened, source):
        for choice in ("required", named):
            body = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
            for stream in (False, True):
                answer = ask(opened, stream=stream, **body)
                if stream:
                    chunks = [chunk["choices"][0] for chunk in events(answer.text)]
                    parts = [part for one in chunks for part in one["delta"].get("tool_calls", ())]
                    found = "".join(part["function"]["arguments"] for part in parts)
                    name, reason = parts[0]["function"]["name"], chunks[-1]["finish_reason"]
                else:
                    (found,) = answer.json()["choices"]
                    reason, (call,) = found["finish_reason"], found["message"]["tool_calls"]
                    name, found = call["function"]["name"], call["function"]["arguments"]
                    assert not found.isspace() and not answer.json()["choices"][0]["message"]["content"]
                assert reason == "tool_calls"
                given = json.loads(found)
                assert name == "weather" or (choice == "required" and (name, given) == ("now", {}))
                if name == "weather":
                    assert given["city"] in ("Rome", "Oslo") and 1 <= given["days"] <= 5


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": None}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}]},
            "tools[0].function.parameters.$ref",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]}, "tools"),
    ],
)
def test_a_call_that_cannot_be_forced_is_refused(opened, body, field):
    with template(opened, HERMES):
        answer = ask(opened, **{"tools": TOOLS, "tool_choice": "required", **body})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text


def test_only_calls_of_json_can_be_forced(opened):
    with template(opened, HERMES + "{# <arg_key> #}"):
        answer = ask(opened, tools=TOOLS, tool_choice="required")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice"


def test_free_text_is_no_form():
    for body in ({}, {"response_format": {"type": "text"}}, {"guided_json": None}):
        request = read_body(COMPLETIONS, json.dumps({"prompt": "x", **body}).encode())
        assert sampling_params(request, {}).structured_outputs is None
