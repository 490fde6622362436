"""Every invalid request, and the status of its answer. The engine receives none of these requests."""

import asyncio
import dataclasses
import math

import grpc
import numpy as np
import pytest
from fake_llm import TEMPLATE, FakeLLM
from harness import client_of, failure, serving, stubs_of, token_request, violated_field

from jaxflow.request import InvalidRequest
from serving.grpc import generate_pb2 as pb
from serving.grpc.connection import Client

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
PRECONDITION, EXHAUSTED = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED
CONTEXT = 4096  # tokens of the fake model


@dataclasses.dataclass(frozen=True)
class Case:
    """A request, as a message or as bytes, and its answer."""

    name: str
    request: pb.GenerateRequest | bytes
    field: str | None = None
    code: grpc.StatusCode = INVALID
    says: str = ""


def sampling(**settings) -> pb.GenerateRequest:
    return token_request(**settings)


def chat(*roles: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role=role, content="hi") for role in roles])
    )


CASES = (
    Case("no prompt", pb.GenerateRequest(), "prompt", says="text, token_ids and chat"),
    Case("empty text", pb.GenerateRequest(text=""), "text"),
    Case("no tokens", pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids.ids"),
    Case("no messages", pb.GenerateRequest(chat=pb.Chat()), "chat.messages"),
    Case("a message without a role", chat("user", ""), "chat.messages[1].role"),
    Case("a role the template refuses", chat("robot"), "chat.messages", says="no robots"),
    Case("an id past the vocabulary", token_request([5, 512]), "token_ids.ids", says="512"),
    Case("the largest id there is", token_request([2**32 - 1]), "token_ids.ids"),
    Case("a prompt over the context", token_request([5] * CONTEXT), "sampling.max_tokens", says=str(CONTEXT)),
    Case(
        "prompt and output over the context",
        token_request([5] * 100, max_tokens=CONTEXT - 99),
        "sampling.max_tokens",
    ),
    Case("invalid UTF-8", b"\x1a\x02\xff\xfe", "request", says="UTF-8"),
    Case("invalid UTF-8 in a stop string", b"\x1a\x01a\x32\x03\x4a\x01\xff", "request"),
    Case("bytes that are no message", b"\xff\xff\xff\xff", "request"),
    Case("a message cut short", token_request([5] * 50).SerializeToString()[:-3], "request"),
    Case("a negative temperature", sampling(temperature=-0.5), "sampling.temperature"),
    Case("a temperature that is no number", sampling(temperature=math.nan), "sampling.temperature"),
    Case("an infinite temperature", sampling(temperature=math.inf), "sampling.temperature"),
    Case("a huge temperature", sampling(temperature=3e38), "sampling.temperature"),
    Case("top_p 0", sampling(top_p=0.0), "sampling.top_p"),
    Case("top_p over 1", sampling(top_p=1.5), "sampling.top_p"),
    Case("top_p that is no number", sampling(top_p=math.nan), "sampling.top_p"),
    Case("a negative top_k", sampling(top_k=-2), "sampling.top_k"),
    Case("min_p over 1", sampling(min_p=1.5), "sampling.min_p"),
    Case("min_p that is no number", sampling(min_p=math.nan), "sampling.min_p"),
    Case("no tokens wanted", sampling(max_tokens=0), "sampling.max_tokens"),
    Case("more tokens than there are numbers", sampling(max_tokens=2**32 - 1), "sampling.max_tokens"),
    Case("more at least than at most", sampling(min_tokens=9, max_tokens=8), "sampling.min_tokens"),
    Case("too many sequences", sampling(n=65), "sampling.n"),
    Case("a million sequences", sampling(n=1_000_000), "sampling.n"),
    Case("10,000 stop strings", sampling(stop=[f"stop {i}" for i in range(10_000)]), "sampling.stop"),
    Case("an empty stop string", sampling(stop=["ok", ""]), "sampling.stop"),
    Case("an endless stop string", sampling(stop=["x" * 100_000]), "sampling.stop"),
    Case("10,000 stop tokens", sampling(stop_token_ids=range(10_000)), "sampling.stop_token_ids"),
    Case("a stop token past the vocabulary", sampling(stop_token_ids=[512]), "sampling.stop_token_ids"),
    Case("a repetition penalty of 0", sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
    Case(
        "a repetition penalty that is no number",
        sampling(repetition_penalty=math.nan),
        "sampling.repetition_penalty",
    ),
    Case("a huge presence penalty", sampling(presence_penalty=1e9), "sampling.presence_penalty"),
    Case(
        "a frequency penalty that is no number",
        sampling(frequency_penalty=math.nan),
        "sampling.frequency_penalty",
    ),
    Case("301 logit biases", sampling(logit_bias=dict.fromkeys(range(301), 1.0)), "sampling.logit_bias"),
    Case("a logit bias that is no number", sampling(logit_bias={5: math.nan}), "sampling.logit_bias[5]"),
    Case("a logit bias past the vocabulary", sampling(logit_bias={512: 1.0}), "sampling.logit_bias"),
    Case("21 logprobs", sampling(logprobs=21), "sampling.logprobs"),
    Case("2**32 - 1 prompt logprobs", sampling(prompt_logprobs=2**32 - 1), "sampling.prompt_logprobs"),
    Case("a request id without end", pb.GenerateRequest(text="hi", request_id="x" * 257), "request_id"),
    Case("a cache salt without end", pb.GenerateRequest(text="hi", cache_salt="x" * 100_000), "cache_salt"),
    Case("a session without end", pb.GenerateRequest(text="hi", session="x" * 257), "session"),
    Case("another model", pb.GenerateRequest(text="hi", model="gpt-9"), code=NOT_FOUND, says="gpt-9"),
    Case("another model, of a long name", pb.GenerateRequest(text="hi", model="x" * 100_000), code=NOT_FOUND),
    Case("a million empty messages", b"\x2a\x82\x89\x7a" + b"\x0a\x00" * 1_000_001, "request", says="fields"),
    Case("64 MB of text", pb.GenerateRequest(text="x" * (64 << 20)), code=EXHAUSTED, says="larger than max"),
)


def test_bad_requests_get_their_status_and_field():
    async def scenario():
        llm = FakeLLM(chat_template=TEMPLATE)
        async with (
            serving(llm) as (server, _),
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            send = channel.unary_stream("/jaxflow.v1.GenerateService/Generate")
            wrong = []
            for case in CASES:
                data = case.request if isinstance(case.request, bytes) else case.request.SerializeToString()
                error = await failure(send(data))
                got = (error.code(), violated_field(error))
                if (
                    got != (case.code, case.field)
                    or case.says not in error.details()
                    or not 0 < len(error.details()) <= 1000
                    or error.details().count("is not accepted") > 1  # an error within an error
                ):
                    wrong.append((case.name, got, error.details()[:200]))
            assert not wrong
            assert llm.driver.submitted == []
            async with client_of(server) as client:  # and it still serves
                assert (await client.generate([5, 6], max_tokens=2).read_all()).token_ids == [[5, 6]]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prompt", "settings", "field"),
    [
        (5, {}, "prompt"),
        (None, {}, "prompt"),
        ([5, -1], {}, "prompt"),
        ([5, "a"], {}, "prompt"),
        ([5, {"role": "user"}], {}, "prompt"),
        (b"text", {}, "prompt"),
        ({"prompt": "text"}, {}, "prompt"),
        ([{"role": "user", "text": "hi"}], {}, "messages[0].text"),
        ("text", {"max_tokens": -1}, "max_tokens"),
        ("text", {"seed": 2**64}, "seed"),
        ("text", {"stop": [5]}, "stop"),
        ("text", {"beams": 2}, "beams"),
    ],
)
def test_the_client_refuses_what_the_proto_has_not_and_names_the_field(prompt, settings, field):
    async def ask():
        async with Client("127.0.0.1:1") as client:
            client.generate(prompt, **settings)

    with pytest.raises(InvalidRequest) as refusal:
        asyncio.run(ask())
    assert refusal.value.field == field


def test_the_client_takes_arrays_and_tuples_of_token_ids():
    async def scenario():
        async with serving(FakeLLM()) as (server, _), client_of(server) as client:
            for prompt in (np.array([5, 6]), (5, 6), range(5, 7)):
                assert (await client.generate(prompt, max_tokens=2).read_all()).token_ids == [[5, 6]]

    asyncio.run(scenario())


def test_a_message_that_is_only_small_when_compressed_is_too_large():
    async def scenario():
        async with serving() as (server, llm), stubs_of(server) as (generate, _, _):
            bomb = pb.GenerateRequest(text="x" * (64 << 20))
            error = await failure(generate.Generate(bomb, compression=grpc.Compression.Gzip))
            assert error.code() == EXHAUSTED and "larger than max" in error.details()
            assert llm.driver.submitted == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("llm", "request_", "says"),
    [
        ({"has_tokenizer": False}, pb.GenerateRequest(text="hi"), "token ids"),
        ({"has_tokenizer": False}, chat("user"), "token ids"),
        ({"has_tokenizer": False}, token_request(stop=["end"]), "token ids"),
        ({"chat_template": None}, chat("user"), "chat template"),
    ],
)
def test_missing_tokenizer_or_template_is_failed_precondition(llm, request_, says):
    async def scenario():
        async with serving(FakeLLM(**llm)) as (server, fake), stubs_of(server) as (generate, _, _):
            error = await failure(generate.Generate(request_))
            assert error.code() == PRECONDITION and says in error.details()
            assert fake.driver.submitted == []

    asyncio.run(scenario())


def test_a_model_without_a_tokenizer_answers_token_ids():
    async def scenario():
        async with (
            serving(FakeLLM(has_tokenizer=False)) as (server, _),
            client_of(server) as client,
            stubs_of(server) as (generate, model, _),
        ):
            answer = await client.generate([5, 6, 7], max_tokens=3, logprobs=1).read_all()
            assert (answer.token_ids, answer.text) == ([[5, 6, 7]], "")
            assert not (await model.GetModel(pb.GetModelRequest())).has_tokenizer
            for call in (
                generate.Tokenize(pb.TokenizeRequest(text="hi")),
                generate.Detokenize(pb.DetokenizeRequest(ids=[5])),
            ):
                assert (await failure(call)).code() == PRECONDITION

    asyncio.run(scenario())


def test_tokenize_and_detokenize_refuse_bad_requests():
    async def scenario():
        async with serving() as (server, _), stubs_of(server) as (generate, _, admin):
            for call, code, field in (
                (generate.Tokenize(pb.TokenizeRequest()), INVALID, "input"),
                (generate.Tokenize(pb.TokenizeRequest(chat=pb.Chat())), PRECONDITION, None),
                (generate.Detokenize(pb.DetokenizeRequest(ids=[5, 512])), INVALID, "ids"),
                (generate.Detokenize(pb.DetokenizeRequest(ids=[2**32 - 1])), INVALID, "ids"),
                (admin.Drain(pb.DrainRequest(timeout_s=-1.0)), INVALID, "timeout_s"),
                (admin.Drain(pb.DrainRequest(timeout_s=math.nan)), INVALID, "timeout_s"),
            ):
                error = await failure(call)
                assert (error.code(), violated_field(error)) == (code, field)

    asyncio.run(scenario())
