"""The model that the servers share: loading, requests, streams and draining.

A server uses it in three steps:

  request = await served.build_request("Once upon a time", SamplingParams(max_tokens=9), model="m")
  async with served.stream(request, timeout_s=30.0) as stream:
      async for outputs in stream:  # the outputs that have arrived, an iterator of `transcript.Output`
          ...                       # write them; leaving the block early aborts the request

All methods run on the event loop's thread.
"""

import asyncio
import contextlib
import dataclasses
import enum
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxflow.request import (
    Amount,
    ContextLengthExceeded,
    Event,
    InvalidRequest,
    MalformedRequest,
    Request,
    SamplingParams,
)
from jaxflow.text.chat import encode_chat
from jaxflow.text.template_sandbox import ChatTemplateError
from jaxflow.text.tokenizer import Tokenizer, TooManyTokens
from jaxflow.text.vocabulary import TokenizerError
from serving.frontend.access import CALLER
from serving.frontend.call import CALL, new_id
from serving.frontend.caller_limits import CallerLimits
from serving.frontend.config import ServerConfig
from serving.frontend.event_queue import EventQueue, EventRouter
from serving.frontend.prompt_work import SMALL_BYTES, PromptWork
from serving.frontend.refusal import Code, Refusal, aborted, deadline_passed, draining
from serving.frontend.sampling_defaults import sampling_defaults
from serving.frontend.transcript import Output, Transcript

if TYPE_CHECKING:
    from jaxflow.llm import LLM

MAX_NAME_CHARS = 256  # limit of request_id, cache_salt, session and the shown part of a model's name
LOADING_RETRY_S = 5.0
TOKENIZE_TOKENS = 100_000  # limit of `encode` and `decode`, or the length of the context if that is longer
INLINE_TOKENS = 4096  # a request of fewer token ids is built without a thread
_HEARTBEAT_S = 1.0


class State(enum.StrEnum):
    """The state of the served model."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"  # a fault ended the engine


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation as a prompt.

    `messages`: `{"role": ..., "content": ...}`, oldest first. `options`: keyword arguments of `encode_chat`.
    """

    messages: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Prompt = str | Sequence[int] | Chat


