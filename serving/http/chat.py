"""The answer of a chat request: whole, and as the chunks of a stream."""

import msgspec
from msgspec import UNSET

from serving.http.answer_head import Head
from serving.http.collected import Collected, Collection
from serving.http.job import AnswerPiece, Begun, Job
from serving.http.logprobs import chat_logprobs, prompt_logprobs
from serving.http.responses import AnswerMessage, ChatChoice, ChatCompletion, Usage

_encode = msgspec.json.encode


class ChatFormat:
    """The form of a chat answer."""

    def __init__(self, head: Head, job: Job):
        self._head, self._job = head, job
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
        return ChatChoice(
            index=index,
            message=AnswerMessage(choice.text),
            finish_reason=choice.finish_reason,
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

    def part(self, piece: AnswerPiece) -> bytes:
        """Return the choice of a chunk with text."""
        head = self._head
        logprobs = b"null"
        if head.with_logprobs:
            logprobs = _encode(chat_logprobs(piece.entries, head.names, head.top))
        ids = b',"token_ids":%b' % _encode(piece.token_ids) if head.with_token_ids else b""
        return b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b}]' % (
            piece.index,
            _encode(piece.text),
            logprobs,
            ids,
        )

    def last(self, piece: AnswerPiece) -> bytes:
        """Return the choice of the chunk that ends a choice."""
        return b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}]' % (
            piece.index,
            _encode(piece.finish_reason),
            _encode(piece.stop_reason),
        )

    @property
    def start(self) -> bytes:
        """Return the start of every chunk, up to its choice."""
        return self._start
