"""Laws of the reader of tool calls: any parts of an answer give the calls and the content of the whole."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxflow.text.tool_call_forms import UnknownForm, form_of
from jaxflow.text.tool_calls import ToolCall, ToolCallReader, split, whole_calls

QWEN = r"""{%- if tools %}{{ "<tool_call>\n{\"name\": <function-name>}\n</tool_call>" }}{% endif %}"""
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]"
LLAMA = (
    """{% if tools %}{{ 'in the format {"name": f, "parameters": dictionary of arguments}' }}{% endif %}"""
)
FORMS = {"qwen": form_of(QWEN), "mistral": form_of(MISTRAL), "llama": form_of(LLAMA)}

names = st.text("abc_", min_size=1, max_size=4)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
calls = st.lists(st.tuples(names, st.dictionaries(names, values, max_size=2)), max_size=3)


def written(form: str, made: list) -> str:
    """Return calls as a model writes them."""
    key = "parameters" if form == "llama" else "arguments"
    objects = [json.dumps({"name": name, key: arguments}) for name, arguments in made]
    match form:
        case "qwen":
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
        case "llama":
            return "; ".join(objects)
    return f"[TOOL_CALLS][{', '.join(objects)}]" if made else ""


@given(st.data(), st.sampled_from(sorted(FORMS)), calls)
def test_calls_are_read_as_they_were_written(data, form, made):
    before = "" if form == "llama" else data.draw(st.sampled_from(["", "\n ", "I look.\n", "a < b <tool"]))
    content, found = split(before + written(form, made), FORMS[form])
    assert [(call.name, json.loads(call.arguments)) for call in found] == made
    assert content == ("" if made and not before.strip() else before)


parts = st.lists(
    st.sampled_from(
        (
            *(
                "<tool_call>",
                "</tool_call>",
                "<tool",
                "_call>",
                "[TOOL_",
                "CALLS]",
                "[",
                "]",
                "{",
                "}",
                ";",
                " ",
            ),
            *('{"name": "f"}', '"a"', "\n", "text", '{"name": "g", "arguments": {"x": 1}}', "[ARGS]"),
        )
    ),
    max_size=12,
)


@given(st.sampled_from(sorted(FORMS)), parts, st.none() | st.integers(0, 2))
def test_the_parts_of_an_answer_change_nothing(form, pieces, most):
    reader = ToolCallReader(FORMS[form], most)
    read = [*map(reader.push, pieces), reader.finish()]
    together = (
        "".join(content for content, _ in read),
        whole_calls(part for _, found in read for part in found),
    )
    assert together == split("".join(pieces), FORMS[form], most)


def test_text_is_not_held_back_for_long():
    reader = ToolCallReader(FORMS["qwen"])
    assert [reader.push(part)[0] for part in ("Hel", "lo <", "b> and <tool")] == ["Hel", "lo ", "<b> and "]
    assert reader.finish() == ("<tool", [])


@pytest.mark.parametrize("arguments", ['"{}"', "{}"])
def test_arguments_may_be_a_text_of_json(arguments):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert split(text, FORMS["qwen"]) == ("", [ToolCall("f", "{}")])


@pytest.mark.parametrize(
    "wrong", ["<tool_call>{</tool_call>", '<tool_call>{"name": 5}</tool_call>', "<tool_call>" + "[" * 10**5]
)
def test_what_is_no_call_is_content(wrong):
    assert split(wrong, FORMS["qwen"]) == (wrong, [])


def test_the_newer_form_of_mistral():
    text = '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}'
    assert split(text, FORMS["mistral"])[1] == [ToolCall("f", '{"x": 1}'), ToolCall("g", "{}")]


@pytest.mark.parametrize(
    ("template", "flag"),
    [("{{ messages }}", "chat_template"), ("{{ tools }}", "parser"), ("{{ tools }}<tool>", "parser")],
)
def test_a_template_without_a_known_form(template, flag):
    with pytest.raises(UnknownForm, match=flag):
        form_of(template)
