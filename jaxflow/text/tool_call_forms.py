"""The forms of tool calls that chat templates teach, by the names that vLLM gives to their parsers.

A form that carries JSON is checked where its call ends. GLM-4.5 and Qwen3-Coder write bare values, which the
schema of the tool types. Gemma 4 writes a JSON of its own. Calls are streamed while the model writes them,
except those of Mistral and Llama.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from jaxflow.text.argument_values import ANY, json_text, strict_json
from jaxflow.text.scan import Scan, Steps, Unexpected
from jaxflow.text.tool_calls import CallWriter, Form, ToolCall

MAX_NAME = 64  # of a function, as in requests
MAX_DEPTH = 32  # of nested values of Gemma 4

# The text of a call of Hermes before the key `arguments`, and between this key and the value.
_ARGUMENTS = '"arguments"'
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*')
_COLON = re.compile(r"[\s:]*")
_CHARACTER = re.compile(r".*", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_KEY = re.compile(r"[^:,{}\[\]<]*")
_BARE = re.compile(r"[^,{}\[\]<]*")


class UnknownForm(ValueError):
    """A chat template without tools, or one whose form of a tool call is not known."""


def form_of(template: str) -> Form:
    """Return the form of the tool calls that a chat template shows to the model.

    Raises:
      UnknownForm: naming the known forms.
    """
    check_tools(template)
    shown = template.replace("\\", "")  # quotes within a string of the template have a backslash
    for marks, name in _SHOWN:
        if all(mark in shown for mark in marks):
            return FORMS[name]
    raise UnknownForm(
        "none, because the chat template shows no known form of a call. --tool_call_parser can name one of "
        + ", ".join(FORMS)
    )


def check_tools(template: str) -> None:
    """Raise UnknownForm for a chat template that shows no tools to the model."""
    if not re.search(r"\btools\b", template):
        raise UnknownForm(
            "none, because the chat template of the model has no tools. --chat_template can name another one"
        )


def _call(value: Any, key: str = "arguments") -> ToolCall:
    """Return the call of a JSON value. Raises: ValueError."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no object with a name")
    arguments = value.get(key, value.get("arguments", {}))
    if isinstance(arguments, str):
        arguments = strict_json(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"{key} is no object")
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _hermes(scan: Scan, out: CallWriter) -> Steps[None]:
    """Read `{"name": ..., "arguments": {...}}</tool_call>`. The mark may lack at the end of the answer.

    A call is streamed if its name comes first, and its arguments are an object.
    """
    end = "</tool_call>"
    before, mark = yield from scan.until(_ARGUMENTS, end, may_end=True)
    parts, head = [before], None
    if mark == _ARGUMENTS:
        parts += [mark, (yield from scan.run(_COLON))]
        head = _HEAD.fullmatch(before) if (yield from scan.comes("{")) else None
    if head:

        def take(text: str) -> None:
            parts.append(text)
            out.more(text)

        out.begin(json.loads(head[1]))
        yield from _object(scan, take, end)
        parts.append("}")
    if mark != end:
        parts.append((yield from scan.until(end, may_end=True))[0])
    call = _call(strict_json("".join(parts)))
    if head:
        out.more("}")  # arguments of a call that breaks off stay incomplete JSON
        out.end()
    else:
        out.whole(call)


def _object(scan: Scan, take: Callable[[str], None], end: str) -> Steps[None]:
    """Read an object of JSON, and give its parts to `take`, but not its last brace.

    Raises:
      Unexpected: `end` comes first.
    """
    depth = 0
    while True:
        _, mark = yield from scan.until('"', "{", "}", end, take=take)
        if mark == end:
            raise Unexpected("the object does not end")
        depth += {"{": 1, "}": -1}.get(mark, 0)
        if not depth:
            return
        take(mark)
        if mark == '"':
            yield from _string(scan, take, end)


def _string(scan: Scan, take: Callable[[str], None], end: str) -> Steps[None]:
    """Read a string of JSON after its first quote. See `_object`."""
    mark = ""
    while mark != '"':
        _, mark = yield from scan.until('"', "\\", end, take=take)
        if mark == end:
            raise Unexpected("the string does not end")
        take(mark if mark == '"' else mark + (yield from scan.run(_CHARACTER, 1)))


