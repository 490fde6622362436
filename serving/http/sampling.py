"""The engine's sampling parameters of a request's body."""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxflow.request import InvalidRequest, SamplingParams
from serving.http.answer_form import form_of_answer
from serving.http.schema import ChatRequest, CompletionRequest

# Fields of the bodies with the same name and meaning in `SamplingParams`. Null means the default.
_SAME = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name not in ("max_tokens", "logprobs", "structured_outputs")
)
_same_values = operator.attrgetter(*_SAME)
DEFAULT_MAX_TOKENS = 16  # completions requests; a chat request goes to the end of the context


def sampling_params(
    request: ChatRequest | CompletionRequest, defaults: Mapping[str, float]
) -> SamplingParams:
    """Return the sampling parameters of a request.

    A field that is absent or null is taken from `defaults`, then from OpenAI's defaults.

    Raises:
      InvalidRequest: a value out of range, or values that contradict each other. The error names the field.
    """
    values = zip(_SAME, _same_values(request), strict=True)
    found = {name: value for name, value in values if value is not None}
    if request.stream_options is not None and not request.stream:
        options = msgspec.to_builtins(request.stream_options)
        given = {name: value for name, value in options.items() if value is not None}
        raise InvalidRequest("stream_options", given, "null unless stream is true")
    limits = chat_limits(request) if isinstance(request, ChatRequest) else completion_limits(request)
    settings = {**defaults, **found, **limits}
    if (form := form_of_answer(request)[0]) is not None:
        settings["structured_outputs"] = form
    try:
        return _of_settings(*settings.items())
    except TypeError:  # a list among the settings
        return SamplingParams(**settings)


@functools.lru_cache(maxsize=256)
def _of_settings(*settings: tuple[str, Any]) -> SamplingParams:
    """Return the sampling parameters of these settings. Most requests of a caller have the same settings."""
    return SamplingParams(**dict(settings))


def chat_limits(request: ChatRequest) -> dict[str, Any]:
    """Return `max_tokens` and `logprobs` of a chat request. Raises: InvalidRequest."""
    most = request.max_completion_tokens
    if most is None:
        most = request.max_tokens
    elif request.max_tokens not in (None, most):
        raise InvalidRequest("max_tokens", request.max_tokens, f"max_completion_tokens, {most}, or null")
    logprobs = None
    if request.top_logprobs is not None:
        if not request.logprobs and request.top_logprobs:
            raise InvalidRequest("top_logprobs", request.top_logprobs, "null or 0 unless logprobs is true")
        if request.top_logprobs > 20:
            raise InvalidRequest("top_logprobs", request.top_logprobs, "0 to 20")
    if request.logprobs:
        logprobs = request.top_logprobs or 0
    return {"max_tokens": most, "logprobs": logprobs}


def completion_limits(request: CompletionRequest) -> dict[str, Any]:
    """Return the number of tokens and the logprobs of a completions request. Raises: InvalidRequest.

    The engine makes a token for `max_tokens` = 0, too, because prompt logprobs come with a step. The answer
    leaves this token out.
    """
    most = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if most == 0 and not request.echo:
        raise InvalidRequest("max_tokens", 0, "a positive number, or 0 with echo")
    limits: dict[str, Any] = {"max_tokens": most or 1, "logprobs": request.logprobs}
    if request.echo and request.logprobs is not None:
        limits["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    return limits
