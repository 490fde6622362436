"""The thread that owns the engine: requests come in through a bounded queue, events go out through mailboxes.

A caller never blocks a step, and a step never blocks a caller. `submit` holds a lock for a moment. A
mailbox's `post` is called once a step with all of its events, and must return at once.
"""

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from jaxflow.engine.expert_load import ExpertTokens
from jaxflow.engine.live_request import refused
from jaxflow.engine.loop import Loop, Stats
from jaxflow.engine.ranked_loop import RankedLoop
from jaxflow.engine.step_log import StepLog
from jaxflow.request import Draining, Event, Finished, InvalidRequest, QueueFull, Request
from jaxflow.scheduler.config import SchedulerConfig

log = logging.getLogger(__name__)


class Mailbox(Protocol):
    """The receiver of a caller's events."""

    def post(self, events: list[Event]) -> None:
        """Take the events of one step, on the engine's thread, without blocking."""
        ...


class EngineDead(RuntimeError):
    """A fault ended the engine's thread. The fault is the cause."""


class Driver:
    """A loop on its own thread."""

    def __init__(self, loop: Loop | RankedLoop):
        self._loop = loop
        self._wake = threading.Condition()
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._mailboxes: dict[str, Mailbox] = {}  # by request id, used by the engine's thread only
        self._queued = 0  # submitted and not yet taken by the engine's thread
        self._draining = self._closed = False
        self._fault: BaseException | None = None
        self._advanced_s: float | None = None  # when a step last advanced; None while there is no work
        self._thread = threading.Thread(target=self._run, name="jaxflow-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while steps can run."""
        return self._thread.is_alive() and self._fault is None

    @property
    def fault(self) -> BaseException | None:
        """The fault that ended the engine."""
        return self._fault

    @property
    def log(self) -> StepLog:
        """The records of recent steps and ended sequences."""
        return self._loop.log

    def seconds_without_progress(self) -> float:
        """Return the seconds since a step was last enqueued or read; 0 while there is no work."""
        advanced_s = self._advanced_s
        return 0.0 if advanced_s is None else time.monotonic() - advanced_s

    @property
    def scheduling(self) -> SchedulerConfig:
        """The scheduler's settings, with the limits of a request."""
        return self._loop.scheduling

    def accept(self, request: Request) -> Request:
        """Return the request with its limit. Any thread may call it.

        Raises:
          InvalidRequest: for a request that could never run.
        """
        return self._loop.accept(request)

    def prepare_masks(self) -> None:
        """Compile what requests with a constraint need, before the first of them runs. Any thread may call
        it. Another process of the engine compiles its part when it runs the first of them.
        """
        self._loop.executor.prepare_masks()

    def submit(self, request: Request, mailbox: Mailbox) -> None:
        """Queue a request. Its events go to `mailbox`, at last a `Finished` for each of its sequences.

        Raises:
          InvalidRequest: for a request that could never run.
          QueueFull: the waiting queue is full.
          Draining: the engine is shutting down.
          EngineDead: a fault ended the engine.
        """
        request = self.accept(request)
        with self._wake:
            self._refuse_if_ending()
            waiting = self._loop.waiting + self._queued
            if waiting >= self._loop.max_waiting:
                raise QueueFull(waiting, self._loop.seconds_until_room())
            self._queued += 1
            self._commands.append(lambda: self._admit(request, mailbox, time.monotonic()))
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """End a request and free its pages. Its sequences get `Finished` with reason abort.

        Unknown ids are ignored.
        """
        with self._wake:
            self._commands.append(lambda: self._deliver(self._loop.abort(request_id)))
            self._wake.notify()

    def call[T](self, work: Callable[[Any], T]) -> Future[T]:
        """Run `work(loop)` on the engine's thread, between two steps. Return its result as a future.

        Raises:
          EngineDead: no more steps run.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work(self._loop))
            except Exception as error:
                future.set_exception(error)

        with self._wake:
            if self._closed or self._fault is not None:
                raise EngineDead("the engine has ended") from self._fault
            self._commands.append(run)
            self._wake.notify()
        return future

    def stats(self) -> Stats:
        return self._loop.stats(self._queued)

    def expert_tokens(self) -> ExpertTokens | None:
        """Return the tokens at each expert since the start; None without mixture
        layers and before the first step.
        """
        return self._loop.expert_counter.read()

    def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait for the running ones. Return the number aborted at the timeout."""
        deadline = time.monotonic() + timeout_s
        with self._wake:
            self._draining = True
            while (self._queued or self._commands or self._loop.has_work) and self.alive:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._wake.wait(min(left, 0.1))
            aborted = len(self._loop.request_ids) + self._queued
            self._commands.append(self._abort_all)
            self._wake.notify()
        return aborted

    def end(self) -> None:
        """Tell the thread to abort what runs and to end. A garbage collector may call it: it never waits."""
        with self._wake:
            self._draining = self._closed = True
            self._wake.notify_all()

    def close(self) -> None:
        """Abort what runs, and stop the thread."""
        self.end()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- the engine's thread

    def _run(self) -> None:
        try:
            self._loop.begin()
            while self._next_commands():
                advances = self._loop.advances
                self._deliver(self._loop.step())
                if self._loop.advances != advances:
                    self._advanced_s = time.monotonic()
        except BaseException as fault:
            log.exception("the engine stopped")
            self._fault = fault
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        # Every caller gets an end: of the running requests, then of those that never reached the loop.
        self._deliver(self._loop.end_all(self._fault))
        self._take_commands()
        self._loop.close()

    def _next_commands(self) -> bool:
        """Run the callers' commands; wait if there is no work. Return False once closed."""
        with self._wake:
            while not (self._commands or self._loop.has_work or self._closed):
                self._advanced_s = None
                self._wake.notify_all()  # a drain may wait for this
                self._wake.wait()
            if self._closed:
                return False
        if self._advanced_s is None:
            self._advanced_s = time.monotonic()
        self._take_commands()
        return True

    def _take_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _admit(self, request: Request, mailbox: Mailbox, now: float) -> None:
        try:
            self._add(request, mailbox, now)
        finally:
            # Until here the request keeps its place, so that `submit` accepts
            # no other request for this place.
            with self._wake:
                self._queued -= 1

    def _add(self, request: Request, mailbox: Mailbox, now: float) -> None:
        name = request.request_id
        if name in self._mailboxes:
            taken = InvalidRequest("request_id", name, "a name that no request under way has")
            self._post(mailbox, refused(request, taken))
            return
        if self._closed:
            self._post(mailbox, refused(request, self._fault))
            return
        self._mailboxes[name] = mailbox
        try:
            self._loop.add(request, now)
        except (InvalidRequest, QueueFull) as refusal:
            self._deliver(refused(request, refusal))
        except Exception as fault:  # only this request fails
            log.exception("request %s was refused", name)
            self._deliver(refused(request, fault))

    def _abort_all(self) -> None:
        for request_id in self._loop.request_ids:
            self._deliver(self._loop.abort(request_id))

    def _deliver(self, events: Sequence[Event]) -> None:
        """Post the events of each mailbox in one call."""
        by_mailbox: dict[int, tuple[Mailbox, list[Event]]] = {}
        mailboxes, last, batch, ended = self._mailboxes, None, [], []
        for event in events:
            mailbox = mailboxes.get(event.request_id)
            if mailbox is None:
                continue
            if mailbox is not last:  # most events of a step go to one mailbox
                last, batch = mailbox, by_mailbox.setdefault(id(mailbox), (mailbox, []))[1]
            batch.append(event)
            if type(event) is Finished:
                self.log.ends.append(event)
                if not self._loop.is_live(event.request_id):
                    ended.append(event.request_id)
        for request_id in ended:
            mailboxes.pop(request_id, None)
        for mailbox, batch in by_mailbox.values():
            self._post(mailbox, batch)

    def _post(self, mailbox: Mailbox, events: list[Event]) -> None:
        try:
            mailbox.post(events)
        except Exception:
            log.exception("a mailbox failed; its request continues without events")

    def _refuse_if_ending(self) -> None:
        if self._fault is not None:
            raise EngineDead("the engine stopped after a fault") from self._fault
        if self._draining or self._closed:
            raise Draining("the engine is shutting down")
