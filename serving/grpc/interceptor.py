"""The interceptor of all calls: authentication, unreadable requests, refusals and faults.

grpc.aio answers UNKNOWN with the text of the exception if a handler or the parser of its request raises. The
interceptor answers INTERNAL with an id instead, and logs the traceback under this id. A request that cannot
be parsed is an error of the client and is answered with INVALID_ARGUMENT.
"""

import asyncio
import inspect
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from absl import logging
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from jaxflow.request import InvalidRequest
from serving.frontend.access import CALLER, BearerTokens, Caller
from serving.frontend.call import Observe, unobserved
from serving.frontend.refusal import Code, Refusal, refusal_of
from serving.grpc.message_fields import check_fields

MAX_FIELD_CHARS = 80  # characters of a field's name in a log line, so that no prompt gets into the log
_OBSERVED = "/Generate"
_NO_TOKEN_NEEDED = "/grpc.health.v1.Health/"  # health probes of an orchestrator carry no token
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


class CallInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that checks the bearer token and turns every exception of a handler into a status.

    Args:
      tokens: the accepted tokens.
      observe: opens the record of a generating call, see `serving.frontend.call`.
    """

    def __init__(self, tokens: BearerTokens, observe: Observe = unobserved):
        self._tokens, self._observe = tokens, observe
        self._guarded: dict[str, grpc.RpcMethodHandler] = {}
        # A stream handler runs before the request is read, so callers without a token cost no memory.
        self._refusing = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(self, continuation, handler_call_details) -> grpc.RpcMethodHandler | None:
        method = handler_call_details.method
        if not method.startswith(_NO_TOKEN_NEEDED):
            caller = caller_of(handler_call_details, self._tokens)
            if caller is None:
                return self._refusing
            CALLER.set(caller)  # each call has a task of its own
        guarded = self._guarded.get(method)
        if guarded is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None  # gRPC answers UNIMPLEMENTED
            guarded = self._guarded[method] = _guard(handler, method, self._observe)
        return guarded


def caller_of(call: grpc.HandlerCallDetails, tokens: BearerTokens) -> Caller | None:
    """Return the caller of a call, or None if its metadata has no valid token."""
    metadata = call.invocation_metadata  # type: ignore[attr-defined]
    return tokens.caller(next((value for key, value in metadata if key == "authorization"), None))


def _traceparent(context: grpc.aio.ServicerContext) -> str:
    """Return the W3C trace context of a call, or an empty text."""
    metadata = context.invocation_metadata() or ()
    return next((str(value) for key, value in metadata if key == "traceparent"), "")


async def _refuse(_requests, context) -> None:
    message = "this server requires `authorization: Bearer <token>` in the metadata, with a valid token"
    await context.abort_with_status(rpc_status.to_status(_status_of(Refusal(Code.UNAUTHENTICATED, message))))


class _Unreadable:
    """A request that could not be parsed. An exception in the parser itself would be answered UNKNOWN."""

    def __init__(self, error: Exception):
        self.error = InvalidRequest(
            "request", str(error), "a message as in generate.proto, its strings in UTF-8"
        )


def _parser(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    kind = getattr(parse, "__self__", None)  # the class of the message, of which the parser is a method

    def tolerant(message: bytes):
        try:
            if kind is not None:
                check_fields(message, kind.DESCRIPTOR)
            return parse(message) if parse else message
        except DecodeError as error:
            return _Unreadable(error)

    return tolerant


def _readable(request):
    if isinstance(request, _Unreadable):
        raise request.error
    return request


async def _each_readable(requests) -> AsyncIterator:
    async for request in requests:
        yield _readable(request)


def _guard(handler: grpc.RpcMethodHandler, method: str, observe: Observe) -> grpc.RpcMethodHandler:
    """Return `handler` with every exception turned into a status."""
    # gRPC has four kinds of handlers, and stores the function under the name of its kind.
    many = handler.request_streaming, handler.response_streaming  # type: ignore[attr-defined]
    kind = "_".join("stream" if each else "unary" for each in many)
    inner = getattr(handler, kind)
    read = _each_readable if many[0] else _readable

    async def call(request, context):
        try:
            if not method.endswith(_OBSERVED):
                return await inner(read(request), context)
            with observe("grpc", method, _traceparent(context)):
                return await inner(read(request), context)
        except BaseException as error:
            await _answer(error, context, method)

    async def generate(request, context):
        try:
            async for response in inner(read(request), context):
                yield response
        except BaseException as error:
            await _answer(error, context, method)

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    body = generate if inspect.isasyncgenfunction(inner) else call
    return make(body, _parser(handler.request_deserializer), handler.response_serializer)  # type: ignore[attr-defined]


async def _answer(error: BaseException, context, method: str) -> None:
    """End the call with the status of `error`. Raises: the exceptions that gRPC must handle itself."""
    cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
    task = asyncio.current_task()
    if cancelled and (isinstance(error, GeneratorExit) or (task is not None and task.cancelling())):
        logging.warning("%s of %s cancelled by the client or its connection", method, context.peer())
        raise error
    if isinstance(error, grpc.aio.AbortError | KeyboardInterrupt | SystemExit):
        raise error  # the call is already answered
    if isinstance(error, grpc.aio.BaseError):
        # gRPC would log any other exception with a traceback.
        logging.warning("%s of %s ended: the connection was lost during a write", method, context.peer())
        raise asyncio.CancelledError from error
    refusal = refusal_of(error)
    if refusal is not None:
        status = _status_of(refusal)
        field = f", field {refusal.field[:MAX_FIELD_CHARS]!r}" if refusal.field else ""
        logging.warning("%s of %s refused: %s%s", method, context.peer(), refusal.code, field)
    else:
        fault = uuid.uuid4().hex[:12]
        logging.error("fault %s in %s", fault, method, exc_info=error)
        status = _status(
            grpc.StatusCode.INTERNAL,
            f"internal fault {fault}; the server's log has the traceback under this id",
        )
    await context.abort_with_status(rpc_status.to_status(status))


def _status(code: grpc.StatusCode, message: str, *details) -> status_pb2.Status:
    """Return a status of `code` with `details`, which are messages of `google.rpc.error_details`."""
    result = status_pb2.Status(code=code.value[0], message=message[:MAX_MESSAGE_CHARS])
    for detail in details:
        result.details.add().Pack(detail)
    return result


def _status_of(refusal: Refusal) -> status_pb2.Status:
    """Return the status of `refusal`: with the field of an invalid request, and with the suggested delay."""
    details, message = [], str(refusal)
    if refusal.code is Code.INVALID:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=refusal.field or "", description=message[:MAX_MESSAGE_CHARS]
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if refusal.retry_after_s is not None:
        details.append(_retry(refusal.retry_after_s))
    return _status(_STATUS[refusal.code], message, *details)


def _retry(seconds: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(max(1, round(seconds * 1000)))
    return error_details_pb2.RetryInfo(retry_delay=delay)
