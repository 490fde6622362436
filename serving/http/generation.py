"""The POST routes with a JSON body. They are plain ASGI applications, because tokens flow through them."""

import asyncio
import contextlib
from collections.abc import Callable

import msgspec
from starlette.types import Receive, Scope, Send

from jaxflow.request import InvalidRequest
from serving.frontend.call import CALL
from serving.http.endpoints import Deadline, Endpoints, Prepared
from serving.http.errors import HttpError
from serving.http.event_stream import Chunks, EventStream, error_event
from serving.http.exchange import CancelOnDisconnect, Disconnected, Exchange
from serving.http.job import Answering, Begun, Direct, Pieces, run
from serving.http.limits import Limits
from serving.http.responses import Usage
from serving.http.schema import ChatRequest, CompletionRequest, read_body

ERROR_EVENT_S = 5.0  # time for the last event of a stream, if the caller reads slowly
TIMEOUT_HEADER = b"x-request-timeout-ms"
JSON = (b"content-type", b"application/json")
JSON_LINE = b"content-type: application/json\r\n"
GENERATIONS = (ChatRequest, CompletionRequest)


class JsonRoute:
    """The application of one POST path, by `Endpoints`.

    Raises:
      HttpError, Refusal, InvalidRequest, RequestFailed: before the answer began.
      Disconnected: the caller disconnected.
    """

    def __init__(self, path: str, endpoints: Endpoints, limits: Limits):
        self._path, self._endpoints, self._limits = path, endpoints, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = Deadline.after(timeout_of(scope))
        endpoints, exchange = self._endpoints, Exchange.take(scope)
        body = await read_all(scope, receive, exchange, self._limits)
        request = read_body(self._path, body)
        async with CancelOnDisconnect(exchange):
            if isinstance(request, GENERATIONS):
                prepared = await endpoints.prepare(request, deadline=deadline)
                if prepared.stream:
                    await self._stream(prepared, deadline, send, exchange)
                    return
                answer = await endpoints.collect(prepared, deadline)
            else:
                answer = await endpoints.whole(request, deadline=deadline)
            if isinstance(request, GENERATIONS) and request.prompt_logprobs is None:
                data = msgspec.json.encode(answer)
            else:
                data = await asyncio.to_thread(msgspec.json.encode, answer)
            if not exchange.answer(JSON_LINE, data):
                await send_json(send, 200, data)
            elif (call := CALL.get()) is not None:
                call.status = 200

    async def _stream(self, prepared: Prepared, deadline: Deadline, send: Send, exchange: Exchange) -> None:
        chunks = Chunks(prepared.head, prepared.form)
        events = EventStream(send, exchange, self._limits.ping_s)
        answering = Answering(prepared.job)
        large = prepared.job.requests[0].sampling.prompt_logprobs is not None

        def usage_so_far() -> Usage | None:
            return answering.usage if prepared.head.usage_in_chunks else None

        def take_now(pieces: Pieces) -> None:
            if data := chunks.events(pieces, usage_so_far()):
                events.write_now(data)

        async def take(pieces: Pieces) -> None:
            usage = usage_so_far()
            if large and any(type(piece) is Begun for piece in pieces):
                # Prompt logprobs can have 21 candidates a token. The other streams continue.
                data = await asyncio.to_thread(chunks.events, pieces, usage)
            else:
                data = chunks.events(pieces, usage)
            if data:
                await events.write(data)

        try:
            left_s = deadline.left_s()
            direct = Direct(exchange.writable, take_now)
            await run(
                self._endpoints.served,
                answering,
                take,
                submitted=events.start,
                timeout_s=left_s,
                direct=direct,
            )
            await events.end(chunks.end(answering.usage))
        except Exception as error:
            if not events.started:
                raise
            found = self._endpoints.error(error, self._path)
            # The write stall of the connection ends a caller that does not read at all.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ERROR_EVENT_S):
                    await events.end(error_event(found))
        finally:
            events.close()


async def read_all(scope: Scope, receive: Receive, exchange: Exchange, limits: Limits) -> bytes:
    """Return the body of a request with JSON.

    Raises:
      HttpError: 408, 413 or 415.
      Disconnected: the caller disconnected within the body.
    """
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
    if kind != b"application/json":  # other types would let a web page of another site send requests
        message = f"content-type: {kind.decode('latin-1')[:80]!r} is not accepted: application/json"
        raise HttpError(415, message, code="unsupported_media_type")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise HttpError(415, "content-encoding: only identity is accepted", code="unsupported_media_type")
    too_large = f"the body has more than {limits.body_bytes} bytes"
    length = headers.get(b"content-length", b"0")
    if int(length) > limits.body_bytes:
        raise HttpError(413, too_large, code="request_too_large")
    body = exchange.take_body()
    if body is not None:
        if len(body) > limits.body_bytes:
            raise HttpError(413, too_large, code="request_too_large")
        return body
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                part = message.get("body", b"")
                size += len(part)
                if size > limits.body_bytes:
                    raise HttpError(413, too_large, code="request_too_large")
                parts.append(part)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        raise HttpError(
            408, f"the body took longer than {limits.body_s:g} s", code="request_timeout"
        ) from None


def timeout_of(scope: Scope) -> float | None:
    """Return the seconds of the header `x-request-timeout-ms`, or None. Raises: InvalidRequest."""
    value = next((value for key, value in scope["headers"] if key == TIMEOUT_HEADER), None)
    if value is None:
        return None
    text = value.decode("latin-1")
    if not (text.isascii() and text.isdigit() and 0 < len(text) <= 10):
        raise InvalidRequest(TIMEOUT_HEADER.decode(), text, "milliseconds, a whole number")
    return int(text) / 1000


async def send_json(send: Send, status: int, data: bytes, headers: Callable[[], list] = list) -> None:
    """Send an answer with a JSON body."""
    length = (b"content-length", str(len(data)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [JSON, length, *headers()]})
    await send({"type": "http.response.body", "body": data})
