"""The answer of a chat request: whole, and as the chunks of a stream."""

import secrets
import string
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from jaxflow.text.reasoning import Said
from jaxflow.text.tool_calls import CallPart, ToolCall
from serving.frontend.answer_reader import AnswerReader
from serving.http.job import AnswerPiece, Begun, Collected, Collection, Head, Job
from serving.http.logprobs import chat_logprobs, prompt_logprobs
from serving.http.responses import (
    AnswerMessage,
    AnswerToolCall,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    Usage,
)

_encode = msgspec.json.encode
_CALL_LINE = b'{"index":%d,"delta":{"tool_calls":[%b]},"logprobs":null,"finish_reason":null}]'


class ChatFormat:
    """The form of a chat answer."""

    def __init__(self, head: Head, job: Job):
        self._head, self._job = head, job
        self._readers: list[AnswerReader] = []  # of each choice of a stream
        if job.reading is not None:
            self._readers = [AnswerReader(job.reading) for _ in range(job.n)]
        self._begun = [0] * job.n  # calls of each choice of a stream
        self._start = (
            b'{"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"system_fingerprint":%b,"choices":['
            % (_encode(head.id), head.created, _encode(head.model), _encode(head.fingerprint))
        )

    # ---- the whole answer

    def whole(self, found: Collection, usage: Usage) -> ChatCompletion:
        """Return the whole answer."""
        head = self._head
        begun = found.begun[0]
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[self._choice(index, choice) for index, choice in enumerate(found.choices)],
            usage=usage,
            system_fingerprint=head.fingerprint,
            seed=begun.seed,
            prompt_logprobs=self._prompt_logprobs(begun) if head.with_prompt_logprobs else UNSET,
            prompt_token_ids=list(self._job.requests[0].prompt_token_ids) if head.with_token_ids else UNSET,
        )

    def _choice(self, index: int, choice: Collected) -> ChatChoice:
        head = self._head
        message, calls = AnswerMessage(choice.text), []
        if self._job.reading is not None:
            content, reasoning, calls = AnswerReader(self._job.reading).whole(choice.text)
            message = AnswerMessage(
                content or None if calls or reasoning else content,
                tool_calls=[_answered(call) for call in calls] if calls else UNSET,
                reasoning=reasoning or UNSET,
                reasoning_content=reasoning or UNSET,
            )
        return ChatChoice(
            index=index,
            message=message,
            finish_reason=_reason(choice.finish_reason, len(calls)),
            logprobs=chat_logprobs(choice.entries, head.names, head.top) if head.with_logprobs else None,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if head.with_token_ids else UNSET,
        )

    def _prompt_logprobs(self, begun: Begun):
        return prompt_logprobs(begun.prompt_logprobs or (), self._head.names)

    # ---- the stream

    def first(self, begun: Begun) -> list[bytes]:
        """Return the choices of the first chunks: the role, and the prompt's fields in the first one."""
        extra = b""
        if self._head.with_token_ids:
            extra += b',"prompt_token_ids":%b' % _encode(list(self._job.requests[0].prompt_token_ids))
        if self._head.with_prompt_logprobs:
            extra += b',"prompt_logprobs":%b' % _encode(self._prompt_logprobs(begun))
        return [
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            b',"seed":%d%b' % (index, begun.seed, b"" if index else extra)
            for index in range(self._head.n)
        ]

    def part(self, piece: AnswerPiece) -> list[bytes]:
        """Return the choices of the chunks with a text, and with the parts of calls after it."""
        head = self._head
        logprobs = b"null"
        if head.with_logprobs:
            logprobs = _encode(chat_logprobs(piece.entries, head.names, head.top))
        ids = b',"token_ids":%b' % _encode(piece.token_ids) if head.with_token_ids else b""
        said = Said(piece.text, "", [])
        if self._readers:
            said = self._readers[piece.index].push(piece.text)
        lines = []
        if said.content or said.reasoning or not self._readers or head.with_logprobs or head.with_token_ids:
            line = b'{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":null%b}]'
            lines = [line % (piece.index, _delta(said), logprobs, ids)]
        return lines + self._calls(piece.index, said.calls)

    def last(self, piece: AnswerPiece) -> list[bytes]:
        """Return the choices of the chunks that end a choice.

        They have the text and the calls that were held back, and the finish reason.
        """
        index, lines, num_calls = piece.index, [], 0
        if self._readers:
            said = self._readers[index].finish()
            if said.content or said.reasoning:
                line = b'{"index":%d,"delta":{%b},"logprobs":null,"finish_reason":null}]'
                lines.append(line % (index, _delta(said)))
            lines += self._calls(index, said.calls)
            num_calls = self._readers[index].num_calls
        assert piece.finish_reason is not None
        reason, stop = _encode(_reason(piece.finish_reason, num_calls)), _encode(piece.stop_reason)
        line = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}]'
        return [*lines, line % (index, reason, stop)]

    def _calls(self, index: int, parts: Sequence[CallPart]) -> list[bytes]:
        """Return the choices of the chunks of calls, one for each part of a call.

        A call that breaks off has nothing more to send: its arguments stay incomplete JSON.
        """
        lines = []
        for part in parts:
            if isinstance(part, ToolCall):
                call = _encode(_answered(part, self._begun[index]))
                self._begun[index] += 1
            elif part.broken:
                continue
            else:
                call = b'{"index":%d,"function":{"arguments":%b}}' % (
                    self._begun[index] - 1,
                    _encode(part.text),
                )
            lines.append(_CALL_LINE % (index, call))
        return lines

    @property
    def start(self) -> bytes:
        """Return the start of every chunk, up to its choice."""
        return self._start


def _delta(said: Said) -> bytes:
    """Return the fields of a delta of reasoning, content or both."""
    if not said.reasoning:
        return b'"content":%b' % _encode(said.content)
    reasoning = _encode(said.reasoning)
    fields = b'"reasoning":%b,"reasoning_content":%b' % (reasoning, reasoning)
    return fields + (b',"content":%b' % _encode(said.content) if said.content else b"")


def _answered(call: ToolCall, index: int | UnsetType = UNSET) -> AnswerToolCall:
    """Return a call with an id of 9 letters and digits, which the templates of Mistral demand."""
    name = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return AnswerToolCall(name, CalledFunction(call.name, call.arguments), index=index)


def _reason(reason: str, calls: int) -> str:
    """Return the finish reason of an answer with so many calls."""
    return "tool_calls" if calls and reason == "stop" else reason
