"""Tool calls in the text of an answer: the forms that chat templates teach, and a reader of growing text.

A model writes a call as text. A form says where a call begins and ends, and `ToolCallReader` splits the text
of an answer into content and calls. Text that may be the start of a call is held back until it is certain.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple


class ToolCall(NamedTuple):
    """A call of a function. `arguments`: a JSON object as text."""

    name: str
    arguments: str


class UnknownForm(ValueError):
    """A chat template without tools, or one whose form of a tool call is not known."""


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of tool calls in a text.

    Attributes:
      start: the text before a call.
      end: the text after a call; "" where calls extend to the end of the answer.
      read: returns the calls of the text between start and end. Raises: ValueError.
      leads: calls can only begin an answer.
      special: `start` is a special token, which an answer's text usually leaves out.
    """

    start: str
    end: str
    read: Callable[[str], list[ToolCall]]
    leads: bool = False
    special: bool = False


def form_of(template: str) -> Form:
    """Return the form of the tool calls that a chat template shows to the model.

    Raises:
      UnknownForm: naming the known forms.
    """
    if not re.search(r"\btools\b", template):
        raise UnknownForm("none, because the chat template of the model has no tools")
    shown = template.replace("\\", "")  # quotes within a string of the template have a backslash
    for mark, other_form, form in _FORMS:
        if mark in shown and not (other_form and re.search(other_form, shown)):
            return form
    raise UnknownForm(
        "none, because the chat template shows no known form of a call: JSON within <tool_call> (Hermes, "
        'Qwen), JSON after [TOOL_CALLS] (Mistral), or an answer {"name": …, "parameters": …} (Llama)'
    )


def _call(value: Any, key: str = "arguments") -> ToolCall:
    """Return the call of a JSON value. Raises: ValueError."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no object with a name")
    arguments = value.get(key, value.get("arguments", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"{key} is no object")
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _hermes(text: str) -> list[ToolCall]:
    return [_call(json.loads(text))]


def _mistral(text: str) -> list[ToolCall]:
    """Return the calls of `[{"name": ..., "arguments": {...}}, ...]`, or of `name[ARGS]{...}`."""
    if text.lstrip().startswith("["):
        return [_call(value) for value in json.loads(text)]
    calls = []
    for part in text.split("[TOOL_CALLS]"):
        name, _, arguments = part.partition("[ARGS]")
        calls.append(_call({"name": name.strip(), "arguments": json.loads(arguments)}))
    return calls


def _llama(text: str) -> list[ToolCall]:
    """Return the calls of one object or several, with semicolons between them."""
    calls, text = [], "{" + text.rstrip()
    while text:
        value, end = json.JSONDecoder().raw_decode(text)
        calls.append(_call(value, "parameters"))
        text = text[end:].lstrip(" \n;")
    return calls


# A text in a template, a pattern of a form that has this text too, and the form.
_FORMS = (
    ("[TOOL_CALLS]", None, Form("[TOOL_CALLS]", "", _mistral, special=True)),
    ("<tool_call>", "<arg_key>|<function=", Form("<tool_call>", "</tool_call>", _hermes)),
    ('"parameters": dictionary of', None, Form("{", "", _llama, leads=True)),
)


class ToolCallReader:
    """The content and the calls of one growing answer. The parts of a text do not change what is read.

    White space before a call, at the start of the answer or after another call, is left out.

    Args:
      most: calls to return at most. Further calls are left out.
    """

    def __init__(self, form: Form, most: int | None = None):
        self._form, self._most = form, most
        self._held = ""  # within a call, the text after its start; else text that may be its start
        self._inside = False
        self._at_edge = True  # no content since the start of the answer, or since a call
        self._begun = False  # there was content, or a call
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the content and the calls that are certain after this text."""
        self._held += text
        content: list[str] = []
        calls: list[ToolCall] = []
        form = self._form
        while True:
            mark = form.end if self._inside else form.start
            before, found, after = self._held.partition(mark) if mark else (self._held, "", "")
            if self._inside:
                if not found:
                    break
                self._held = after
                self._close(before, form.end, content, calls)
            elif found and (not form.leads or not (self._begun or before.strip())):
                self._add("" if self._at_edge and not before.strip() else before, content)
                self._inside, self._held = True, after
            else:
                certain = len(self._held) - self._uncertain()
                self._add(self._held[:certain], content)
                self._held = self._held[certain:]
                break
        return "".join(content), calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the rest of the content and the calls at the end of the answer."""
        content: list[str] = []
        calls: list[ToolCall] = []
        held, self._held = self._held, ""
        if self._inside:
            self._close(held, "", content, calls)
        elif held.strip() or not self.num_calls:
            self._add(held, content)
        return "".join(content), calls

    def _add(self, text: str, content: list[str]) -> None:
        if text:
            content.append(text)
            self._at_edge, self._begun = False, True

    def _close(self, body: str, end: str, content: list[str], calls: list[ToolCall]) -> None:
        """Add the calls of a text after a start. A text that holds no call is content."""
        self._inside = False
        try:
            found = self._form.read(body)
        except (ValueError, RecursionError):
            self._add(self._form.start + body + end, content)
            return
        calls += found if self._most is None else found[: max(0, self._most - self.num_calls)]
        self.num_calls += len(found)
        self._at_edge = self._begun = True

    def _uncertain(self) -> int:
        """Return the length of the end of the held text that is no content yet.

        This is the possible start of a call, and the white space before it.
        """
        start = self._form.start
        possible = next((n for n in range(len(start) - 1, 0, -1) if self._held.endswith(start[:n])), 0)
        if self._form.leads and self._begun:
            return 0
        rest = self._held[: len(self._held) - possible]
        return len(self._held) if self._at_edge and not rest.strip() else possible


def split(text: str, form: Form, most: int | None = None) -> tuple[str, list[ToolCall]]:
    """Return the content and the calls of a whole answer."""
    reader = ToolCallReader(form, most)
    content, calls = reader.push(text)
    rest, more = reader.finish()
    return content + rest, [*calls, *more]
