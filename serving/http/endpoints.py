"""The endpoints of a served model, without a socket: from the bytes of a body to the answer.

The plain POST routes and the runner of batches call `Endpoints.answer`.
"""

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException

import jaxflow
from jaxflow.request import Amount, InvalidRequest, Request, SamplingParams, StructuredOutputsParams
from jaxflow.text.chat import MAX_MESSAGES, REASONING_NAMES
from jaxflow.text.reasoning import begin_of
from jaxflow.text.tool_call_forms import FORMS, UnknownForm, check_tools, form_of
from jaxflow.text.tool_calls import Form
from serving.frontend.answer_reader import HARMONY_CALLS, Reading, reading_of
from serving.frontend.call import CALL, new_id
from serving.frontend.form_after_reasoning import after_reasoning
from serving.frontend.refusal import Code, Refusal, deadline_passed
from serving.frontend.served_model import Chat, Prompt, ServedModel
from serving.http.answer_form import form_of_answer
from serving.http.chat import ChatFormat
from serving.http.completions import CompletionFormat
from serving.http.errors import HttpError, http_error
from serving.http.forced_calls import form_of_calls, is_forced
from serving.http.job import Answering, Collection, Head, Job, rename, run
from serving.http.logprobs import TokenNames
from serving.http.responses import (
    Answer,
    DetokenizeAnswer,
    Model,
    ModelList,
    TokenizeAnswer,
    TokenizerInfo,
    builtins,
)
from serving.http.sampling import sampling_params
from serving.http.schema import (
    MAX_CHOICES,
    MAX_PROMPTS,
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
    Tool,
    read_body,
)


@dataclasses.dataclass(frozen=True)
class Deadline:
    """The end of a caller's patience, in seconds of the monotonic clock; None for no end."""

    at_s: float | None = None

    @staticmethod
    def after(seconds: float | None) -> "Deadline":
        """Return the deadline this many seconds from now."""
        return NO_DEADLINE if seconds is None else Deadline(time.monotonic() + seconds)

    def left_s(self) -> float | None:
        """Return the seconds left, or None. Raises: Refusal after the deadline."""
        if self.at_s is None:
            return None
        left = self.at_s - time.monotonic()
        if left <= 0:
            raise deadline_passed()
        return left


NO_DEADLINE = Deadline()
_END_TOKENS = 32  # the end of a prompt that may hold the marks of reasoning
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Prepared(msgspec.Struct, frozen=True):
    """A generation that can run: its job, and the form of its answer."""

    job: Job
    head: Head
    form: ChatFormat | CompletionFormat
    stream: bool


