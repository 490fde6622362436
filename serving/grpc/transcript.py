"""Conversion of a request's engine events to gRPC messages with text."""

from collections.abc import Iterable, Iterator

from jaxflow.request import Delta, Event, Finished, Request, Started
from jaxflow.request_output import SequenceText, check_fault
from jaxflow.text.tokenizer import Tokenizer
from serving.grpc import convert
from serving.grpc import generate_pb2 as pb

MAX_TOKENS_A_MESSAGE = 256  # with 20 logprobs each, far below gRPC's default limit of 4 MB


class Transcript:
    """The messages of one request. `done` is True once all of its n sequences have finished.

    Args:
      request_id: the client's name of the request.
      tokenizer: None for messages without text.
      end_token_ids: the tokens that end a sequence.
    """

    def __init__(
        self, request_id: str, request: Request, tokenizer: Tokenizer | None, end_token_ids: frozenset[int]
    ):
        self._request_id = request_id
        self._tokenizer = tokenizer
        self._texts = [SequenceText(request, tokenizer, end_token_ids) for _ in range(request.sampling.n)]
        self._running = request.sampling.n

    @property
    def done(self) -> bool:
        """Return True once all sequences have finished."""
        return self._running == 0

    def messages(self, events: Iterable[Event]) -> Iterator[pb.GenerateResponse]:
        """Yield the messages for `events`. Deltas of one sequence are joined into one message.

        Raises:
          RequestFailed: a fault of the engine ended the request. The fault is the cause.
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
                    check_fault(event)
                    text = self._texts[event.index].finish(event)
                    self._running -= 1
                    yield self._message(finished=convert.finished(event, text))
        for index, deltas in waiting.items():
            yield from self._deltas(index, deltas)

    def _deltas(self, index: int, deltas: list[Delta]) -> Iterator[pb.GenerateResponse]:
        token_ids = convert.joined([delta.token_ids for delta in deltas])
        logprobs = convert.joined([delta.logprobs or () for delta in deltas])
        decoded = [delta.text for delta in deltas if delta.text is not None]
        text = "".join(decoded) if decoded else None  # the engine decodes all deltas of a request, or none
        for start in range(0, len(token_ids), MAX_TOKENS_A_MESSAGE):
            part = slice(start, start + MAX_TOKENS_A_MESSAGE)
            yield self._message(
                delta=pb.Delta(
                    index=index,
                    token_ids=token_ids[part],
                    text=self._texts[index].push(token_ids[part], text),
                    logprobs=[
                        convert.token_logprobs(candidates, self._tokenizer) for candidates in logprobs[part]
                    ],
                )
            )
            text = text and ""

    def _message(self, **event) -> pb.GenerateResponse:
        return pb.GenerateResponse(request_id=self._request_id, **event)
