"""OpenTelemetry traces: a server span a call, with spans of its queue, prefill and decode.

The spans are made after the end of a call, from its times, so that traces cost a step nothing.
"""

from typing import TYPE_CHECKING, Any

from serving.frontend.call import Call
from serving.operations.request_log import CANCELLED, OK, outcome

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

SERVICE_NAME = "jaxflow"


class TracingError(ValueError):
    """Traces that cannot be exported. The message is one line."""


class Tracing:
    """The exporter of traces.

    Args:
      processor: takes the finished spans.

    Raises:
      TracingError: the packages of OpenTelemetry are not installed.
    """

    def __init__(self, processor: "SpanProcessor", model_name: str = ""):
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
        except ImportError as error:
            raise _not_installed() from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE_NAME}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SERVICE_NAME)
        self.model_name = model_name

    def export(self, call: Call, ended_ns: int) -> str:
        """Make the spans of a call that ended at `ended_ns`, and return its
        trace id as 32 hexadecimal digits.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": call.traceparent})
        span = self._tracer.start_span(
            call.method,
            parent,
            SpanKind.SERVER,
            self._attributes(call),
            start_time=call.begun_ns,
        )
        result, reason = outcome(call)
        if result not in (OK, CANCELLED):
            span.set_status(Status(StatusCode.ERROR, reason))
            span.set_attribute("error.type", reason)
        inside = set_span_in_context(span)
        for end_ns, end in call.ends:
            timings = end.timings
            arrived_ns = end_ns - _ns(timings.total_s)
            begun_ns, first_ns = (
                arrived_ns + _ns(timings.queued_s),
                arrived_ns + _ns(timings.time_to_first_token_s),
            )
            borders = (arrived_ns, begun_ns, first_ns, end_ns)
            for name, start, stop in zip(("queue", "prefill", "decode"), borders, borders[1:], strict=False):
                attributes = {"jaxflow.sequence": end.index, "jaxflow.engine_id": end.request_id}
                child = self._tracer.start_span(name, inside, attributes=attributes, start_time=start)
                child.end(max(start, stop))
        span.end(ended_ns)
        return f"{span.get_span_context().trace_id:032x}"

    def close(self) -> None:
        """Send the last spans."""
        self._provider.shutdown()

    def _attributes(self, call: Call) -> dict[str, Any]:
        """Return the attributes of a call, named by the semantic conventions for generative AI."""
        ends = [end for _, end in call.ends]
        found: dict[str, Any] = {
            "gen_ai.operation.name": "chat" if "chat" in call.method else "text_completion",
            "gen_ai.provider.name": SERVICE_NAME,
            "gen_ai.request.model": self.model_name,
            "gen_ai.response.id": call.name,
            "gen_ai.response.finish_reasons": [str(end.reason) for end in ends],
            "gen_ai.usage.input_tokens": call.prompt_tokens,
            "gen_ai.usage.output_tokens": sum(end.usage.completion_tokens for end in ends),
            "rpc.system" if call.protocol == "grpc" else "url.path": call.protocol
            if call.protocol == "grpc"
            else call.method,
        }
        if call.sampling is not None:
            found |= {
                "gen_ai.request.temperature": call.sampling.temperature,
                "gen_ai.request.top_p": call.sampling.top_p,
                "gen_ai.request.choice.count": call.sampling.n,
            }
            if call.sampling.max_tokens is not None:
                found["gen_ai.request.max_tokens"] = call.sampling.max_tokens
        if ends:
            found["gen_ai.server.time_to_first_token"] = max(e.timings.time_to_first_token_s for e in ends)
            found["jaxflow.queued_s"] = max(e.timings.queued_s for e in ends)
        return found


def otlp(endpoint: str) -> Tracing:
    """Return traces that go to an OTLP collector over gRPC. `http://` or no scheme means no TLS.

    Raises:
      TracingError: the packages of OpenTelemetry are not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise _not_installed() from error
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    return Tracing(BatchSpanProcessor(exporter))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _not_installed() -> TracingError:
    return TracingError('--otlp_traces_endpoint needs OpenTelemetry: pip install "jaxflow[otel]"')
