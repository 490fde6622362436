"""Faults around a request: callers that leave, wait or stall, and an engine
that is full, faulty or ending.
"""

import asyncio
import logging as python_logging
import re
import types

import grpc
import pytest
from fake_llm import FAULT_TOKEN, PAGES, FakeLLM
from google.rpc import error_details_pb2, status_pb2
from harness import client_of, detail, failure, read, serving, stubs_of, token_request, until

from serving.client import Answer, RequestFailed
from serving.frontend.config import ServerConfig
from serving.frontend.refusal import Code, Refusal
from serving.frontend.served_model import ServedModel
from serving.grpc import generate_pb2 as pb
from serving.grpc import generate_pb2_grpc
from serving.grpc.service import GenerateService

LONG = 4000  # tokens; a fake step takes a millisecond

# A window of 64 KiB for good: gRPC would widen it for a connection as fast as this one.
NARROW = (("grpc.http2.bdp_probe", 0),)


def all_free(llm: FakeLLM) -> bool:
    return llm.driver.stats().kv_pages_free == PAGES


async def others_are_served(server) -> None:
    async with client_of(server) as client:
        assert (await client.generate([5, 6], max_tokens=4).read_all()).token_ids == [[5, 6, 5, 6]]


def test_cancelling_frees_the_pages_at_once():
    async def scenario():
        async with serving() as (server, llm), client_of(server) as client:
            answer = client.generate([5, 6, 7], max_tokens=LONG)
            async for message in answer:
                if message.HasField("delta"):
                    break  # leaving the loop cancels
            answer.cancel()
            await until(lambda: all_free(llm))
            assert llm.driver.aborted == [llm.driver.submitted[0].request_id]
            assert llm.driver.steps < LONG / 2

    asyncio.run(scenario())


def test_a_burst_of_streams_loses_none():
    """gRPC's core drops calls at random above 1,000 that wait to be taken up, unless its limit is raised."""

    async def scenario():
        async with serving(FakeLLM(max_waiting=2000)) as (server, _), stubs_of(server) as (generate, _, _):
            calls = [generate.Generate(token_request(max_tokens=1)) for _ in range(1500)]
            ended = await asyncio.gather(*map(read, calls), return_exceptions=True)
            failed = [error for error in ended if isinstance(error, BaseException)]
            assert not failed, failed[0]
            assert all(messages[-1].HasField("finished") for messages in ended)

    asyncio.run(scenario())


def test_a_request_that_still_waits_is_cancelled_too():
    async def scenario():
        async with serving() as (server, llm), stubs_of(server) as (generate, _, _):
            llm.driver.gate.clear()
            call = generate.Generate(token_request(max_tokens=LONG))
            await until(lambda: len(llm.driver.submitted) == 1)
            call.cancel()
            await until(lambda: all_free(llm))
            assert llm.driver.steps == 0
            llm.driver.gate.set()
            await others_are_served(server)

    asyncio.run(scenario())


def test_a_caller_whose_connection_breaks_is_noticed():
    async def scenario():
        async with serving() as (server, llm):
            wires: list[asyncio.StreamWriter] = []

            async def forward(reader, writer):
                while data := await reader.read(1 << 16):
                    writer.write(data)

            async def proxy(reader, writer):
                to_reader, to_writer = await asyncio.open_connection("127.0.0.1", server.port)
                wires.extend((writer, to_writer))
                await asyncio.gather(
                    forward(reader, to_writer), forward(to_reader, writer), return_exceptions=True
                )

            listener = await asyncio.start_server(proxy, "127.0.0.1", 0)
            port = listener.sockets[0].getsockname()[1]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                call = generate_pb2_grpc.GenerateServiceStub(channel).Generate(token_request(max_tokens=LONG))
                await call.read()
                for wire in wires:
                    wire.transport.abort()
                await until(lambda: all_free(llm))
                assert llm.driver.steps < LONG / 2
                assert (await failure_of_reads(call)).code() == grpc.StatusCode.UNAVAILABLE
            listener.close()
            await others_are_served(server)

    asyncio.run(scenario())


async def failure_of_reads(call) -> grpc.aio.AioRpcError:
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call was served")


@pytest.mark.parametrize("running", [False, True])
def test_a_deadline_ends_the_request_waiting_or_running(running):
    async def scenario():
        async with serving() as (server, llm), client_of(server) as client:
            if not running:
                llm.driver.gate.clear()
            with pytest.raises(RequestFailed) as failed:
                await client.generate([5, 6, 7], max_tokens=LONG, timeout_s=0.3).read_all()
            assert failed.value.code == grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: all_free(llm))
            llm.driver.gate.set()
            await others_are_served(server)

    asyncio.run(scenario())