class Endpoints:
    """The endpoints of a served model. Used on the event loop's thread."""

    def __init__(self, served: ServedModel):
        self.served = served
        self._created = int(time.time())
        self._fingerprint = ""

    def alive(self) -> bool:
        """Return False once the engine can answer no more."""
        return not self.served.loaded or self.served.llm.driver.alive

    def check(self, path: str, body: bytes) -> None:
        """Check the body of a generation as far as the model is not needed.

        Raises:
          InvalidRequest: naming the field.
        """
        request = read_body(path, body)
        if not isinstance(request, ChatRequest | CompletionRequest):
            raise InvalidRequest("url", path, f"{_CHAT} or {_COMPLETIONS}")
        if request.stream:
            raise InvalidRequest("stream", True, "false or null")
        sampling_params(request, {})
        if isinstance(request, CompletionRequest):
            prompts(request)

    async def answer(self, path: str, body: bytes, *, priority: int = 0) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status and the JSON body of a request that is not streamed.

        Cancellation ends the request.

        Args:
          priority: the least priority number of the request; a higher number is later.
        """
        try:
            request = read_body(path, body)
            if isinstance(request, ChatRequest | CompletionRequest) and request.stream:
                raise InvalidRequest("stream", True, "false or null")
            return 200, builtins(await self.whole(request, priority=priority))
        except Exception as error:
            found = self.error(error, path)
            return found.status, builtins(found.body)

    def error(self, error: Exception, path: str) -> HttpError:
        """Return the HTTP error of an exception, and note it in the record of the call.

        `path`: of the route.
        """
        if not isinstance(error, HttpError | HTTPException) and (call := CALL.get()) is not None:
            call.fail(error)
        # Other routes, as /tokenize, take more tokens than the context.
        in_context = self.served.loaded and path in (_CHAT, _COMPLETIONS)
        max_model_len = self.served.llm.max_model_len if in_context else None
        return http_error(error, max_model_len, path == _CHAT)

    # ---- answers

    async def whole(self, request: Body, *, priority: int = 0, deadline: Deadline = NO_DEADLINE) -> Answer:
        """Return the answer of a request. Raises: Refusal, InvalidRequest, RequestFailed, HttpError."""
        match request:
            case TokenizeRequest():
                return await self._tokenize(request, deadline)
            case DetokenizeRequest():
                return await self._detokenize(request, deadline)
        return await self.collect(await self.prepare(request, priority=priority, deadline=deadline), deadline)

    async def collect(self, prepared: Prepared, deadline: Deadline = NO_DEADLINE) -> Answer:
        """Run a generation and return its whole answer."""
        job = prepared.job
        found = Collection(len(job.requests) * job.n)
        answering = Answering(job)
        await run(self.served, answering, found.take, timeout_s=deadline.left_s(), whole=True)
        if job.requests[0].sampling.prompt_logprobs is None:
            return prepared.form.whole(found, answering.usage)
        # Prompt logprobs can have 21 candidates a token. The streams continue while they are converted.
        return await asyncio.to_thread(prepared.form.whole, found, answering.usage)

    async def prepare(
        self,
        request: ChatRequest | CompletionRequest,
        *,
        priority: int = 0,
        deadline: Deadline = NO_DEADLINE,
    ) -> Prepared:
        """Return a generation that can run. Raises: Refusal, InvalidRequest."""
        served, llm = self.served, self.served.llm
        served.check_model(request.model or "")
        sampling = sampling_params(request, served.sampling_defaults)
        chat = isinstance(request, ChatRequest)
        reading, special = self._reading(request) if isinstance(request, ChatRequest) else (None, False)
        if special:
            sampling = dataclasses.replace(sampling, skip_special_tokens=False)
        if isinstance(request, ChatRequest) and is_forced(request):
            form = self._form_of_calls(request, reading, sampling.structured_outputs)
            sampling = dataclasses.replace(sampling, structured_outputs=form)
        if (form := sampling.structured_outputs) is not None and isinstance(request, ChatRequest):
            parser, tokenizer = served.config.reasoning_parser, served.tokenizer("messages")
            try:
                sampling = after_reasoning(sampling, parser, tokenizer, _continued(request))
            except InvalidRequest as error:
                raise error.at(form_of_answer(request)[1] or "tool_choice") from None
        asked = [_chat(request)] if chat else prompts(request)
        if len(asked) * sampling.n > MAX_CHOICES:
            raise InvalidRequest("n", sampling.n, f"at most {MAX_CHOICES} choices of all prompts together")
        requests: list[Request] = []
        for number, prompt in enumerate(asked):
            field = "messages" if chat else f"prompt[{number}]" if len(asked) > 1 else "prompt"
            try:
                requests.append(
                    await served.build_request(
                        await self._truncated(prompt, request, sampling.max_tokens, deadline),
                        sampling,
                        model=request.model or "",
                        request_id=request.request_id or "",
                        priority=max(request.priority or 0, priority) if priority else request.priority or 0,
                        cache_salt=request.cache_salt or "",
                        session=request.prompt_cache_key or "",
                        add_special_tokens=request.add_special_tokens,
                        timeout_s=deadline.left_s(),
                    )
                )
            except InvalidRequest as error:
                names = {"prompt": field, "prompt_token_ids": field, "session": "prompt_cache_key"}
                if chat and request.max_completion_tokens is not None:
                    names["max_tokens"] = "max_completion_tokens"
                if form is not None:
                    path = form_of_answer(request)[1] or "tools"
                    names |= {f"structured_outputs.{form.form}": path, "structured_outputs": path}
                rename(error, names)
                raise
        echo = None
        if not chat and request.echo:
            echo = await asyncio.to_thread(lambda: list(map(self._text, asked, requests)))
        drop = not chat and request.max_tokens == 0
        if isinstance(request, ChatRequest) and reading is not None:
            reading = self._begun(reading, request, requests[0].prompt_token_ids)
        job = Job(requests, llm.tokenizer, llm.model_config.eos_token_ids, echo, drop, reading)
        head = self._head(request, sampling)
        return Prepared(
            job, head, (ChatFormat if chat else CompletionFormat)(head, job), bool(request.stream)
        )

    def _reading(self, request: ChatRequest) -> tuple[Reading | None, bool]:
        """Return how the answer is read, and whether its marks are special tokens, which the text must keep.

        A caller who chooses about special tokens gets text that is not read for special marks.

        Raises: Refusal, InvalidRequest.
        """
        served, tokenizer = self.served, self.served.llm.tokenizer
        if tokenizer is None:
            return None, False
        free, template = request.skip_special_tokens is None, tokenizer.chat_template or ""
        tools, parser = tools_of(request), served.config.tool_call_parser
        reading = reading_of(served.config.reasoning_parser, template)
        if tools and parser == HARMONY_CALLS:
            reading = Reading(harmony=True)
        special = reading.harmony or not tokenizer.special_texts.isdisjoint(reading.marks or ())
        if request.separate_reasoning is False or (special and not free):
            reading, special = Reading(), False
        form = None
        if tools and not (reading.harmony and parser in ("auto", HARMONY_CALLS) and "tools" in template):
            form = self._tool_form(request)
            special = special or (free and not tokenizer.special_texts.isdisjoint(form.marks))
        if not (reading.harmony or reading.marks or form):
            return None, False
        most = 1 if request.parallel_tool_calls is False else None
        shown = request.include_reasoning is not False
        parameters = {tool.function.name: tool.function.parameters for tool in tools}
        more = {"shown": shown, "tools": bool(tools), "form": form, "parameters": parameters}
        return msgspec.structs.replace(reading, most_calls=most, **more), special

    def _form_of_calls(
        self, request: ChatRequest, reading: Reading | None, other: StructuredOutputsParams | None
    ) -> StructuredOutputsParams:
        """Return the form of an answer that must call. other: the form of `form_of_answer`.

        Raises: InvalidRequest.
        """
        if other is not None:
            path = form_of_answer(request)[1]
            raise InvalidRequest(path, Amount(other.form), "null with a forced call")
        texts = self.served.tokenizer("tools").special_texts
        return form_of_calls(request, None if reading is None else reading.form, texts)

    def _begun(self, reading: Reading, request: ChatRequest, prompt: Sequence[int]) -> Reading:
        """Return a reading that begins where the answer to a prompt begins."""
        if reading.marks is None:
            return reading
        end = self.served.tokenizer("messages").decode(prompt[-_END_TOKENS:], skip_special_tokens=False)
        begin = begin_of(end, _continued(request), reading.begin, reading.marks)
        return msgspec.structs.replace(reading, begin=begin)

    def _tool_form(self, request: ChatRequest) -> Form:
        """Return the form of the tool calls of the served model. Raises: Refusal, InvalidRequest."""
        template = self.served.tokenizer("tools").chat_template or ""
        try:
            check_tools(template)
            return FORMS.get(self.served.config.tool_call_parser) or form_of(template)
        except UnknownForm as error:
            shown = Amount(f"{len(request.tools or ())} tools")
            raise InvalidRequest("tools", shown, str(error)) from error

    def _head(self, request: ChatRequest | CompletionRequest, sampling: SamplingParams) -> Head:
        served = self.served
        chat = isinstance(request, ChatRequest)
        options = request.stream_options
        return Head(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{request.request_id or new_id()}",
            created=int(time.time()),
            model=request.model or served.names[0],
            fingerprint=self.fingerprint,
            names=TokenNames(served.llm.tokenizer, bool(request.return_tokens_as_token_ids)),
            n=sampling.n,
            top=(request.top_logprobs or 0) if chat else 0,
            with_logprobs=bool(request.logprobs) if chat else request.logprobs is not None,
            with_token_ids=bool(request.return_token_ids),
            with_prompt_logprobs=request.prompt_logprobs is not None,
            usage_at_end=options is not None and bool(options.include_usage),
            usage_in_chunks=options is not None and bool(options.continuous_usage_stats),
            skip_special_tokens=sampling.skip_special_tokens,
        )

    @property
    def fingerprint(self) -> str:
        """Return the version with a digest of the model's and the engine's configuration."""
        if not self._fingerprint:
            llm = self.served.llm
            text = f"{llm.name}\n{llm.model_config}\n{llm.engine_config}"
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            self._fingerprint = f"jaxflow-{jaxflow.__version__}-{digest}"
        return self._fingerprint

    async def _truncated(
        self,
        prompt: Prompt,
        request: ChatRequest | CompletionRequest,
        max_tokens: int | None,
        deadline: Deadline,
    ) -> Prompt:
        """Return the last tokens of a prompt, if the request asks for a truncated prompt."""
        keep = request.truncate_prompt_tokens
        if keep is None:
            return prompt
        if keep == 0:
            raise InvalidRequest("truncate_prompt_tokens", 0, "a positive number, or -1 for what fits")
        if keep < 0:
            keep = max(1, self.served.llm.max_model_len - (max_tokens or 1))
        special = request.add_special_tokens
        return await self.served.encode_last(prompt, keep, special, timeout_s=deadline.left_s())

    def _text(self, prompt: Prompt, request: Request) -> str:
        """Return the text of a completions prompt, as `echo` repeats it."""
        tokenizer = self.served.llm.tokenizer
        if isinstance(prompt, str) and len(request.prompt_token_ids):
            return prompt
        if tokenizer is None:
            return ""
        return tokenizer.decode(request.prompt_token_ids, request.sampling.skip_special_tokens)

    # ---- tokens

    async def _tokenize(self, request: TokenizeRequest, deadline: Deadline) -> TokenizeAnswer:
        served = self.served
        served.check_model(request.model or "")
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("prompt", request.prompt, "either prompt or messages")
        prompt = _chat(request) if request.prompt is None else request.prompt
        ids = await served.encode(prompt, request.add_special_tokens, timeout_s=deadline.left_s())
        texts = None
        if request.return_token_strs:
            tokenizer = served.tokenizer("prompt")
            texts = await asyncio.to_thread(lambda: [tokenizer.token_text(token) for token in ids])
        return TokenizeAnswer(len(ids), served.llm.max_model_len, ids, texts)

    async def _detokenize(self, request: DetokenizeRequest, deadline: Deadline) -> DetokenizeAnswer:
        served = self.served
        served.check_model(request.model or "")
        try:
            text = await served.decode(request.tokens, False, timeout_s=deadline.left_s())
        except InvalidRequest as error:
            rename(error, {"ids": "tokens"})
            raise
        return DetokenizeAnswer(text)

    def tokenizer_info(self) -> TokenizerInfo:
        """Return the special tokens and the chat template. Raises: Refusal."""
        tokenizer = self.served.tokenizer("tokenizer")
        bos, eos = (
            None if token is None else tokenizer.token_text(token)
            for token in (tokenizer.bos_token_id, tokenizer.eos_token_id)
        )
        return TokenizerInfo(bos, eos, tokenizer.chat_template, self.served.llm.max_model_len)

    # ---- models

    def models(self) -> ModelList:
        """Return the names of the served model. Raises: Refusal while it loads."""
        llm = self.served.llm
        return ModelList(
            [Model(name, self._created, llm.name, llm.max_model_len) for name in self.served.names]
        )

    def model(self, name: str) -> Model:
        """Return one name of the served model. Raises: Refusal."""
        self.served.check_model(name)
        found = [model for model in self.models().data if model.id == name]
        if not found:
            raise Refusal(Code.MODEL_NOT_FOUND, "the name of a model is empty", field="model")
        return found[0]


def prompts(request: CompletionRequest) -> list[Prompt]:
    """Return the prompts of a request. Raises: InvalidRequest."""
    given = request.prompt
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return [given]  # type: ignore[list-item]
    if len(kinds) != 1 or len(given) > MAX_PROMPTS:
        accepted = f"a text, token ids, or 1 to {MAX_PROMPTS} texts or lists of token ids"
        raise InvalidRequest("prompt", Amount(f"{len(given)} entries"), accepted)
    return given  # type: ignore[return-value]


def _chat(request: ChatRequest | TokenizeRequest) -> Chat:
    """Return the conversation of a request. Raises: InvalidRequest."""
    options: dict[str, Any] = {"template_kwargs": _template_kwargs(request)}
    if request.add_generation_prompt is not None:
        options["add_generation_prompt"] = request.add_generation_prompt
    if request.continue_final_message is not None:
        options["continue_final_message"] = request.continue_final_message
    if request.parse_control_tokens is not None:
        options["parse_control_tokens"] = request.parse_control_tokens
    if tools := tools_of(request):
        options["tools"] = msgspec.to_builtins(tools)
    return Chat(_messages(request.messages or ()), options)


def _template_kwargs(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Return the further variables of the chat template. Those of `chat_template_kwargs` count first."""
    effort = request.reasoning_effort if isinstance(request, ChatRequest) else None
    chosen = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return {**chosen, **(request.chat_template_kwargs or {})}


def _continued(request: ChatRequest) -> str:
    """Return the text of the message that the answer continues, or ""."""
    if not request.continue_final_message:
        return ""
    content = request.messages[-1].content
    if not isinstance(content, list):
        return content or ""
    texts = [part if isinstance(part, str) else part.get("text") for part in content]
    return "\n".join(text for text in texts if isinstance(text, str))


def tools_of(request: ChatRequest | TokenizeRequest) -> Sequence[Tool]:
    """Return the tools that the model of a request sees."""
    hidden = isinstance(request, ChatRequest) and request.tool_choice == "none"
    return () if hidden or request.tools is None else request.tools


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest("messages", Amount(f"{len(messages)} messages"), f"1 to {MAX_MESSAGES} messages")
    result = []
    for i, message in enumerate(messages):
        for name in ("audio", "function_call"):
            if getattr(message, name) is not None:
                raise InvalidRequest(f"messages[{i}].{name}", getattr(message, name), "null")
        made = {name: value for name in _MESSAGE_FIELDS if (value := getattr(message, name)) is not None}
        result.append(made)
    return result


_MESSAGE_FIELDS = ("role", "content", "name", "tool_call_id", "tool_calls", *REASONING_NAMES)
