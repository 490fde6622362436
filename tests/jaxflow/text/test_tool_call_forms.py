"""Laws of the streamed forms: what a template writes is read back, from any parts of its text."""

import itertools
import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxflow.text import tool_calls
from jaxflow.text.chat import render_chat
from jaxflow.text.tool_call_forms import FORMS, UnknownForm, form_of
from jaxflow.text.tool_calls import MoreArguments, ToolCall, ToolCallReader, split, whole_calls

# Templates that write an answer of calls as the models' own templates do.
ANSWER = (
    "{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or () %}"
    "{% set f = c.function %}CALL{% endfor %}{% if m.tool_calls %}END{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{{ '' if loop.index > 1 else '<｜tool▁calls▁begin｜>' }}{{ '<｜tool▁call▁begin｜>' + CALL + "
    "'<｜tool▁call▁end｜>' }}"
)
V3 = "c.type + '<｜tool▁sep｜>' + f.name + '\n```json\n' + (f.arguments | tojson) + '\n```'"
V31 = "f.name + '<｜tool▁sep｜>' + f.arguments"
GLM = (
    "{{ '\n<tool_call>' + f.name + '\n' }}{% for k, v in f.arguments.items() %}"
    "{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' }}{{ v if v is string else v | tojson }}"
    "{{ '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}"
)
QWEN = (
    "{{ '\n<tool_call>\n<function=' + f.name + '>\n' }}{% for k, v in f.arguments.items() %}"
    "{{ '<parameter=' + k + '>\n' }}{{ v | tojson if v is mapping else v | string }}"
    "{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}"
)
GEMMA_VALUE = (
    "{% macro written(v) %}{% if v is string %}{{ '<|\"|>' + v + '<|\"|>' }}{% elif v is mapping %}{{ '{' }}"
    "{% for k, x in v.items() %}{{ k }}:{{ written(x) }}{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}"
    "{% elif v is sequence %}[{% for x in v %}{{ written(x) }}{{ '' if loop.last else ',' }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
HERMES = (
    '{{ \'\n<tool_call>\n{"name": "\' + f.name + \'", "arguments": \' }}{{ f.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}"
)
OBJECT = '{{ \'{"name": "\' + f.name + \'", "KEY": \' }}{{ f.arguments | tojson }}}'
MISTRAL = "{{ '[TOOL_CALLS][' if loop.first else ', ' }}" + OBJECT.replace("KEY", "arguments")
MISTRAL_NAMED = "{{ '[TOOL_CALLS]' + f.name + MARK }}{{ f.arguments | tojson }}"
LLAMA = "{{ '' if loop.first else '; ' }}" + OBJECT.replace("KEY", "parameters")
GEMMA = "{{ '<|tool_call>call:' + f.name }}{{ written(f.arguments) }}{{ '<tool_call|>' }}"
# A key is the name of a form, and perhaps a word for a variant.
TEMPLATES = {
    form: macro + ANSWER.replace("CALL", call).replace("END", end)
    for form, macro, call, end in (
        ("glm45", "", GLM, ""),
        ("qwen3_coder", "", QWEN, ""),
        ("deepseek_v3", "", DEEPSEEK.replace("CALL", V3), "<｜tool▁calls▁end｜>"),
        ("deepseek_v31", "", DEEPSEEK.replace("CALL", V31), "<｜tool▁calls▁end｜>"),
        ("gemma4", GEMMA_VALUE, GEMMA, ""),
        ("hermes", "", HERMES, ""),
        ("mistral", "", MISTRAL, "]"),
        ("mistral args", "", MISTRAL_NAMED.replace("MARK", "'[ARGS]'"), ""),
        ("mistral id", "", MISTRAL_NAMED.replace("MARK", "'[CALL_ID]a1b2c3d4e[ARGS]'"), ""),
        ("mistral bare", "", MISTRAL_NAMED.replace("MARK", "''"), ""),
        ("llama3_json", '{# "parameters": dictionary of #}', LLAMA, ""),
    )
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "on": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "items": {"$ref": "#/$defs/list"},
        "more": {"type": ["object", "null"]},
    },
    "$defs": {"list": {"type": "array"}},
}
TOOLS = dict.fromkeys(("look", "a-b.c"), PARAMETERS)
forms = st.sampled_from(sorted(TEMPLATES))
texts = st.text('a7{}":,<>\n é\\', max_size=8).filter(lambda text: "<|" not in text)
scalars = st.integers(-9, 9) | st.booleans() | texts.filter(lambda text: "'" not in text)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts | st.sampled_from(("12", "null", "true", " 1 ", "[]")),
        "count": st.integers(),
        "share": st.floats(-9, 9) | st.integers(-9, 9),
        "on": st.none() | st.booleans(),
        "items": st.lists(scalars, max_size=2),
        "more": st.dictionaries(st.sampled_from(("k", "n m")), scalars, max_size=2),
    },
)
calls = st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), arguments), max_size=3)
contents = st.sampled_from(("", "I look.", "a < b <tool <func"))
cuts = st.lists(st.integers(0, 200), max_size=8)


