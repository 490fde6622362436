"""Requests to the engine (`SamplingParams`, `Request`) and its events (`Started`, `Delta`, `Finished`)."""

import dataclasses
import enum
import json
import math
import numbers
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from jaxflow.config import check_types

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP = 64  # stop strings, and stop token ids, of one request
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 12
MAX_ALLOWED_TOKENS = 300
MAX_N = 64
MAX_FORM_CHARS = 1 << 18  # of a JSON schema, a regular expression or a grammar, and of all choices together
MAX_FORM_DEPTH = 64  # nested values of a JSON schema
MAX_CHOICES = 4096
MIN_REPETITION_PENALTY = 0.01  # below it, one repeated token takes all probability

_SHORT = reprlib.Repr()  # of a value that may have millions of parts
_SHORT.maxstring = _SHORT.maxother = 80


class Amount(str):
    """A description of a value that an error shows in the place of the value, as "3 messages"."""

    def __repr__(self) -> str:
        return str(self)


class InvalidRequest(ValueError):
    """A request that cannot be served. `field` is the path of the wrong field in the request."""

    def __init__(self, field: str, value: object, accepted: str):
        self.field, self.value, self.accepted = field, value, accepted
        text = isinstance(value, str) and not isinstance(value, Amount)
        shown = repr(value[:80]) if text else _SHORT.repr(value)  # type: ignore[index]
        super().__init__(
            f"{field}={shown if len(shown) <= 80 else shown[:77] + '...'} is not accepted: {accepted}"
        )

    def at(self, field: str) -> "InvalidRequest":
        """Return the error for another path of the field."""
        return InvalidRequest(field, self.value, self.accepted)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.accepted)


class MalformedRequest(InvalidRequest):
    """A request of a wrong form. `problem` is the whole message, cut to 400 characters."""

    def __init__(self, field: str, problem: str):
        super().__init__(field, None, problem)
        self.args = (problem[:400],)

    def at(self, field: str) -> InvalidRequest:
        """Return the error for another path of the field."""
        return MalformedRequest(field, self.accepted)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.accepted)


class ContextLengthExceeded(InvalidRequest):
    """A prompt, or a prompt and its output, longer than the context.

    `prompt_tokens`: None if the prompt was refused before its tokens were counted. `output_tokens`:
    requested, or 1 without a number.
    """

    def __init__(
        self, field: str, value: object, accepted: str, prompt_tokens: int | None, output_tokens: int = 1
    ):
        super().__init__(field, value, accepted)
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        shown = (self.field, self.value, self.accepted)
        return type(self), (*shown, self.prompt_tokens, self.output_tokens)


class QueueFull(RuntimeError):
    """The waiting queue is full. `retry_after_s` estimates the time until it has room."""

    def __init__(self, waiting: int, retry_after_s: float):
        self.waiting, self.retry_after_s = waiting, retry_after_s
        super().__init__(f"{waiting} requests wait, the maximum; try again in about {retry_after_s:.1f} s")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.waiting, self.retry_after_s)


class Draining(RuntimeError):
    """The engine is shutting down and accepts no new requests."""


class Interrupted(RuntimeError):
    """The process that ran a request was lost, and no other one can go on with the answer."""


