"""Bodies of the requests, and the function that reads them, for HTTP and for the lines of a batch.

Names and meanings are those of OpenAI's API and of vLLM's extra fields. An unknown field is an error. Some
fields are accepted and change nothing. Other fields are known, but not served: a value that asks for
something is refused by name.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxflow.request import InvalidRequest, MalformedRequest
from jaxflow.text.chat import MAX_TOOLS

MAX_PROMPTS = 2048  # prompts of a completions request
MAX_CHOICES = 4096  # choices of a request: prompts times n
# Limits of a body, which the event loop reads at once: commas, quotes of strings, and opening brackets. They
# are about the numbers of its JSON values, half of its strings, and its arrays and objects.
MAX_COMMAS = 1 << 20
MAX_QUOTES = 100_000
MAX_BRACKETS = 1 << 17

Count = Annotated[int, Meta(ge=0, lt=2**31)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ShortText = Annotated[str, Meta(max_length=4096)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Options of a stream.

    include_usage: end the stream with a chunk of the usage. continuous_usage_stats: put the usage so far into
    every chunk. include_obfuscation: accepted; no padding is sent.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A JSON schema of the answer. `strict`: true or false, the answer always has the schema."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The form of the answer, by OpenAI's names. `schema`: of json_object, as llama.cpp has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The form of the answer, by vLLM's names. One field is set."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Generation(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The fields that chat and completions requests share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Count | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Priority | None = None
    cache_salt: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    request_id: ShortText | None = None
    # Accepted, without an effect.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    verbosity: Any = None
    spaces_between_special_tokens: Any = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Known, but not served.
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    use_beam_search: Any = None
    best_of: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    lora_path: Any = None
    lora_request: Any = None
    prompt_embeds: Any = None
    mm_processor_kwargs: Any = None


class Message(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """A message of a conversation. `content` is a text, a list of text parts, or null.

    `reasoning_content`, `reasoning` and `thinking` name the same. The first that has a text counts.
    `parsed`: accepted without an effect. The messages of the `openai` package's stream helper have it.
    """

    role: str
    content: Any = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: Any = None
    annotations: Any = None
    parsed: Any = None
    audio: Any = None
    function_call: Any = None


class Function(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """A function that the model may call. `parameters`: JSON schema of its arguments.

    `strict` has no effect: the arguments of a call that is not forced are not checked.
    """

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A tool of a chat request."""

    type: Literal["function"]
    function: Function


