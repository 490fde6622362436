"""The policy of steps that serve online and batch requests.

A batch request has the priority `jaxflow.request.BATCH_PRIORITY` or a later one. Batch requests use the
capacity that online requests leave. A step with online tokens takes batch tokens only while its predicted
time stays within a limit, so that the batch slows the tokens of online requests at most to that limit.
"""

import math

import numpy as np

from jaxflow.scheduler.scheduler import Chunks, DecodeMaximal, Scheduler
from jaxflow.scheduler.step_time import StepTime, cut_chunks, keys_of, most_within, pairs_of

MOST_OVERRUN = 8.0  # limits; a long burst of online prompts holds the batch back for so many steps at most


class BatchBudget:
    """Online requests first, as `DecodeMaximal` serves them; then batch requests within the limit.

    A step with online tokens:
      1. Every online decode gets its token, and online prompts fill the budget.
      2. A waiting online request takes the slot and the pages of the youngest
        batch requests, if it needs them.
      3. Batch decodes, oldest first, then batch prefills, while the predicted time stays within `limit_s`.
    A step of online prompts alone may take longer than the limit. The later steps take fewer batch tokens,
    until the mean step is within the limit again. A batch sequence without a token in a step keeps its slot
    and its pages. A step without online tokens has no limit.

    Args:
      limit_s: seconds; infinity for no limit.
      step_time: the prediction, which `limit_s` needs.
    """

    min_tokens = 0

    def __init__(self, limit_s: float = math.inf, step_time: StepTime | None = None):
        assert step_time is not None or limit_s == math.inf
        self._limit_s, self._step_time = limit_s, step_time
        self._all = DecodeMaximal()
        self._overrun_s = 0.0  # the last steps with online tokens exceeded the limit by this time, together

    def fill(self, scheduler: Scheduler, now: float) -> tuple[np.ndarray, Chunks]:
        """See `StepPolicy.fill`."""
        if not (scheduler.has_batch and scheduler.has_online):
            self._overrun_s = 0.0
            return self._all.fill(scheduler, now)
        is_batch = scheduler.running.slots.is_batch
        online = scheduler.decode(~is_batch)
        chunks = scheduler.prefill(now, decodes=len(online), share_room=True, kind="online")
        if not len(online) and not chunks:
            return self._all.fill(scheduler, now)
        tokens = len(online) + sum(count for _, count in chunks)
        keys = int(keys_of(scheduler.running.slots.num_computed[online])[-1])
        pairs = sum(pairs_of(seq.num_computed, count) for seq, count in chunks)
        added = self._decodes(scheduler, tokens, keys, pairs)
        keys += int(keys_of(scheduler.running.slots.num_computed[added])[-1])
        more = self._chunks(scheduler, now, tokens + len(added), keys, pairs)
        tokens += len(added) + sum(count for _, count in more)
        pairs += sum(pairs_of(seq.num_computed, count) for seq, count in more)
        self._count_overrun(tokens, keys, pairs)
        return np.sort(np.concatenate([online, added])), [*chunks, *more]

    def _decodes(self, scheduler: Scheduler, tokens: int, keys: int, pairs: int) -> np.ndarray:
        """Return the batch decodes of a step that has these tokens, keys and pairs: slots, oldest first."""
        slots = scheduler.running.slots
        waiting = scheduler.batch_decodes()
        most = min(len(waiting), scheduler.config.token_budget - tokens)
        read = keys_of(slots.num_computed[waiting])
        count = self._most(lambda n: (tokens + n, keys + int(read[n]), pairs), most)
        return scheduler.grow_without_preemption(waiting[:count])

    def _chunks(self, scheduler: Scheduler, now: float, tokens: int, keys: int, pairs: int) -> Chunks:
        """Return the batch prefills of a step that has these tokens, keys and pairs."""
        room = scheduler.config.token_budget - tokens
        most = self._most(lambda n: (tokens + n, keys, pairs + pairs_of(0, n)), room)
        if not most:
            return []
        chunks = scheduler.prefill(now, decodes=tokens, max_tokens=most, kind="batch")

        def work(count: int) -> tuple[int, int, int]:
            kept = cut_chunks(chunks, count)
            return tokens + count, keys, pairs + sum(pairs_of(seq.num_computed, n) for seq, n in kept)

        return cut_chunks(chunks, self._most(work, sum(count for _, count in chunks)))

    def _most(self, work, most: int) -> int:
        """Return the largest number n of tokens, at most `most`, with the work `work(n)` within the limit."""
        time = self._step_time
        if time is None:
            return most
        return most_within(self._limit_s - self._overrun_s, lambda n: time.seconds(*work(n)), most)

    def _count_overrun(self, tokens: int, keys: int, pairs: int) -> None:
        """Add a step's predicted time over the limit, or pay an earlier overrun back."""
        if self._step_time is not None:
            over_s = self._overrun_s + self._step_time.seconds(tokens, keys, pairs) - self._limit_s
            self._overrun_s = min(max(0.0, over_s), MOST_OVERRUN * self._limit_s)
