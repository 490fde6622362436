"""From the engine's thread to the streams: one wake-up of the event loop a step, and a bounded queue for each
caller.
"""

import asyncio
import contextlib
from collections.abc import Callable

from jaxflow.request import Delta, Event


class Stream:
    """The events of one request that its caller has not taken; lives on the event loop's thread.

    `on_overflow` is called once, when more than `max_tokens` tokens wait; the stream takes no more then.
    """

    def __init__(self, max_tokens: int, on_overflow: Callable[[], None]):
        self._max_tokens = max_tokens
        self._on_overflow = on_overflow
        self._events: list[Event] = []
        self._tokens = 0
        self._waiter: asyncio.Future | None = None
        self.overflowed = False

    def put(self, events: list[Event]) -> None:
        if self.overflowed:
            return
        self._events += events
        self._tokens += sum(len(event.token_ids) for event in events if isinstance(event, Delta))
        if self._tokens > self._max_tokens:
            self.overflowed = True
            self._events.clear()
            self._on_overflow()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Event]:
        """All events that wait; waits for the first of them."""
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events, self._tokens = self._events, [], 0
        return events


class Switchboard:
    """The engine's mailbox of every stream: however many streams a step has tokens for, it wakes the event
    loop once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._streams: dict[str, Stream] = {}

    def connect(self, request_id: str, stream: Stream) -> None:
        self._streams[request_id] = stream

    def disconnect(self, request_id: str) -> None:
        """What the engine still says of this request is dropped from now on."""
        self._streams.pop(request_id, None)

    def post(self, events: list[Event]) -> None:
        """Called on the engine's thread; never blocks."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending, nobody listens
            self._loop.call_soon_threadsafe(self._deliver, tuple(events))

    def _deliver(self, events: tuple[Event, ...]) -> None:
        by_request: dict[str, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, mine in by_request.items():
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.put(mine)