def _mistral(scan: Scan, out: CallWriter) -> Steps[None]:
    """Read `[{"name": ..., "arguments": {...}}, ...]`, or `name[ARGS]{...}` with `[TOOL_CALLS]` between."""
    text, _ = yield from scan.until(may_end=True)
    if text.lstrip().startswith("["):
        calls = [_call(value) for value in strict_json(text)]
    else:
        parts = [part.partition("[ARGS]") for part in text.split("[TOOL_CALLS]")]
        calls = [_call({"name": name.strip(), "arguments": strict_json(text)}) for name, _, text in parts]
    for call in calls:
        out.whole(call)


def _llama(scan: Scan, out: CallWriter) -> Steps[None]:
    """Read one object or several, with semicolons between them."""
    text, _ = yield from scan.until(may_end=True)
    calls, at = [], 0
    text = "{" + text.rstrip()
    decoder = json.JSONDecoder()
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        calls.append(_call(value, "parameters"))
        while at < len(text) and text[at] in " \n;":
            at += 1
    for call in calls:
        out.whole(call)


def _name(scan: Scan) -> Steps[str]:
    """Read the name of a function with the white space around the name. Raises: Unexpected."""
    yield from scan.blanks()
    name = yield from scan.run(_NAME, MAX_NAME)
    if not name:
        raise Unexpected("no name")
    yield from scan.blanks()
    return name


def _glm(scan: Scan, out: CallWriter) -> Steps[None]:
    """Read `name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>`."""
    name = yield from _name(scan)
    mark = yield from scan.expect("<arg_key>", "</tool_call>")
    out.begin(name)
    while mark == "<arg_key>":
        key, _ = yield from scan.until("</arg_key>")
        yield from scan.blanks()
        yield from scan.expect("<arg_value>")
        yield from out.value(key.strip(), scan, "</arg_value>")
        yield from scan.blanks()
        mark = yield from scan.expect("<arg_key>", "</tool_call>")
    out.end_values()


def _qwen3_coder(scan: Scan, out: CallWriter) -> Steps[None]:
    """Read `<function=name><parameter=key>value</parameter>…</function></tool_call>`.

    A line end after `>` and one before `</parameter>` are no part of the value. The model may leave out the
    marks around the function, and `</parameter>` before the next line's mark.
    """
    if out.start == "<tool_call>":
        yield from scan.blanks()
        yield from scan.expect("<function=")
    name = yield from _name(scan)
    yield from scan.expect(">")
    out.begin(name)
    mark = ""
    while True:
        if not mark:
            yield from scan.blanks()
            mark = yield from scan.expect("<parameter=", "</function>", "</tool_call>")
        if not mark.endswith("<parameter="):
            break
        key, _ = yield from scan.until(">")
        yield from scan.maybe("\n")
        mark = yield from out.value(
            key.strip(), scan, "\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>"
        )
        mark = "" if mark.endswith("</parameter>") else mark
    out.end_values()
    if mark != "</tool_call>":
        yield from scan.maybe("</tool_call>", after_blanks=True)


_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _deepseek(scan: Scan, out: CallWriter) -> Steps[None]:
    """Read a call of DeepSeek-V3.1, or one of V3 and R1, which have a type and a fence.

    The former is `name<｜tool▁sep｜>{…}`, and the latter is `function<｜tool▁sep｜>name`, a line of three
    backquotes and `json`, `{…}`, and a line of three backquotes. The answer may end after `}`.
    """
    if out.start == _CALLS:
        yield from scan.blanks()
        yield from scan.expect(_CALL)
    name = yield from _name(scan)
    yield from scan.expect(_SEPARATOR)
    ends = (_CALL_END,)
    yield from scan.blanks()
    if not (yield from scan.comes("{", _CALL_END)):
        name = yield from _name(scan)
        yield from scan.expect("```json")
        yield from scan.blanks()
        if not (yield from scan.comes("{", "```")):
            raise Unexpected("no object")
        ends = tuple(before + _CALL_END for before in ("\n```", "```", "\n```\n", "```\n"))
    out.begin(name)
    parts: list[str] = []

    def take(text: str) -> None:
        parts.append(text)
        out.more(text)

    _, mark = yield from scan.until(*ends, take=take, may_end=True)
    text = "".join(parts)
    if mark and not text.strip():
        out.more("{}")
    else:
        strict_json(text)
    out.end()
    yield from scan.maybe(_CALLS_END, after_blanks=True)


