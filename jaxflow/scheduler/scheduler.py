"""Continuous batching: the choice of the sequences and tokens of the next step, and of their pages.

`Scheduler.schedule` runs before the results of the step before are known. A sampled token counts as soon as
it is scheduled (`num_total`), and `commit` adds its value later. The scheduler keeps only the host's books of
the pages. Because steps run in the order in which they are scheduled, a page can change hands at once.
"""

import bisect
import random
from collections.abc import Sequence as Seq
from typing import Literal, Protocol

import numpy as np

from jaxflow.kv.tiers.policy import Fetch, TierPolicy
from jaxflow.request import QueueFull, Request
from jaxflow.scheduler.admission import Forecast, OutputLengths
from jaxflow.scheduler.config import SchedulerConfig, accept, prefix_salt
from jaxflow.scheduler.micro_batch import micro_batch
from jaxflow.scheduler.running import Running
from jaxflow.scheduler.state import BY_AGE, Sequence, StepWork, WaitingQueue, sequences_of

Chunks = list[tuple[Sequence, int]]  # sequences that prefill in a step, with their tokens
Kind = Literal["online", "batch"]  # of requests, by `Sequence.is_batch`


class StepPolicy(Protocol):
    """A rule that fills a step.

    Attributes:
      min_tokens: the bucket of a step holds at least so many tokens.
    """

    min_tokens: int

    def fill(self, scheduler: "Scheduler", now: float) -> tuple[np.ndarray, Chunks]:
        """Return the slots that decode, int32 [n], and the chunks, from `Scheduler.decode` and `prefill`."""
        ...


class DecodeMaximal:
    """JaxFlow's policy: all decodes, then prefill tokens up to the budget (SARATHI §4.3, NanoFlow §4.2.1)."""

    min_tokens = 0

    def fill(self, scheduler: "Scheduler", now: float) -> tuple[np.ndarray, Chunks]:
        """See `StepPolicy.fill`."""
        slots = scheduler.decode()
        return slots, scheduler.prefill(now, decodes=len(slots), share_room=True)


