"""Conversion of a request's engine events to outputs with text, for every server."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from jaxflow.request import Delta, Event, Finished, FinishReason, Logprob, Request, Started
from jaxflow.request_output import SequenceText, check_fault
from jaxflow.text.tokenizer import Tokenizer

MAX_TOKENS_A_DELTA = 256  # with 20 logprobs each, far below gRPC's default limit of 4 MB for a message


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one of the n sequences, and the text that is certain after them.

    `logprobs`: one dict a token, the sampled token first; empty unless requested.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[dict[int, Logprob], ...] = ()


class Ended(msgspec.Struct, frozen=True):
    """The end of one of the n sequences. `text` is the rest of the text that no delta carried."""

    event: Finished
    text: str


Output = Started | TextDelta | Ended


class Transcript:
    """The outputs of one request.

    Attributes:
      aborted: the server ended a sequence before its end.

    Args:
      tokenizer: None for outputs without text.
      end_token_ids: the tokens that end a sequence.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, end_token_ids: frozenset[int]):
        self._texts = [SequenceText(request, tokenizer, end_token_ids) for _ in range(request.sampling.n)]
        self._running = request.sampling.n
        self.aborted = False

    @property
    def done(self) -> bool:
        """Return True once all sequences have finished."""
        return self._running == 0

    def outputs(self, events: Sequence[Event]) -> Iterable[Output]:
        """Return the outputs for `events`, to be read once. Deltas of one sequence are joined.

        Raises, while the outputs are read:
          RequestFailed: a fault of the engine ended the request. The fault is the cause.
          InvalidRequest, QueueFull, Draining: the engine refused the request after `submit`.
        """
        if self.only_adds(events):
            return self._deltas(0, events)  # type: ignore[arg-type]
        return self._all(events)

    def only_adds(self, events: Sequence[Event]) -> bool:
        """Return True for events that add tokens to the only sequence, the events of nearly every step."""
        return len(self._texts) == 1 and type(events[-1]) is Delta and type(events[0]) is Delta

    def _all(self, events: Iterable[Event]) -> Iterator[Output]:
        waiting: dict[int, list[Delta]] = {}
        for event in events:
            if type(event) is Delta:
                if (deltas := waiting.get(event.index)) is None:
                    waiting[event.index] = [event]
                else:
                    deltas.append(event)
            elif type(event) is Started:
                yield event
            elif type(event) is Finished:
                yield from self._deltas(event.index, waiting.pop(event.index, []))
                check_fault(event)
                text = self._texts[event.index].finish(event)
                self._running -= 1
                self.aborted = self.aborted or event.reason is FinishReason.ABORT
                yield Ended(event, text)
        for index, deltas in waiting.items():
            yield from self._deltas(index, deltas)

    def _deltas(self, index: int, deltas: Sequence[Delta]) -> Iterable[TextDelta]:
        """Return the outputs of a sequence's deltas, joined.

        The text changes only when the outputs are read.
        """
        if len(deltas) == 1 and len(deltas[0].token_ids) <= MAX_TOKENS_A_DELTA:
            return (self._delta(deltas[0]),)
        return self._joined_deltas(index, deltas)

    def _delta(self, delta: Delta) -> TextDelta:
        text = self._texts[delta.index].push(delta.token_ids, delta.text)
        return TextDelta(delta.index, delta.token_ids, text, delta.logprobs or ())

    def _joined_deltas(self, index: int, deltas: Sequence[Delta]) -> Iterator[TextDelta]:
        token_ids = _joined([delta.token_ids for delta in deltas])
        logprobs = _joined([delta.logprobs or () for delta in deltas])
        decoded = [delta.text for delta in deltas if delta.text is not None]
        text = "".join(decoded) if decoded else None  # the engine decodes all deltas of a request, or none
        for start in range(0, len(token_ids), MAX_TOKENS_A_DELTA):
            part = slice(start, start + MAX_TOKENS_A_DELTA)
            yield TextDelta(
                index, token_ids[part], self._texts[index].push(token_ids[part], text), logprobs[part]
            )
            text = text and ""


def _joined[T](parts: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(itertools.chain.from_iterable(parts))
