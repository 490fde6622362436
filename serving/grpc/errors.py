"""gRPC statuses of refused requests, as `google.rpc.Status` with details."""

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from jaxflow.request import Draining, InvalidRequest, QueueFull

MAX_MESSAGE_CHARS = 1000  # the status travels in the trailing metadata, which transports keep small


class Refusal(Exception):
    """A request that this server cannot serve. `code` is the gRPC status."""

    def __init__(self, code: grpc.StatusCode, message: str):
        self.code = code
        super().__init__(message)


class Loading(RuntimeError):
    """The model is still loading. `retry_after_s` is a suggested delay before the next try."""

    def __init__(self, retry_after_s: float = 5.0):
        self.retry_after_s = retry_after_s
        super().__init__("the model is still loading")


class TooSlow(RuntimeError):
    """The client left more tokens unread than the server buffers for one stream."""

    def __init__(self, limit: int):
        super().__init__(
            f"the stream was read too slowly: more than {limit} tokens were waiting for the client"
        )


def status(code: grpc.StatusCode, message: str, *details) -> status_pb2.Status:
    """Return a status of `code` with `details`, which are messages of `google.rpc.error_details`."""
    result = status_pb2.Status(code=code.value[0], message=message[:MAX_MESSAGE_CHARS])
    for detail in details:
        result.details.add().Pack(detail)
    return result


def status_of(error: BaseException) -> status_pb2.Status | None:
    """Return the status of `error` for the client, or None if `error` is a fault of the server."""
    message = str(error)
    match error:
        case InvalidRequest(field=field):
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=field, description=message[:MAX_MESSAGE_CHARS]
            )
            return status(
                grpc.StatusCode.INVALID_ARGUMENT,
                message,
                error_details_pb2.BadRequest(field_violations=[violation]),
            )
        case QueueFull(retry_after_s=seconds):
            return status(grpc.StatusCode.RESOURCE_EXHAUSTED, message, _retry(seconds))
        case Loading(retry_after_s=seconds):
            return status(grpc.StatusCode.UNAVAILABLE, message, _retry(seconds))
        case Draining():
            return status(
                grpc.StatusCode.UNAVAILABLE,
                message or "the server is shutting down and takes no new requests",
            )
        case TooSlow():
            return status(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        case Refusal(code=code):
            return status(code, message)
    return None


def _retry(seconds: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(max(1, round(seconds * 1000)))
    return error_details_pb2.RetryInfo(retry_delay=delay)
