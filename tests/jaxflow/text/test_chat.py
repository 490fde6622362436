"""Chat templates: goldens, the names that templates may read, and the names that the sandbox hides."""

import copy
import re

import pytest
import toy_vocabularies
from tokenizers import processors

from jaxflow.config import ConfigError
from jaxflow.text import template_sandbox
from jaxflow.text.chat import REASONING_NAMES, encode_chat, read_chat_template, render_chat
from jaxflow.text.template_sandbox import ChatTemplateError
from jaxflow.text.tokenizer import load_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt "
    "%}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    return load_tokenizer(smollm2_gguf)


def test_goldens(smollm2, goldens):
    chats = [prompt for prompt in goldens("smollm2-135m-q4")["prompts"] if "messages" in prompt]
    assert len(chats) == 3
    for prompt in chats:
        assert render_chat(smollm2, prompt["messages"]) == prompt["text"]
        assert encode_chat(smollm2, prompt["messages"]) == prompt["prompt_ids"]


def test_the_generation_prompt_can_be_left_out(smollm2):
    assert (
        render_chat(smollm2, HELLO)
        == render_chat(smollm2, HELLO, add_generation_prompt=False) + "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "last",
    [
        "The answer",
        "ends with space ",
        "",
        "  x\n",
        "twice Hello twice",
        "with \ue000 and \ue000\ue000 in it",
    ],
)
def test_the_last_message_can_be_continued(smollm2, last):
    messages = [*HELLO, {"role": "assistant", "content": last}]
    continued = render_chat(smollm2, messages, continue_final_message=True)
    assert continued.endswith("<|im_start|>assistant\n" + last)
    assert render_chat(smollm2, messages, add_generation_prompt=False) == continued + "<|im_end|>\n"
    assert messages[-1]["content"] == last


def test_a_template_that_trims_can_be_continued_too():
    trimming = "{% for m in messages %}{{ m.content | trim }}|{% endfor %}"
    assert (
        render_chat(trimming, [{"role": "assistant", "content": " a b "}], continue_final_message=True)
        == "a b "
    )
    with pytest.raises(ChatTemplateError, match="leaves out the last message"):
        render_chat("{{ messages[0].role }}", HELLO, continue_final_message=True)


# A template of harmony's form (gpt-oss): a system message with the date and the effort, the caller's system
# message as the developer's, channels of the assistant.
HARMONY = """
{%- macro say(role, text, end="<|end|>") -%}
    {{- "<|start|>" + role + "<|message|>" + text + end -}}
{%- endmacro -%}
{%- if reasoning_effort is not defined %}{% set reasoning_effort = "medium" %}{% endif -%}
{{- say("system", "Date: " + strftime_now("%Y") + "\\nReasoning: " + reasoning_effort) -}}
{%- if messages[0].role in ["developer", "system"] -%}
    {%- set developer, messages = messages[0].content, messages[1:] -%}
    {{- say("developer", "# Instructions\\n\\n" + developer) -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == "assistant" -%}
        {{- say("assistant<|channel|>final", message.content, "<|return|>" if loop.last else "<|end|>") -}}
    {%- else -%}
        {{- say(message.role, message.content) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif -%}
"""


@pytest.mark.parametrize("effort", [None, "high"])
def test_a_template_of_harmonys_form(effort):
    given = [
        {"role": "system", "content": "Be short."},
        *HELLO,
        {"role": "assistant", "content": "Hi"},
        *HELLO,
    ]
    kwargs = None if effort is None else {"reasoning_effort": effort}
    text = render_chat(HARMONY, given, template_kwargs=kwargs)
    assert re.sub(r"Date: \d{4}", "Date", text) == (
        f"<|start|>system<|message|>Date\nReasoning: {effort or 'medium'}<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe short.<|end|><|start|>user<|message|>Hello<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hi<|end|><|start|>user<|message|>Hello<|end|><|start|>assistant"
    )


def test_a_continued_message_is_followed_by_no_generation_prompt():
    assert (
        render_chat(
            "{{ add_generation_prompt }} {{ messages[0].content }}", HELLO, continue_final_message=True
        )
        == "False Hello"
    )


