"""HTTP statuses and bodies of refused and failed requests, as in OpenAI's API."""

import logging
import math
import uuid
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException

from jaxflow.request import ContextLengthExceeded
from serving.frontend.refusal import Code, Refusal, refusal_of

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 160


class ErrorDetail(msgspec.Struct, frozen=True):
    """The fields of an error. `param`: the path of the refused field. `code`: a name for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of an answer that reports an error."""

    error: ErrorDetail


class HttpError(Exception):
    """An error with its HTTP status.

    `retry_after_s`: seconds after which another try can succeed, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))

    @property
    def body(self) -> ErrorBody:
        """Return the JSON body."""
        param = None if self.param is None else self.param[:MAX_PARAM_CHARS]
        return ErrorBody(ErrorDetail(str(self)[:MAX_MESSAGE_CHARS], _type(self.status), param, self.code))


_ANSWERS: dict[Code, tuple[int, str | None]] = {
    Code.INVALID: (400, None),
    Code.MODEL_NOT_FOUND: (404, "model_not_found"),
    Code.UNSUPPORTED: (400, "unsupported"),
    Code.UNAUTHENTICATED: (401, "invalid_api_key"),
    Code.FORBIDDEN: (403, "forbidden"),
    Code.RATE_LIMITED: (429, "rate_limit_exceeded"),
    Code.QUEUE_FULL: (429, "rate_limit_exceeded"),
    Code.TOO_SLOW: (408, "client_too_slow"),
    Code.LOADING: (503, "model_loading"),
    Code.DRAINING: (503, "server_shutting_down"),
    Code.ABORTED: (503, "server_shutting_down"),
    Code.INTERRUPTED: (503, "replica_lost"),
    Code.DEADLINE: (504, "deadline_exceeded"),
}
_CODES = {404: "not_found", 405: "method_not_allowed"}


def http_error(error: BaseException, max_model_len: int | None = None, in_chat: bool = False) -> HttpError:
    """Return the HTTP error of an exception. A fault of the server is logged
    under an id, which the answer has.

    Args:
      max_model_len: the context in tokens, for the message of a request that is too long. None: the limit of
        the request is not that of the context.
      in_chat: the request has messages instead of a prompt.
    """
    match error:
        case HttpError():
            return error
        case HTTPException():
            detail, allowed = error.detail, (error.headers or {}).get("Allow")
            if allowed is not None:
                detail = f"this method is not accepted here; accepted: {allowed}"
            return HttpError(
                error.status_code, detail, code=_CODES.get(error.status_code), headers=error.headers
            )
        case ContextLengthExceeded() if max_model_len is not None:
            message = too_long(error, max_model_len, in_chat)
            return HttpError(400, message, code="context_length_exceeded", param=error.field)
    refusal = refusal_of(error)
    if refusal is not None:
        return _refused(refusal)
    fault = uuid.uuid4().hex[:12]
    log.error("fault %s", fault, exc_info=error)
    message = f"internal fault {fault}; the server's log has the traceback under this id"
    return HttpError(500, message, code="internal_error")


def too_long(error: ContextLengthExceeded, max_model_len: int, in_chat: bool) -> str:
    """Return the message of a request that is too long, in the words that clients of OpenAI look for."""
    place, has = ("messages", "have") if in_chat else ("prompt", "has")
    limit = f"This model's maximum context length is {max_model_len} tokens. However, "
    if error.prompt_tokens is None:
        return f"{limit}your {place} {has} more: {error}. Please reduce the length of the {place}."
    prompt, output = error.prompt_tokens, error.output_tokens
    return (
        f"{limit}you requested {prompt + output} tokens ({prompt} in the {place}, {output} in the "
        "completion). "
        f"Please reduce the length of the {place} or completion."
    )


def _refused(refusal: Refusal) -> HttpError:
    status, code = _ANSWERS[refusal.code]
    retry_s = refusal.retry_after_s
    if status == 503 and retry_s is None:
        retry_s = 5.0  # by then another process may serve the request
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return HttpError(
        status, str(refusal), code=code, param=refusal.field, retry_after_s=retry_s, headers=headers
    )


def _type(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 429:
            return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
