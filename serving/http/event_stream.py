"""A stream of server-sent events as the answer of a request."""

import asyncio

from starlette.types import Send

from serving.http.chunks import PING
from serving.http.exchange import Exchange

PING_S = 15.0
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-store"),
    (b"x-accel-buffering", b"no"),  # nginx must not collect the events
]


class EventStream:
    """The events of one answer.

    While nothing is written, a comment every `ping_s` seconds keeps proxies waiting.
    """

    def __init__(self, send: Send, exchange: Exchange, ping_s: float = PING_S):
        self._send, self._exchange, self._ping_s = send, exchange, ping_s
        self._loop = asyncio.get_running_loop()
        self._written_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None
        self.started = False

    async def start(self) -> None:
        """Send the headers."""
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._written_s = self._loop.time()
        self._timer = self._loop.call_later(self._ping_s, self._check)

    async def write(self, data: bytes) -> None:
        """Send events."""
        self._written_s = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def write_now(self, data: bytes) -> None:
        """Send events at once. The exchange is `writable`."""
        self._written_s = self._loop.time()
        self._exchange.write(data)

    async def end(self, data: bytes) -> None:
        """Send the last events."""
        self.close()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    def close(self) -> None:
        """Send no more comments."""
        if self._timer is not None:
            self._timer.cancel()
        if self._pinging is not None:
            self._pinging.cancel()

    def _check(self) -> None:
        left_s = self._written_s + self._ping_s - self._loop.time()
        if left_s <= 0 and (self._pinging is None or self._pinging.done()):
            self._pinging = self._loop.create_task(self.write(PING))
        self._timer = self._loop.call_later(max(left_s, 0.0) or self._ping_s, self._check)
