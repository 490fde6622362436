"""Conversion between the messages of `generate.proto` and the engine's data, as pure functions."""

import dataclasses
from collections.abc import Mapping

from google.protobuf.message import Message

from jaxflow.request import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_STOP,
    Amount,
    Finished,
    FinishReason,
    InvalidRequest,
    Logprob,
    SamplingParams,
    Started,
    StructuredOutputsParams,
)
from jaxflow.text.chat import MAX_MESSAGES
from jaxflow.text.tokenizer import Tokenizer
from serving.frontend.sampling_defaults import GENERATION_DEFAULTS
from serving.frontend.served_model import Chat, Prompt
from serving.frontend.transcript import Ended, Output, TextDelta
from serving.grpc import generate_pb2 as pb

_OPTIONAL = (
    *GENERATION_DEFAULTS,
    "seed",
    "max_tokens",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
)

_MOST = {
    "stop": MAX_STOP,
    "stop_token_ids": MAX_STOP,
    "logit_bias": MAX_LOGIT_BIAS,
    "bad_words": MAX_BAD_WORDS,
    "allowed_token_ids": MAX_ALLOWED_TOKENS,
}

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}

# The path of the prompt in a request, by the name of its field.
_PROMPT_PATHS = {"text": "text", "token_ids": "token_ids.ids", "chat": "chat.messages", None: "prompt"}
_SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))


def sampling_params(message: pb.SamplingParams, defaults: Mapping) -> SamplingParams:
    """Return the engine's sampling parameters of a message.

    A field that `message` leaves unset is taken from `defaults`, then from the proto's comments.

    Raises:
      InvalidRequest: a value out of range. The error names the field.
    """
    # A message of a few megabytes can have millions of entries, which take seconds to convert.
    for name, most in _MOST.items():
        _check_most(name, len(getattr(message, name)), most)
    given = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}  # type: ignore[arg-type]
    return SamplingParams(
        **{
            "max_tokens": None,
            **defaults,
            **given,
            "n": message.n or 1,
            "stop": tuple(message.stop),
            "stop_token_ids": tuple(message.stop_token_ids),
            "ignore_eos": message.ignore_eos,
            "logit_bias": dict(message.logit_bias),
            "bad_words": tuple(message.bad_words),
            "allowed_token_ids": tuple(message.allowed_token_ids) or None,
            "include_stop_str_in_output": message.include_stop_string,
            "structured_outputs": structured_outputs(message),
        }
    )


def structured_outputs(message: pb.SamplingParams) -> StructuredOutputsParams | None:
    """Return the form of the answer, or None. Raises: InvalidRequest."""
    if not message.HasField("structured_outputs"):
        return None
    wanted = message.structured_outputs
    form = wanted.WhichOneof("form")
    if form is None:
        raise InvalidRequest(
            "structured_outputs", None, "one of json, regex, choice, grammar and json_object"
        )
    if form == "choice":
        _check_most("structured_outputs.choice", len(wanted.choice.texts), MAX_CHOICES)
        return StructuredOutputsParams(choice=tuple(wanted.choice.texts))
    return StructuredOutputsParams(**{form: getattr(wanted, form)})


def prompt(message: pb.GenerateRequest) -> Prompt:
    """Return the prompt of a request. Raises: InvalidRequest if there is none."""
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return message.token_ids.ids  # type: ignore[return-value]  # a sequence
        case "chat":
            return chat(message.chat)
    raise InvalidRequest("", None, "one of text, token_ids and chat")


def chat(message: pb.Chat) -> Chat:
    """Return the conversation of a message. Raises: InvalidRequest for too many messages."""
    _check_most("messages", len(message.messages), MAX_MESSAGES)
    continued = message.continue_final_message
    return Chat(
        [{"role": part.role, "content": part.content} for part in message.messages],
        {
            "add_generation_prompt": not continued,
            "continue_final_message": continued,
            "parse_control_tokens": message.parse_control_tokens,
        },
    )


def _check_most(field: str, entries: int, most: int) -> None:
    if entries > most:
        raise InvalidRequest(field, Amount(f"{entries} entries"), f"at most {most} entries")


def path(field: str, kind: str | None) -> str:
    """Return the path of a field in a request of the proto.

    `kind` is the name of the request's prompt field.
    """
    name, bracket, rest = field.partition("[")
    if name.startswith("messages"):
        return f"chat.{field}"
    if name in ("prompt", "prompt_token_ids", ""):
        return _PROMPT_PATHS[kind] + bracket + rest
    if name == "include_stop_str_in_output":
        return "sampling.include_stop_string"
    return f"sampling.{field}" if name.partition(".")[0] in _SAMPLING_FIELDS else field


def message(request_id: str, output: Output, tokenizer: Tokenizer | None) -> pb.GenerateResponse:
    """Return the message of an output. `request_id` is the caller's name of the request."""
    match output:
        case Started():
            return pb.GenerateResponse(request_id=request_id, started=started(output, tokenizer))
        case TextDelta():
            delta = pb.Delta(
                index=output.index,
                token_ids=output.token_ids,
                text=output.text,
                logprobs=[token_logprobs(candidates, tokenizer) for candidates in output.logprobs],
            )
            return pb.GenerateResponse(request_id=request_id, delta=delta)
        case Ended():
            return pb.GenerateResponse(request_id=request_id, finished=finished(output.event, output.text))


def started(event: Started, tokenizer: Tokenizer | None) -> pb.Started:
    """Return the message of `event`, with the text of each prompt token if there is a tokenizer."""
    return pb.Started(
        prompt_tokens=event.prompt_tokens,
        cached_prompt_tokens=event.cached_prompt_tokens,
        seed=signed(event.seed),
        prompt_logprobs=[token_logprobs(entry or {}, tokenizer) for entry in event.prompt_logprobs or ()],
    )


def signed(bits: int) -> int:
    """Return a 64-bit number as the signed number of the same bits, which `SamplingParams.seed` accepts."""
    return bits - 2**64 if bits >= 2**63 else bits


def token_logprobs(candidates: Mapping[int, Logprob], tokenizer: Tokenizer | None) -> pb.TokenLogprobs:
    """Return the candidates of one token, in the order of `candidates`: the sampled token first."""

    def text(token_id: int, entry: Logprob) -> str:
        if entry.decoded_token is not None:
            return entry.decoded_token
        return tokenizer.token_text(token_id) if tokenizer is not None else ""

    return pb.TokenLogprobs(
        candidates=[
            pb.TokenLogprob(
                token_id=token_id, logprob=entry.logprob, rank=entry.rank, text=text(token_id, entry)
            )
            for token_id, entry in candidates.items()
        ]
    )


def finished(event: Finished, text: str) -> pb.Finished:
    """Return the message of `event`. `text` is the rest of the text that the deltas did not carry."""
    message = pb.Finished(
        index=event.index,
        reason=_REASONS[event.reason],
        text=text,
        usage=same_fields(pb.Usage, event.usage),
        timings=same_fields(pb.Timings, event.timings),
    )
    if event.stop_string is not None:
        message.stop_string = event.stop_string
    elif event.stop_token_id is not None:
        message.stop_token_id = event.stop_token_id
    return message


def same_fields[M: Message](kind: type[M], source: object) -> M:
    """Return a message of `kind`, filled from attributes of `source` with the same names."""
    return kind(**{field.name: getattr(source, field.name) for field in kind.DESCRIPTOR.fields})