def named(form):
    """Return the form of a template."""
    return FORMS[form.split()[0]]


def written(form, content, made):
    """Return an answer of calls as the template of the form writes it."""
    message = {"role": "assistant", "content": content}
    if made:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
            for name, given in made
        ]
    return render_chat(TEMPLATES[form], [message])


def read(form, text, bounds=(), most=None):
    """Return the content, the whole calls and the parts of an answer that comes in parts."""
    reader = ToolCallReader(named(form), most, TOOLS)
    at = [0, *sorted(min(bound, len(text)) for bound in bounds), len(text)]
    said = [*(reader.push(text[a:b]) for a, b in itertools.pairwise(at)), reader.finish()]
    parts = [part for _, found in said for part in found]
    found = whole_calls(parts)
    assert reader.num_calls >= len(found)
    sent = ""  # of the latest call
    for part in parts:
        sent = "" if isinstance(part, ToolCall) else sent + part.text
        if isinstance(part, MoreArguments) and part.broken:
            with pytest.raises(json.JSONDecodeError):
                json.loads(sent)
    return "".join(content for content, _ in said), found, parts


@given(forms, contents, calls, cuts)
def test_what_a_template_writes_is_read_back(form, content, made, bounds):
    content = "" if named(form).leads else content
    text = written(form, content, made)
    said, found, parts = read(form, text, bounds)
    assert [(call.name, json.loads(call.arguments)) for call in found] == made
    assert said == (text[: text.index(form_of(TEMPLATES[form]).starts[0])] if made and content else content)
    assert [part for part in parts if isinstance(part, ToolCall)] == [ToolCall(name, "") for name, _ in made]
    types = [[type(value) for value in json.loads(call.arguments).values()] for call in found]
    assert types == [[type(value) for value in given.values()] for _, given in made]


@given(forms, contents, calls.filter(bool), st.integers(0, 400))
def test_a_cut_answer_keeps_its_whole_calls_and_all_other_text(form, content, made, length):
    content = "" if named(form).leads else content
    text = written(form, content, made)
    said, found, _ = read(form, text[:length])
    assert [(call.name, json.loads(call.arguments)) for call in found] == made[: len(found)]
    if not found:
        assert said == text[:length]
    elif len(found) < len(made):
        assert text[:length].endswith(said.removeprefix(content).lstrip("\n"))


def soup(form):
    """Return texts of parts of the form's marks, in any order."""
    pieces = [
        *named(form).starts,
        *named(form).marks,
        "<function=f>",
        "<parameter=text>",
        "</parameter>",
        "</function>",
    ]
    pieces += [
        "look",
        "call:look{",
        "}",
        "{",
        "]",
        "[",
        ",",
        ":",
        "text",
        "{}",
        "```json",
        "```",
        "\n",
        " ",
        "1",
        "a b",
    ]
    pieces += [
        "<tool_call>look<arg_key>text</arg_key><arg_value>",
        "<tool_call><function=look>",
        "<tool_",
        "<｜",
    ]
    pieces += [
        '[{"name": "look", "arguments": {',
        '{"name": "look", "parameters": {',
        "}, {",
        "}]",
        ";",
        "look{",
    ]
    pieces += ['{"name": "look", "arguments": {', '"a": "', "\\", '"', '"}', "}}"]
    return st.lists(st.sampled_from(pieces), max_size=14).map("".join)