def test_a_deadline_that_passes_as_the_status_arrives():
    """gRPC then gives the metadata of the server's status beside the code and the details of its own."""
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    status = status_pb2.Status(code=code.value[0], message="the deadline has passed")
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, "Stream removed")

    class Call:
        async def __aiter__(self):
            raise error
            yield

        def cancel(self):
            pass

    async def scenario():
        with pytest.raises(RequestFailed) as failed:
            await Answer(Call(), 1).read_all()
        assert failed.value.code == code and not failed.value.from_server

    asyncio.run(scenario())


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_a_deadline_already_past_over_the_wire(timeout_s):
    async def scenario():
        async with serving() as (server, llm), stubs_of(server) as (generate, _, _):
            error = await failure(generate.Generate(token_request(), timeout=timeout_s))
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert (
                timeout_s == 0 or llm.driver.submitted == []
            )  # the wire rounds 0 up to a millisecond, and a request may arrive within the millisecond
            await until(lambda: all_free(llm))
            await others_are_served(server)

    asyncio.run(scenario())


def test_a_deadline_already_past_never_reaches_the_engine():
    """Called directly: gRPC's own client may not even send such a request."""

    async def scenario():
        llm, served = FakeLLM(), ServedModel(ServerConfig())
        await served.serve(llm)
        service = GenerateService(served)
        context = types.SimpleNamespace(time_remaining=lambda: 0.0)
        with pytest.raises(Refusal) as refused:
            await service.Generate(token_request(), context)
        assert refused.value.code is Code.DEADLINE
        # Nor one that passes while the prompt is being tokenised.
        left = iter([5.0, 0.0])

        async def send_initial_metadata(_):
            pass

        context = types.SimpleNamespace(
            time_remaining=lambda: next(left), send_initial_metadata=send_initial_metadata
        )
        with pytest.raises(Refusal):
            await service.Generate(token_request(), context)
        assert llm.driver.submitted == []
        llm.close()

    asyncio.run(scenario())


def test_a_slow_reader_is_dropped_and_nobody_waits_for_it():
    async def scenario():
        async with (
            serving(max_pending_tokens=64) as (server, llm),
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=NARROW) as channel,
        ):
            generate = generate_pb2_grpc.GenerateServiceStub(channel)
            slow = generate.Generate(token_request(max_tokens=LONG, logprobs=20))
            assert (await slow.read()).HasField("started")
            await until(lambda: len(llm.driver.aborted) == 1)  # while we read nothing
            assert all_free(llm)
            await others_are_served(server)
            read_tokens = 0
            with pytest.raises(grpc.aio.AioRpcError) as dropped:
                while (message := await slow.read()) is not grpc.aio.EOF:
                    read_tokens += len(message.delta.token_ids)
            assert dropped.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "too slowly" in dropped.value.details()
            assert 0 < read_tokens < LONG  # sent messages are delivered in order before the status

    asyncio.run(scenario())


def test_a_reader_who_catches_up_loses_nothing():
    async def scenario():
        async with (
            serving(max_pending_tokens=LONG) as (server, llm),
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=NARROW) as channel,
        ):
            llm.driver.step_s = 0.0
            call = generate_pb2_grpc.GenerateServiceStub(channel).Generate(
                token_request(max_tokens=1000, logprobs=20)
            )
            await call.read()
            await until(lambda: llm.driver.steps == 1000)
            messages = []
            while (message := await call.read()) is not grpc.aio.EOF:
                messages.append(message)
            tokens = [token for message in messages for token in message.delta.token_ids]
            assert tokens == [5 + i % 3 for i in range(1000)]
            assert len(messages) < 1000, "what waits together travels together"
            assert not llm.driver.aborted

    asyncio.run(scenario())


def test_a_full_queue_says_when_to_come_back():
    async def scenario():
        async with serving(FakeLLM(max_waiting=2)) as (server, llm), stubs_of(server) as (generate, _, _):
            llm.driver.gate.clear()
            waiting = [
                asyncio.create_task(read(generate.Generate(token_request(max_tokens=3)))) for _ in range(2)
            ]
            await until(lambda: len(llm.driver.submitted) == 2)
            error = await failure(generate.Generate(token_request()))
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1500
            llm.driver.gate.set()
            assert all(messages[-1].HasField("finished") for messages in await asyncio.gather(*waiting))
            async with client_of(server) as client:
                assert (await client.generate([5], max_tokens=1).read_all()).token_ids == [[5]]

    asyncio.run(scenario())


