"""A server of a fake model and a client of it, on one event loop."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import grpc
from fake_llm import FakeLLM
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from serving.client import Client
from serving.frontend.config import ServerConfig
from serving.frontend.served_model import ServedModel
from serving.grpc import generate_pb2 as pb
from serving.grpc import generate_pb2_grpc
from serving.grpc.server import Server


@contextlib.asynccontextmanager
async def serving(llm: FakeLLM | None = None, **settings) -> AsyncIterator[tuple[Server, FakeLLM]]:
    """A running server on ports of the system's choice."""
    llm = llm or FakeLLM()
    server = Server(ServedModel(ServerConfig(port=0, admin_port=0, **settings)))
    await server.start()
    await server.served.serve(llm)
    try:
        yield server, llm
    finally:
        await server.stop()
        llm.close()


@contextlib.asynccontextmanager
async def client_of(server: Server, **settings) -> AsyncIterator[Client]:
    async with Client(f"127.0.0.1:{server.port}", **settings) as client:
        yield client


@contextlib.asynccontextmanager
async def stubs_of(server: Server) -> AsyncIterator[tuple]:
    """The bare stubs (generate, model, admin)."""
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as main,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.admin_port}") as admin,
    ):
        yield (
            generate_pb2_grpc.GenerateServiceStub(main),
            generate_pb2_grpc.ModelServiceStub(main),
            generate_pb2_grpc.AdminServiceStub(admin),
        )


async def read(call: grpc.aio.UnaryStreamCall) -> list[pb.GenerateResponse]:
    return [message async for message in call]


async def failure(call) -> grpc.aio.AioRpcError:
    """The error a call, of any kind, ends with."""
    try:
        if hasattr(call, "__aiter__"):
            await read(call)
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call was served")


def detail(error: grpc.aio.AioRpcError, kind: type):
    """The one detail of `kind` that the error carries, or None."""
    status = rpc_status.from_call(error)
    for packed in status.details if status else ():
        unpacked = kind()
        if packed.Unpack(unpacked):
            return unpacked
    return None


def violated_field(error: grpc.aio.AioRpcError) -> str | None:
    bad = detail(error, error_details_pb2.BadRequest)
    return bad.field_violations[0].field if bad else None


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for `condition`. Fail after `timeout_s`; the timeout only ends a broken test."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.005)


def token_request(ids=(5, 6, 7), *, request_id: str = "", **sampling) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id, token_ids=pb.TokenIds(ids=ids), sampling=pb.SamplingParams(**sampling)
    )
