"""The flags of operation, and the `Operations` that they describe."""

from absl import flags

from serving.operations.fleet import Fleet
from serving.operations.health import ServedState
from serving.operations.operations import Operations
from serving.operations.request_log import RequestLog
from serving.operations.tracing import otlp

STALL_S = flags.DEFINE_float(
    "stall_s",
    None,
    "Seconds without progress, while there is work, after which the server is not live. "
    "Default: 10, or 20 times the longest recent step if that is more.",
    lower_bound=0.1,
)
REQUEST_LOG = flags.DEFINE_string(
    "request_log",
    None,
    "Write one JSON line a request, without prompts, to stderr or to this file.",
)
OTLP_TRACES_ENDPOINT = flags.DEFINE_string(
    "otlp_traces_endpoint",
    None,
    'Send OpenTelemetry traces to this OTLP collector over gRPC. Needs pip install "jaxflow[otel]".',
)
LEGACY_METRIC_NAMES = flags.DEFINE_boolean(
    "legacy_metric_names", False, "Also expose the metric names that vLLM removed."
)


def operations_from_flags(served: ServedState, fleet: Fleet | None = None) -> Operations:
    """Return the operations of a served model, and of the replicas behind it.

    Raises:
      RequestLogError, TracingError: settings that cannot be used.
    """
    tracing = None if OTLP_TRACES_ENDPOINT.value is None else otlp(OTLP_TRACES_ENDPOINT.value)
    return Operations(
        served,
        stall_s=STALL_S.value,
        legacy_metric_names=LEGACY_METRIC_NAMES.value,
        request_log=None if REQUEST_LOG.value is None else RequestLog(REQUEST_LOG.value),
        tracing=tracing,
        fleet=fleet,
    )
