"""Request log, traces and gRPC health of a gRPC server around a fake engine."""

import asyncio
import builtins
import contextlib
import json
import os
from concurrent import futures

import grpc
import pytest
from fake_llm import FAULT_TOKEN, FakeLLM
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness import failure, read, stubs_of, token_request, until
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from served_state import in_loop
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from serving.frontend.call import Call
from serving.frontend.config import ServerConfig
from serving.frontend.served_model import ServedModel
from serving.grpc.server import Server
from serving.operations import Operations, tracing
from serving.operations.http_routes import ObservedCalls
from serving.operations.request_log import RequestLog, RequestLogError, record

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
SECRET = "a secret of the engine"


@contextlib.asynccontextmanager
async def observed(llm: FakeLLM | None = None, **settings):
    """A server with its operations."""
    llm = llm or FakeLLM()
    served = ServedModel(ServerConfig(port=0, admin_port=0))
    operations = Operations(served, **settings)
    server = Server(served, operations.observe)
    await server.start()
    await served.serve(llm)
    watching = asyncio.create_task(operations.run(server.show_ready))
    try:
        yield server, operations
    finally:
        watching.cancel()
        await server.stop()
        llm.close()
        operations.close()


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().decode("ascii").splitlines()]


@in_loop
async def test_each_call_has_one_line(tmp_path):
    path = tmp_path / "requests.log"
    exporter = InMemorySpanExporter()
    traces = tracing.Tracing(SimpleSpanProcessor(exporter))
    async with observed(request_log=RequestLog(str(path)), tracing=traces) as (server, operations):  # noqa: SIM117
        async with stubs_of(server) as (generate, _, _):
            name = 'a\r\n{"outcome":"ok"}\u2028'
            request = token_request((5, 6, 7), request_id=name, max_tokens=4, n=2)
            await read(generate.Generate(request, metadata=(("traceparent", PARENT),)))
            await failure(generate.Generate(token_request((5,), max_tokens=10**6)))
            await failure(generate.Generate(token_request((FAULT_TOKEN,), max_tokens=2)))
            call = generate.Generate(token_request((5,), max_tokens=4000))
            await call.read()
            call.cancel()
            await until(lambda: len(lines(path)) == 4)
    done, refused, failed, cancelled = lines(path)
    assert done["request_id"] == name and done["trace_id"] == TRACE
    assert (done["outcome"], done["reason"], done["protocol"]) == ("ok", "length", "grpc")
    assert (done["prompt_tokens"], done["completion_tokens"], len(done["engine_ids"])) == (3, 8, 1)
    assert 0 <= done["queued_s"] <= done["ttft_s"] <= done["engine_s"] <= done["total_s"]
    assert (refused["outcome"], refused["reason"]) == ("refused", "invalid: sampling.max_tokens")
    assert (failed["outcome"], failed["reason"]) == ("error", "ZeroDivisionError")
    assert cancelled["outcome"] == "cancelled"
    assert SECRET not in path.read_text()
    assert +operations.recorder.refusals == {"invalid": 1}
    spans = exporter.get_finished_spans()
    server_span = next(span for span in spans if span.parent and span.parent.span_id == 0xB7AD6B7169203331)
    children = [span for span in spans if span.parent and span.parent.span_id == server_span.context.span_id]
    assert sorted(span.name for span in children) == [
        "decode",
        "decode",
        "prefill",
        "prefill",
        "queue",
        "queue",
    ]
    assert server_span.attributes["gen_ai.usage.output_tokens"] == 8
    assert server_span.attributes["gen_ai.request.model"] == "fake"
    assert server_span.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    assert all(span.start_time <= span.end_time for span in spans)
    assert sum(not span.status.is_ok for span in spans) == 2  # the refused call and the failed call


@in_loop
async def test_grpc_health_follows_a_stall_and_a_recovery():
    llm = FakeLLM()
    async with observed(llm, stall_s=0.2) as (server, _):
        target = f"127.0.0.1:{server.port}"
        async with grpc.aio.insecure_channel(target) as channel, stubs_of(server) as (generate, _, _):
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            serving, not_serving = (
                health_pb2.HealthCheckResponse.SERVING,
                health_pb2.HealthCheckResponse.NOT_SERVING,
            )
            assert (await watch.read()).status == serving
            llm.driver.gate.clear()
            call = generate.Generate(token_request((5,), max_tokens=2))
            assert (await watch.read()).status == not_serving
            llm.driver.gate.set()
            assert (await watch.read()).status == serving
            await read(call)


@in_loop
async def test_spans_reach_a_collector():
    got = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):
            got.extend(
                span for r in request.resource_spans for scope in r.scope_spans for span in scope.spans
            )
            return trace_service_pb2.ExportTraceServiceResponse()

    collector = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), collector)
    port = collector.add_insecure_port("127.0.0.1:0")
    collector.start()
    traces = tracing.otlp(f"http://127.0.0.1:{port}")
    call = Call("http", "/v1/chat/completions", PARENT)
    traces.export(call, call.begun_ns + 10)
    await asyncio.to_thread(traces.close)
    collector.stop(None)
    assert [(span.name, span.trace_id.hex()) for span in got] == [("/v1/chat/completions", TRACE)]


@in_loop
async def test_posts_of_an_asgi_application_are_recorded(tmp_path):
    path = tmp_path / "log"
    served = ServedModel(ServerConfig())
    operations = Operations(served, request_log=RequestLog(str(path)))

    async def answer(request):
        return Response(status_code=int(request.query_params["code"]))

    app = ObservedCalls(Starlette(routes=[Route("/a", answer, methods=["GET", "POST"])]), operations)

    async def ask(method: str, code: int) -> None:
        scope = {"type": "http", "method": method, "path": "/a", "headers": []}
        scope["query_string"] = f"code={code}".encode()

        async def receive():
            return {"type": "http.request"}

        async def send(message): ...

        await app(scope, receive, send)

    for method, code in (("GET", 200), ("POST", 200), ("POST", 404), ("POST", 500)):
        await ask(method, code)
    assert [(line["outcome"], line["reason"]) for line in lines(path)] == [
        ("ok", ""),
        ("refused", "HTTP 404"),
        ("error", "HTTP 500"),
    ]


def test_a_renamed_log_is_opened_anew(tmp_path):
    path = tmp_path / "log"
    log = RequestLog(str(path))
    call = Call("http", "/a")
    log.write(record(call, call.begun_ns))
    os.rename(path, tmp_path / "old")
    log.write(record(call, call.begun_ns))
    log.close()
    assert len(lines(path)) == len(lines(tmp_path / "old")) == 1
    with pytest.raises(RequestLogError, match="request_log"):
        RequestLog(str(tmp_path / "no folder" / "log"))


def test_traces_without_the_packages_name_the_extra(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(tracing.TracingError, match=r"jaxflow\[otel\]"):
        tracing.otlp("http://127.0.0.1:1")
