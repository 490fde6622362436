"""The services of `generate.proto`, for a `ServedModel`."""

import asyncio
import math

import grpc

import jaxflow
from jaxflow.request import InvalidRequest, Started
from serving.frontend.form_after_reasoning import after_reasoning
from serving.frontend.refusal import deadline_passed
from serving.frontend.served_model import Chat, ServedModel
from serving.frontend.transcript import Output
from serving.grpc import convert, generate_pb2_grpc
from serving.grpc import generate_pb2 as pb


class GenerateService(generate_pb2_grpc.GenerateServiceServicer):
    """The service of generation and tokenization."""

    def __init__(self, served: ServedModel):
        self._served = served

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        seconds_left(context)
        try:
            await self._generate(request, context)
        except InvalidRequest as error:
            kind = request.WhichOneof("prompt")
            raise error.at(convert.path(error.field, kind)) from None

    async def _generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        served = self._served
        prompt = convert.prompt(request)
        sampling = convert.sampling_params(request.sampling, served.sampling_defaults)
        if sampling.structured_outputs is not None and isinstance(prompt, Chat):
            continued = prompt.messages[-1:] if request.chat.continue_final_message else ()
            text = "".join(each["content"] for each in continued)
            sampling = after_reasoning(
                sampling, served.config.reasoning_parser, served.tokenizer("chat"), text
            )
        prepared = await served.build_request(
            prompt,
            sampling,
            model=request.model,
            request_id=request.request_id,
            priority=request.priority,
            cache_salt=request.cache_salt,
            session=request.session,
            timeout_s=seconds_left(context),
        )
        name = request.request_id or prepared.request_id
        # A client that does not read could block the first message. An error needs the headers sent before.
        await context.send_initial_metadata(())
        async with served.stream(prepared, timeout_s=seconds_left(context)) as stream:
            async for outputs in stream:
                for output in outputs:
                    await context.write(await self._message(name, output))

    async def _message(self, name: str, output: Output) -> pb.GenerateResponse:
        """Return the message of an output.

        Prompt logprobs can have 21 candidates a token. They are converted on another thread, so that the
        streams continue.
        """
        tokenizer = self._served.llm.tokenizer
        if isinstance(output, Started) and output.prompt_logprobs is not None:
            return await asyncio.to_thread(convert.message, name, output, tokenizer)
        return convert.message(name, output, tokenizer)

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("input", None, "one of text and chat")
        special = request.add_special_tokens if request.HasField("add_special_tokens") else None
        try:
            text = convert.chat(request.chat) if kind == "chat" else request.text
            ids = await self._served.encode(text, special, timeout_s=seconds_left(context))
            return pb.TokenizeResponse(ids=ids)
        except InvalidRequest as error:
            raise error.at(convert.path(error.field, kind)) from None

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        text = await self._served.decode(
            request.ids, request.skip_special_tokens, timeout_s=seconds_left(context)
        )
        return pb.DetokenizeResponse(text=text)


class ModelService(generate_pb2_grpc.ModelServiceServicer):
    """The service that describes the served model."""

    def __init__(self, served: ServedModel):
        self._served = served

    async def GetModel(
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelResponse:
        llm = self._served.llm
        config = llm.engine_config
        return pb.GetModelResponse(
            name=self._served.names[0],
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
    """The service for operators: statistics and draining."""

    def __init__(self, served: ServedModel):
        self._served = served

    async def GetStats(
        self, request: pb.GetStatsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetStatsResponse:
        return convert.same_fields(pb.GetStatsResponse, self._served.llm.driver.stats())

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        if not (math.isfinite(request.timeout_s) and request.timeout_s >= 0):
            raise InvalidRequest("timeout_s", request.timeout_s, "seconds, or 0 for the server's own timeout")
        return pb.DrainResponse(aborted_requests=await self._served.drain(request.timeout_s or None))


def seconds_left(context: grpc.aio.ServicerContext) -> float | None:
    """Return the seconds until the deadline, or None without one. Raises: Refusal after the deadline."""
    left = context.time_remaining()
    if left is not None and left <= 0:
        raise deadline_passed()
    return left