class FinishReason(enum.StrEnum):
    """The reason for the end of a sequence."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"
    ABORT = "abort"


def _entries(field: str, value: Any, kind: type, accepted: str) -> tuple:
    """Return the entries of a setting that is a list; none for None.

    Raises:
      InvalidRequest: the value is no list, or an entry is not of `kind`.
    """
    if value is None:
        return ()
    listed = type(value) in (tuple, list) or (isinstance(value, Iterable) and not isinstance(value, str))
    entries = tuple(value) if listed else ()
    if not listed or not all(isinstance(entry, kind) for entry in entries):
        raise InvalidRequest(field, value, accepted)
    return entries


def _finite(field: str, value: float, low: float, high: float, accepted: str) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(field, value, accepted)


class Reasoning(NamedTuple):
    """The marks of the reasoning before an answer, which has no form.

    `begun`: an answer to a prompt without a mark at its end begins within the reasoning. Otherwise it may
    begin with the opening mark. `continued`: the text of the message that the answer continues.
    """

    opening: str
    closing: str
    begun: bool
    continued: str = ""


@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of an answer, with the names and meanings of vLLM. Exactly one form is given.

    `json`: a JSON schema, as an object or a text. It is kept as a text. `json_object`: True for any JSON
    object. `regex`: of the whole answer. `choice`: the answer is one of these texts. `grammar`: in Lark or
    GBNF. `reasoning`: the form begins after this reasoning.

    Raises:
      InvalidRequest: no form, several forms, or a form beyond the limits; it names the field.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        check_types(self, lambda field, *found: InvalidRequest(f"structured_outputs.{field}", *found))
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            accepted = f"1 to {MAX_CHOICES} different texts that are not empty"
            choice = _entries("structured_outputs.choice", self.choice, str, accepted)
            if not 1 <= len(set(choice)) == len(choice) <= MAX_CHOICES or not all(choice):
                raise InvalidRequest("structured_outputs.choice", choice, accepted)
            object.__setattr__(self, "choice", choice)
        forms = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(forms) != 1:
            found = Amount(" and ".join(forms) or "no form")
            raise InvalidRequest("structured_outputs", found, f"exactly one of {', '.join(FORMS)}")
        (form,) = forms
        text = self.text
        if not text or len(text) > MAX_FORM_CHARS:
            shown = Amount(f"{len(text)} characters")
            raise InvalidRequest(f"structured_outputs.{form}", shown, f"1 to {MAX_FORM_CHARS} characters")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"structured_outputs.{form}", text, "a text in valid Unicode") from None

    @property
    def form(self) -> str:
        """Return the name of the field that has the form."""
        return next(name for name in FORMS if getattr(self, name) not in (None, False))

    @property
    def text(self) -> str:
        """Return the form as a text: the schema, the expression, the grammar, or the joined choices."""
        value = getattr(self, self.form)
        if value is True:
            return '{"type":"object"}'
        return value if isinstance(value, str) else "".join(value)


FORMS = ("json", "regex", "choice", "grammar", "json_object")  # of `StructuredOutputsParams`


def _schema_text(schema: Any) -> str:
    """Return a JSON schema as a text. Raises: InvalidRequest."""
    accepted = f"a JSON schema: an object of at most {MAX_FORM_DEPTH} nested values"
    given = schema
    try:
        if isinstance(schema, str):
            if len(schema) > MAX_FORM_CHARS:
                shown = Amount(f"{len(schema)} characters")
                raise InvalidRequest("structured_outputs.json", shown, f"1 to {MAX_FORM_CHARS} characters")
            schema = json.loads(schema)
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except InvalidRequest:
        raise
    except (ValueError, TypeError, RecursionError):
        raise InvalidRequest("structured_outputs.json", given, accepted) from None
    level: list[Any] = [schema]
    for _ in range(MAX_FORM_DEPTH):
        level = [
            each
            for value in level
            if isinstance(value, dict | list)
            for each in (value.values() if isinstance(value, dict) else value)
        ]
    if level or not isinstance(schema, dict):
        raise InvalidRequest("structured_outputs.json", Amount(text[:80]), accepted)
    return text


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The sampling settings of a request, with the names and meanings of vLLM.

    `stop`, `stop_token_ids`, `logit_bias` and `bad_words` may be None, for no entry.

    Raises:
      InvalidRequest: for a value out of range or of another type; it names the field.
    """

    n: int = 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None  # None: random
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: to the end of the context
    min_tokens: int = 0
    logprobs: int | None = None  # k: log-probabilities of the sampled token and the k likeliest
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    bad_words: Sequence[str] = ()  # the output has no run of their tokens, alone or after a space
    allowed_token_ids: Sequence[int] | None = None  # the only tokens that may be drawn; None: all
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None  # the form of the answer; None: any text

    def __post_init__(self) -> None:
        check_types(self, InvalidRequest)
        for field in ("stop", "bad_words"):
            value = getattr(self, field)
            value = (value,) if isinstance(value, str) else value
            object.__setattr__(self, field, _entries(field, value, str, "a text, or a list of texts"))
        for field in ("stop_token_ids", "allowed_token_ids"):
            if (value := getattr(self, field)) is not None or field == "stop_token_ids":
                value = _entries(field, value, numbers.Integral, "a list of token ids")
                object.__setattr__(self, field, value)
        stop, words = self.stop, self.bad_words
        if self.logit_bias is not None and not isinstance(self.logit_bias, dict | Mapping):
            raise InvalidRequest("logit_bias", self.logit_bias, "a mapping from token ids to numbers")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        allowed = self.allowed_token_ids
        if allowed is not None and not 1 <= len(allowed) <= MAX_ALLOWED_TOKENS:
            raise InvalidRequest("allowed_token_ids", allowed, f"1 to {MAX_ALLOWED_TOKENS} ids, or null")
        if len(words) > MAX_BAD_WORDS or not all(
            isinstance(word, str) and word.strip() and len(word) <= MAX_STOP_CHARS for word in words
        ):
            accepted = f"at most {MAX_BAD_WORDS} texts of 1 to {MAX_STOP_CHARS} characters"
            raise InvalidRequest("bad_words", words, accepted)
        if not 1 <= self.n <= MAX_N:
            raise InvalidRequest("n", self.n, f"1 to {MAX_N}")
        _finite("temperature", self.temperature, 0.0, 100.0, "a number from 0 to 100")
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise InvalidRequest("top_p", self.top_p, "a number in (0, 1]")
        if not (self.top_k == -1 or 0 <= self.top_k < 2**31):
            raise InvalidRequest("top_k", self.top_k, "0 or -1 for off, or a positive number")
        _finite("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InvalidRequest("seed", self.seed, "a 64-bit integer")
        if len(stop) > MAX_STOP or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in stop):
            raise InvalidRequest(
                "stop", stop, f"at most {MAX_STOP} strings of 1 to {MAX_STOP_CHARS} characters"
            )
        if len(self.stop_token_ids) > MAX_STOP:
            raise InvalidRequest("stop_token_ids", self.stop_token_ids, f"at most {MAX_STOP} ids")
        if self.max_tokens is not None and not 1 <= self.max_tokens < 2**31:
            raise InvalidRequest("max_tokens", self.max_tokens, "a positive number")
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise InvalidRequest("min_tokens", self.min_tokens, "0 to max_tokens")
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise InvalidRequest(field, value, f"0 to {MAX_LOGPROBS}")
        form = self.structured_outputs
        if not isinstance(form, StructuredOutputsParams | None):
            raise InvalidRequest("structured_outputs", form, "a StructuredOutputsParams, or None")
        if form is not None and (self.ignore_eos or allowed is not None):
            field, accepted = ("ignore_eos", "false") if self.ignore_eos else ("allowed_token_ids", "null")
            raise InvalidRequest(field, getattr(self, field), f"{accepted} with structured outputs")
        penalty, least = self.repetition_penalty, MIN_REPETITION_PENALTY
        _finite("repetition_penalty", penalty, least, 1 / least, f"a number from {least} to {1 / least:g}")
        _finite("presence_penalty", self.presence_penalty, -2.0, 2.0, "a number from -2 to 2")
        _finite("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "a number from -2 to 2")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                "logit_bias", Amount(f"{len(self.logit_bias)} entries"), f"at most {MAX_LOGIT_BIAS} entries"
            )
        for token, bias in self.logit_bias.items():
            if not isinstance(token, numbers.Integral) or not isinstance(bias, numbers.Real):
                raise InvalidRequest("logit_bias", {token: bias}, "a mapping from token ids to numbers")
            _finite(f"logit_bias[{token}]", bias, -100.0, 100.0, "a number from -100 to 100")

    def end_token_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Return the tokens that end a sequence, given the model's end tokens."""
        return frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else eos_token_ids)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequest for a token id outside the model's vocabulary."""
        allowed = self.allowed_token_ids or ()
        lists = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias,
            "allowed_token_ids": allowed,
        }
        for field, ids in lists.items():
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise InvalidRequest(field, token, f"token ids 0 to {vocab_size - 1}")


