"""From the events of a request to what the Python API returns: `RequestOutput`, its sequences, their text."""

from collections.abc import Iterable

import msgspec

from jaxflow.request import (
    Delta,
    Draining,
    Event,
    Finished,
    InvalidRequest,
    Logprob,
    QueueFull,
    Request,
    Started,
    Usage,
)
from jaxflow.text.detokenizer import Detokenizer
from jaxflow.text.tokenizer import Tokenizer


class CompletionOutput(msgspec.Struct):
    """One of a request's n sequences.

    `token_ids` ends with the stop token, if one ended it, which `text` does not show; a stop string is in
    neither, unless asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop, length or abort; None while it runs
    stop_reason: int | str | None = (
        None  # the stop token or string that ended it; None for the model's own end token
    )


class RequestOutput(msgspec.Struct):
    """A request and what became of it."""

    request_id: str
    prompt: str | None  # None if it came as token ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    usage: Usage | None = None  # of the sequence that ended last


class RequestFailed(RuntimeError):
    """The engine could not finish a request; its cause is chained."""


class Answer:
    """An output under way: events in, text and tokens out.

    Args:
      prompt: its text; None if it came as token ids.
      tokenizer: None for token ids only.
      eos_token_ids: the model's own end tokens.
    """

    def __init__(
        self, request: Request, prompt: str | None, tokenizer: Tokenizer | None, eos_token_ids: Iterable[int]
    ):
        self.error: BaseException | None = None
        self._request, self._tokenizer, self._eos = request, tokenizer, frozenset(eos_token_ids)
        sampling = request.sampling
        self._ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos)}
        outputs = [
            CompletionOutput(i, logprobs=None if sampling.logprobs is None else []) for i in range(sampling.n)
        ]
        self.output = RequestOutput(request.request_id, prompt, list(request.prompt_token_ids), None, outputs)
        self._left = sampling.n
        self._text: list[Detokenizer] = []
        if tokenizer is not None:
            self._text = [self._detokenizer(tokenizer) for _ in outputs]

    def _detokenizer(self, tokenizer: Tokenizer) -> Detokenizer:
        s = self._request.sampling
        return Detokenizer(
            tokenizer,
            self._request.prompt_token_ids,
            skip_special_tokens=s.skip_special_tokens,
            stop=s.stop,
            include_stop=s.include_stop_str_in_output,
            min_tokens=s.min_tokens,
        )

    def take(self, event: Event) -> None:
        """Takes the request's next event."""
        if isinstance(event, Delta):
            self._delta(self.output.outputs[event.index], event)
        elif isinstance(event, Finished):
            self._finished(self.output.outputs[event.index], event)
        elif isinstance(event, Started):
            self.output.num_cached_tokens = event.cached_prompt_tokens
            if event.prompt_logprobs is not None:
                self.output.prompt_logprobs = [
                    None if d is None else self._named(d) for d in event.prompt_logprobs
                ]

    def raise_fault(self) -> None:
        """Raises: what the engine refused the request for, or RequestFailed for a fault of the engine."""
        if isinstance(self.error, InvalidRequest | QueueFull | Draining):
            raise self.error
        if self.error is not None:
            raise RequestFailed(f"request {self.output.request_id} failed") from self.error

    def _delta(self, out: CompletionOutput, event: Delta) -> None:
        out.token_ids.extend(event.token_ids)
        if out.logprobs is not None and event.logprobs is not None:
            out.logprobs.extend(self._named(d) for d in event.logprobs)
        if self._text:
            shown = (
                [t for t in event.token_ids if t not in self._ends]
                if len(out.token_ids) > self._request.sampling.min_tokens
                else event.token_ids
            )
            out.text += self._text[event.index].push(shown)

    def _finished(self, out: CompletionOutput, event: Finished) -> None:
        if self._text:
            out.text += self._text[event.index].finish()
        if event.stop_string is not None and not self._request.sampling.include_stop_str_in_output:
            self._cut(out)
        out.finish_reason = event.reason.value
        eos = event.stop_token_id in self._eos
        out.stop_reason = (
            event.stop_string if event.stop_string is not None else (None if eos else event.stop_token_id)
        )
        self.error = event.error or self.error
        self.output.usage = event.usage
        self._left -= 1
        self.output.finished = self._left == 0

    def _cut(self, out: CompletionOutput) -> None:
        """Drops the tokens that a stop string made: those behind the last one with a share in the text."""
        assert self._tokenizer is not None
        s = self._request.sampling
        text = Detokenizer(
            self._tokenizer, self._request.prompt_token_ids, skip_special_tokens=s.skip_special_tokens
        )
        kept, shown = 0, 0
        while shown < len(out.text) and kept < len(out.token_ids):
            shown += len(text.push(out.token_ids[kept : kept + 1]))
            kept += 1
        del out.token_ids[kept:]
        if out.logprobs is not None:
            del out.logprobs[kept:]

    def _named(self, found: dict[int, Logprob]) -> dict[int, Logprob]:
        """With each token's text, where there is a tokenizer."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return found
        return {t: Logprob(p.logprob, p.rank, tokenizer.token_text(t)) for t, p in found.items()}
