"""Tool calls in the text of an answer: a reader of growing text, which splits it into content and calls.

A model writes a call as text. `jaxflow.text.tool_call_forms` has the forms of the models. Text that may be
the start of a call is held back until it is certain.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jaxflow.text.argument_values import STRING, ArgumentTypes, json_text
from jaxflow.text.scan import BLANKS, MAX_BLANKS, Scan, Steps

MAX_CALL_CHARS = 1 << 20  # of a text that is read as a call


class ToolCall(NamedTuple):
    """A call of a function, or its start. `arguments`: a JSON object as text, or "" in a start."""

    name: str
    arguments: str


class MoreArguments(NamedTuple):
    """The next part of the arguments of the latest call.

    `broken`: the call ends, and is no call. Its whole text is content.
    """

    text: str
    broken: bool = False


CallPart = ToolCall | MoreArguments


def whole_calls(parts: Iterable[CallPart]) -> list[ToolCall]:
    """Return the calls that the parts of an answer are, without broken ones."""
    names: list[str] = []
    arguments: list[list[str]] = []
    for part in parts:
        if isinstance(part, ToolCall):
            names.append(part.name)
            arguments.append([part.arguments])
        elif part.broken:
            del names[-1], arguments[-1]
        else:
            arguments[-1].append(part.text)
    return [ToolCall(name, "".join(texts)) for name, texts in zip(names, arguments, strict=True)]


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of tool calls in a text.

    Attributes:
      starts: a call begins with one of these texts.
      read: reads one call, or several, from the text after a start, and writes them. It begins a new record
        of the scan after a call that others may follow. Raises: ValueError, RecursionError.
      marks: the texts that a tokenizer may have as special tokens.
      leads: starts that can only begin an answer.
    """

    starts: tuple[str, ...]
    read: Callable[[Scan, "CallWriter"], Steps[None]]
    marks: frozenset[str] = frozenset()
    leads: frozenset[str] = frozenset()


class CallWriter:
    """The calls that a form reads at one place, as the parts of a stream.

    Args:
      start: the start that was found.
      parts: gets the parts.
      most: calls to write at most, or None.
      parameters: the JSON schema of the arguments of each tool.
    """

    def __init__(self, start: str, parts: list[CallPart], most: int | None, parameters: Mapping[str, Any]):
        self.start = start
        self.ended = 0
        self._parts, self._most, self._parameters = parts, most, parameters
        self._open = self._has_arguments = False
        self._types = ArgumentTypes(None)

    def whole(self, call: ToolCall) -> None:
        """Write a call."""
        self._write(call)
        self.ended += 1

    def begin(self, name: str) -> None:
        """Begin a call."""
        self._write(ToolCall(name, ""))
        self._open, self._has_arguments = True, False
        self._types = ArgumentTypes(self._parameters.get(name))

    def more(self, text: str) -> None:
        """Write JSON of the arguments."""
        if text:
            self._write(MoreArguments(text))

    def more_text(self, text: str) -> None:
        """Write a part of a string within the arguments."""
        self.more(json.dumps(text, ensure_ascii=False)[1:-1])

    def value(self, name: str, scan: Scan, *marks: str) -> Steps[str]:
        """Write an argument with the bare text up to one of the marks as its value. Return the mark."""
        self.more(f"{', ' if self._has_arguments else '{'}{json.dumps(name, ensure_ascii=False)}: ")
        self._has_arguments = True
        types = self._types.of(name)
        if types == STRING:
            self.more('"')
            _, mark = yield from scan.until(*marks, take=self.more_text)
            self.more('"')
        else:
            text, mark = yield from scan.until(*marks)
            self.more(json_text(text, types))
        return mark

    def end(self) -> None:
        """End a call. Its arguments are those of `value`, or were written by `more`."""
        self._open = False
        self.ended += 1

    def end_values(self) -> None:
        """End a call after its last `value`."""
        self.more("}" if self._has_arguments else "{}")
        self.end()

    def break_off(self) -> None:
        """End a call that has begun, if there is one, as no call."""
        if self._open:
            self._write(MoreArguments("", broken=True))

    def _write(self, part: CallPart) -> None:
        if self._most is None or self.ended < self._most:
            self._parts.append(part)


class ToolCallReader:
    """The content and the calls of one growing answer. The parts of a text do not change what is read.

    White space before a call, at the start of the answer or after another call, is left out. The text of a
    call that is malformed, that is cut, or that has over `MAX_CALL_CHARS` is content.

    Args:
      most: calls to return at most. Further calls are left out.
      parameters: the JSON schema of the arguments of each tool, by the tool's name.
    """

    def __init__(self, form: Form, most: int | None = None, parameters: Mapping[str, Any] | None = None):
        self._form, self._most, self._parameters = form, most, parameters or {}
        self._scan = Scan()
        self._content: list[str] = []
        self._parts: list[CallPart] = []
        self.num_calls = 0
        self._steps = self._read()

    def push(self, text: str) -> tuple[str, list[CallPart]]:
        """Return the content and the parts of calls that are certain after this text."""
        self._scan.push(text)
        return self._advance()

    def finish(self) -> tuple[str, list[CallPart]]:
        """Return the rest of the content and of the calls at the end of the answer."""
        self._scan.finish()
        return self._advance()

    def _advance(self) -> tuple[str, list[CallPart]]:
        next(self._steps, None)
        content, parts = "".join(self._content), _joined(self._parts)
        self._content.clear()
        self._parts.clear()
        return content, parts

    def _read(self) -> Steps[None]:
        scan, form, add = self._scan, self._form, self._content.append
        starts, at_edge = form.starts, True
        while True:
            blanks = start = ""
            if at_edge:  # no content since the start of the answer, or since a call
                blanks = yield from scan.run(BLANKS, MAX_BLANKS)
                start = yield from scan.maybe(*starts)
            if not start:
                if not (scan.ended and self.num_calls):
                    add(blanks)
                starts = tuple(start for start in form.starts if start not in form.leads)
                blanks, (_, start) = "", (yield from scan.until(*starts, take=add, may_end=True))
                if not start:
                    return
            at_edge = yield from self._call(blanks + start, start)

    def _call(self, before: str, start: str) -> Steps[bool]:
        """Read calls after a start. Return False if the text is content.

        before: the start with the white space before it.
        """
        left = None if self._most is None else self._most - self.num_calls
        writer = CallWriter(start, self._parts, left, self._parameters)
        self._scan.record(before, MAX_CALL_CHARS)
        try:
            yield from self._form.read(self._scan, writer)
        except (ValueError, RecursionError):
            writer.break_off()
            self._content.append(self._scan.recorded())
            return False
        finally:
            self.num_calls += writer.ended
        self._scan.recorded()
        return True


def _joined(parts: list[CallPart]) -> list[CallPart]:
    """Return parts of calls with the arguments that follow one another joined."""
    joined: list[CallPart] = []
    for continues, group in itertools.groupby(
        parts, lambda part: isinstance(part, MoreArguments) and not part.broken
    ):
        same = list(group)
        joined += [MoreArguments("".join(part[0] for part in same))] if continues else same
    return joined


def split(
    text: str, form: Form, most: int | None = None, parameters: Mapping[str, Any] | None = None
) -> tuple[str, list[ToolCall]]:
    """Return the content and the calls of a whole answer."""
    reader = ToolCallReader(form, most, parameters)
    content, parts = reader.push(text)
    rest, more = reader.finish()
    return content + rest, whole_calls([*parts, *more])
