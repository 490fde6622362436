"""Whatever arrives, well-formed or not, is served or refused by name: never UNKNOWN, and never a fault."""

import asyncio

import grpc
import hypothesis.strategies as st
import pytest
from drawn_requests import REFUSALS, requests
from fake_llm import PAGES, TEMPLATE, FakeLLM
from harness import serving, until
from hypothesis import given, settings

METHODS = (
    "GenerateService/Generate",
    "GenerateService/Tokenize",
    "GenerateService/Detokenize",
    "ModelService/GetModel",
)


@pytest.fixture(scope="module")
def world():
    """An event loop with a server and a channel, for all the examples."""
    with asyncio.Runner() as runner:

        async def start():
            llm = FakeLLM(chat_template=TEMPLATE, step_s=0.0, fault_token=None, max_model_len=128)
            context = serving(llm)
            server, _ = await context.__aenter__()
            return context, llm, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")

        context, llm, channel = runner.run(start())
        yield runner, llm, channel

        async def stop():
            await until(lambda: llm.driver.stats().kv_pages_free == PAGES)
            await channel.close()
            await context.__aexit__(None, None, None)

        runner.run(stop())


def outcome(world, method: str, message: bytes) -> grpc.StatusCode:
    runner, _, channel = world

    async def call():
        call = channel.unary_stream(f"/jaxflow.v1.{method}")(message, timeout=5.0)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            assert error.details()
            return error.code()
        return grpc.StatusCode.OK

    return runner.run(call())


@settings(max_examples=150)
@given(request=requests)
def test_any_request(world, request):
    assert outcome(world, METHODS[0], request.SerializeToString()) in {grpc.StatusCode.OK, *REFUSALS}


@settings(max_examples=60)
@given(method=st.sampled_from(METHODS), message=st.binary(max_size=60))
def test_any_bytes(world, method, message):
    assert outcome(world, method, message) in {grpc.StatusCode.OK, *REFUSALS}


@settings(max_examples=60)
@given(st.data(), requests)
def test_any_bytes_near_a_request(world, data, request):
    message = bytearray(request.SerializeToString() or b"\0")
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    assert outcome(world, METHODS[0], bytes(message)) in {grpc.StatusCode.OK, *REFUSALS}


def test_the_requests_drawn_are_not_all_refused(world):
    """Else the tests above would say little."""
    outcomes = set()

    @settings(max_examples=60)
    @given(requests)
    def collect(request):
        outcomes.add(outcome(world, METHODS[0], request.SerializeToString()))

    collect()
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} <= outcomes
