"""A prompt longer than the context is refused at a bounded cost, and the event loop continues meanwhile."""

import asyncio

import grpc
import paths
import pytest
from fake_llm import TEMPLATE, FakeLLM
from harness import client_of, failure, serving, stubs_of, until, violated_field

from jaxflow.text.tokenizer import PIECE_CHARS, Tokenizer, TooManyTokens, load_tokenizer
from serving.frontend.served_model import TOKENIZE_TOKENS
from serving.grpc import generate_pb2 as pb
from serving.grpc.server import MAX_REQUEST_BYTES

MANY = MAX_REQUEST_BYTES - 1000
UNITS = ("a", "word ", " ", "\N{GRINNING FACE}", "a b ")
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
def counted(monkeypatch):
    """The characters of each text that a backend tokenizes."""
    sizes = []
    encode = Tokenizer.encode

    class Counting:
        def __init__(self, backend):
            self._backend = backend

        def __getattr__(self, name):
            return getattr(self._backend, name)

        def encode_batch_fast(self, texts, **how):
            sizes.extend(map(len, texts))
            return self._backend.encode_batch_fast(texts, **how)

    def counting(self, *arguments, **settings):
        if not isinstance(self._backend, Counting):
            self._backend = Counting(self._backend)
        return encode(self, *arguments, **settings)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    return sizes


def text_of(unit: str) -> str:
    return unit * (MANY // len(unit.encode()))


@pytest.mark.parametrize("unit", UNITS)
def test_megabytes_are_refused_without_being_tokenized(unit, counted):
    async def scenario():
        async with (
            serving(FakeLLM(chat_template=TEMPLATE)) as (server, llm),
            stubs_of(server) as (generate, _, _),
        ):
            text = text_of(unit)
            chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=text)])
            calls = {
                "text": generate.Generate(pb.GenerateRequest(text=text)),
                "chat.messages": generate.Generate(pb.GenerateRequest(chat=chat)),
            }
            for field, call in calls.items():
                error = await failure(call)
                assert (error.code(), violated_field(error)) == (INVALID, field)
                assert "4096 tokens" in str(error.details())
            gzipped = generate.Generate(pb.GenerateRequest(text=text), compression=grpc.Compression.Gzip)
            assert (await failure(gzipped)).code() == INVALID
            error = await failure(generate.Tokenize(pb.TokenizeRequest(text=text)))
            assert (error.code(), violated_field(error)) == (INVALID, "text")
            longest = server.served.tokenizer("text").max_token_chars
            assert sum(counted) <= 2 * TOKENIZE_TOKENS * longest
            assert llm.driver.submitted == []
            async with client_of(server) as client:
                assert (await client.generate("Once", max_tokens=1).read_all()).token_ids

    asyncio.run(scenario())


def test_many_long_prompts_with_a_deadline_leave_nothing_behind():
    async def scenario():
        async with serving() as (server, llm), stubs_of(server) as (generate, _, _):
            request = pb.GenerateRequest(text=text_of("a b "))
            calls = [generate.Generate(request, timeout=3.0) for _ in range(40)]
            for call in calls:
                assert (await failure(call)).code() in {INVALID, grpc.StatusCode.DEADLINE_EXCEEDED}
            await until(lambda: server.served._work.bytes_in_work == 0)
            assert llm.driver.submitted == []

    asyncio.run(scenario())


def test_token_ids_beyond_the_limits_are_refused_by_their_number():
    async def scenario():
        async with serving() as (server, _), stubs_of(server) as (generate, _, _):
            ids = [5] * 1_000_000
            error = await failure(generate.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))))
            assert (error.code(), violated_field(error)) == (INVALID, "token_ids.ids")
            error = await failure(generate.Detokenize(pb.DetokenizeRequest(ids=ids)))
            assert (error.code(), violated_field(error)) == (INVALID, "ids")

    asyncio.run(scenario())


@pytest.mark.parametrize("unit", UNITS)
def test_the_length_check_passes_what_fits_and_stops_early(unit):
    tokenizer = load_tokenizer(paths.MODELS / "stories260K")
    text = unit * (3 * PIECE_CHARS // len(unit))
    tokens = len(tokenizer.encode(text))
    assert tokenizer.encode(text, max_tokens=tokens) == tokenizer.encode(text)
    with pytest.raises(TooManyTokens):
        tokenizer.encode(text, max_tokens=tokens // 4)