_QUOTE = '<|"|>'


def _gemma4(scan: Scan, out: CallWriter) -> Steps[None]:
    """Read `call:name{key:value,…}<tool_call|>`. The mark may lack."""
    yield from scan.expect("call:")
    name = yield from _name(scan)
    yield from scan.expect("{")
    out.begin(name)
    yield from _gemma4_object(scan, out, MAX_DEPTH)
    out.end()
    yield from scan.maybe("<tool_call|>", after_blanks=True)


def _gemma4_object(scan: Scan, out: CallWriter, depth: int) -> Steps[None]:
    """Read an object after its `{`. Keys are bare, or between quotes."""
    out.more("{")
    yield from scan.blanks()
    mark = yield from scan.maybe("}")
    while mark != "}":
        yield from scan.blanks()
        if (yield from scan.maybe(_QUOTE)):
            key, _ = yield from scan.until(_QUOTE)
            yield from scan.blanks()
        else:
            key = (yield from scan.run(_KEY)).strip()
        yield from scan.expect(":")
        out.more(json.dumps(key, ensure_ascii=False) + ": ")
        yield from _gemma4_value(scan, out, depth)
        mark = yield from scan.expect(",", "}")
        out.more(", " if mark == "," else "")
    out.more("}")


def _gemma4_value(scan: Scan, out: CallWriter, depth: int) -> Steps[None]:
    """Read a value with the white space around the value."""
    if not depth:
        raise Unexpected("values are nested too deeply")
    yield from scan.blanks()
    mark = yield from scan.maybe(_QUOTE, "{", "[")
    if mark == _QUOTE:
        out.more('"')
        yield from scan.until(_QUOTE, take=out.more_text)
        out.more('"')
    elif mark == "{":
        yield from _gemma4_object(scan, out, depth - 1)
    elif mark == "[":
        out.more("[")
        yield from scan.blanks()
        mark = yield from scan.maybe("]")
        while mark != "]":
            yield from _gemma4_value(scan, out, depth - 1)
            mark = yield from scan.expect(",", "]")
            out.more(", " if mark == "," else "")
        out.more("]")
    else:
        text = (yield from scan.run(_BARE)).strip()
        out.more("null" if text in ("None", "nil") else json_text(text, ANY))
    yield from scan.blanks()


_DEEPSEEK = Form((_CALLS, _CALL), _deepseek, frozenset((_CALLS, _CALLS_END, _CALL, _SEPARATOR, _CALL_END)))
_TAGS = frozenset(("<tool_call>", "</tool_call>"))
_GLM_TAGS = _TAGS | {"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}

# The forms by the names of vLLM's parsers.
FORMS = {
    "hermes": Form(("<tool_call>",), _hermes, _TAGS),
    "mistral": Form(("[TOOL_CALLS]",), _mistral, frozenset(("[TOOL_CALLS]",))),
    "llama3_json": Form(("{",), _llama, leads=True),
    "glm45": Form(("<tool_call>",), _glm, _GLM_TAGS),
    "qwen3_coder": Form(("<tool_call>", "<function="), _qwen3_coder, _TAGS),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "gemma4": Form(("<|tool_call>",), _gemma4, frozenset(("<|tool_call>", "<tool_call|>", _QUOTE))),
}
# Texts that a template has together, and the form. The first that fits counts.
_SHOWN = (
    (("[TOOL_CALLS]",), "mistral"),
    ((_CALL, _SEPARATOR, "```json"), "deepseek_v3"),
    ((_CALL, _SEPARATOR), "deepseek_v31"),
    (("<|tool_call>call:",), "gemma4"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (('"parameters": dictionary of',), "llama3_json"),
)