def test_only_the_template_adds_a_bos(tmp_path):
    backend = toy_vocabularies.byte_level_bpe()
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    files = {
        "tokenizer.json": backend,
        "tokenizer_config.json": {"bos_token": "<s>"},
        "chat_template.jinja": "{{ bos_token }}cat",
    }
    tokenizer = load_tokenizer(toy_vocabularies.write_folder(tmp_path, files))
    assert encode_chat(tokenizer, HELLO) == tokenizer.encode("cat")


def test_templates_find_their_special_tokens_and_settings(tmp_path):
    files = {
        "tokenizer.json": toy_vocabularies.byte_level_bpe(),
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"},
        "chat_template.jinja": (
            "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ unk_token }}{{ tools is none }}"
        ),
    }
    tokenizer = load_tokenizer(toy_vocabularies.write_folder(tmp_path, files))
    assert render_chat(tokenizer, HELLO) == "<s>Hello</s>True"
    assert encode_chat(tokenizer, HELLO)[0] == 0


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (PLAIN, "[user]Hello[assistant]"),
        ("{% if true %}\n  x\n{% endif %}\n", "  x\n"),  # blocks take no lines of their own
        ("{{ {'a': '<é>', 'b': [1]} | tojson }}", '{"a": "<é>", "b": [1]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "Hello"),
        (
            (
                "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% "
                "endif %}{{ i }}{% endfor %}"
            ),
            "013",
        ),
        (
            (
                "{% for m in messages %}{{ loop.first }}{{ loop.last }}{{ loop.index0 }}{{ loop.length "
                "}}{% endfor %}"
            ),
            "TrueTrue01",
        ),
        (
            (
                "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i * 2 %}{% "
                "endfor %}{{ ns.n }}"
            ),
            "6",
        ),
        ("{% macro twice(x) %}{{ x * 2 }}{% endmacro %}{{ twice('ab') }}{{ 2 ** 3 }}", "abab8"),
        (
            (
                "{{ messages[0].content.upper().split('L') | length }}{{ messages | selectattr('role', "
                "'equalto', 'user') | list | length }}"
            ),
            "31",
        ),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% for a, b in {'k': 'v'}.items() %}{{ a }}{{ b }}{% endfor %}", "kv"),
        (
            (
                "{% for x in [1, 2, 3] if x != 2 %}{{ x }}{% else %}none{% endfor %}{% for x in [] %}{% "
                "else %}none{% endfor %}"
            ),
            "13none",
        ),
    ],
)
def test_supported_template_features(template, text):
    assert render_chat(template, HELLO) == text


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("a\n{% if %}", "line 2: "),
        ("{% bogus %}", "line 1: .*bogus"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content + 1 }}", "chat template: "),
        ("{% include 'other' %}", "chat template: "),
        ("{{ messages.append(1) }}", "chat template: .*safe"),
        ("{{ messages[0].update(role='x') }}", "chat template: .*safe"),
    ],
)
def test_a_template_that_fails_raises_chat_template_error(template, says):
    with pytest.raises(ChatTemplateError, match=says):
        render_chat(template, HELLO)


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__",
        "''['__class__']",
        "'' | attr('__class__')",
        "messages | map(attribute='__class__') | list",
        "'{0.__class__.__mro__}'.format('')",
        "'{0.__class__}' | format(messages)",
        "'{a.__class__}'.format_map({'a': ''})",
        "raise_exception.__globals__",
        "strftime_now.__globals__['__builtins__']",
        "cycler.__init__.__globals__.os",
        "self.__init__.__globals__",
        "lipsum.__globals__['os'].popen('id').read()",
        "namespace.__init__",
        "joiner.__init__.__func__",
        "(messages | first).__class__.__base__.__subclasses__()",
        "range.__self__",
        "self._TemplateReference__context",
    ],
)
def test_templates_reach_no_attribute_of_python(expression):
    try:
        text = render_chat("{{ " + expression + " }}", HELLO)
    except ChatTemplateError:
        return
    assert not re.search(r"class|function|method|object|module|Context|uid=", text.replace(expression, "")), (
        text
    )


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "does not end within",
        ),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "does not end within",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for x in [[]] recursive %}{{ loop([x]) }}{% endfor %}", "recursive loops are not supported"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        (
            "{% for a in range(50000) %}{{ messages[0].content * 1000 }}{% endfor %}",
            "makes texts and lists of",
        ),
        ("{{ 9 ** 9 ** 9 ** 9 }}", "uses \\*\\* with operands that are not small numbers"),
        ("{{ 'x' * 10 ** 12 }}", "repeats a value"),
        ("{{ 10 ** 12 * [1] }}", "repeats a value"),
        (
            (
                "{% set jaxflow_counted = 1 %}{% for a in range(99999) %}{% for b in range(99999) %}{% "
                "endfor %}{% endfor %}"
            ),
            "does not end within",
        ),
    ],
)
def test_templates_take_a_bounded_number_of_steps(monkeypatch, template, says):
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 100_000)
    with pytest.raises(ChatTemplateError, match=says):
        render_chat(template, HELLO)
    assert render_chat(PLAIN, HELLO) == "[user]Hello[assistant]"  # the steps of one rendering are no other's


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages: 0 messages; accepted: 1 to 10000"),
        (HELLO * 10_001, "messages: 10001 messages"),
        ([{"role": "user"}], r"messages\[0\].content is null, not a text"),
        ([*HELLO, {"role": 3, "content": ""}], r"messages\[1\].role is an int"),
        (["Hello"], r"messages\[0\] is a str, not an object"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}],
            r"messages\[0\].content\[1\].type='image_url' is not accepted: text",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\].text is null"),
        ([{"role": "user", "content": [None]}], r"messages\[0\].content\[0\] is null, not a text part"),
        ([{"role": "user", "content": None}], r"messages\[0\].content is null"),
        ([{"role": "a<b", "content": ""}], r"messages\[0\].role is 'a<b'"),
        ([{"role": "user", "content": "", "tool_calls": [{}]}], r"messages\[0\].tool_calls is not accepted"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"messages\[0\].tool_calls\[0\] is not accepted"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            r"messages\[0\].tool_calls\[0\].function.arguments is not JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            r"function.arguments is a list, not an object",
        ),
        ([{"role": "tool", "content": "x", "tool_call_id": 3}], r"messages\[0\].tool_call_id is an int"),
        ([{"role": "", "content": "x"}], r"messages\[0\].role is empty"),
        (
            [{"role": "user", "content": "a\ud83d"}],
            r"messages\[0\].content: the text has a lone surrogate U\+D83D at character 1",
        ),
        (
            [{"role": "user", "content": "x" * 2_000_001}] * 2,
            "messages: over 4000000 characters",
        ),
    ],
)
def test_malformed_messages_are_refused_by_place(messages, says):
    with pytest.raises(ChatTemplateError, match=says):
        render_chat(PLAIN, messages)


