"""gRPC statuses of refused requests, as `google.rpc.Status` with details."""

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from serving.frontend.refusal import Code, Refusal

MAX_MESSAGE_CHARS = 1000  # the status travels in the trailing metadata, which transports keep small

_STATUS = {
    Code.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Code.MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
    Code.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Code.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Code.RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.TOO_SLOW: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.LOADING: grpc.StatusCode.UNAVAILABLE,
    Code.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Code.ABORTED: grpc.StatusCode.UNAVAILABLE,
    Code.INTERRUPTED: grpc.StatusCode.UNAVAILABLE,
    Code.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def status(code: grpc.StatusCode, message: str, *details) -> status_pb2.Status:
    """Return a status of `code` with `details`, which are messages of `google.rpc.error_details`."""
    result = status_pb2.Status(code=code.value[0], message=message[:MAX_MESSAGE_CHARS])
    for detail in details:
        result.details.add().Pack(detail)
    return result


def status_of(refusal: Refusal) -> status_pb2.Status:
    """Return the status of `refusal`: with the field of an invalid request, and with the suggested delay."""
    details, message = [], str(refusal)
    if refusal.code is Code.INVALID:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=refusal.field or "", description=message[:MAX_MESSAGE_CHARS]
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if refusal.retry_after_s is not None:
        details.append(_retry(refusal.retry_after_s))
    return status(_STATUS[refusal.code], message, *details)


def _retry(seconds: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(max(1, round(seconds * 1000)))
    return error_details_pb2.RetryInfo(retry_delay=delay)
