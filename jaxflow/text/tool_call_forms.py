"""The forms of tool calls that chat templates teach, by the names that vLLM gives to their parsers.

A form that carries JSON is checked where its call ends. GLM-4.5 and Qwen3-Coder write bare values, which the
schema of the tool types. Gemma 4 writes a JSON of its own.
"""

import json
import re
from collections.abc import Callable

from jaxflow.text.argument_values import ANY, json_text, strict_json
from jaxflow.text.scan import Scan, Steps, Unexpected
from jaxflow.text.tool_calls import CallWriter, Form, ToolCall

MAX_NAME = 64  # of a function, as in requests
MAX_DEPTH = 32  # of nested values of Gemma 4

# The ends of the keys that an object of a call has.
_NAME_KEY = 'name"'
_ARGUMENTS_KEYS = ('arguments"', 'parameters"')
_KEYS = (_NAME_KEY, *_ARGUMENTS_KEYS, 'type"', 'id"')
_DEPTHS = {"{": 1, "[": 1, "}": -1, "]": -1}
_ESCAPED = re.compile(r".*", re.DOTALL)
_LITERAL = re.compile(r"[^\s,{}\[\]\"<]*")
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
        "no tools, because the chat template of the model shows no known form of a call. Leave tools out, or "
        "start the server with --tool_call_parser and one of " + ", ".join(FORMS)
    )


def check_tools(template: str) -> None:
    """Raise UnknownForm for a chat template that shows no tools to the model."""
    if not re.search(r"\btools\b", template):
        raise UnknownForm(
            "no tools, because the chat template of the model does not show tools to the model. Leave tools "
            "out, or start the server with --chat_template and the file of a template that shows them"
        )


def _hermes(scan: Scan, out: CallWriter) -> Steps[None]:
    """Read `{"name": ..., "arguments": {...}}</tool_call>`. The mark may lack at the end of the answer."""
    yield from scan.blanks()
    yield from scan.expect("{")
    yield from _members(scan, out, ("</tool_call>",))


def _mistral(scan: Scan, out: CallWriter) -> Steps[None]:
    """Read `[{"name": ..., "arguments": {...}}, ...]`, or `name[ARGS]{...}`.

    `[CALL_ID]` and an id may follow the name. A tokenizer may leave out these marks.
    """
    yield from scan.blanks()
    if not (yield from scan.maybe("[")):
        name = yield from _name(scan)
        if (yield from scan.maybe("[CALL_ID]")):
            yield from _name(scan)
        yield from scan.maybe("[ARGS]")
        yield from scan.blanks()
        yield from _streamed(scan, out, name, ())
        out.more("}")
        out.end()
        return
    mark = ","
    while mark == ",":
        yield from scan.blanks()
        yield from scan.expect("{")
        yield from _members(scan, out)
        scan.record("")
        yield from scan.blanks()
        mark = yield from scan.expect(",", "]")


def _llama(scan: Scan, out: CallWriter) -> Steps[None]:
    """Read an object, or several with semicolons between them. Another key than a call has is no call."""
    mark = out.start
    while mark:
        if mark != "{":
            yield from scan.blanks()
            yield from scan.expect("{")
        yield from _members(scan, out, strict=True)
        scan.record("")
        mark = yield from scan.maybe(";", after_blanks=True)