@given(st.data(), forms, st.none() | st.integers(0, 1), st.booleans())
def test_the_parts_of_a_text_do_not_matter_and_nothing_is_lost(data, form, most, short):
    text, bounds = data.draw(soup(form)), data.draw(cuts)
    with pytest.MonkeyPatch.context() as patch:
        if short:
            patch.setattr(tool_calls, "MAX_CALL_CHARS", 30)
        whole = read(form, text, (), most)
        for parts in (bounds, range(len(text))):
            assert read(form, text, parts, most)[:2] == whole[:2]
    for call in whole[1]:
        assert isinstance(json.loads(call.arguments), dict)
    if not whole[1] and most is None:
        assert whole[0] == text


@pytest.mark.parametrize("form", sorted(TEMPLATES))
def test_arguments_are_streamed_while_they_are_written(form):
    value = "long " * 40
    text = written(form, "", [("look", {"text": value, "count": 1})])
    reader, told, held = ToolCallReader(named(form), None, TOOLS), 0, []
    for at, character in enumerate(text):
        _, parts = reader.push(character)
        told += sum(len(part.text) for part in parts if isinstance(part, MoreArguments))
        if told > 10 and value[-10:] in text[at:]:
            held.append(at - text.index("long ") - told)
    assert len(held) > 100 and max(held) - min(held) <= 1


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, " -5\n", -5),
        ({"type": "integer"}, "5 or 6", "5 or 6"),
        ({"type": "string"}, "5", "5"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "array"}, "['it\\'s', \"a\", None]", ["it's", "a", None]),
        ({"type": "array"}, '["a"]', ["a"]),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        ({"type": "object"}, "[" * 10**5, "[" * 10**5),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"$ref": "#/$defs/a"}, "7", 7),
        ({"$ref": "#/$defs/loop"}, "7", 7),
        ({"allOf": [{"$ref": "#/$defs/a"}], "nullable": True}, "null", None),
        ({}, "7", 7),
        ({}, "seven", "seven"),
        (None, '{"a": 1}', {"a": 1}),
        ("no schema", "x", "x"),
    ],
)
@pytest.mark.parametrize("form", ["glm45", "qwen3_coder"])
def test_the_schema_types_a_bare_value(form, schema, text, value):
    parameters = {
        "properties": {"x": schema},
        "$defs": {"a": {"type": "INT"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}},
    }
    answers = {
        "glm45": f"<tool_call>f<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call>",
        "qwen3_coder": f"<function=f><parameter=x>{text}</parameter></function>",
    }
    _, [call] = split(answers[form], FORMS[form], parameters={"f": parameters})
    assert json.loads(call.arguments) == {
        "x": value.strip() if form == "qwen3_coder" and value == text else value
    }


@pytest.mark.parametrize(
    ("form", "text", "found"),
    [
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</function>", {"a": 1, "b": 2}),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</tool_call>", {}),
        ("glm45", "<tool_call>f</tool_call>", {}),
        ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>", {}),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>f<｜tool▁sep｜> {} ", {}),
        (
            "gemma4",
            '<|tool_call>call:f{a : nil, b:[ ], <|"|>c<|"|>:word }',
            {"a": None, "b": [], "c": "word"},
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n', {}),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "arguments": {"a": 1}}</tool_call>', {}),
    ],
)
def test_small_departures_from_a_form(form, text, found):
    content, [call] = split(text, FORMS[form])
    assert (content, call.name, json.loads(call.arguments)) == ("", "f", found)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("llama3_json", '{"name": "f", "parameters": {"a": x}}'),
        ("llama3_json", '{"name": "f", "parameters": {"a": [}}}'),
        ("llama3_json", '{"id": x, "name": "f", "parameters": {}}'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": NaN}'),
        ("mistral", '[TOOL_CALLS][{"id": x, "name": "f", "arguments": {}}]'),
    ],
)
def test_what_is_no_json_is_content(form, text):
    assert read(form, text, range(len(text)))[:2] == (text, [])


