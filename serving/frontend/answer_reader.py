"""How the text of a chat's answer is read: which parts are reasoning, calls and content."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from jaxflow.text.harmony import HarmonyReader, is_harmony
from jaxflow.text.reasoning import (
    CHANNEL,
    THINK,
    Begin,
    Marks,
    ReasoningTokens,
    Said,
    ThinkReader,
    marks_of,
)
from jaxflow.text.tokenizer import Tokenizer
from jaxflow.text.tool_call_forms import FORMS
from jaxflow.text.tool_calls import Form, ToolCall, ToolCallReader, whole_calls


class Reading(msgspec.Struct, frozen=True):
    """What is read in a text.

    `harmony`: the text has harmony messages; `tools`: some may be calls. `marks`: around the reasoning of
    other text, if it has any. `begin`: where the answer begins. `shown`: the answer has the reasoning.
    `form`: of the calls in other text, if the request has tools. `parameters`: the JSON schema of each tool's
    arguments. `most_calls`: of a choice; None for any number.
    """

    harmony: bool = False
    marks: Marks | None = None
    begin: Begin = Begin.ANSWER
    shown: bool = True
    tools: bool = False
    form: Form | None = None
    parameters: Mapping[str, Any] | None = None
    most_calls: int | None = None

    def counter(self, tokenizer: Tokenizer) -> ReasoningTokens | None:
        """Return a counter of the reasoning of one choice, or None for an answer without reasoning."""
        if self.harmony:
            return ReasoningTokens(tokenizer, HarmonyReader(tools=False))
        if self.marks is not None:
            return ReasoningTokens(tokenizer, ThinkReader(self.begin, self.marks))
        return None


HARMONY_CALLS = "openai"
# The values of --reasoning_parser beside auto, by vLLM's names.
PARSERS = {
    "none": Reading(),
    "qwen3": Reading(marks=THINK),
    "glm45": Reading(marks=THINK),
    "deepseek_v3": Reading(marks=THINK),
    "deepseek_r1": Reading(marks=THINK, begin=Begin.REASONING),
    "gemma4": Reading(marks=CHANNEL),
    "openai_gptoss": Reading(harmony=True),
}


# The values of --tool_call_parser, by vLLM's names. auto: the form that the chat template shows.
TOOL_CALL_PARSERS = ("auto", *FORMS, HARMONY_CALLS)


def reading_of(name: str, template: str) -> Reading:
    """Return how reasoning is read. `begin` is that of an answer to a prompt without a mark.

    Args:
      name: a key of `PARSERS`, or auto for the form that the chat template shows.
    """
    if name != "auto":
        return PARSERS[name]
    return Reading(harmony=True) if is_harmony(template) else Reading(marks=marks_of(template))


class Answer(NamedTuple):
    """A whole answer."""

    content: str
    reasoning: str
    calls: list[ToolCall]


class AnswerReader:
    """The reader of one choice."""

    def __init__(self, reading: Reading):
        form, most = reading.form, reading.most_calls
        self._shown = reading.shown
        self._harmony = HarmonyReader(reading.tools, most) if reading.harmony else None
        self._think = None if reading.marks is None else ThinkReader(reading.begin, reading.marks)
        self._calls = None if form is None else ToolCallReader(form, most, reading.parameters)

    @property
    def num_calls(self) -> int:
        """Return the number of calls so far."""
        counted = self._calls or self._harmony
        return 0 if counted is None else counted.num_calls

    def push(self, text: str) -> Said:
        """Return what is certain after this text."""
        outer = self._harmony or self._think
        said = Said(text, "", []) if outer is None else outer.push(text)
        if self._calls is not None:
            content, calls = self._calls.push(said.content)
            said = Said(content, said.reasoning, calls)
        return self._visible(said)

    def finish(self) -> Said:
        """Return the rest at the end of the answer."""
        outer = self._harmony or self._think
        said = Said("", "", []) if outer is None else outer.finish()
        if self._calls is not None:
            content, calls = self._calls.push(said.content)
            rest, more = self._calls.finish()
            said = Said(content + rest, said.reasoning, calls + more)
        return self._visible(said)

    def whole(self, text: str) -> Answer:
        """Return what a whole answer says."""
        said, rest = self.push(text), self.finish()
        calls = whole_calls([*said.calls, *rest.calls])
        return Answer(said.content + rest.content, said.reasoning + rest.reasoning, calls)

    def _visible(self, said: Said) -> Said:
        return said if self._shown else said._replace(reasoning="")
