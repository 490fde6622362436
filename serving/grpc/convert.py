"""Conversion between the messages of `generate.proto` and the engine's data, as pure functions."""

import dataclasses
import itertools
from collections.abc import Mapping

from google.protobuf.message import Message

from jaxflow.config import ConfigError
from jaxflow.request import Finished, FinishReason, InvalidRequest, Logprob, SamplingParams, Started
from jaxflow.text.tokenizer import Tokenizer
from serving.grpc import generate_pb2 as pb

# Sampling fields for which a checkpoint's generation config gives the default.
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

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

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}

_SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))


def sampling_defaults(generation_config: Mapping) -> dict[str, float]:
    """Return the sampling defaults of a checkpoint's generation config.

    Raises:
      ConfigError: a default that is not a valid sampling parameter.
    """
    defaults = {
        name: generation_config[name]
        for name in GENERATION_DEFAULTS
        if generation_config.get(name) is not None
    }
    try:
        SamplingParams(**defaults)
    except (InvalidRequest, TypeError) as error:
        raise ConfigError("generation_config", defaults, str(error)) from error
    return defaults


def sampling_params(message: pb.SamplingParams, defaults: Mapping) -> SamplingParams:
    """Return the engine's sampling parameters of a message.

    A field that `message` leaves unset is taken from `defaults`, then from the proto's comments.

    Raises:
      InvalidRequest: a value out of range. The error names the field.
    """
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
            "include_stop_str_in_output": message.include_stop_string,
        }
    )


def at_path(error: InvalidRequest, prompt_field: str) -> InvalidRequest:
    """Return `error` with the path of its field in a GenerateRequest. `prompt_field` is the prompt's path."""
    if error.field.partition("[")[0] in _SAMPLING_FIELDS:
        return InvalidRequest(f"sampling.{error.field}", error.value, error.accepted)
    if error.field.startswith("prompt"):
        return InvalidRequest(prompt_field, error.value, error.accepted)
    return error


def chat_messages(chat: pb.Chat) -> list[dict[str, str]]:
    """Return the messages for `jaxflow.text.chat.render_chat`. Raises: InvalidRequest if there are none."""
    if not chat.messages:
        raise InvalidRequest("chat.messages", [], "at least one message")
    for i, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequest(
                f"chat.messages[{i}].role",
                "",
                "system, user, assistant or another role of the model's chat template",
            )
    return [{"role": message.role, "content": message.content} for message in chat.messages]


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


def joined[T](parts: list[tuple[T, ...]]) -> list[T]:
    return list(itertools.chain.from_iterable(parts))
