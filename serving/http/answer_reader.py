"""How the text of a chat's answer is read: which parts are reasoning, calls and content."""

import enum

import msgspec

from jaxflow.text.harmony import HarmonyReader, is_harmony
from jaxflow.text.reasoning import Begin, ReasoningTokens, Said, ThinkReader, thinks
from jaxflow.text.tokenizer import Tokenizer
from jaxflow.text.tool_calls import Form, ToolCallReader


class Parser(enum.Enum):
    """A form of reasoning in an answer."""

    NONE = enum.auto()
    THINK = enum.auto()
    HARMONY = enum.auto()


# The values of --reasoning_parser beside auto, by vLLM's names: the form, and where the answer to a prompt
# without a mark begins.
PARSERS = {
    "none": (Parser.NONE, Begin.CONTENT),
    "qwen3": (Parser.THINK, Begin.ANSWER),
    "glm45": (Parser.THINK, Begin.ANSWER),
    "deepseek_v3": (Parser.THINK, Begin.ANSWER),
    "deepseek_r1": (Parser.THINK, Begin.REASONING),
    "openai_gptoss": (Parser.HARMONY, Begin.ANSWER),
}


def parser_of(name: str, template: str) -> tuple[Parser, Begin]:
    """Return the form of reasoning, and where the answer to a prompt without a mark begins.

    Args:
      name: a key of `PARSERS`, or auto for the form that the chat template shows.
    """
    if name != "auto":
        return PARSERS[name]
    if is_harmony(template):
        return Parser.HARMONY, Begin.ANSWER
    return (Parser.THINK if thinks(template) else Parser.NONE), Begin.ANSWER


class Reading(msgspec.Struct, frozen=True):
    """What is read in a text.

    `begin`: where an answer with `<think>` begins. `shown`: the answer has the reasoning. `tools`: harmony
    messages may be calls. `form`: of the calls in other text, if the request has tools. `most_calls`: of a
    choice; None for any number.
    """

    parser: Parser
    begin: Begin = Begin.ANSWER
    shown: bool = True
    tools: bool = False
    form: Form | None = None
    most_calls: int | None = None

    def counter(self, tokenizer: Tokenizer) -> ReasoningTokens | None:
        """Return a counter of the reasoning of one choice, or None for an answer without reasoning."""
        match self.parser:
            case Parser.THINK:
                return ReasoningTokens(tokenizer, ThinkReader(self.begin))
            case Parser.HARMONY:
                return ReasoningTokens(tokenizer, HarmonyReader(tools=False))
        return None


class AnswerReader:
    """The reader of one choice."""

    def __init__(self, reading: Reading):
        form, most = reading.form, reading.most_calls
        self._shown = reading.shown
        self._harmony = HarmonyReader(reading.tools, most) if reading.parser is Parser.HARMONY else None
        self._think = ThinkReader(reading.begin) if reading.parser is Parser.THINK else None
        self._calls = None if form is None else ToolCallReader(form, most)

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

    def whole(self, text: str) -> Said:
        """Return what a whole answer says."""
        said, rest = self.push(text), self.finish()
        return Said(said.content + rest.content, said.reasoning + rest.reasoning, said.calls + rest.calls)

    def _visible(self, said: Said) -> Said:
        return said if self._shown else said._replace(reasoning="")
