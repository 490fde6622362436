"""Runs of requests through an engine in this process, with the times of their tokens."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from tqdm import tqdm

from jaxflow.bench.report.requests import Record
from jaxflow.bench.workload.lengths import Item
from jaxflow.engine.driver import Mailbox
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


class Recorder:
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
        recorder = Recorder(requests, bar.update)
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
