"""One request of a connection, beside ASGI's `receive` and `send`.

ASGI waits for a message where this server only needs an answer at once: whether the body has arrived, whether
the connection is lost, and whether a chunk can be written. `LimitedProtocol` puts an `Exchange` into the
scope of each request, as an extension of ASGI. A request then needs no second task, and a chunk no change of
tasks. `CancelOnDisconnect` ends the work of a request whose caller has disconnected.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "jaxflow.exchange"


class Exchange:
    """One request and its answer.

    Attributes:
      headers: the header lines that an answer of `answer` has beside its own; None if only `send` may answer.
    """

    __slots__ = ("_cycle", "_on_lost", "headers")

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle
        self._on_lost: Callable[[], None] | None = None
        self.headers: bytes | None = None

    @staticmethod
    def take(scope: Scope) -> "Exchange":
        """Return the exchange of a request, once. The scope and the exchange would keep each other alive."""
        return scope["extensions"].pop(EXTENSION)

    # ---- the request

    def take_body(self) -> bytes | None:
        """Return the whole body, if it has arrived. Otherwise return None: `receive` waits for it."""
        cycle = self._cycle
        if cycle.more_body or cycle.waiting_for_100_continue or cycle.flow.read_paused or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return body

    def on_lost(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` once the connection is lost; None for no call.

        The body of the request has been read.
        """
        self._on_lost = callback
        if callback is None:
            return
        self._cycle.flow.resume_reading()  # a connection that is not read shows no end
        if self._cycle.disconnected:
            callback()

    def lose(self) -> None:
        """Note that the connection is lost."""
        if self._on_lost is not None:
            self._on_lost()

    # ---- the answer

    def answer(self, headers: bytes, body: bytes) -> bool:
        """Send a whole answer with status 200 at once. Return False if it has to be given to `send`.

        Args:
          headers: header lines without the length of the body.
        """
        cycle = self._cycle
        if self.headers is None or cycle.flow.write_paused or cycle.disconnected or cycle.response_started:
            return False
        common = b"".join([b"%b: %b\r\n" % header for header in cycle.default_headers])
        close = b"" if cycle.keep_alive else b"connection: close\r\n"
        head = b"HTTP/1.1 200 OK\r\n%b%b%b%bcontent-length: %d\r\n\r\n"
        cycle.transport.write(head % (common, headers, self.headers, close, len(body)) + body)
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True

    def writable(self) -> bool:
        """Return True while the answer is a stream of chunks and the caller takes them."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (
            cycle.flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write(self, data: bytes) -> None:
        """Write a chunk of an answer that is `writable`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class Disconnected(asyncio.CancelledError):
    """The caller has disconnected. The task itself is not cancelled."""


class CancelOnDisconnect:
    """A block that is cancelled once the caller disconnects. The body of the request has been read.

    Raises:
      Disconnected: the caller disconnected before the end of the block.
    """

    def __init__(self, exchange: Exchange):
        self._exchange = exchange
        self._task: asyncio.Task | None = None
        self._gone = False

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._exchange.on_lost(self._cancel)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exchange.on_lost(None)
        if not self._gone:
            return
        if error is None:
            try:
                await asyncio.sleep(0)  # the cancellation is on its way
            except asyncio.CancelledError as cancelled:
                error = cancelled
        if not isinstance(error, asyncio.CancelledError):
            return
        assert self._task is not None
        if self._task.uncancel() == 0:
            raise Disconnected from None
        raise error

    def _cancel(self) -> None:
        assert self._task is not None
        self._gone = True
        self._task.cancel()