class TextDecoder(Protocol):
    """The text of one growing sequence; `jaxflow.text.detokenizer.Detokenizer` is one."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text; None without one."""
        ...

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that is certain after them."""
        ...

    def finish(self) -> str:
        """Return the text that was held back, after the last token."""
        ...


class Constraint(Protocol):
    """The form of one growing sequence; `jaxflow.structured.constraint.TokenConstraint` is one."""

    @property
    def complete(self) -> bool:
        """True once the form is complete and nothing may follow."""
        ...

    def push(self, token: int) -> None:
        """Add a token. Raises: ValueError, if the form does not allow the token."""
        ...

    def fill(self, others: Sequence[tuple["Constraint", int]], masks: Any) -> None:
        """Write the masks of the next tokens of several constraints, of this class all.

        Bit t % 32 of word t // 32 of a row is set if token t may follow.

        Args:
          others: each constraint, with its row in `masks`.
          masks: int32 [R, words], contiguous.
        """
        ...


BATCH_PRIORITY = 1000  # a request of this priority or a later one is a batch request


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, as token ids, and its sampling settings."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = SamplingParams()
    priority: int = 0  # lower is sooner
    cache_salt: str = ""  # only requests of the same salt share prefixes
    # Returns the decoder of a sequence. The decoder finds stop strings, so `sampling.stop` needs it.
    make_detokenizer: "Callable[[], TextDecoder] | None" = None
    # Returns the constraint of a sequence, for `sampling.structured_outputs`.
    make_constraint: "Callable[[], Constraint] | None" = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # the tokens of sampling.bad_words
    limit: int | None = None  # tokens a sequence, prompt and output; set when the engine accepts the request
    session: str = ""  # requests of one session go to one replica, while its load allows it


def with_limit(request: Request, max_prompt: int, max_output: int) -> Request:
    """Return the request with its `limit`, where its prompt and output tokens are within these numbers.

    Raises:
      InvalidRequest: for an empty prompt.
      ContextLengthExceeded: for a number of tokens beyond the maximum.
    """
    prompt, sampling = len(request.prompt_token_ids), request.sampling
    if prompt == 0:
        raise InvalidRequest("prompt", [], "at least one token")
    if prompt > max_prompt:
        raise ContextLengthExceeded(
            "prompt",
            Amount(f"{prompt} tokens"),
            f"at most {max_prompt} tokens",
            prompt,
            sampling.max_tokens or 1,
        )
    for field in ("max_tokens", "min_tokens"):
        tokens = getattr(sampling, field)
        if tokens is not None and tokens > max_output:
            accepted = f"at most {max_output} after a prompt of {prompt} tokens"
            raise ContextLengthExceeded(field, tokens, accepted, prompt, tokens)
    output = max_output if sampling.max_tokens is None else sampling.max_tokens
    return dataclasses.replace(request, limit=prompt + output)


class Logprob(msgspec.Struct, frozen=True):
    """The log-probability of a token from the raw logits, before temperature and filters.

    Rank 1 is the likeliest.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


class Timings(msgspec.Struct, frozen=True):
    """Times of a sequence since its request arrived."""

    queued_s: float
    time_to_first_token_s: float
    total_s: float
    preemptions: int


class Started(msgspec.Struct, frozen=True):
    """The first event of a request, sent with its first token or just before.

    `prompt_logprobs`: None unless requested. One entry a prompt token, the first is None; the others are
    dicts token id -> Logprob, the prompt's token first.
    """

    request_id: str
    prompt_tokens: int
    cached_prompt_tokens: int
    seed: int
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None


class Delta(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one of the n sequences, up to and with the token that ended it.

    `logprobs`: one dict a token, the sampled token first. `text`: the text that the tokens add, where the
    engine decoded it to find stop strings; else None.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    text: str | None = None


class Finished(msgspec.Struct, frozen=True):
    """The last event of one of the n sequences. With `error`, a fault ended the sequence (reason ABORT)."""

    request_id: str
    index: int
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_token_id: int | None = None
    stop_string: str | None = None
    error: BaseException | None = None
    text: str = ""  # the rest of the text, where the deltas carry text


Event = Started | Delta | Finished
