"""The records of recent steps and ended sequences, which other threads read."""

import collections
from typing import NamedTuple

from jaxflow.request import Finished

LIMIT = 8192  # records kept for a slow reader; 8 s of the shortest steps


class StepRecord(NamedTuple):
    """One step, after its tokens were read. Times are seconds of `time.monotonic`.

    Attributes:
      bucket: tokens of the compiled step, padding included.
      decode_tokens: tokens computed for decodes; `prefill_tokens`: for prompts.
      new_tokens: sampled tokens that were kept; `new_decode_tokens`: of them, the decodes' tokens.
      enqueued_s: the device got the step; `wait_s`: the host then waited so long for its tokens.
      read_s: the tokens were on the host.
      replica: the engine that ran the step, where a router has several.
    """

    plan: str
    bucket: int
    decode_tokens: int
    prefill_tokens: int
    new_tokens: int
    new_decode_tokens: int
    enqueued_s: float
    wait_s: float
    read_s: float
    replica: int = 0


class StepLog:
    """The records that no reader took yet. A full log drops its oldest records.

    One thread writes, one thread reads. Neither waits, because a deque's ends are safe to share.
    """

    def __init__(self, limit: int = LIMIT):
        self.steps: collections.deque[StepRecord] = collections.deque(maxlen=limit)
        self.ends: collections.deque[Finished] = collections.deque(maxlen=limit)

    def take(self) -> tuple[list[StepRecord], list[Finished]]:
        """Remove and return the records, oldest first."""
        return _drained(self.steps), _drained(self.ends)


def _drained[T](records: collections.deque[T]) -> list[T]:
    return [records.popleft() for _ in range(len(records))]
