"""Text and outputs from the events of a request, for the Python API, gRPC and offloaded runs."""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from jaxflow.request import (
    Delta,
    Draining,
    Event,
    Finished,
    Interrupted,
    InvalidRequest,
    Logprob,
    QueueFull,
    Request,
    Started,
    Usage,
)
from jaxflow.text.detokenizer import Detokenizer
from jaxflow.text.tokenizer import Tokenizer


class CompletionOutput(msgspec.Struct, frozen=True):
    """One of a request's n sequences.

    Attributes:
      text: the text without the stop token, and without the stop string unless requested.
      token_ids: all sampled tokens, with the stop token and the tokens of the stop string.
      logprobs: one dict a token, the sampled token first; None unless requested.
      finish_reason: stop, length or abort; None while the sequence runs.
      stop_reason: the stop token or string that ended it; None for one of the model's end tokens.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestOutput(msgspec.Struct, frozen=True):
    """A request and its outputs so far.

    Attributes:
      prompt: the prompt's text; None for a prompt of token ids.
      usage: tokens of the prompt, and of all n sequences together; None until all have finished.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    usage: Usage | None = None


class RequestFailed(RuntimeError):
    """The engine could not finish a request. The fault is the cause."""


class SequenceText:
    """The text of one sequence, from its tokens or from the text that the engine decoded.

    `end_token_ids`: see `SamplingParams.end_token_ids`. Without a tokenizer the text is empty.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, end_token_ids: frozenset[int]):
        self._request, self._tokenizer, self._end_token_ids = request, tokenizer, end_token_ids
        self._detokenizer: Detokenizer | None = None
        self._held: tuple[int, ...] = ()

    def push(self, token_ids: Sequence[int], text: str | None = None) -> str:
        """Return the text that these tokens complete. `text`: the text, if the engine decoded it."""
        if text is not None:
            return text
        if self._tokenizer is None:
            return ""
        if self._detokenizer is None:
            self._detokenizer = detokenizer(self._request, self._tokenizer)
        token_ids = (*self._held, *token_ids)
        # An end token has no text if it ended the sequence, which is known when the sequence has finished.
        split = len(token_ids) - (bool(token_ids) and token_ids[-1] in self._end_token_ids)
        self._held = token_ids[split:]
        return self._detokenizer.push(token_ids[:split])

    def finish(self, event: Finished) -> str:
        """Return the rest of the text at the end of the sequence."""
        if self._detokenizer is None:
            return event.text
        held = () if self._held == (event.stop_token_id,) else self._held
        return self._detokenizer.push(held) + self._detokenizer.finish()


def detokenizer(request: Request, tokenizer: Tokenizer) -> Detokenizer:
    """Return the text decoder of a sequence of a request."""
    sampling = request.sampling
    return Detokenizer(
        tokenizer,
        request.prompt_token_ids,
        skip_special_tokens=sampling.skip_special_tokens,
        stop=sampling.stop,
        include_stop=sampling.include_stop_str_in_output,
        min_tokens=sampling.min_tokens,
    )


def check_fault(event: Finished) -> None:
    """Raise the error of a sequence's last event, if it has one.

    Raises:
      InvalidRequest, QueueFull, Draining: the engine refused the request.
      Interrupted: the process that ran the request was lost.
      RequestFailed: a fault of the engine ended the request.
    """
    if isinstance(event.error, InvalidRequest | QueueFull | Draining | Interrupted):
        raise event.error
    if event.error is not None:
        raise RequestFailed(f"a fault of the engine ended request {event.request_id}") from event.error


class OutputBuilder:
    """The output of one request, built from its events.

    Args:
      prompt: the prompt's text; None for a prompt of token ids.
      tokenizer: None for token ids only.
      eos_token_ids: the model's end tokens.
    """

    def __init__(
        self, request: Request, prompt: str | None, tokenizer: Tokenizer | None, eos_token_ids: Iterable[int]
    ):
        self._request, self._prompt, self._tokenizer = request, prompt, tokenizer
        self._eos = frozenset(eos_token_ids)
        ends, n = request.sampling.end_token_ids(self._eos), request.sampling.n
        self._texts = [SequenceText(request, tokenizer, ends) for _ in range(n)]
        self._text = [""] * n
        self._token_ids: list[list[int]] = [[] for _ in range(n)]
        self._logprobs: list[list[dict[int, Logprob]]] = [[] for _ in range(n)]
        self._finished: list[Finished | None] = [None] * n
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._cached_tokens = 0
        self._failed: Finished | None = None

    @property
    def request_id(self) -> str:
        """The request's name."""
        return self._request.request_id

    @property
    def finished(self) -> bool:
        """True once all sequences have finished."""
        return None not in self._finished

    def take(self, event: Event) -> None:
        """Add the request's next event."""
        match event:
            case Started():
                self._cached_tokens = event.cached_prompt_tokens
                if event.prompt_logprobs is not None:
                    named = [None if entry is None else self._named(entry) for entry in event.prompt_logprobs]
                    self._prompt_logprobs = named
            case Delta():
                i = event.index
                self._token_ids[i].extend(event.token_ids)
                self._logprobs[i].extend(self._named(entry) for entry in event.logprobs or ())
                self._text[i] += self._texts[i].push(event.token_ids, event.text)
            case Finished():
                self._finished[event.index] = event
                self._text[event.index] += self._texts[event.index].finish(event)
                self._failed = event if event.error is not None else self._failed

    def output(self) -> RequestOutput:
        """Return the output so far, which later events do not change.

        Raises:
          InvalidRequest, QueueFull, Draining, RequestFailed: see `check_fault`.
        """
        if self._failed is not None:
            check_fault(self._failed)
        usage = None
        if self.finished:
            tokens = sum(map(len, self._token_ids))
            usage = Usage(len(self._request.prompt_token_ids), self._cached_tokens, tokens)
        return RequestOutput(
            self._request.request_id,
            self._prompt,
            list(self._request.prompt_token_ids),
            self._prompt_logprobs,
            [self._completion(i) for i in range(len(self._texts))],
            self.finished,
            self._cached_tokens,
            usage,
        )

    def _completion(self, i: int) -> CompletionOutput:
        end = self._finished[i]
        stop_reason = None
        if end is not None:
            stop_token = None if end.stop_token_id in self._eos else end.stop_token_id
            stop_reason = stop_token if end.stop_string is None else end.stop_string
        return CompletionOutput(
            i,
            self._text[i],
            list(self._token_ids[i]),
            None if self._request.sampling.logprobs is None else list(self._logprobs[i]),
            None if end is None else end.reason.value,
            stop_reason,
        )

    def _named(self, found: dict[int, Logprob]) -> dict[int, Logprob]:
        """Return log-probabilities with each token's text, if there is a tokenizer."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return found
        return {t: Logprob(p.logprob, p.rank, tokenizer.token_text(t)) for t, p in found.items()}


def collect(
    builders: Sequence[OutputBuilder],
    events: Iterable[Event],
    on_finished: Callable[[], object] = lambda: None,
) -> list[RequestOutput]:
    """Return the outputs of several requests, in their order, from the events of all of them.

    `on_finished` is called for each request that has finished.

    Raises:
      InvalidRequest, QueueFull, Draining, RequestFailed: for the first request that fails.
    """
    by_name = {builder.request_id: builder for builder in builders}
    for event in events:
        builder = by_name[event.request_id]
        builder.take(event)
        if isinstance(event, Finished):
            check_fault(event)
            if builder.finished:
                on_finished()
    return [builder.output() for builder in builders]
