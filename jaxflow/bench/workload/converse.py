"""Conversations with an engine in this process. The next round is submitted when the previous answer has
ended."""

import heapq
import queue
import time
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from jaxflow.bench.report.requests import Record
from jaxflow.bench.workload.conversations import Conversation
from jaxflow.bench.workload.drive import Submits
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


class Talk:
    """The state of a running conversation."""

    def __init__(self, index: int, conversation: Conversation, ended: "queue.SimpleQueue[Talk]"):
        self.index, self.conversation = index, conversation
        self.records: list[Record] = []
        self.said = np.zeros(0, np.int32)
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
        known = len(self.said) or self.conversation.known_tokens
        number, turn = len(self.records), self.conversation.rounds[len(self.records)]
        self.said = np.concatenate([self.said, turn.text])
        self.records.append(
            Record(
                len(self.said),
                time.perf_counter(),
                round=self.conversation.opening + number,
                known_tokens=known,
            )
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=turn.output_tokens, ignore_eos=True, seed=0)
        return Request(f"bench-{self.index}-{number}", self.said.tolist(), sampling)

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
        self.said = np.concatenate([self.said, np.array(self._answer, np.int32)])
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
