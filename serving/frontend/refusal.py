"""Refused and failed requests with neutral codes. Each server maps a code to its own status."""

import enum

from jaxflow.request import Draining, Interrupted, InvalidRequest, QueueFull


class Code(enum.StrEnum):
    """The kind of a refusal."""

    INVALID = "invalid"  # a field has a value that is not accepted
    MODEL_NOT_FOUND = "model_not_found"  # the request names another model
    UNSUPPORTED = "unsupported"  # the served model lacks a tokenizer or a chat template
    UNAUTHENTICATED = "unauthenticated"  # no valid token
    FORBIDDEN = "forbidden"  # a valid token without the right for this request
    RATE_LIMITED = "rate_limited"  # the caller has reached a limit of its token
    QUEUE_FULL = "queue_full"  # the server's queue is full
    TOO_SLOW = "too_slow"  # the caller reads its stream too slowly
    LOADING = "loading"
    DRAINING = "draining"
    DEADLINE = "deadline"  # the caller's deadline has passed
    ABORTED = "aborted"  # the server shut down before the answer was complete
    INTERRUPTED = "interrupted"  # the replica was lost before the answer was complete


class Refusal(Exception):
    """A request that ends without an answer, or with a partial answer.

    Attributes:
      code: the kind of the refusal.
      field: the path of the refused field in the engine's names (`top_p`, `messages[1].role`), or None.
      retry_after_s: the seconds after which another try can succeed, or None.
    """

    def __init__(
        self, code: Code, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ):
        self.code, self.field, self.retry_after_s = code, field, retry_after_s
        super().__init__(message)


def refusal_of(error: BaseException) -> Refusal | None:
    """Return `error` as a refusal, or None if `error` is a fault of the server."""
    match error:
        case Refusal():
            return error
        case InvalidRequest(field=field):
            return Refusal(Code.INVALID, str(error), field=field)
        case QueueFull(retry_after_s=seconds):
            return Refusal(Code.QUEUE_FULL, str(error), retry_after_s=seconds)
        case Draining():
            return draining()
        case Interrupted():
            return Refusal(Code.INTERRUPTED, str(error))
    return None


def draining() -> Refusal:
    """Return the refusal of a new request while the server shuts down."""
    return Refusal(Code.DRAINING, "the server is shutting down and accepts no new requests")


def aborted() -> Refusal:
    """Return the error of a request that the server aborted at its shutdown, after a part of the answer."""
    return Refusal(Code.ABORTED, "the server shut down before the answer was complete")


def deadline_passed() -> Refusal:
    """Return the refusal of a request after its deadline."""
    return Refusal(Code.DEADLINE, "the deadline has passed")