SHOWN = "{% for m in messages %}{{ m | tojson(sort_keys=true) }}{% endfor %}"
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, null]}'}}


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            '{"content": "a\\nb", "role": "user"}',
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            '{"content": "", "role": "assistant", "tool_calls": [{"function": '
            '{"arguments": {"x": [1, null]}, "name": "f"}, "id": "c1", "type": "function"}]}',
        ),
        (
            {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "f"},
            '{"content": "4", "name": "f", "role": "tool", "tool_call_id": "c1"}',
        ),
        ({"role": "developer", "content": "x"}, '{"content": "x", "role": "system"}'),
        (
            {"role": "assistant", "content": "x", "reasoning_content": "y", "tool_calls": []},
            '{"content": "x", "reasoning_content": "y", "role": "assistant"}',
        ),
    ],
)
def test_templates_get_the_messages_of_openai(message, shown):
    assert render_chat(SHOWN, [message]) == shown


@pytest.mark.parametrize("given", REASONING_NAMES)
@pytest.mark.parametrize("read", REASONING_NAMES)
def test_templates_get_the_reasoning_by_the_name_that_they_read(given, read):
    empty = dict.fromkeys(REASONING_NAMES, "")
    message = {"role": "assistant", "content": None, **empty, given: "y"}
    assert render_chat(f"{{{{ messages[0].{read} }}}}", [message]) == "y"
    with pytest.raises(ChatTemplateError, match=given):
        render_chat("x", [{"role": "assistant", "content": "x", given: 1}])


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"content": "x", "reasoning": "y", "tool_calls": [CALL]}, "|y\n\nx"),
        ({"content": None, "reasoning": "y", "tool_calls": [CALL]}, "|y"),
        ({"content": "x", "reasoning": "", "tool_calls": [CALL]}, "|x"),
        ({"content": "x", "tool_calls": [CALL]}, "x|"),
        ({"content": "x", "reasoning": "y"}, "x|y"),
    ],
)
def test_a_harmony_call_has_either_content_or_reasoning(message, shown):
    template = "{# <|start|><|channel|><|message|> #}{{ messages[0].content }}|{{ messages[0].thinking }}"
    assert render_chat(template, [{"role": "assistant", **message}]) == shown


