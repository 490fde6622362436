"""Answers in the harmony format of gpt-oss: channels and calls, and a reader of growing text.

An answer is a row of messages: a header with a channel and perhaps a recipient, `<|message|>`, a text, and a
mark of its end. The text of the answer keeps these special tokens.
"""

import re

from jaxflow.text.argument_values import strict_json
from jaxflow.text.reasoning import Said
from jaxflow.text.tool_calls import CallPart, MoreArguments, ToolCall

_MARK = re.compile(r"<\|(start|channel|constrain|message|end|call|return)\|>")
_PARTIAL = re.compile(r"<(?:\|[a-z]{0,9}\|?)?\Z")
# The prompt ends within a header, so an answer may begin with the recipient of its first message.
_RECIPIENT = re.compile(r"\s{0,9}to=[^\s<]{0,256}\s{0,9}(?=<\|(?:channel|constrain|message)\|>)")
_LEAD = re.compile(r"\s{0,9}(?:t|to|to=[^\s<]{0,256}\s{0,9}(?:<[|a-z]{0,11})?)?\Z")


def is_harmony(template: str) -> bool:
    """Return True if a chat template writes harmony messages."""
    return all(mark in template for mark in ("<|start|>", "<|channel|>", "<|message|>"))


class HarmonyReader:
    """The content, the reasoning and the calls of one growing answer.

    The parts of a text do not change what is read. The channel `analysis` is reasoning, a message to a
    function is a call, and other text is content. Headers are left out. A call is streamed from its `{` on.

    Args:
      tools: the request has tools. Otherwise messages to functions are read by their channels.
      most: calls to return at most. Further calls are left out.
    """

    def __init__(self, tools: bool, most: int | None = None):
        self._tools, self._most = tools, most
        self._held = ""
        self._fresh = True
        self._kind = "content"  # or header, reasoning, call: what the text is
        self._parts: list[str] = []  # of a header or a call
        self._name = ""  # of the called function
        self._sent: bool | None = None  # its call is streamed; None until this is known
        self._calls: list[CallPart] = []
        self.num_calls = 0

    @property
    def in_reasoning(self) -> bool:
        """Return True within a message of reasoning."""
        return self._kind == "reasoning"

    def push(self, text: str) -> Said:
        """Return what is certain after this text."""
        said = Said("", "", [])
        self._held += text
        if self._fresh:
            if _RECIPIENT.match(self._held):
                self._kind = "header"
            elif _LEAD.match(self._held):
                return said
            self._fresh = False
        return self._read(final=False)

    def finish(self) -> Said:
        """Return the rest at the end of the answer."""
        return self._read(final=True)

    def _read(self, final: bool) -> Said:
        out: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._calls = []
        at = 0
        for mark in _MARK.finditer(self._held):
            self._add(self._held[at : mark.start()], out)
            self._turn(mark, out)
            at = mark.end()
        partial = None if final else _PARTIAL.search(self._held, at)
        end = partial.start() if partial else len(self._held)
        self._add(self._held[at:end], out)
        self._held = self._held[end:]
        if final:
            self._close(out)
        return Said("".join(out["content"]), "".join(out["reasoning"]), self._calls)

    def _add(self, text: str, out: dict[str, list[str]]) -> None:
        if text:
            out.get(self._kind, self._parts).append(text)
        if self._kind != "call" or self._full:
            return
        if self._sent is None and (text := text.lstrip()):
            self._sent = text[0] == "{"
            if self._sent:
                self._calls.append(ToolCall(self._name, ""))
        if self._sent and text:
            self._calls.append(MoreArguments(text))

    @property
    def _full(self) -> bool:
        """Return True if no more calls are returned."""
        return self._most is not None and self.num_calls >= self._most

    def _turn(self, mark: re.Match[str], out: dict[str, list[str]]) -> None:
        """Change the state at a special token."""
        name, in_header = mark[1], self._kind == "header"
        if name == "message" and in_header:
            self._open()
        elif name in ("channel", "constrain") and in_header:
            self._parts.append(mark[0])
        elif name in ("message", "constrain"):
            self._add(mark[0], out)
        else:
            self._close(out)
            if name in ("start", "channel"):
                self._kind, self._parts = "header", [mark[0]]

    def _open(self) -> None:
        """Begin the text of a message after its header."""
        header = "".join(self._parts)
        self._parts = []
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        function = re.search(r"\bto=functions\.([\w.-]+)", header)
        self._kind = "reasoning" if channel and channel[1] == "analysis" else "content"
        if function and self._tools:
            self._kind, self._name, self._sent = "call", function[1], None

    def _close(self, out: dict[str, list[str]]) -> None:
        """End a message. Arguments that are no JSON object are content."""
        kind, body = self._kind, "".join(self._parts)
        self._kind, self._parts = "content", []
        if kind != "call":
            return
        try:
            if body.strip() and not isinstance(strict_json(body), dict):
                raise ValueError("no object")
        except (ValueError, RecursionError):
            if self._sent:
                self._calls.append(MoreArguments("", broken=True))
            self._add(body, out)
            return
        if not self._full:
            if not self._sent:
                self._calls.append(ToolCall(self._name, "{}"))
            self.num_calls += 1
