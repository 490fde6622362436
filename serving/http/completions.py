"""The answer of a completions request: whole, and as the chunks of a stream."""

import msgspec
from msgspec import UNSET

from serving.http.job import AnswerPiece, Begun, Collected, Collection, Head, Job
from serving.http.logprobs import completion_logprobs, echoed_logprobs, joined, prompt_logprobs
from serving.http.responses import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs, Usage

_encode = msgspec.json.encode


class CompletionFormat:
    """The form of a completions answer. Choice i of prompt p has the index p·n + i."""

    def __init__(self, head: Head, job: Job):
        self._head, self._job = head, job
        self._start = (
            b'{"id":%b,"object":"text_completion","created":%d,"model":%b,"system_fingerprint":%b,"choices":['
            % (_encode(head.id), head.created, _encode(head.model), _encode(head.fingerprint))
        )

    # ---- the whole answer

    def whole(self, found: Collection, usage: Usage) -> Completion:
        """Return the whole answer."""
        head = self._head
        return Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[
                self._choice(index, choice, found.begun[index // head.n])
                for index, choice in enumerate(found.choices)
            ],
            usage=usage,
            system_fingerprint=head.fingerprint,
            seed=found.begun[0].seed if len(self._job.requests) == 1 else UNSET,
        )

    def _choice(self, index: int, choice: Collected, begun: Begun) -> CompletionChoice:
        head, job = self._head, self._job
        echo = self._echo(begun.prompt)
        logprobs = None
        if head.with_logprobs:
            own = completion_logprobs(choice.entries, head.names, len(echo))
            logprobs = joined([*self._echoed(begun), own])
        prompt_ids = list(job.requests[begun.prompt].prompt_token_ids)
        return CompletionChoice(
            index=index,
            text=echo + choice.text,
            finish_reason=choice.finish_reason,
            logprobs=logprobs,
            stop_reason=choice.stop_reason,
            prompt_logprobs=self._prompt_logprobs(begun) if head.with_prompt_logprobs else UNSET,
            token_ids=choice.token_ids if head.with_token_ids else UNSET,
            prompt_token_ids=prompt_ids if head.with_token_ids else UNSET,
        )

    def _echo(self, prompt: int) -> str:
        return "" if self._job.echo_texts is None else self._job.echo_texts[prompt]

    def _echoed(self, begun: Begun) -> list[CompletionLogprobs]:
        """Return the log-probabilities of the echoed prompt, or nothing without `echo`."""
        if self._job.echo_texts is None:
            return []
        ids, head = self._job.requests[begun.prompt].prompt_token_ids, self._head
        found = begun.prompt_logprobs or ()
        return [echoed_logprobs(ids, found, head.names, self._job.tokenizer, head.skip_special_tokens)]

    def _prompt_logprobs(self, begun: Begun) -> PromptLogprobs:
        return prompt_logprobs(begun.prompt_logprobs or (), self._head.names)

    # ---- the stream

    def first(self, begun: Begun) -> list[bytes]:
        """Return the choices of the first chunks of a prompt: the echo and the
        prompt's fields, if asked for.
        """
        head, job = self._head, self._job
        if job.echo_texts is None and not head.with_token_ids and not head.with_prompt_logprobs:
            return []
        extra = b""
        if head.with_token_ids:
            extra += b',"prompt_token_ids":%b' % _encode(list(job.requests[begun.prompt].prompt_token_ids))
        if head.with_prompt_logprobs:
            extra += b',"prompt_logprobs":%b' % _encode(self._prompt_logprobs(begun))
        parts = self._echoed(begun) if head.with_logprobs else []
        logprobs = _encode(joined(parts)) if parts else b"null"
        text = _encode(self._echo(begun.prompt))
        return [
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null%b}]'
            % (begun.prompt * head.n + i, text, logprobs, extra)
            for i in range(head.n)
        ]

    def part(self, piece: AnswerPiece) -> list[bytes]:
        """Return the choice of a chunk with text."""
        head = self._head
        logprobs = b"null"
        if head.with_logprobs:
            offset = len(self._echo(piece.index // head.n))
            logprobs = _encode(completion_logprobs(piece.entries, head.names, offset))
        ids = b',"token_ids":%b' % _encode(piece.token_ids) if head.with_token_ids else b""
        text = _encode(piece.text)
        line = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null%b}]'
        return [line % (piece.index, text, logprobs, ids)]

    def last(self, piece: AnswerPiece) -> list[bytes]:
        """Return the choice of the chunk that ends a choice."""
        reason, stop = _encode(piece.finish_reason), _encode(piece.stop_reason)
        line = b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b,"stop_reason":%b}]'
        return [line % (piece.index, reason, stop)]

    @property
    def start(self) -> bytes:
        """Return the start of every chunk, up to its choice."""
        return self._start
