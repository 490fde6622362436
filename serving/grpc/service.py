"""The services of `generate.proto`, implemented by one loaded `jaxflow.LLM`."""

import asyncio
import math
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

import grpc

import jaxflow
from jaxflow.request import Draining, Event, InvalidRequest, Request, Started
from jaxflow.text.chat import ChatTemplateError, render_chat
from jaxflow.text.tokenizer import Tokenizer
from serving.grpc import convert, generate_pb2_grpc
from serving.grpc import generate_pb2 as pb
from serving.grpc.errors import Loading, Refusal, TooSlow
from serving.grpc.event_queue import EventQueue, EventRouter
from serving.grpc.transcript import Transcript

if TYPE_CHECKING:
    from jaxflow.llm import LLM

# Field of a request that holds the prompt, by kind of prompt, for error messages.
PROMPT_FIELDS = {"text": "text", "token_ids": "token_ids.ids", "chat": "chat.messages", None: "prompt"}
MAX_NAME_CHARS = 256  # limit of request_id and cache_salt


class Served:
    """The served model: None while it loads. Once `draining`, new requests are refused."""

    def __init__(self) -> None:
        self._llm: LLM | None = None
        self.draining = False
        self.sampling_defaults: dict[str, float] = {}

    def set(self, llm: "LLM") -> None:
        """Set the loaded model. Raises: ConfigError for a generation config that cannot be used."""
        self.sampling_defaults = convert.sampling_defaults(llm.generation_config)
        self._llm = llm

    @property
    def loaded(self) -> bool:
        """Return True once the model is loaded."""
        return self._llm is not None

    @property
    def llm(self) -> "LLM":
        """Return the model. Raises: Loading, Draining."""
        if self._llm is None:
            raise Draining("the server is shutting down") if self.draining else Loading()
        return self._llm

    def tokenizer(self, field: str) -> Tokenizer:
        """Return the tokenizer. Raises: Refusal of the request's `field` if the model has no tokenizer."""
        if self.llm.tokenizer is None:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{field}: the served model has no tokenizer: send token_ids",
            )
        return self.llm.tokenizer

    def encode_chat(self, chat: pb.Chat, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a chat. The chat template writes the special tokens.

        Raises:
          Refusal: the model has no chat template.
          InvalidRequest: messages that the template refuses.
        """
        tokenizer = self.tokenizer("chat")
        if tokenizer.chat_template is None:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                "chat: the served model has no chat template: send text or token_ids",
            )
        messages = convert.chat_messages(chat)
        try:
            text = render_chat(
                tokenizer,
                messages,
                add_generation_prompt=not chat.continue_final_message,
                continue_final_message=chat.continue_final_message,
            )
        except ChatTemplateError as error:
            raise InvalidRequest("chat.messages", f"{len(messages)} messages", str(error)) from error
        return tokenizer.encode(text, add_special_tokens)


class GenerateService(generate_pb2_grpc.GenerateServiceServicer):
    """The service of generation and tokenization.

    Args:
      max_pending_tokens: most unread tokens of a sequence. A client that reads more slowly loses its request.
    """

    def __init__(self, served: Served, router: EventRouter, max_pending_tokens: int):
        self._served = served
        self._router = router
        self._max_pending_tokens = max_pending_tokens

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        llm = self._served.llm
        if self._served.draining:
            raise Draining("the server is shutting down")
        seconds_left(context)
        try:
            # A long prompt is tokenized on another thread, so that the streams continue.
            prepared = await asyncio.to_thread(self._prepare, llm, request)
            await self._stream(llm, prepared, request.request_id or prepared.request_id, context)
        except InvalidRequest as error:
            raise convert.at_path(error, PROMPT_FIELDS[request.WhichOneof("prompt")]) from None

    async def _stream(
        self, llm: "LLM", request: Request, name: str, context: grpc.aio.ServicerContext
    ) -> None:
        """Run a request and write its messages.

        Raises:
          InvalidRequest, QueueFull, Draining: the engine refused the request.
          TooSlow: the client reads too slowly.
          Refusal: the deadline has passed.
        """
        end_token_ids = request.sampling.end_token_ids(llm.model_config.eos_token_ids)
        transcript = Transcript(name, request, llm.tokenizer, end_token_ids)
        # A client that does not read could block the first message. An error needs the headers sent before.
        await context.send_initial_metadata(())
        loop = asyncio.get_running_loop()
        limit = self._max_pending_tokens * request.sampling.n
        queue = EventQueue(limit, on_overflow=lambda: scope.reschedule(loop.time()))
        self._router.connect(request.request_id, queue)
        try:
            async with asyncio.timeout(seconds_left(context)) as scope:
                llm.driver.submit(request, self._router)
                try:
                    while not transcript.done:
                        for message in await messages_of(transcript, await queue.take()):
                            await context.write(message)
                finally:
                    if not transcript.done:
                        llm.driver.abort(request.request_id)
        except TimeoutError:
            if queue.overflowed:
                raise TooSlow(limit) from None
            if scope.expired():
                raise deadline_passed() from None
            raise
        finally:
            self._router.disconnect(request.request_id)

    def _prepare(self, llm: "LLM", request: pb.GenerateRequest) -> Request:
        """Return the engine's request. Raises: Refusal, InvalidRequest."""
        if request.model not in ("", llm.name):
            raise Refusal(
                grpc.StatusCode.NOT_FOUND,
                f"model {request.model[:MAX_NAME_CHARS]!r} is not served here: {llm.name!r} is",
            )
        for field in ("request_id", "cache_salt"):
            if len(getattr(request, field)) > MAX_NAME_CHARS:
                raise InvalidRequest(field, getattr(request, field), f"at most {MAX_NAME_CHARS} characters")
        sampling = convert.sampling_params(request.sampling, self._served.sampling_defaults)
        if sampling.stop:
            self._served.tokenizer("sampling.stop")
        kind = request.WhichOneof("prompt")
        match kind:
            case "text":
                self._served.tokenizer("text")
                if not request.text:  # most tokenizers would turn the empty text into a lone BOS token
                    raise InvalidRequest(
                        "text",
                        "",
                        "a text that is not empty; for an empty prompt, token_ids with a BOS token",
                    )
                prompt = request.text
            case "token_ids":
                prompt = list(request.token_ids.ids)
            case "chat":
                prompt = self._served.encode_chat(request.chat)
            case None:
                raise InvalidRequest("prompt", None, "one of text, token_ids and chat")
        # The engine's id is a new one, because two clients may choose the same request_id.
        return llm.request(
            prompt,
            sampling,
            request_id=uuid.uuid4().hex,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(ids=await asyncio.to_thread(self._tokenize, request))

    def _tokenize(self, request: pb.TokenizeRequest) -> list[int]:
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("input", None, "one of text and chat")
        special = request.add_special_tokens if request.HasField("add_special_tokens") else kind == "text"
        if kind == "chat":
            return self._served.encode_chat(request.chat, special)
        return self._served.tokenizer("text").encode(request.text, special)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        tokenizer = self._served.tokenizer("ids")
        vocab_size = self._served.llm.model_config.vocab_size
        for token in request.ids:
            if token >= vocab_size:
                raise InvalidRequest("ids", token, f"token ids 0 to {vocab_size - 1}")
        text = await asyncio.to_thread(
            tokenizer.decode, list(request.ids), skip_special_tokens=request.skip_special_tokens
        )
        return pb.DetokenizeResponse(text=text)


class ModelService(generate_pb2_grpc.ModelServiceServicer):
    """The service that describes the served model."""

    def __init__(self, served: Served):
        self._served = served

    async def GetModel(
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelResponse:
        llm = self._served.llm
        config = llm.engine_config
        return pb.GetModelResponse(
            name=llm.name,
            architecture=llm.model_config.architecture,
            vocab_size=llm.model_config.vocab_size,
            max_model_len=llm.max_model_len,
            dtype=config.dtype,
            kv_cache_dtype=config.kv_cache_dtype,
            tensor_parallel_size=config.tensor_parallel_size,
            plan=config.plan,
            eos_token_ids=llm.model_config.eos_token_ids,
            has_chat_template=llm.tokenizer is not None and llm.tokenizer.chat_template is not None,
            version=jaxflow.__version__,
            has_tokenizer=llm.tokenizer is not None,
        )


class AdminService(generate_pb2_grpc.AdminServiceServicer):
    """The service for operators: statistics and draining.

    Args:
      drain: drains the server within a timeout in seconds, where None is the server's default. It returns
        the number of aborted requests.
    """

    def __init__(self, served: Served, drain: Callable[[float | None], Awaitable[int]]):
        self._served = served
        self._drain = drain

    async def GetStats(
        self, request: pb.GetStatsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetStatsResponse:
        return convert.same_fields(pb.GetStatsResponse, self._served.llm.driver.stats())

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        if not (math.isfinite(request.timeout_s) and request.timeout_s >= 0):
            raise InvalidRequest("timeout_s", request.timeout_s, "seconds, or 0 for the server's own timeout")
        return pb.DrainResponse(aborted_requests=await self._drain(request.timeout_s or None))


async def messages_of(transcript: Transcript, events: list[Event]) -> Iterable[pb.GenerateResponse]:
    """Return the messages for `events`.

    Prompt logprobs can have 21 candidates a token. They are converted on another thread, so that the streams
    continue.
    """
    if isinstance(events[0], Started) and events[0].prompt_logprobs is not None:
        return await asyncio.to_thread(list, transcript.messages(events))
    return transcript.messages(events)


def seconds_left(context: grpc.aio.ServicerContext) -> float | None:
    """Return the seconds until the deadline, or None without one. Raises: Refusal after the deadline."""
    left = context.time_remaining()
    if left is not None and left <= 0:
        raise deadline_passed()
    return left


def deadline_passed() -> Refusal:
    """Return the refusal of a request after its deadline."""
    return Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")