class ToolName(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The name of a function."""

    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The tool that the answer must call."""

    type: Literal["function"]
    function: ToolName


class ChatRequest(Generation, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`.

    `tools`: functions that the model may call. `tool_choice`: auto, none to show no tools to the model, or
    required or a tool for an answer that must call.
    `parallel_tool_calls`: false for at most one call in an answer.
    `parse_control_tokens`: a control token in a message (`<|im_end|>`) becomes
      this token; else it is plain text.
    `reasoning_effort`: a variable of the chat template; none also sets its `enable_thinking` to false, and
      the others set it to true.
    `include_reasoning`: false leaves the reasoning out. `separate_reasoning`: false leaves it in the content.
    """

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    parse_control_tokens: bool | None = None
    echo: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # Known, but not served.
    functions: Any = None
    function_call: Any = None
    documents: Any = None
    chat_template: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None


class CompletionRequest(Generation, frozen=True, kw_only=True):
    """The body of `POST /v1/completions`. `prompt`: a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Count | None = None
    echo: bool | None = None
    # Known, but not served.
    suffix: Any = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The body of `POST /tokenize`: a prompt or messages. `parse_control_tokens`: see `ChatRequest`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parse_control_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    # Known, but not served.
    chat_template: Any = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: list[TokenId]
    model: str | None = None


Body = ChatRequest | CompletionRequest | TokenizeRequest | DetokenizeRequest

# Values of the fields that are known and not served, beside null, that ask for nothing special.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "best_of": (1,),
    "length_penalty": (1, 1.0),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "documents": ([],),
    "modalities": (["text"],),
    "suffix": ("",),
    "echo": (False,),
}
_TEXT_ONLY = "this server reads and writes text only"
_NO_BEAMS = "there is no beam search: ask for n answers with logprobs, and choose one"
_NO_LORA = "LoRA adapters are not served: merge the adapter into the checkpoint"
# The fields that are known and not served, and what to do instead.
NOT_SERVED_FIELDS = {
    "functions": "tools has taken its place",
    "function_call": "tool_choice has taken its place",
    "documents": "write the documents into a message",
    "thinking_token_budget": "max_tokens limits all tokens of the answer",
    "repetition_detection": "repetition_penalty and frequency_penalty lower repetitions",
    "suffix": "write the prompt of the model for filling in the middle",
    "use_beam_search": _NO_BEAMS,
    "best_of": _NO_BEAMS,
    "length_penalty": _NO_BEAMS,
    "logits_processors": "logit_bias, bad_words and allowed_token_ids change which tokens are drawn",
    "kv_transfer_params": "python -m serving.cluster computes prompts on replicas of their own",
    "lora_path": _NO_LORA,
    "lora_request": _NO_LORA,
    "prompt_embeds": "send a text or token ids",
    "chat_template": "--chat_template of the server sets the template",
    "mm_processor_kwargs": _TEXT_ONLY,
    "modalities": _TEXT_ONLY,
    "audio": _TEXT_ONLY,
    "prediction": "there is no speculative decoding",
    "web_search_options": "this server searches nothing",
}
# Fields of a chat that accept some values only.
_IN_CHAT = {
    "echo": "false or null in a chat",
}
_CHECKED_FIELDS = {
    kind: tuple(
        name
        for name in kind.__struct_fields__
        if name in NOT_SERVED_FIELDS or (name == "echo" and kind is ChatRequest)
    )
    for kind in (ChatRequest, CompletionRequest, TokenizeRequest)
}


def refused_fields(body: Body) -> list[tuple[str, Any, str]]:
    """Return the fields of a body that are not served: name, value, reason."""
    if isinstance(body, DetokenizeRequest):
        return []
    names = _CHECKED_FIELDS[type(body)]
    values = [getattr(body, name) for name in names]
    if values.count(None) == len(values):
        return []
    result = []
    for name, value in zip(names, values, strict=True):
        if value is None or any(value == harmless for harmless in _HARMLESS.get(name, ())):
            continue
        result.append((name, value, NOT_SERVED_FIELDS.get(name, _IN_CHAT.get(name, ""))))
    return result


KINDS: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_DECODERS = {path: msgspec.json.Decoder(kind) for path, kind in KINDS.items()}
_UNKNOWN = "Object contains unknown field "
_MISSING = "Object missing required field "


def read_body(path: str, body: bytes) -> Body:
    """Return the request of a body.

    Raises:
      InvalidRequest: not JSON, an unknown field, a value of another type, or a field that is not served.
    """
    _check_parts(body)
    try:
        request = _DECODERS[path].decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed("body", f"not a JSON object in UTF-8: {error}") from None
    except RecursionError:
        raise _malformed("body", "the JSON is nested too deeply") from None
    for name, value, reason in refused_fields(request):
        raise InvalidRequest(name, value, reason)
    return request


def _check_parts(body: bytes) -> None:
    """Check the number of a body's values, so that the event loop reads them in a short time.

    Raises: MalformedRequest.
    """
    quotes = body.count(b'"') - body.count(b'\\"')  # an escaped quote is a part of a string
    brackets = body.count(b"{") + body.count(b"[")
    for found, most in ((body.count(b","), MAX_COMMAS), (quotes, MAX_QUOTES), (brackets, MAX_BRACKETS)):
        if found > most:
            accepted = f"at most {MAX_COMMAS} commas, {MAX_QUOTES} quotes of strings, {MAX_BRACKETS} brackets"
            raise _malformed("body", f"too many values; accepted: {accepted}")


def _malformed(field: str, problem: str) -> MalformedRequest:
    """Return the error of a field, or of `body`."""
    return MalformedRequest(field, f"{field[:80]}: {problem[:300]}")


def _invalid(message: str) -> MalformedRequest:
    """Return the error of a validation message of msgspec, such as "Expected `int` - at `$.n`"."""
    problem, _, where = message.partition(" - at ")
    path = where.rpartition("`$")[2].rstrip("`").lstrip(".")
    for start, reason in ((_UNKNOWN, "unknown field"), (_MISSING, "this field is required")):
        if problem.startswith(start):
            field = problem.removeprefix(start).strip("`")
            return _malformed(f"{path}.{field}" if path else field, reason)
    return _malformed(path or "body", problem)