def test_a_fault_ends_one_request_and_its_id_is_in_the_log(caplog):
    async def scenario():
        async with (
            serving() as (server, llm),
            stubs_of(server) as (generate, _, _),
            client_of(server) as client,
        ):
            llm.driver.gate.clear()
            other = asyncio.create_task(client.generate([5, 6], max_tokens=40).read_all())
            call = generate.Generate(token_request([FAULT_TOKEN]))
            await until(lambda: len(llm.driver.submitted) == 2)
            llm.driver.gate.set()
            error = await failure(call)
            assert error.code() == grpc.StatusCode.INTERNAL
            assert "secret" not in error.details()
            assert len((await other).token_ids[0]) == 40
            return re.search(r"fault (\w+)", error.details()).group(1)

    with caplog.at_level(python_logging.ERROR, logger="absl"):
        fault = asyncio.run(scenario())
    assert fault in caplog.text
    assert "a secret of the engine" in caplog.text


@pytest.mark.parametrize("broken", ["submit", "stats", "request", "tokenizer.encode", "model_config"])
def test_server_faults_are_never_unknown(broken, caplog):
    """Whatever part raises: the callers see INTERNAL with an id, never the exception."""

    async def scenario():
        async with serving() as (server, llm), stubs_of(server) as (generate, model, admin):

            def fail(*_, **__):
                raise LookupError("a secret of ours")

            close = llm.driver.close
            calls = [lambda: generate.Generate(pb.GenerateRequest(text="hi"))]
            match broken:
                case "submit":
                    llm.driver.submit = fail
                case "stats":
                    llm.driver.stats = fail
                    calls = [lambda: admin.GetStats(pb.GetStatsRequest())]
                case "request":
                    llm.request = fail
                case "tokenizer.encode":
                    llm.tokenizer.encode = fail
                    calls.append(lambda: generate.Tokenize(pb.TokenizeRequest(text="hi")))
                case "model_config":
                    llm.model_config = None
                    calls += [
                        lambda: model.GetModel(pb.GetModelRequest()),
                        lambda: generate.Detokenize(pb.DetokenizeRequest()),
                    ]
            for call in calls:
                error = await failure(call())
                assert error.code() == grpc.StatusCode.INTERNAL
                assert (
                    "secret" not in error.details()
                    and re.search(r"fault \w{12}", error.details()).group() in caplog.text
                )
            assert llm.driver.close == close

    asyncio.run(scenario())


def test_draining_lets_the_running_finish_and_refuses_the_new():
    async def scenario():
        async with (
            serving() as (server, llm),
            client_of(server) as client,
            stubs_of(server) as (generate, _, admin),
        ):
            llm.driver.gate.clear()
            running = asyncio.create_task(client.generate([5, 6], max_tokens=20).read_all())
            await until(lambda: len(llm.driver.submitted) == 1)
            draining = asyncio.ensure_future(admin.Drain(pb.DrainRequest(timeout_s=30.0)))
            await until(lambda: llm.driver._draining)
            error = await failure(generate.Generate(token_request()))
            assert error.code() == grpc.StatusCode.UNAVAILABLE and "shutting down" in error.details()
            assert not draining.done()
            llm.driver.gate.set()
            assert (await draining).aborted_requests == 0
            answer = await running
            assert (len(answer.token_ids[0]), answer.finished[0].reason) == (20, pb.FINISH_REASON_LENGTH)
            assert await server.served.drain(0.0) == 0  # drained already: the same answer

    asyncio.run(scenario())


async def error_of(reading) -> RequestFailed:
    with pytest.raises(RequestFailed) as failed:
        await reading
    return failed.value


def test_requests_that_outlast_a_drain_are_aborted():
    async def scenario():
        async with serving() as (server, llm), client_of(server) as client:
            llm.driver.gate.clear()
            answer = client.generate([5, 6], max_tokens=20)
            running = asyncio.create_task(error_of(answer.read_all()))
            await until(lambda: len(llm.driver.submitted) == 1)
            assert await server.served.drain(0.05) == 1
            assert (await running).code == grpc.StatusCode.UNAVAILABLE
            assert answer.finished[0].reason == pb.FINISH_REASON_ABORT  # sent before the status
            llm.driver.gate.set()

    asyncio.run(scenario())


def test_health_reports_a_dead_engine():
    async def scenario():
        async with serving() as (server, llm), client_of(server) as client:
            await client.wait_until_ready(5.0)
            llm.driver.alive = False
            await server.served.engine_failure()
            with pytest.raises(RequestFailed):
                await client.wait_until_ready(0.2)

    asyncio.run(scenario())


def test_three_hundred_callers_on_one_connection():
    async def scenario():
        async with serving() as (server, llm), client_of(server) as client:
            answers = await asyncio.gather(
                *(client.generate([5, 6, 10 + i % 200], max_tokens=9).read_all() for i in range(300))
            )
            for i, answer in enumerate(answers):
                assert answer.token_ids == [[5, 6, 10 + i % 200] * 3]
            assert all_free(llm)
            assert llm.driver.posts == llm.driver.steps, "one mailbox: one post a step"

    asyncio.run(scenario())
