"""Delivery of events from the engine's thread to the clients' streams.

The event loop is woken once a step. Each request has a bounded queue.
"""

import asyncio
import contextlib
from collections.abc import Callable

from jaxflow.request import Delta, Event, Finished


class EventQueue:
    """The unread events of one request, used on the event loop's thread only.

    Args:
      max_tokens: most tokens of the unread events. When there are more, the queue drops its events, accepts
        no more, and calls `on_overflow` once.
      whole: wake the reader only at the end of a sequence, or once half of `max_tokens` wait. An answer that is
        not streamed then costs no task switch a step.
    """

    def __init__(self, max_tokens: int, on_overflow: Callable[[], None], whole: bool = False):
        self._max_tokens = max_tokens
        self._on_overflow = on_overflow
        self._whole = whole
        self._due = False
        self._events: list[Event] = []
        self._tokens = 0
        self._waiter: asyncio.Future | None = None
        self.overflowed = False

    def put(self, events: list[Event]) -> None:
        """Add events and wake the reader."""
        if self.overflowed:
            return
        self._events += events
        ended = False
        for event in events:
            if type(event) is Delta:
                self._tokens += len(event.token_ids)
            elif type(event) is Finished:
                ended = True
        if self._tokens > self._max_tokens:
            self.overflowed = True
            self._events.clear()
            self._on_overflow()
            return
        if self._whole and not ended and 2 * self._tokens <= self._max_tokens:
            return
        self._due = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Event]:
        """Wait for events that wake the reader, and return all unread events."""
        while not self._due:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._due = False
        events, self._events, self._tokens = self._events, [], 0
        return events


class EventRouter:
    """The engine's mailbox for all requests. It wakes the event loop once a step, not once a request."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._queues: dict[str, EventQueue] = {}

    def connect(self, request_id: str, queue: EventQueue) -> None:
        """Deliver the events of the request to `queue` from now on."""
        self._queues[request_id] = queue

    def disconnect(self, request_id: str) -> None:
        """Drop the events of the request from now on."""
        self._queues.pop(request_id, None)

    def post(self, events: list[Event]) -> None:
        """Deliver the events of a step. Called on the engine's thread; never blocks."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed at the end of the process
            self._loop.call_soon_threadsafe(self._deliver, tuple(events))

    def _deliver(self, events: tuple[Event, ...]) -> None:
        by_request: dict[str, list[Event]] = {}
        for event in events:
            request_id = event.request_id
            if request_id in by_request:
                by_request[request_id].append(event)
            else:
                by_request[request_id] = [event]
        queues = self._queues
        for request_id, mine in by_request.items():
            if (queue := queues.get(request_id)) is not None:
                queue.put(mine)
