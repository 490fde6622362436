"""What a bearer token may have in work at once, and what it shares with others."""

import asyncio

import grpc
import pytest
from fake_llm import FakeLLM
from google.rpc import error_details_pb2
from harness import client_of, detail, failure, serving, stubs_of, token_request, until, violated_field

from jaxflow.request import Request, SamplingParams
from serving.frontend.access import ANONYMOUS, BearerTokens, Caller
from serving.frontend.caller_limits import CallerLimits
from serving.frontend.refusal import Code, Refusal
from serving.grpc import generate_pb2 as pb

ONE, OTHER = (("authorization", "Bearer one"),), (("authorization", "Bearer other"),)


def test_a_token_stands_for_a_caller_without_showing_the_token():
    tokens = BearerTokens(("one", "other"))
    one, other = tokens.caller("Bearer one"), tokens.caller(b"bearer other")
    assert one and other and one != other and "one" not in one.name
    for header in (None, "", "Bearer", "Bearer on", "Bearer one2", "Basic one", b"\xff", "Bearer \udcff"):
        assert tokens.caller(header) is None
    assert BearerTokens().caller(None) is ANONYMOUS


def test_counts_end_with_their_requests():
    limits, caller = CallerLimits(max_requests=2, max_tokens=100), Caller("c")

    def request(limit, n=1):
        return Request("r", [1], SamplingParams(n=n), limit=limit)

    def refused(new):
        with pytest.raises(Refusal) as error, limits.admit(caller, new):
            pass
        return error.value.code is Code.RATE_LIMITED

    with limits.admit(caller, request(60)):
        assert refused(request(41)) and refused(request(21, n=2))
        with limits.admit(Caller("d"), request(100)), limits.admit(ANONYMOUS, request(1000)):
            pass
        with limits.admit(caller, request(20, n=2)):
            assert refused(request(0))
    assert refused(request(101))
    with limits.admit(caller, request(100)):
        pass


def test_one_token_at_its_limit_leaves_the_others_alone():
    async def scenario():
        async with (
            serving(auth_tokens=("one", "other"), max_requests_per_token=1) as (server, llm),
            stubs_of(server) as (generate, _, _),
        ):
            llm.driver.gate.clear()
            first = generate.Generate(token_request(max_tokens=2), metadata=ONE)
            await until(lambda: len(llm.driver.submitted) == 1)
            error = await failure(generate.Generate(token_request(), metadata=ONE))
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert detail(error, error_details_pb2.RetryInfo) is not None
            second = generate.Generate(token_request(max_tokens=2), metadata=OTHER)
            await until(lambda: len(llm.driver.submitted) == 2)
            llm.driver.gate.set()
            for call in (first, second):
                assert [message async for message in call][-1].HasField("finished")
            async with client_of(server, auth_token="one") as client:
                assert (await client.generate([5], max_tokens=1).read_all()).token_ids == [[5]]

    asyncio.run(scenario())


@pytest.mark.parametrize("isolated", [True, False])
def test_tokens_share_no_prefixes_unless_the_server_allows_it(isolated):
    async def scenario():
        async with (
            serving(auth_tokens=("one", "other"), isolate_tokens=isolated) as (server, llm),
            stubs_of(server) as (generate, _, _),
        ):
            request = pb.GenerateRequest(text="hi", cache_salt="s", sampling=pb.SamplingParams(max_tokens=1))
            for metadata in (ONE, OTHER, ONE):
                async for _ in generate.Generate(request, metadata=metadata):
                    pass
            one, other, again = (made.cache_salt for made in llm.driver.submitted)
            assert one == again and one.endswith("s")
            assert (one != other) is isolated

    asyncio.run(scenario())


@pytest.mark.parametrize("allowed", [True, False])
def test_a_caller_may_only_lower_its_priority(allowed):
    async def scenario():
        async with (
            serving(FakeLLM(), allow_priority=allowed) as (server, llm),
            client_of(server) as client,
            stubs_of(server) as (generate, _, _),
        ):
            await client.generate([5], max_tokens=1, priority=9).read_all()
            call = generate.Generate(pb.GenerateRequest(text="hi", priority=-1))
            if not allowed:
                error = await failure(call)
                assert (
                    error.code() == grpc.StatusCode.INVALID_ARGUMENT and violated_field(error) == "priority"
                )
            else:
                await call.read()
            assert [made.priority for made in llm.driver.submitted] == ([9, -1] if allowed else [9])

    asyncio.run(scenario())