class ServedModel:
    """The model that the servers share. It is None while it loads; a draining one accepts no new requests."""

    def __init__(self, config: ServerConfig):
        self.config = config
        self.sampling_defaults: dict[str, float] = {}
        self._llm: LLM | None = None
        self._router: EventRouter | None = None
        self._state = State.LOADING
        self._listeners: list[Callable[[State], Awaitable[None]]] = []
        self._drained: asyncio.Task[int] | None = None
        self._work = PromptWork()
        self._masks: asyncio.Task[None] | None = None  # see `_prepare_masks`
        self._limits = CallerLimits(config.max_requests_per_token, config.max_tokens_per_token)

    # ---- the model's life

    @property
    def state(self) -> State:
        """Return the state of the model."""
        return self._state

    @property
    def loaded(self) -> bool:
        """Return True once the model is loaded."""
        return self._llm is not None

    @property
    def draining(self) -> bool:
        """Return True once new requests are refused."""
        return self._state is State.DRAINING

    def on_change(self, listener: Callable[[State], Awaitable[None]]) -> None:
        """Call `listener` with each new state."""
        self._listeners.append(listener)

    async def serve(self, llm: "LLM") -> None:
        """Accept requests for `llm`, which is warm.

        Raises:
          ConfigError: a generation config that cannot be used.
        """
        self.sampling_defaults = sampling_defaults(llm.generation_config)
        if (tokenizer := llm.tokenizer) is not None:
            await asyncio.to_thread(lambda: tokenizer.max_token_chars)  # takes a while the first time
        self._router = EventRouter(asyncio.get_running_loop())
        self._llm = llm
        if self._state is State.LOADING:
            await self._change(State.READY)

    async def drain(self, timeout_s: float | None = None) -> int:
        """Refuse new requests, finish the running ones, and return the number aborted after `timeout_s`.

        The default of `timeout_s` is the server's. Draining cannot be undone. A second call waits for the
        same result.
        """
        if self._drained is None:
            seconds = self.config.drain_timeout_s if timeout_s is None else timeout_s
            self._drained = asyncio.create_task(self._drain(seconds))
        return await asyncio.shield(self._drained)

    async def engine_failure(self) -> None:
        """Return if the engine's thread ends by a fault. The state is then FAILED."""
        while self.llm.driver.alive:
            await asyncio.sleep(_HEARTBEAT_S)
        await self._change(State.FAILED)

    async def _drain(self, timeout_s: float) -> int:
        await self._change(State.DRAINING)
        return 0 if self._llm is None else await asyncio.to_thread(self._llm.driver.drain, timeout_s)

    async def _change(self, state: State) -> None:
        self._state = state
        for listener in self._listeners:
            await listener(state)

    # ---- the model's parts

    @property
    def llm(self) -> "LLM":
        """Return the model. Raises: Refusal while it loads."""
        if self._llm is None:
            if self._state is State.DRAINING:
                raise draining()
            raise Refusal(Code.LOADING, "the model is still loading", retry_after_s=LOADING_RETRY_S)
        return self._llm

    @property
    def names(self) -> tuple[str, ...]:
        """Return the accepted names of the model, the main name first. Raises: Refusal while it loads."""
        return self.config.served_model_names or (self.llm.name,)

    def check_model(self, name: str) -> None:
        """Check the model's name in a request; empty means the served model. Raises: Refusal."""
        if name and name not in self.names:
            raise Refusal(
                Code.MODEL_NOT_FOUND,
                f"model {name[:MAX_NAME_CHARS]!r} is not served here: {', '.join(map(repr, self.names))} is",
                field="model",
            )

    def tokenizer(self, field: str) -> Tokenizer:
        """Return the tokenizer. Raises: Refusal of the request's `field` if the model has no tokenizer."""
        tokenizer = self.llm.tokenizer
        if tokenizer is None:
            message = f"{field}: the served model has no tokenizer: send token ids"
            raise Refusal(Code.UNSUPPORTED, message, field=field)
        return tokenizer

    # ---- requests

    async def build_request(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        model: str = "",
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        session: str = "",
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> Request:
        """Return the engine's request of a prompt. Its `request_id` is a new one,
        since callers may choose equal ids.

        Errors name fields in the engine's names: `prompt` for a text or token ids, `messages` for a chat, and
        the fields of `SamplingParams`. The caller is the one of the task, see
        `serving.frontend.access.CALLER`. A prompt that is clearly longer than the context is refused by its
        length, before it is tokenized.

        Args:
          prompt: a text, token ids, or a `Chat`.
          model: the model's name in the caller's request; empty for the served model.
          request_id: the caller's own id, of which only the length is checked.
          priority: a lower number runs sooner. Below 0 only if the server allows it.
          cache_salt: only requests of the same salt share prefixes, and of the same caller unless the server
            shares prefixes between callers.
          session: a router sends the requests of one session and caller to one replica.
          add_special_tokens: let the tokenizer add its BOS token. None: for a text only, because a chat
            template writes its own special tokens.
          timeout_s: the seconds until the caller's deadline, or None.

        Raises:
          Refusal: another model, no tokenizer or chat template, the model loads or drains, too many prompts
            are being tokenized, or the deadline has passed.
          InvalidRequest: a request that can never run.
        """
        llm = self.llm
        if self._state is State.DRAINING:
            raise draining()
        self.check_model(model)
        for field, value in (("request_id", request_id), ("cache_salt", cache_salt), ("session", session)):
            if len(value) > MAX_NAME_CHARS:
                raise InvalidRequest(field, value, f"at most {MAX_NAME_CHARS} characters")
        if priority < 0 and not self.config.allow_priority:
            raise InvalidRequest("priority", priority, "0 or more; --allow_priority accepts every number")
        if sampling.stop:
            self.tokenizer("stop")
        if prompt == "":  # most tokenizers would turn the empty text into a lone BOS token
            accepted = "a text that is not empty; for an empty prompt, token ids with a BOS token"
            raise InvalidRequest("prompt", "", accepted)

        caller = CALLER.get()
        salt = f"{caller.name}:{cache_salt}" if caller.name and self.config.isolate_tokens else cache_salt

        def make() -> Request:
            made = llm.request(
                self._encoded(prompt, add_special_tokens, llm.max_model_len),
                sampling,
                request_id=new_id(),
                priority=priority,
                cache_salt=salt,
            )
            if not session:
                return made
            return dataclasses.replace(made, session=f"{caller.name}:{session}")

        self._check_size(prompt, llm.max_model_len)
        form = sampling.structured_outputs
        if form is None and not isinstance(prompt, str | Chat) and len(prompt) <= INLINE_TOKENS:
            built = make()
        else:
            built = await self._in_thread(prompt, make, timeout_s, quick=form is None)
        if built.make_constraint is not None:
            await self._prepare_masks(timeout_s)
        if (call := CALL.get()) is not None:
            call.build(request_id, built)
        return built

    async def encode(
        self,
        prompt: str | Chat,
        add_special_tokens: bool | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Return the token ids of a text or a chat, see `build_request`.

        A prompt has at most `TOKENIZE_TOKENS` tokens, or as many as the context if that is longer.

        Raises: Refusal, InvalidRequest.
        """
        limit = self.tokenize_limit
        self._check_size(prompt, limit)

        def work() -> list[int]:
            ids = self._encoded(prompt, add_special_tokens, limit)
            _check_count(len(ids), limit)
            return ids

        return await self._in_thread(prompt, work, timeout_s)

    async def encode_last(
        self,
        prompt: Prompt,
        most: int,
        add_special_tokens: bool | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Sequence[int]:
        """Return the last `most` token ids of a prompt. A BOS token at the start of a text or a chat stays.

        Raises: Refusal, InvalidRequest.
        """
        if not isinstance(prompt, str | Chat):
            return prompt[-most:]
        tokenizer = self.tokenizer("prompt" if isinstance(prompt, str) else "messages")
        if isinstance(prompt, str):  # the characters before these cannot be in the last tokens
            prompt = prompt[-(most + 1) * tokenizer.max_token_chars :]
        ids = await self.encode(prompt, add_special_tokens, timeout_s=timeout_s)
        if len(ids) <= most:
            return ids
        keep_first = most > 1 and ids[0] == tokenizer.bos_token_id
        return [ids[0], *ids[1 - most :]] if keep_first else ids[-most:]

    async def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = True, *, timeout_s: float | None = None
    ) -> str:
        """Return the text of token ids. The limits are those of `encode`. Raises: Refusal, InvalidRequest."""
        tokenizer, vocab_size = self.tokenizer("ids"), self.llm.model_config.vocab_size
        _check_count(len(token_ids), self.tokenize_limit, "ids")

        def work() -> str:
            for token in token_ids:
                if not 0 <= token < vocab_size:
                    raise InvalidRequest("ids", token, f"token ids 0 to {vocab_size - 1}")
            return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

        return await self._in_thread(token_ids, work, timeout_s)

    @property
    def tokenize_limit(self) -> int:
        """Return the most tokens of one call of `encode` or `decode`."""
        return max(TOKENIZE_TOKENS, self.llm.max_model_len)

    async def _prepare_masks(self, timeout_s: float | None) -> None:
        """Wait until the engine can draw tokens of a form. The first call compiles programs.

        A call after one whose compilation failed compiles again.

        Raises: Refusal, after the deadline. Other exceptions: of the compilation.
        """
        if self._masks is None or (self._masks.done() and self._masks.exception() is not None):
            self._masks = asyncio.create_task(asyncio.to_thread(self.llm.driver.prepare_masks))
        try:
            await asyncio.wait_for(asyncio.shield(self._masks), timeout_s)
        except TimeoutError:
            raise deadline_passed() from None

    async def _in_thread[T](
        self, prompt: Prompt, work: Callable[[], T], timeout_s: float | None, quick: bool = True
    ) -> T:
        """Return the result of `work` on a prompt. Raises: Refusal, also after the deadline.

        quick: False for work that takes long also on a short prompt.
        """
        if timeout_s is not None and timeout_s <= 0:
            raise deadline_passed()
        size = _bytes(prompt) if quick else max(_bytes(prompt), SMALL_BYTES + 1)
        if timeout_s is None:
            return await self._work.run(size, work)
        scope = asyncio.timeout(timeout_s)
        try:
            async with scope:
                return await self._work.run(size, work)
        except TimeoutError:
            if scope.expired():
                raise deadline_passed() from None
            raise

    def _check_size(self, prompt: Prompt, max_tokens: int) -> None:
        """Check a prompt's length as far as that costs nothing, before the prompt waits for a thread.

        Raises: Refusal, InvalidRequest.
        """
        if not isinstance(prompt, str | Chat):
            _check_count(len(prompt), max_tokens)
            return
        field = "prompt" if isinstance(prompt, str) else "messages"
        size = _size(prompt)
        try:
            self.tokenizer(field).check_chars(size, max_tokens)
        except TooManyTokens as error:
            raise ContextLengthExceeded(field, Amount(f"{size} characters"), str(error), None) from None

    def _encoded(self, prompt: Prompt, add_special_tokens: bool | None, max_tokens: int) -> list[int]:
        match prompt:
            case str():
                try:
                    special = add_special_tokens is not False
                    return self.tokenizer("prompt").encode(prompt, special, max_tokens=max_tokens)
                except TooManyTokens as error:
                    shown = Amount(f"{len(prompt)} characters")
                    raise ContextLengthExceeded("prompt", shown, str(error), None) from None
                except TokenizerError as error:
                    raise InvalidRequest("prompt", prompt, str(error)) from error
            case Chat():
                return self._chat_ids(prompt, bool(add_special_tokens), max_tokens)
        return list(prompt)

    def _chat_ids(self, chat: Chat, add_special_tokens: bool, max_tokens: int) -> list[int]:
        tokenizer = self.tokenizer("messages")
        if tokenizer.chat_template is None:
            message = "messages: the served model has no chat template: send a text or token ids"
            raise Refusal(Code.UNSUPPORTED, message, field="messages")
        _check_messages(chat.messages)
        try:
            options = {"add_special_tokens": add_special_tokens, "max_tokens": max_tokens, **chat.options}
            return encode_chat(tokenizer, chat.messages, **options)
        except TooManyTokens as error:
            shown = Amount(f"{_size(chat)} characters")
            raise ContextLengthExceeded("messages", shown, str(error), None) from None
        except ChatTemplateError as error:
            raise MalformedRequest(error.field, str(error)) from error

    # ---- streams

    @contextlib.asynccontextmanager
    async def stream(
        self, request: Request, *, timeout_s: float | None = None, whole: bool = False
    ) -> AsyncIterator["Stream"]:
        """Submit a request and yield its stream. At the end of the block a
        request that still runs is aborted.

        The deadline and the limit of unread tokens also end an `await` of the block itself, for example a
        write that blocks.

        Args:
          timeout_s: the seconds until the caller's deadline, or None.
          whole: the answer is sent as a whole, so the outputs of a sequence may wait until its end.

        Raises:
          InvalidRequest, QueueFull, Draining: the engine refused the request.
          RequestFailed: a fault of the engine ended the request.
          Refusal: the deadline has passed, the caller reads too slowly or has reached a limit of
            its token, or the server shut down before the end of the answer. In the last case all
            outputs come before the error.
        """
        llm, router = self.llm, self._router
        assert router is not None
        if timeout_s is not None and timeout_s <= 0:
            raise deadline_passed()
        end_token_ids = request.sampling.end_token_ids(llm.model_config.eos_token_ids)
        transcript = Transcript(request, llm.tokenizer, end_token_ids)
        loop = asyncio.get_running_loop()
        with self._limits.admit(CALLER.get(), request):
            limit = self.config.max_pending_tokens * request.sampling.n
            queue = EventQueue(limit, on_overflow=lambda: scope.reschedule(loop.time()), whole=whole)
            router.connect(request.request_id, queue)
            try:
                async with asyncio.timeout(timeout_s) as scope:
                    llm.driver.submit(request, router)
                    try:
                        yield Stream(transcript, queue)
                    finally:
                        if not transcript.done:
                            llm.driver.abort(request.request_id)
            except TimeoutError:
                if queue.overflowed:
                    message = f"the stream was read too slowly: over {limit} tokens waited for the client"
                    raise Refusal(Code.TOO_SLOW, message) from None
                if scope.expired():
                    raise deadline_passed() from None
                raise
            finally:
                router.disconnect(request.request_id)


class Stream:
    """The outputs of a running request. Each iteration yields what has arrived since the last one."""

    def __init__(self, transcript: Transcript, queue: EventQueue):
        self._transcript, self._queue = transcript, queue

    def take_deltas(self, ready: Callable[[], bool], take: Callable[[Iterable[Output]], None]) -> None:
        """Give the outputs of the steps that only add tokens to `take`, instead of by iteration.

        `take` is called as soon as a step has ended, without a change of tasks, while `ready()` and while an
        iteration waits. So the outputs stay in order. An exception of `take` ends the iteration.
        """
        transcript = self._transcript

        def direct(events: list[Event]) -> bool:
            if not (transcript.only_adds(events) and ready()):
                return False
            take(transcript.outputs(events))
            return True

        self._queue.direct = direct

    async def __aiter__(self) -> AsyncIterator[Iterable[Output]]:
        """Yield outputs, which must be read to their end. Raises: while they are read, see `Transcript`."""
        call = CALL.get()
        while not self._transcript.done:
            events = await self._queue.take()
            if call is not None:
                call.take(events)
            yield self._transcript.outputs(events)
        if self._transcript.aborted:
            raise aborted()


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Check that there is a message, and that each has a role. Raises: InvalidRequest."""
    if not messages:
        raise InvalidRequest("messages", [], "at least one message")
    for i, message in enumerate(messages):
        if not message.get("role"):
            accepted = "system, user, assistant or another role of the model's chat template"
            raise InvalidRequest(f"messages[{i}].role", "", accepted)


def _check_count(tokens: int, most: int, field: str = "prompt") -> None:
    if tokens > most:
        raise ContextLengthExceeded(field, Amount(f"{tokens} tokens"), f"at most {most} tokens", tokens)


def _size(prompt: str | Chat) -> int:
    """Return the characters of a text, or of the contents of a chat's
    messages, which every template writes.
    """
    if isinstance(prompt, str):
        return len(prompt)
    return sum(_chars(message.get("content")) for message in prompt.messages)


def _bytes(prompt: Prompt) -> int:
    """Return about the bytes of a prompt, also of a chat's other fields. A token id counts 8."""
    if isinstance(prompt, str):
        return len(prompt)
    if not isinstance(prompt, Chat):
        return 8 * len(prompt)
    size, left = 0, [prompt.messages, prompt.options]
    while left:
        value = left.pop()
        if isinstance(value, str):
            size += len(value)
        elif value is None:
            pass
        elif isinstance(value, (dict, Mapping)):  # a check of an abstract class alone costs much more
            left += value.values()
        elif isinstance(value, (list, Sequence)):
            left += value
        size += 8
    return size


def _chars(content: Any) -> int:
    """Return the characters of a message's content: a text, a list of text parts, or None."""
    if isinstance(content, str):
        return len(content)
    if isinstance(content, (list, Sequence)):
        return sum(len(part["text"]) for part in content if isinstance(part, Mapping) and _has_text(part))
    return 0


def _has_text(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("text"), str)