@pytest.mark.parametrize("begun", ['{"a": [', '{"a": "', '"'])
def test_a_mark_ends_a_call_of_hermes_at_once(begun):
    cut = f'<tool_call>{{"name": "f", "arguments": {begun}</tool_call>'
    text = f'{cut}<tool_call>{{"name": "f", "arguments": {{}}}}</tool_call>'
    assert read("hermes", text, range(len(text)))[:2] == (cut, [ToolCall("f", "{}")])


def test_a_broken_call_is_content_and_the_next_one_is_read():
    text = "<tool_call>look<arg_key>text</arg_key><arg_value>a</arg_value>?<tool_call>look</tool_call>"
    content, found, parts = read("glm45", text, range(len(text)))
    assert (content, found) == (text[: text.index("?") + 1], [ToolCall("look", "{}")])
    assert MoreArguments("", broken=True) in parts


@pytest.mark.parametrize(
    ("form", "text", "certain"),
    [
        ("llama3_json", '{"answer": 42}', '{"an'),
        ("llama3_json", '{"name": "Bob Smith"}', '{"name": "Bob S'),
        ("llama3_json", '{"name": "Bob", "age": 5}', '{"name": "Bob", "ag'),
        ("llama3_json", '{"name": "Bob"}', '{"name": "Bob"}'),
        ("llama3_json", "{a}", "{a"),
        ("llama3_json", 'I say {"name": "look", "parameters": {}}', "I"),
        ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>p"),
        ("mistral", "[1, 2]", "[1"),
        ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]look, then", "[TOOL_CALLS]look,"),
        ("hermes", "<tool_call>look", "<tool_call>l"),
    ],
)
def test_what_only_looks_like_a_call_is_content_as_soon_as_this_is_certain(form, text, certain):
    reader = ToolCallReader(FORMS[form], None, TOOLS)
    said = [reader.push(character) for character in text]
    lengths = list(itertools.accumulate(len(content) for content, _ in said))
    held = len(certain) - 1
    assert lengths == [*[0] * held, *range(held + 1, len(text) + 1)]
    assert reader.finish() == ("", []) and not any(parts for _, parts in said)


@pytest.mark.parametrize(
    ("form", "text", "rest"),
    [
        ("llama3_json", ' <|python_tag|>{"type": "function", "name": "f", "parameters": {}}', ""),
        ("llama3_json", 'Hm.<|python_tag|> {"id": 1, "name": "f", "arguments": "{}"} Done.', " Done."),
        ("llama3_json", '{"parameters": {}, "name": "f"}; so', "; so"),
        ("mistral", '[TOOL_CALLS] [{"id": [{}, "]"], "arguments": {}, "name": "f"}, {"name', ', {"name'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{} Done.", " Done."),
        ("hermes", '<tool_call>{"why": "}", "name": "f", "parameters": {}}</tool_call> Done.', " Done."),
    ],
)
def test_text_after_a_call_is_content(form, text, rest):
    content, found, _ = read(form, text, range(len(text)))
    assert (content.removeprefix("Hm."), found) == (rest, [ToolCall("f", "{}")])


def test_half_of_a_surrogate_pair_stays_an_escape():
    text = '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>'
    assert split(text, FORMS["hermes"]) == ("", [ToolCall("f", '{"a": "\\ud83d"}')])
    inner = '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>'
    assert split(inner, FORMS["hermes"]) == (inner, [])


@pytest.mark.parametrize("form", sorted(TEMPLATES))
def test_a_template_shows_its_form(form):
    assert form_of(TEMPLATES[form]) is named(form)
    with pytest.raises(UnknownForm):
        form_of(TEMPLATES[form].replace("tools", ""))
