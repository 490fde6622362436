"""Connections without calls, and clients that take no data: they end, and nobody else is held up."""

import asyncio
import logging as python_logging
import struct

import grpc
import pytest
from fake_llm import PAGES
from harness import client_of, serving, stubs_of, token_request, until

from serving.grpc import generate_pb2 as pb
from serving.grpc import generate_pb2_grpc

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def call_with_a_closed_window(message: bytes) -> bytes:
    """A whole Generate call in HTTP/2 frames, on a connection that lets the server send no data."""
    headers = b"".join(
        header(name, value)
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", b"/jaxflow.v1.GenerateService/Generate"),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        )
    )
    no_window = frame(4, 0, 0, struct.pack(">HI", 4, 0))
    body = b"\0" + struct.pack(">I", len(message)) + message
    return PREFACE + no_window + frame(1, 4, 1, headers) + frame(0, 1, 1, body)


async def ends(reader: asyncio.StreamReader) -> None:
    while await asyncio.wait_for(reader.read(1 << 16), 20.0):
        pass


def test_a_connection_without_a_call_ends():
    async def scenario():
        async with serving(idle_timeout_s=0.2) as (server, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(PREFACE + frame(4, 0, 0))
            await ends(reader)
            writer.close()
            async with client_of(server) as client:  # a real client connects again by itself
                for _ in range(2):
                    assert (await client.generate([5], max_tokens=1).read_all()).token_ids == [[5]]
                    await asyncio.sleep(0.5)

    asyncio.run(scenario())


def test_a_client_that_takes_no_data_loses_its_connection():
    async def scenario():
        async with serving(connection_age_s=0.3) as (server, llm):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(call_with_a_closed_window(token_request(max_tokens=3).SerializeToString()))
            await until(lambda: len(llm.driver.submitted) == 1)
            await until(lambda: llm.driver.stats().kv_pages_free == PAGES)  # a short answer holds no page
            await ends(reader)
            writer.close()

    asyncio.run(scenario())


def test_a_stream_closed_during_a_write_is_one_line_in_the_log(caplog):
    async def scenario():
        async with serving() as (server, llm):
            options = (("grpc.http2.bdp_probe", 0),)
            for _ in range(5):
                async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
                    request = token_request(max_tokens=4000, logprobs=20)
                    call = generate_pb2_grpc.GenerateServiceStub(channel).Generate(request)
                    await call.read()
                    await asyncio.sleep(0.1)  # the client reads nothing, so a write waits
                    call.cancel()
                await until(lambda: llm.driver.stats().kv_pages_free == PAGES)
            await until(lambda: len(caplog.records) >= 5)

    with caplog.at_level(python_logging.WARNING):
        asyncio.run(scenario())
    assert len(caplog.records) == 5
    assert not any(record.exc_info for record in caplog.records)
    assert all("GenerateService/Generate" in record.getMessage() for record in caplog.records)


def test_each_refused_request_is_one_line_without_its_text(caplog):
    async def scenario():
        async with serving() as (server, _), stubs_of(server) as (generate, _, _):
            for request in (
                pb.GenerateRequest(text="a secret", sampling=pb.SamplingParams(top_p=2.0)),
                pb.GenerateRequest(text="a secret", model="another secret"),
            ):
                with pytest.raises(grpc.aio.AioRpcError):
                    await generate.Generate(request).read()

    with caplog.at_level(python_logging.WARNING, logger="absl"):
        asyncio.run(scenario())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "secret" not in caplog.text
    assert "refused: invalid, field 'sampling.top_p'" in lines[0] and "model_not_found" in lines[1]
