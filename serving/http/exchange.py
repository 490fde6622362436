"""One request of a connection, beside ASGI's `receive` and `send`.

ASGI waits for a message where this server only needs an answer at once: whether the body has arrived, whether the
connection is lost, and whether a chunk can be written. `LimitedProtocol` puts an `Exchange` into the scope of each
request, as an extension of ASGI. A request then needs no second task, and a chunk no change of tasks.
"""

from collections.abc import Callable

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "jaxflow.exchange"


class Exchange:
    """One request and its answer."""

    __slots__ = ("_cycle", "_on_lost")

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle
        self._on_lost: Callable[[], None] | None = None

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
        """Call `callback` once the connection is lost; None for no call. The body of the request has been read."""
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

    def writable(self) -> bool:
        """Return True while the answer is a stream of chunks and the caller takes them."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (
            cycle.flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write(self, data: bytes) -> None:
        """Write a chunk of an answer that is `writable`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