def test_a_template_that_knows_developers_gets_them():
    knows = "{{ messages[0].role }}{# developer #}"
    assert render_chat(knows, [{"role": "developer", "content": "x"}]) == "developer"


def test_templates_get_tools_and_their_own_variables():
    template = "{{ tools[0].function.name }} {{ enable_thinking }} {{ limits.most }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    given = {"enable_thinking": False, "limits": {"most": 3}}
    assert render_chat(template, HELLO, tools=tools, template_kwargs=given) == "f False 3"
    assert render_chat("{{ tools is none }}", HELLO, tools=[]) == "True"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        *(({name: 1}, "a name that no other setting has") for name in ("messages", "tools", "range", "a-b")),
        ({"bos_token": "x"}, "a name that no other setting has"),
        ({"x": object()}, "chat_template_kwargs has an object, not a JSON value"),
        ({"x": "y" * 4_000_001}, "over 4000000 characters"),
        ({f"x{i}": 1 for i in range(65)}, "65 entries"),
        ({"x": [1] * 200_001}, "too many values"),
    ],
)
def test_template_variables_are_bounded_and_hide_nothing(tmp_path, given, says):
    files = {
        "tokenizer.json": toy_vocabularies.byte_level_bpe(),
        "tokenizer_config.json": {"bos_token": "<s>", "chat_template": PLAIN},
    }
    tokenizer = load_tokenizer(toy_vocabularies.write_folder(tmp_path, files))
    with pytest.raises(ChatTemplateError, match=says) as refused:
        render_chat(tokenizer, HELLO, template_kwargs=given)
    assert refused.value.field in ("chat_template_kwargs", "messages")


def test_deep_values_are_refused():
    deep = []
    for _ in range(40):
        deep = [deep]
    with pytest.raises(ChatTemplateError, match="too many values"):
        render_chat(PLAIN, HELLO, template_kwargs={"x": deep})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "can be read"),
        (b"\xff", "a Jinja template in UTF-8"),
        (b"{% if %}", "line 1"),
        (b"x" * 500_001, "500001"),
    ],
)
def test_a_chat_template_file_is_checked(tmp_path, content, says):
    path = tmp_path / "t.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as refused:
        read_chat_template(str(path))
    assert refused.value.field == "chat_template"


def test_a_chat_template_file_replaces_the_models(tmp_path, models_dir):
    (tmp_path / "t.jinja").write_text("new {{ messages[0].content }}")
    tokenizer = load_tokenizer(models_dir / "stories260K")
    other = tokenizer.with_chat_template(read_chat_template(str(tmp_path / "t.jinja")))
    assert render_chat(other, HELLO) == "new Hello"
    assert tokenizer.chat_template is None


def test_a_model_without_a_template_says_so(models_dir):
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        render_chat(load_tokenizer(models_dir / "stories260K"), HELLO)


def test_render_chat_does_not_change_the_messages():
    messages = [{"role": "user", "content": "x", "extra": object()}]
    before = copy.copy(messages[0])
    render_chat(PLAIN, messages, continue_final_message=True)
    assert messages == [before]
