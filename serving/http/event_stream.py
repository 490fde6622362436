"""A stream of server-sent events as the answer of a request: a `data:` line for each chunk."""

import asyncio
from typing import Protocol

import msgspec
from starlette.types import Send

from serving.http.errors import HttpError
from serving.http.exchange import Exchange
from serving.http.job import AnswerPiece, Begun, Head, Pieces
from serving.http.responses import Usage

PING_S = 15.0
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-store"),
    (b"x-accel-buffering", b"no"),  # nginx must not collect the events
]


DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class ChunkFormat(Protocol):
    """The form of an answer's chunks."""

    @property
    def start(self) -> bytes:
        """Return the start of every chunk, up to its choice."""
        ...

    def first(self, begun: Begun) -> list[bytes]:
        """Return the choices of the first chunks of a prompt, with the end of the list and further fields."""
        ...

    def part(self, piece: AnswerPiece) -> list[bytes]:
        """Return the choices of the chunks with a text, with the end of the list."""
        ...

    def last(self, piece: AnswerPiece) -> list[bytes]:
        """Return the choices of the chunks that end a choice, with the end of the list."""
        ...


class Chunks:
    """The events of one answer."""

    def __init__(self, head: Head, form: ChunkFormat):
        self._head, self._form = head, form
        self._open = b"data: " + form.start

    def events(self, pieces: Pieces, usage: Usage | None) -> bytes:
        """Return the events of the pieces of a step. `usage`: after these pieces, if the chunks carry it."""
        form, head = self._form, self._head
        end = b"}\n\n"
        if usage is not None:
            end = b',"usage":' + msgspec.json.encode(usage) + end
        elif head.usage_at_end:
            end = b',"usage":null}\n\n'
        lines = []
        for piece in pieces:
            if isinstance(piece, Begun):
                lines += form.first(piece)
                continue
            if piece.text or piece.entries or (piece.token_ids and head.with_token_ids):
                lines += form.part(piece)
            if piece.finish_reason is not None:
                lines += form.last(piece)
        return b"".join([self._open + line + end for line in lines])

    def end(self, usage: Usage) -> bytes:
        """Return the last events of a complete answer."""
        if not self._head.usage_at_end:
            return DONE
        return self._open + b'],"usage":' + msgspec.json.encode(usage) + b"}\n\n" + DONE


def error_event(error: HttpError) -> bytes:
    """Return the event that ends a stream with an error. No `[DONE]` follows."""
    return b"data: " + msgspec.json.encode(error.body) + b"\n\n"


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
