"""Runs of requests through an engine in this process, with the times of their tokens."""

import heapq
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from tqdm import tqdm

from jaxflow.bench.report.requests import Record
from jaxflow.bench.workload.conversations import Conversation
from jaxflow.bench.workload.lengths import Item
from jaxflow.engine.driver import Mailbox
from jaxflow.engine.loop import Loop
from jaxflow.request import (
    Delta,
    Draining,
    Event,
    Finished,
    InvalidRequest,
    QueueFull,
    Request,
    SamplingParams,
    Started,
)


class Submits(Protocol):
    """The interface of an engine's driver that the benchmarks use."""

    def submit(self, request: Request, mailbox: Mailbox) -> None: ...


def greedy_requests(items: Sequence[Item], token_ids: Sequence[np.ndarray]) -> list[Request]:
    """Return greedy requests with exactly the item's output length, ignoring end tokens (the rivals'
    protocol)."""
    return [
        Request(
            f"bench-{i}",
            ids.tolist(),
            SamplingParams(temperature=0.0, max_tokens=item.output_tokens, ignore_eos=True, seed=0),
        )
        for i, (item, ids) in enumerate(zip(items, token_ids, strict=True))
    ]


def run_loop(loop: Loop, requests: Sequence[Request]) -> float:
    """Run requests to their end on this thread, all at once and without a driver. Return the seconds."""
    start = time.perf_counter()
    for request in requests:
        loop.add(request, start)
    while loop.has_work:
        loop.step()
    return time.perf_counter() - start


class RecordingMailbox:
    """A mailbox that records times and counts instead of tokens, to keep its cost on the engine's thread
    small."""

    def __init__(self, requests: Sequence[Request], on_finished: Callable[[], object] = lambda: None):
        self.records = {
            request.request_id: Record(len(request.prompt_token_ids), 0.0) for request in requests
        }
        self.done = threading.Event()
        self._left = len(requests)
        self._lock = threading.Lock()
        self._on_finished = on_finished
        if not requests:
            self.done.set()

    def post(self, events: list[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            record = self.records[event.request_id]
            if isinstance(event, Delta):
                record.deliveries.append((now, len(event.token_ids)))
            elif isinstance(event, Started):
                record.cached_prompt_tokens = event.cached_prompt_tokens
            elif isinstance(event, Finished):
                record.finished_s = now
                if event.error is not None:
                    record.error = f"{type(event.error).__name__}: {event.error}"
                self.ended()

    def ended(self) -> None:
        """Count one request as ended."""
        self._on_finished()
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.done.set()


def drive(
    engine: Submits,
    requests: Sequence[Request],
    arrivals_s: Sequence[float] | None = None,
    *,
    progress: bool = False,
) -> tuple[list[Record], float]:
    """Submit each request at its arrival time (None: all at once) and wait for all requests.

    A request that the engine refuses is a failed record. Returns the records in order, and the seconds from
    the first submission to the last token.
    """
    with tqdm(total=len(requests), disable=not progress, unit="request", mininterval=1.0) as bar:
        recorder = RecordingMailbox(requests, bar.update)
        start = time.perf_counter()
        for i, request in enumerate(requests):
            if arrivals_s is not None:
                time.sleep(max(0.0, start + arrivals_s[i] - time.perf_counter()))
            record = recorder.records[request.request_id]
            record.sent_s = time.perf_counter()
            try:
                engine.submit(request, recorder)
            except (InvalidRequest, QueueFull, Draining) as refusal:
                record.error = f"{type(refusal).__name__}: {refusal}"
                recorder.ended()
        recorder.done.wait()
    return list(recorder.records.values()), time.perf_counter() - start


class Talk:
    """The state of a running conversation."""

    def __init__(self, index: int, conversation: Conversation, ended: "queue.SimpleQueue[Talk]"):
        self.index, self.conversation = index, conversation
        self.records: list[Record] = []
        self.history = np.zeros(0, np.int32)
        self._answer: list[int] = []
        self._ended = ended

    @property
    def left(self) -> int:
        """Return the number of rounds left, which is 0 after a failed round."""
        return (
            0
            if self.records and self.records[-1].error
            else len(self.conversation.rounds) - len(self.records)
        )

    def next_round(self) -> Request:
        """Return the request of the next round and record its submission time."""
        known = len(self.history) or self.conversation.known_tokens
        number, turn = len(self.records), self.conversation.rounds[len(self.records)]
        self.history = np.concatenate([self.history, turn.text])
        self.records.append(
            Record(
                len(self.history),
                time.perf_counter(),
                round=self.conversation.opening + number,
                known_tokens=known,
            )
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=turn.output_tokens, ignore_eos=True, seed=0)
        return Request(f"bench-{self.index}-{number}", self.history.tolist(), sampling)

    def pause_s(self) -> float:
        """Return the pause before the next round, in seconds."""
        return self.conversation.rounds[len(self.records)].think_s

    def take(self, event: Event, now: float) -> None:
        """Record an event. The engine's thread calls this method."""
        record = self.records[-1]
        if isinstance(event, Delta):
            record.deliveries.append((now, len(event.token_ids)))
            self._answer.extend(event.token_ids)
        elif isinstance(event, Started):
            record.cached_prompt_tokens = event.cached_prompt_tokens
        elif isinstance(event, Finished):
            record.finished_s = now
            self.end(f"{type(event.error).__name__}: {event.error}" if event.error is not None else None)

    def end(self, error: str | None = None) -> None:
        """Finish the current round."""
        self.records[-1].error = error
        self.history = np.concatenate([self.history, np.array(self._answer, np.int32)])
        self._answer = []
        self._ended.put(self)


class Talks:
    """One mailbox for all conversations, because the engine's thread calls every mailbox in every step."""

    def __init__(self) -> None:
        self.by_request: dict[str, Talk] = {}  # the latest request of each conversation

    def post(self, events: list[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            self.by_request[event.request_id].take(event, now)


def converse(
    engine: Submits, conversations: Sequence[Conversation], *, progress: bool = False
) -> tuple[list[list[Record]], float]:
    """Run each conversation from its arrival time, with greedy sampling that ignores end tokens.

    A round that the engine refuses is a failed record, and ends its conversation. Returns the records of each
    conversation, and the seconds from the first submission to the last token.
    """
    ended: queue.SimpleQueue[Talk] = queue.SimpleQueue()
    talks = [Talk(i, conversation, ended) for i, conversation in enumerate(conversations)]
    mailbox = Talks()
    start = time.perf_counter()
    due = [(start + talk.conversation.arrival_s, talk.index) for talk in talks]
    heapq.heapify(due)
    under_way = 0
    rounds = sum(len(one.rounds) for one in conversations)
    with tqdm(total=rounds, disable=not progress, unit="request", mininterval=1.0) as bar:
        while due or under_way:
            while due and due[0][0] <= time.perf_counter():
                talk = talks[heapq.heappop(due)[1]]
                under_way += 1
                request = talk.next_round()
                mailbox.by_request[request.request_id] = talk
                try:
                    engine.submit(request, mailbox)
                except (InvalidRequest, QueueFull, Draining) as refusal:
                    talk.end(f"{type(refusal).__name__}: {refusal}")
            try:
                talk = ended.get(timeout=max(0.0, due[0][0] - time.perf_counter()) if due else None)
            except queue.Empty:
                continue
            under_way -= 1
            bar.update()
            if talk.left:
                heapq.heappush(due, (time.perf_counter() + talk.pause_s(), talk.index))
    return [talk.records for talk in talks], time.perf_counter() - start