class Scheduler:
    """The owner of the requests and the pages.

    A step with the default policy:
      1. Every decode gets its token. If pages run out, the youngest running sequence is pre-empted: the
         sequence loses its slot and pages and waits. Later the sequence continues from its pages in the host
         tier, or computes its known tokens again.
      2. Sequences that have begun to prefill continue, oldest first.
      3. Unless this step pre-empted, waiting sequences are admitted, oldest first, while a slot is free and
         the forecast peak of memory fits (`jaxflow.scheduler.admission`). Admission ends at the first
         sequence that does not fit, so no younger sequence takes its pages. A sequence with more pages on the
         host than on the device waits until these pages have arrived (`jaxflow.kv.tiers.policy`). Its slot
         and its memory are reserved, and other sequences continue.
      4. The step is filled exactly to the budget, or holds all work. A chunk that fills little of the last
         tile is shortened to the tile's border.
    Older means a smaller `Sequence.key`: by priority, then by arrival. Sequence i of a request counts as if
    it arrived i requests later, so a request of many sequences lets later requests start between them.

    With P pipeline stages, each call of `schedule` makes a micro-batch, and P micro-batches are in flight. A
    sequence with a token from one of the last P - 1 calls does not decode in the present call. A prompt's
    chunks may follow each other at once, because each stage computes them in order.

    Fairness: a prompt is long if it has more tokens than a step. Together, long prompts get at most half
    (rounded up) of the room that decodes leave, as long as shorter prompts use the other half. Without
    shorter prompts the long prompts get all room. So a short prompt behind a very long prompt starts in the
    next step with room, memory and a slot, and the long prompt takes at most twice its time. While a long
    prompt uses up its share, waiting long prompts are passed over. Prompts of one kind run one after the
    other, because turns would only delay the first prompts. No sequence starves. The oldest prefilling
    sequence gets at least half of the room of every step. Decodes are bounded in number and length. No
    sequence overtakes the head of the queue once the share of long prompts is free.

    The scheduler never deadlocks. `accept` refuses a request that does not fit by itself. The oldest running
    sequence can take the pages of all other sequences, so it ends, and the next sequence becomes the oldest.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        tiers: TierPolicy[Sequence] | None = None,
        policy: StepPolicy | None = None,
        seeds: random.Random | None = None,
    ):
        """`seeds`: draws the seeds of requests without one, for several
        schedulers; None for a source of its own.
        """
        self.config, self.tiers = config, tiers
        self.running = Running(config, tiers)
        self.lengths = OutputLengths()
        self.num_preemptions = 0
        self.admitted: list[Sequence] = []  # sequences that got their slot in this step
        self._policy: StepPolicy = policy or DecodeMaximal()
        self._waiting = WaitingQueue(config.token_budget)
        self._num_requests = self._num_waiting = 0
        self._index = 0  # calls of `schedule`
        self._admitting = True  # the step may still admit
        self._planned: list[int] = []  # pages that the step's chunks will take, by layer group
        self._forecast: Forecast | None = None  # of this step, once a sequence is considered
        self._random = seeds or random.Random(config.seed)
        self._start_interval_s = 1.0  # recent mean time between the starts of requests
        self._last_start_s: float | None = None

    # ---- counts

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return self.running.slots.num_taken

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return self._num_waiting

    @property
    def _num_in_flight(self) -> int:
        """Decoding sequences that wait for their last token in the pipeline, or on its way to the host."""
        slots = self.running.slots
        in_pipeline = slots.decoding & (slots.sampled_at > self._index - self.config.stages)
        return int((in_pipeline | slots.awaited()).sum())

    @property
    def has_batch(self) -> bool:
        """Return True if a batch request runs or waits."""
        return bool(self.running.slots.is_batch.any()) or self._waiting.has_batch

    @property
    def has_online(self) -> bool:
        """Return True if an online request runs or waits."""
        slots = self.running.slots
        return bool((slots.taken & ~slots.is_batch).any()) or self._waiting.has_online

    @property
    def pages_free(self) -> int:
        """Free or cached pages, over all layer groups."""
        return sum(self.running.tables.available())

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequences that run or wait."""
        return self._waiting.num_tokens + int(self.running.slots.num_total.sum())

    def num_cached_tokens(self, names: Seq[bytes]) -> int:
        """Return the tokens of the leading pages of these names that the device or the host has."""
        found = self.running.tables.hit(names) if self.tiers is None else self.tiers.reach(names)
        return found * self.config.block_size

    def seconds_until_room(self) -> float:
        """Return the expected time until a place in the waiting queue is free.

        The estimate is the recent mean time between the starts of two requests.
        """
        return min(60.0, max(0.1, self._start_interval_s))

    # ---- requests

    def accept(self, request: Request) -> Request:
        """Return the request with its limit, see `jaxflow.scheduler.config.accept`. Any thread may call it.

        Raises:
          InvalidRequest: for a request that could never run.
        """
        return accept(self.config, request)

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request, and return its n sequences.

        Raises:
          InvalidRequest: for a request that could never run.
          QueueFull: if the waiting queue is full.
        """
        request = self.accept(request)
        assert request.limit is not None
        if self._num_waiting >= self.config.max_waiting:
            raise QueueFull(self._num_waiting, self.seconds_until_room())
        arrival, self._num_requests = self._num_requests, self._num_requests + 1
        seed = self._random.getrandbits(64) if request.sampling.seed is None else request.sampling.seed
        salt = prefix_salt(self.config, request, arrival)
        sequences = sequences_of(request, seed=seed, limit=request.limit, arrival=arrival, salt=salt)
        self._num_waiting += 1
        self._waiting.add(sequences[0])
        if self.tiers is not None:
            self.tiers.read_ahead(sequences[0])
        return sequences

    def commit(self, sequences: list[Sequence], tokens: list[int] | np.ndarray) -> None:
        """Add the value of one sampled token to each sequence, in the order of their steps.

        Tokens of finished sequences are dropped.
        """
        tokens = np.asarray(tokens, np.int32)
        slots = np.array([seq.slot for seq in sequences], np.int32)
        in_slot = slots >= 0
        for i in np.flatnonzero(~in_slot).tolist():
            seq = sequences[i]
            if not seq.finished:  # it lost its slot while the step ran: pre-empted, or with its last token
                seq.append(int(tokens[i]))
                if seq.num_known == seq.num_total < seq.limit:
                    self._waiting.add(seq)
        self.running.commit(slots[in_slot], tokens[in_slot])

    def in_slot(self, work: StepWork) -> np.ndarray:
        """Return bool [n]: for each decode of a step, whether it still has
        the slot that it had in the step.
        """
        return self.running.slots.sequences[work.decode_slots] == work.decodes

    def commit_in_slot(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Commit tokens of sequences that are known to have these slots, int32 [n] both."""
        self.running.commit(slots, tokens)

    def finish(self, seq: Sequence) -> None:
        """End a sequence with its output complete: free its slot and pages. Does nothing the second time."""
        if not seq.finished:
            self.lengths.record(seq.num_known - seq.num_prompt)
            self.abort(seq)

    def abort(self, seq: Sequence) -> None:
        """End a sequence, running or waiting, without recording its output length."""
        if seq.finished:
            return
        seq.finished = True
        if self.tiers is not None:
            self.tiers.forget(seq)
        if seq.slot >= 0:
            self.running.leave(seq)
        else:
            self._waiting.remove(seq)
        if seq.index == 0 and seq.t_first_schedule is None:
            self._num_waiting -= 1
        self._queue_siblings(seq)

    def _queue_siblings(self, seq: Sequence) -> None:
        siblings, seq.siblings = seq.siblings, ()
        for sibling in siblings:
            if not sibling.finished:
                self._waiting.add(sibling)

    # ---- a step

    def schedule(self, now: float) -> StepWork | None:
        """Return the work of the next step; None if there is nothing to compute. `now` in seconds.

        The counts change at once: `num_computed` by the step's tokens, `num_total` by one for each sample.
        """
        self._settle()
        self._index += 1
        self._admitting, self._forecast = True, None
        slots, chunks = self._fill(now)
        while not len(slots) and not chunks and not self._num_in_flight and self._can_make_room():
            self._make_room()  # prefilling sequences hold the pages that all of them need
            slots, chunks = self._fill(now)
        if not len(slots) and not chunks:
            return None
        num_tokens = len(slots) + sum(tokens for _, tokens in chunks)
        admitted, self.admitted = tuple(seq for seq in self.admitted if seq.slot >= 0), []
        return StepWork(
            decodes=self.running.slots.sequences[slots],
            decode_slots=slots,
            decode_positions=self.running.advance_decodes(slots, self._index),
            chunks=tuple(self.running.advance_chunk(seq, tokens, self._index) for seq, tokens in chunks),
            admitted=admitted,
            num_tokens=num_tokens,
            bucket=bucket_of(max(num_tokens, self._policy.min_tokens), self.config.buckets),
            page_appends=self.running.tables.take_appends(),
        )

    def _fill(self, now: float) -> tuple[np.ndarray, Chunks]:
        self._planned = [0] * len(self.config.windows)
        return self._policy.fill(self, now)

    def _settle(self) -> None:
        """Act on the last step: queue siblings, release pages and slots, queue sequences to retry."""
        for seq in self.running.computed:
            if seq.siblings and seq.num_computed >= seq.num_prompt:
                self._queue_siblings(seq)
        self.running.settle()
        for seq in self.tiers.take_retries() if self.tiers is not None else ():
            self._waiting.add(seq)

    def decode(self, among: np.ndarray | None = None) -> np.ndarray:
        """Return the slots that decode, int32 [n], each with a page for its token.

        Pre-empts the youngest sequences until the pages suffice.

        Args:
          among: bool [slots], the slots that may decode in this step; None for all.
        """
        slots_of, tables = self.running.slots, self.running.tables
        while True:
            slots = self._decoding()
            if among is not None:
                slots = slots[among[slots]]
            crossing = tables.crossing(slots, slots_of.num_computed[slots])
            if (crossing.sum(axis=1) <= tables.available()).all():
                tables.grow_crossing(slots, crossing)
                return slots
            self._make_room()

    def _decoding(self) -> np.ndarray:
        """Return the slots that may decode in this step, int32 [n], ascending.

        With several pipeline stages, the slots are those of one micro-batch, see
        `jaxflow.scheduler.micro_batch`. Then a constrained sequence waits for the value of its last token.
        """
        table = self.running.slots
        if self.config.stages == 1:
            return table.decoding.nonzero()[0].astype(np.int32)
        may = table.decoding & ~table.awaited() if table.constrained.any() else table.decoding
        return micro_batch(may.nonzero()[0].astype(np.int32), table, self._index, self.config)

    def batch_decodes(self) -> np.ndarray:
        """Return the slots of batch requests that may decode, int32 [n], oldest first."""
        table, slots = self.running.slots, self._decoding()
        oldest_first = sorted(slots[table.is_batch[slots]].tolist(), key=lambda s: BY_AGE(table.sequences[s]))
        return np.array(oldest_first, np.int32)

    def grow_without_preemption(self, slots: np.ndarray) -> np.ndarray:
        """Give the first of these slots pages for their tokens, as far as pages
        are free, and return these slots.
        """
        tables = self.running.tables
        crossing = tables.crossing(slots, self.running.slots.num_computed[slots])
        free = np.array(tables.available()) - self._planned
        count = int((crossing.cumsum(axis=1) <= free[:, None]).all(axis=0).sum())
        tables.grow_crossing(slots[:count], crossing[:, :count])
        return slots[:count]

    def prefill(
        self,
        now: float,
        *,
        decodes: int = 0,
        max_tokens: int | None = None,
        max_chunks: int | None = None,
        admit: bool = True,
        cut_prompts: bool = True,
        share_room: bool = False,
        kind: Kind | None = None,
    ) -> Chunks:
        """Return the chunks of a step, oldest sequence first, and admit waiting sequences to fill the step.

        Args:
          decodes: tokens of the step's decodes.
          max_tokens: maximum number of prefill tokens; None: the budget's rest.
          max_chunks: maximum number of sequences that prefill; None: all that run.
          admit: False to admit no sequence.
          cut_prompts: False to begin a prompt that fits in a step only when it fits beside the decodes.
          share_room: True to give long prompts only half of the room at first, see `Scheduler`.
          kind: of the sequences that prefill; None for all. Online sequences of a pass of their own take
            slots and pages from batch sequences.
        """
        config, running = self.config, self.running
        self._admitting = self._admitting and admit
        if self._admitting and self.tiers is not None:
            for fetch in self.tiers.complete_fetches():
                if running.slots.free:
                    self._admit_fetched(fetch, now)
        room = min(config.token_budget - decodes, max_tokens or config.token_budget)
        left, planned = room, self._planned
        tokens_of: dict[Sequence, int] = {}
        for long_left in (room - room // 2, room) if share_room else (room,):
            begun = iter([seq for seq in running.prefilling if kind in (None, kind_of(seq))])
            while left > 0 and len(tokens_of) < (max_chunks or config.max_num_seqs):
                seq = next(begun, None) or self._admit_next(left, now, long_left > 0, cut_prompts, kind)
                if seq is None:
                    break
                done = seq.num_computed + tokens_of.get(seq, 0)
                is_long = seq.num_total > config.token_budget
                wanted = min(seq.num_total - done, left, long_left if is_long else left)
                tokens = running.tables.fit(seq.slot, done, wanted, planned)
                if tokens:
                    tokens_of[seq] = tokens_of.get(seq, 0) + tokens
                    left -= tokens
                    long_left -= tokens * is_long
        over = surplus(decodes + sum(tokens_of.values()), config.buckets)
        for seq in reversed(tokens_of) if over else ():
            if seq.num_computed + tokens_of[seq] < seq.num_total and tokens_of[seq] > over:
                tokens_of[seq] -= over
                break
        return sorted(tokens_of.items(), key=lambda chunk: chunk[0].key)

    # ---- admission and pre-emption

    def _admit_next(
        self, room: int, now: float, include_long: bool, cut_prompts: bool, kind: Kind | None
    ) -> Sequence | None:
        """Give the oldest waiting sequence a slot and return it; None if no more are admitted in this step.

        Sequences that wait for pages from the host on the way are set aside.
        """
        running = self.running
        while self._admitting:
            seq = self._waiting.head(include_long=include_long)
            if seq is None or kind not in (None, kind_of(seq)):
                return None
            if len(running.slots.free) <= running.num_fetches:
                if kind == "online" and self._preempt_batch():
                    continue
                return None
            self._forecast = self._forecast or running.forecast(self.lengths)
            if not self._admit(seq, self._forecast, room, now, cut_prompts):
                if kind == "online" and self._preempt_batch():
                    continue
                self._admitting = False
            elif seq.slot >= 0:
                return seq
        return None

    def _admit(self, seq: Sequence, forecast: Forecast, room: int, now: float, cut_prompts: bool) -> bool:
        """Admit a waiting sequence if its pages will last; return False if they will not.

        The sequence gets a slot on the pages that the prefix cache has, or it is set aside to wait for more
        pages from the host tier.
        """
        size = self.config.block_size
        names: list[bytes] = []
        if seq.index > 0 or seq.request.sampling.prompt_logprobs is None:
            known = seq.names((seq.num_known - 1) // size, size)
            names = known[: self.running.tables.hit(known)]
            if self.tiers is not None and seq.chain is not None:
                waits = self.tiers.consider(
                    seq,
                    known,
                    len(names),
                    lambda names: self.running.fits(seq, names, forecast, self.lengths),
                )
                if waits:
                    self._waiting.remove(seq)
                if waits is not None:
                    return waits
        if not cut_prompts and room < seq.num_total - len(names) * size <= self.config.token_budget:
            return False
        if not self.running.fits(seq, names, forecast, self.lengths):
            return False
        self._waiting.remove(seq)
        self.running.enter(seq, names)
        self._count_admission(seq, len(names) * size, None, now)
        return True

    def _admit_fetched(self, fetch: Fetch[Sequence], now: float) -> None:
        """Give a slot to the sequence of a complete fetch. Its memory was reserved when the fetch began."""
        assert self.tiers is not None
        self.tiers.finish(fetch)
        self.running.enter(fetch.seq, fetch.names, fetch.start)
        self._count_admission(fetch.seq, fetch.seq.num_computed, fetch, now)

    def _count_admission(self, seq: Sequence, found: int, fetch: Fetch[Sequence] | None, now: float) -> None:
        """Count a sequence that got a slot with `found` computed positions, some of them by a `fetch`."""
        self.admitted.append(seq)
        if self.tiers is not None:
            self.tiers.admitted(seq, found, fetch)
        if seq.t_first_schedule is None:
            seq.t_first_schedule, seq.cached_tokens = now, found
            if seq.index == 0:
                self._num_waiting -= 1
                if self._last_start_s is not None:
                    self._start_interval_s += 0.1 * (now - self._last_start_s - self._start_interval_s)
                self._last_start_s = now

    def _preempt_batch(self) -> bool:
        """Pre-empt the youngest batch sequence that runs, and return True; False if none runs."""
        slots = self.running.slots
        batch = slots.sequences[slots.is_batch].tolist()
        if batch:
            self._preempt(max(batch, key=BY_AGE))
            self._forecast = None
        return bool(batch)

    def _can_make_room(self) -> bool:
        """Return True if a sequence or a fetch can give its pages to another one."""
        return self.num_running > 1 or (self.num_running > 0 and self.running.num_fetches > 0)

    def _make_room(self) -> None:
        """Take the pages of the youngest fetch, or without fetches those of the youngest running sequence."""
        self._admitting = False
        if self.tiers is not None and self.tiers.fetches:
            self._waiting.add(self.tiers.cancel(max(self.tiers.fetches, key=lambda fetch: fetch.seq.key)))
        else:
            self.preempt_youngest()

    def preempt_youngest(self) -> None:
        """Take the slot and the pages of the youngest running sequence, which waits from here on."""
        self._preempt(self.running.youngest())

    def _preempt(self, seq: Sequence) -> None:
        if self.tiers is not None:
            self.tiers.swap_out(seq)
        self.running.leave(seq)
        seq.preemptions += 1
        self.num_preemptions += 1
        if seq.num_known == seq.num_total:
            self._waiting.add(seq)


def kind_of(seq: Sequence) -> Kind:
    """Return the kind of a sequence's request."""
    return "batch" if seq.is_batch else "online"


def bucket_of(tokens: int, buckets: Seq[int]) -> int:
    """Return the smallest of the ascending buckets that holds the tokens."""
    return buckets[bisect.bisect_left(buckets, tokens)]


def surplus(tokens: int, buckets: Seq[int]) -> int:
    """Return the tokens to postpone, so that a step does not run a bucket that is mostly padding.

    A step costs what its bucket costs (tile quantization, SARATHI §4.4). The smaller bucket is better where
    it postpones no more tokens than the larger one would pad. A later step computes the postponed tokens.
    """
    i = bisect.bisect_left(buckets, tokens)
    if i == 0:
        return 0
    over = tokens - buckets[i - 1]
    return over if over <= buckets[i] - tokens else 0
