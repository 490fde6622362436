"""Conversion of a request's engine events to gRPC messages with text."""

from collections.abc import Iterable, Iterator, Sequence

from jaxflow.request import (
    Delta,
    Draining,
    Event,
    Finished,
    InvalidRequest,
    QueueFull,
    Request,
    Started,
)
from jaxflow.text.detokenizer import Detokenizer
from jaxflow.text.tokenizer import Tokenizer
from serving.grpc import convert
from serving.grpc import generate_pb2 as pb

MAX_TOKENS_A_MESSAGE = 256  # with 20 logprobs each, far below gRPC's default limit of 4 MB


class SequenceText:
    """The incremental text of one sequence."""

    def __init__(self, tokenizer: Tokenizer, request: Request, stop_token_ids: frozenset[int]):
        sampling = request.sampling
        self._detokenizer = Detokenizer(
            tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=sampling.skip_special_tokens,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )
        self._stop_token_ids = stop_token_ids
        self._held: tuple[int, ...] = ()

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        token_ids = (*self._held, *token_ids)
        # A stop token has no text if it ended the sequence, which is known when the sequence has finished.
        cut = len(token_ids) - (bool(token_ids) and token_ids[-1] in self._stop_token_ids)
        self._held = token_ids[cut:]
        return self._detokenizer.push(token_ids[:cut])

    def finish(self, stop_token_id: int | None) -> str:
        """Return the rest of the text at the end of the sequence."""
        held = () if self._held == (stop_token_id,) else self._held
        return self._detokenizer.push(held) + self._detokenizer.finish()


class Transcript:
    """The messages of one request. `done` is True once all of its n sequences have finished.

    Args:
      request_id: the client's name of the request.
      tokenizer: None for messages without text.
    """

    def __init__(
        self, request_id: str, request: Request, tokenizer: Tokenizer | None, stop_token_ids: frozenset[int]
    ):
        self._request_id = request_id
        self._tokenizer = tokenizer
        self._texts = (
            [SequenceText(tokenizer, request, stop_token_ids) for _ in range(request.sampling.n)]
            if tokenizer
            else None
        )
        self._running = request.sampling.n

    @property
    def done(self) -> bool:
        """Return True once all sequences have finished."""
        return self._running == 0

    def messages(self, events: Iterable[Event]) -> Iterator[pb.GenerateResponse]:
        """Yield the messages for `events`. Deltas of one sequence are joined into one message.

        Raises:
          RuntimeError: a fault of the engine ended the request. The fault is the cause.
          InvalidRequest, QueueFull, Draining: the engine refused the request after `submit`.
        """
        waiting: dict[int, list[Delta]] = {}
        for event in events:
            match event:
                case Started():
                    yield self._message(started=convert.started(event, self._tokenizer))
                case Delta():
                    waiting.setdefault(event.index, []).append(event)
                case Finished():
                    yield from self._deltas(event.index, waiting.pop(event.index, []))
                    if isinstance(event.error, InvalidRequest | QueueFull | Draining):
                        raise event.error
                    if event.error is not None:
                        raise RuntimeError(
                            f"a fault of the engine ended request {event.request_id}"
                        ) from event.error
                    text = self._texts[event.index].finish(event.stop_token_id) if self._texts else ""
                    self._running -= 1
                    yield self._message(finished=convert.finished(event, text))
        for index, deltas in waiting.items():
            yield from self._deltas(index, deltas)

    def _deltas(self, index: int, deltas: list[Delta]) -> Iterator[pb.GenerateResponse]:
        token_ids = convert.joined([delta.token_ids for delta in deltas])
        logprobs = convert.joined([delta.logprobs or () for delta in deltas])
        for start in range(0, len(token_ids), MAX_TOKENS_A_MESSAGE):
            part = slice(start, start + MAX_TOKENS_A_MESSAGE)
            yield self._message(
                delta=pb.Delta(
                    index=index,
                    token_ids=token_ids[part],
                    text=self._texts[index].push(token_ids[part]) if self._texts else "",
                    logprobs=[
                        convert.token_logprobs(candidates, self._tokenizer) for candidates in logprobs[part]
                    ],
                )
            )

    def _message(self, **event) -> pb.GenerateResponse:
        return pb.GenerateResponse(request_id=self._request_id, **event)
