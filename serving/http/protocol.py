"""uvicorn's HTTP protocol with limits of connections, headers and times, and with half-closed connections.

A caller that closes the sending half of its connection sends the same FIN as a caller that is gone. So a FIN
does not end a request. Small writes find out which of both happened: a host answers a write to a closed
socket with a reset. Before an answer, the write is the interim response 102, which every HTTP/1.1 client
skips. Within a stream of events, the write is a comment.
"""

import asyncio
from typing import Any

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from serving.http.errors import HttpError
from serving.http.exchange import EXTENSION, Exchange
from serving.http.limits import Limits

FIRST_PROBE_S = 0.02  # after the first probe; a reset over loopback takes less
LAST_PROBE_S = 2.0  # the pause between probes doubles up to this
_INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"
_COMMENT = b"3\r\n:\n\n\r\n"  # a chunk of the chunked encoding


class LimitedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: Limits,
    ):
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._refusal: HttpError | None = None
        self._head_bytes = 0
        self._in_head = True
        self._begun = False  # the first byte of the head has come
        self._body_left = False
        self._exchange: Exchange | None = None

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse(
                503, f"the server has {self._limits.connections} connections, the maximum", retry_after_s=1
            )
            return
        self._start_timer("header", self._limits.header_s, self._header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self._exchange is not None and not self.cycle.response_complete:
            self._exchange.lose()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a request that is being answered. TLS has no half-closed connections."""
        if self.scheme == "https" or self.cycle is None or self.cycle.response_complete:
            return False
        if self.cycle.more_body or self.scope["http_version"] == "1.0":
            return False  # the body is not whole, or the caller cannot read an interim response
        self._probe(FIRST_PROBE_S)
        return True

    def _probe(self, pause_s: float) -> None:
        """Write a few bytes, so that a caller that is gone is noticed."""
        cycle = self.cycle
        if self.transport.is_closing() or cycle.response_complete:
            return
        if not cycle.response_started:
            self.transport.write(_INTERIM)
        elif cycle.chunked_encoding:  # only streams of events have no length
            self.transport.write(_COMMENT)
        self._start_timer("probe", pause_s, self._probe, min(2 * pause_s, LAST_PROBE_S))

    # ---- the head of a request

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_head or self.parser is None:
            return
        if self._begun and "header" not in self._timers:
            self._start_timer("header", self._limits.header_s, self._header_timeout)
        if self._head_bytes > self._limits.header_bytes:
            self._refuse(431, f"the headers have more than {self._limits.header_bytes} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._body_left, self._begun = True, True, True
        self._stop_timer("flush")

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes, self._begun = False, 0, False
        self._stop_timer("header")
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.header_bytes or len(self.headers) > self._limits.headers:
            limits = self._limits
            message = (
                f"more than {limits.header_bytes} bytes of headers, or more than {limits.headers} headers"
            )
            self._refusal = HttpError(431, message, code="headers_too_large")
            raise ValueError(message)  # the parser then reports an error, see send_400_response
        super().on_headers_complete()
        self._exchange = Exchange(self.cycle)
        # The task of the request has not begun.
        self.scope["extensions"] = {EXTENSION: self._exchange}  # type: ignore[typeddict-item]

    def on_message_complete(self) -> None:
        self._body_left = False
        self._stop_timer("linger")
        super().on_message_complete()

    def _header_timeout(self) -> None:
        self._refuse(408, f"the headers took longer than {self._limits.header_s:g} s")

    # ---- the answer

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._body_left and not self.transport.is_closing():
            self._start_timer("linger", self._limits.linger_s, self.transport.close)
        self._watch_the_rest()

    def _watch_the_rest(self, before: int | None = None) -> None:
        """Cut the connection of a caller that takes nothing of the end of an answer within `write_stall_s`.

        `pause_writing` watches only answers with more bytes left than the transport's limit.

        before: the bytes that were left at the last look.
        """
        left = self.transport.get_write_buffer_size()
        if before is not None and left >= before:
            self.transport.abort()
        elif left:
            self._start_timer("flush", self._limits.write_stall_s, self._watch_the_rest, left)

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be parsed, and close the connection."""
        error = self._refusal or HttpError(400, "this is not an HTTP/1.1 request", code="invalid_http")
        self._answer(error)

    def _refuse(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        if not self.transport.is_closing():
            self._answer(HttpError(status, message, retry_after_s=retry_after_s))

    def _answer(self, error: HttpError) -> None:
        """Send `error` and close, unless an answer is under way: then the connection is cut."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = msgspec.json.encode(error.body)
        headers = {"content-type": "application/json", "connection": "close", **error.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {error.status} \r\ncontent-length: {len(body)}\r\n{lines}\r\n"
        self.transport.write(head.encode("latin-1") + body)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer("stall", self._limits.write_stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer("stall")

    # ---- timers

    def _start_timer(self, name: str, seconds: float, function, *arguments) -> None:
        self._stop_timer(name)
        self._timers[name] = self.loop.call_later(seconds, function, *arguments)

    def _stop_timer(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
