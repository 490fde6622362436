"""Bodies of the answers, as in OpenAI's API, with vLLM's extra fields. An extra
field is there only if asked for.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Prompt tokens that were read from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Tokens of the reasoning. It is 0 where reasoning is not told from other text."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request, summed over its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def make_usage(prompt: int, cached: int, completion: int, reasoning: int = 0) -> Usage:
    """Return the usage of these numbers of tokens."""
    return Usage(
        prompt,
        completion,
        prompt + completion,
        PromptTokensDetails(cached),
        CompletionTokensDetails(reasoning),
    )


class TopLogprob(msgspec.Struct, frozen=True):
    """A candidate of a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(msgspec.Struct, frozen=True):
    """A token of a message. The bytes of all tokens are those of the message; null: the token has no text."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a message, from the raw logits."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a completion. Entry i of each list is about token i."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """A candidate of a position of the prompt. Rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(msgspec.Struct, frozen=True):
    """The function of a tool call. `arguments`: a JSON object as text."""

    name: str
    arguments: str


class AnswerToolCall(msgspec.Struct, frozen=True):
    """A tool call in an answer. `index`: among the calls, in a stream."""

    id: str
    function: CalledFunction
    type: str = "function"
    index: int | UnsetType = UNSET


class AnswerMessage(msgspec.Struct, frozen=True):
    """The message of an answer. `content` is null in an answer of calls or reasoning only.

    The reasoning has two names: vLLM's is `reasoning`, that of DeepSeek and SGLang is `reasoning_content`.
    """

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One of the n answers. `stop_reason`: the stop string or stop token that ended it, if one did."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """The answer of `POST /v1/chat/completions`."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    object: str = "chat.completion"
    seed: int | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    """One of the n completions of a prompt."""

    index: int
    text: str
    finish_reason: str
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """The answer of `POST /v1/completions`."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str
    object: str = "text_completion"
    seed: int | UnsetType = UNSET


class TokenizeAnswer(msgspec.Struct, frozen=True):
    """The answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    """The answer of `POST /detokenize`."""

    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True):
    """The answer of `GET /tokenizer_info`: what a program needs to build prompts.

    null: there is no such token.
    """

    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    model_max_length: int


class Model(msgspec.Struct, frozen=True):
    """A name of the served model. `root` is the model's own name."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "jaxflow"
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True):
    """The answer of `GET /v1/models`."""

    data: list[Model]
    object: str = "list"


class Version(msgspec.Struct, frozen=True):
    """The answer of `GET /version`."""

    version: str


Answer = ChatCompletion | Completion | TokenizeAnswer | DetokenizeAnswer


def builtins(answer: Any) -> dict[str, Any]:
    """Return an answer as JSON values."""
    return msgspec.to_builtins(answer)