def _members(scan: Scan, out: CallWriter, ends: tuple[str, ...] = (), strict: bool = False) -> Steps[None]:
    """Read a call that is an object of JSON, after its `{`.

    Arguments after the name are streamed. Arguments before it, and those that are a text of JSON, are written
    at the end of the call.

    Args:
      ends: marks after the object, if the form has any. Each ends a call at once.
      strict: the object has arguments and the keys of a call only.

    Raises:
      Unexpected, ValueError, RecursionError: the object is no call.
    """
    name = arguments = ""
    streamed, mark = False, ","
    while mark == ",":
        yield from scan.blanks()
        yield from scan.expect('"')
        key = yield from scan.maybe(*_KEYS)
        if not key:
            if strict:
                raise Unexpected("another key than a call has")
            yield from _string(scan, _drop, ends)
        yield from scan.blanks()
        yield from scan.expect(":")
        yield from scan.blanks()
        if key == _NAME_KEY and not name:
            yield from scan.expect('"')
            name = yield from _name(scan)
            yield from scan.expect('"')
        elif key not in _ARGUMENTS_KEYS or streamed or arguments:
            strict_json((yield from _value(scan, ends)))
        elif name and (yield from scan.comes("{")):
            streamed = True
            yield from _streamed(scan, out, name, ends)
        else:
            arguments = _object_text((yield from _value(scan, ends)))
        yield from scan.blanks()
        mark = yield from scan.expect(",", "}")
    if not name or (strict and not (streamed or arguments)):
        raise Unexpected("no name, or no arguments")
    if ends:
        yield from scan.blanks()
        if not (yield from scan.maybe(*ends)) and not scan.ended:
            raise Unexpected("another text after the object")
    if streamed:
        out.more("}")  # arguments of a call that breaks off stay incomplete JSON
        out.end()
    else:
        out.whole(ToolCall(name, arguments or "{}"))


def _streamed(scan: Scan, out: CallWriter, name: str, ends: tuple[str, ...]) -> Steps[None]:
    """Begin a call, and read and write its arguments, an object, but do not write their last brace."""
    yield from scan.expect("{")
    out.begin(name)
    parts: list[str] = []

    def take(text: str) -> None:
        parts.append(text)
        out.more(text)

    take("{")
    parts.append((yield from _nested(scan, take, ends)))
    strict_json("".join(parts))


def _object_text(text: str) -> str:
    """Return the text of an object from the JSON of an object, or of the text of one. Raises: ValueError."""
    value = strict_json(text)
    if isinstance(value, str):
        text, value = value, strict_json(value)
        text.encode()  # half of a surrogate pair is no text
    if not isinstance(value, dict):
        raise ValueError("the arguments are no object")
    return text


def _value(scan: Scan, ends: tuple[str, ...]) -> Steps[str]:
    """Return the text of a value of JSON. Its caller checks the text."""
    parts: list[str] = []
    mark = yield from scan.maybe('"', "{", "[")
    parts.append(mark)
    if mark == '"':
        yield from _string(scan, parts.append, ends)
    elif mark:
        parts.append((yield from _nested(scan, parts.append, ends)))
    else:
        parts.append((yield from scan.run(_LITERAL)))
    return "".join(parts)


def _nested(scan: Scan, take: Callable[[str], None], ends: tuple[str, ...]) -> Steps[str]:
    """Read an object or an array of JSON after its first mark. Return its last mark, and `take` the rest.

    Raises:
      Unexpected: one of `ends` comes first.
    """
    depth = 1
    while True:
        _, mark = yield from scan.until('"', *_DEPTHS, *ends, take=take)
        if mark in ends:
            raise Unexpected("the value does not end")
        depth += _DEPTHS.get(mark, 0)
        if not depth:
            return mark
        take(mark)
        if mark == '"':
            yield from _string(scan, take, ends)


def _string(scan: Scan, take: Callable[[str], None], ends: tuple[str, ...]) -> Steps[None]:
    """Read a string of JSON after its first quote. See `_nested`."""
    mark = ""
    while mark != '"':
        _, mark = yield from scan.until('"', "\\", *ends, take=take)
        if mark in ends:
            raise Unexpected("the string does not end")
        take(mark if mark == '"' else mark + (yield from scan.run(_ESCAPED, 1)))


def _drop(text: str) -> None:
    """Take a text that is not needed."""


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
    "mistral": Form(("[TOOL_CALLS]",), _mistral, frozenset(("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"))),
    "llama3_json": Form(("{", "<|python_tag|>"), _llama, leads=frozenset(("{",))),
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
