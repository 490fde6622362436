"""Delivery of events from the engine's thread to the clients' streams.

The event loop is woken once a step. Each request has a bounded queue. A step's events are delivered in short
slices, so that the event loop takes new requests between them. First tokens come before all others.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from jaxflow.request import Delta, Event, Finished, Started

log = logging.getLogger(__name__)

SLICE_S = 0.0005  # of deliveries, before the event loop's other work
SLICE_WAKES = 16  # readers that a slice wakes: each of them writes when the slice has ended


class EventQueue:
    """The unread events of one request, used on the event loop's thread only.

    Args:
      max_tokens: most tokens of the unread events. When there are more, the queue drops its events, accepts
        no more, and calls `on_overflow` once.
      whole: wake the reader only at the end of a sequence, or once half of `max_tokens` wait. An answer that
        is not streamed then costs no task switch a step.

    Attributes:
      direct: gets events that arrive while a reader waits, and returns True if it took them. The reader then
        sleeps on. An exception of `direct` is raised in the reader.
    """

    def __init__(self, max_tokens: int, on_overflow: Callable[[], None], whole: bool = False):
        self._max_tokens = max_tokens
        self._on_overflow = on_overflow
        self._whole = whole
        self._due = False
        self._events: list[Event] = []
        self._tokens = 0
        self._waiter: asyncio.Future | None = None
        self._error: Exception | None = None
        self.overflowed = False
        self.direct: Callable[[list[Event]], bool] | None = None

    def put(self, events: list[Event]) -> bool:
        """Add events. Return True if they wake the reader."""
        if self.overflowed:
            return False
        waiter = self._waiter
        waits = waiter is not None and not waiter.done()
        if self.direct is not None and waits and not self._events:
            try:
                if self.direct(events):
                    return False
            except Exception as error:
                self._error = error
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
            return False
        if self._whole and not ended and 2 * self._tokens <= self._max_tokens:
            return False
        self._due = True
        if waits:
            waiter.set_result(None)  # type: ignore[union-attr]
        return waits

    async def take(self) -> list[Event]:
        """Wait for events that wake the reader, and return all unread events."""
        while not self._due:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        self._due = False
        events, self._events, self._tokens = self._events, [], 0
        return events


class EventRouter:
    """The engine's mailbox for all requests. It wakes the event loop once a step, not once a request."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._queues: dict[str, EventQueue] = {}
        self._groups: dict[str, list[Event]] = {}  # events by request, in the order of their arrival
        self._slices: Iterator[tuple[str, list[Event]]] | None = None  # the groups under delivery

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
        """Deliver first tokens, and begin to deliver the others. Events of one request stay in order."""
        groups = self._groups
        begun: list[str] = []
        for event in events:
            request_id = event.request_id
            if (group := groups.get(request_id)) is not None:
                group.append(event)
                continue
            groups[request_id] = [event]
            if type(event) is Started:
                begun.append(request_id)
        for request_id in begun:
            self._put(request_id, groups.pop(request_id))
        if self._slices is not None:
            return
        self._slices = iter(())
        if begun:
            self._deliver_later()
        else:
            self._deliver_slice()

    def _deliver_later(self) -> None:
        """Deliver the next slice after the woken readers, the arrived requests,
        and the tasks of these requests.
        """
        self._loop.call_soon(self._loop.call_soon, self._deliver_slice)

    def _deliver_slice(self) -> None:
        """Deliver groups for a short time."""
        end_s, woken = time.perf_counter() + SLICE_S, 0
        while True:
            for request_id, group in self._slices or ():
                woken += self._put(request_id, group)
                if woken >= SLICE_WAKES or time.perf_counter() > end_s:
                    self._deliver_later()
                    return
            if not self._groups:
                self._slices = None
                return
            self._slices, self._groups = iter(self._groups.items()), {}

    def _put(self, request_id: str, group: list[Event]) -> bool:
        """Deliver the events of a request. Return True if they wake its reader."""
        queue = self._queues.get(request_id)
        try:
            return queue is not None and queue.put(group)
        except Exception:  # the other requests get their events
            log.exception("the events of request %s were not delivered", request_id)
            return False
