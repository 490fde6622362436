"""Reasoning in the text of an answer: a reader of `<think> … </think>`, and the count of its tokens.

Qwen3, DeepSeek-R1, GLM-4.5 and Gemma 4 write their reasoning between two marks, before the content. Some chat
templates write the first mark at the end of the prompt. The answer then begins within the reasoning.
"""

import enum
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from jaxflow.text.tokenizer import Tokenizer
from jaxflow.text.tool_calls import CallPart

MAX_BLANKS = 9  # white spaces before the first mark


class Marks(NamedTuple):
    """The texts around the reasoning of an answer."""

    opening: str
    closing: str


THINK = Marks("<think>", "</think>")
CHANNEL = Marks("<|channel>thought", "<channel|>")  # of Gemma 4


class Said(NamedTuple):
    """What is certain after a text."""

    content: str
    reasoning: str
    calls: list[CallPart]


class Begin(enum.Enum):
    """Where an answer begins."""

    ANSWER = enum.auto()  # before the first mark
    REASONING = enum.auto()
    CONTENT = enum.auto()


def marks_of(template: str) -> Marks | None:
    """Return the marks of which a chat template has one, or None."""
    return next((marks for marks in (CHANNEL, THINK) if any(mark in template for mark in marks)), None)


def begin_of(prompt_end: str, continued: str, otherwise: Begin, marks: Marks = THINK) -> Begin:
    """Return where an answer begins.

    Args:
      prompt_end: the last characters of the prompt.
      continued: the text of the message that the answer continues, or "".
      otherwise: the result for a prompt without a mark at its end.
    """
    if continued.strip():
        reader = ThinkReader(otherwise, marks)
        reader.push(continued)
        return Begin.REASONING if reader.in_reasoning else Begin.CONTENT
    prompt_end = prompt_end.rstrip()
    if prompt_end.endswith(marks.closing):
        return Begin.CONTENT
    return Begin.REASONING if prompt_end.endswith(marks.opening) else otherwise


class ThinkReader:
    """The reasoning and the content of one growing answer.

    The parts of a text do not change what is read. Marks after the first closing one, and an opening one
    after other text, are text. Left out are the two marks, white space before the first one, one line end
    after it, one before the closing mark and two after it: templates write them around the marks. The
    reader holds back at most `MAX_BLANKS` characters and a mark.
    """

    def __init__(self, begin: Begin, marks: Marks = THINK):
        self._marks = marks
        self._fresh = begin is not Begin.CONTENT  # the first mark may follow
        self.in_reasoning = begin is Begin.REASONING
        self._line_ends = int(self.in_reasoning)  # at most so many are left out next
        self._held = ""

    def push(self, text: str) -> Said:
        """Return what is certain after this text."""
        return self._read(text, final=False)

    def finish(self) -> Said:
        """Return the rest at the end of the answer."""
        return self._read("", final=True)

    def _read(self, text: str, final: bool) -> Said:
        self._held += text
        if self._fresh:
            opening, text = self._marks.opening, self._held.lstrip()
            few = len(self._held) - len(text) <= MAX_BLANKS
            if few and text.startswith(opening):
                self.in_reasoning, self._line_ends = True, 1
                self._held = text.removeprefix(opening)
            elif few and opening.startswith(text) and not final:
                return Said("", "", [])
            self._fresh = False
        reasoning = ""
        if self.in_reasoning:
            self._leave_line_ends()
            reasoning, closed, after = self._held.partition(self._marks.closing)
            if not closed:
                certain = len(reasoning) - (0 if final else self._uncertain())
                self._held = reasoning[certain:]
                return Said("", reasoning[:certain], [])
            reasoning = reasoning.removesuffix("\n")
            self._held, self.in_reasoning, self._line_ends = after, False, 2
        self._leave_line_ends()
        content, self._held = self._held, ""
        return Said(content, reasoning, [])

    def _leave_line_ends(self) -> None:
        while self._line_ends and self._held.startswith("\n"):
            self._held, self._line_ends = self._held[1:], self._line_ends - 1
        if self._held:
            self._line_ends = 0

    def _uncertain(self) -> int:
        """Return the length of the end of the held text that may belong to the second mark."""
        closing, held = self._marks.closing, self._held
        ends = (n for n in range(len(closing), 0, -1) if held.endswith((closing[:n], ("\n" + closing)[:n])))
        return next(ends, 0)


class Reader(Protocol):
    """A reader that tells reasoning from other text."""

    @property
    def in_reasoning(self) -> bool:
        """Return True within reasoning."""
        ...

    def push(self, text: str) -> Said:
        """Return what is certain after this text."""
        ...


class ReasoningTokens:
    """The number of tokens within the reasoning of one growing answer, without the marks around it.

    `reader`: a new one, of the answer's form.
    """

    def __init__(self, tokenizer: Tokenizer, reader: Reader):
        self._text = tokenizer.token_text
        self._reader = reader
        self.count = 0

    def push(self, token_ids: Iterable[int]) -> None:
        """Add tokens."""
        for token in token_ids:
            before = self._reader.in_reasoning
            self._reader.push(self._text(token))
            self.count += before and self._reader.in_reasoning
