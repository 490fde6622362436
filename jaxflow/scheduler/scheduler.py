"""Continuous batching: which sequences compute how many tokens in the next step, and on which pages.

`Scheduler.schedule` decides before the step runs, and before the results of the step before it are known: a
sampled token counts as soon as it is scheduled (`num_total`), its value comes later (`commit`). All pages are
host bookkeeping; that steps run in the order in which they are scheduled makes every hand-over of a page
safe.
"""

import random

import numpy as np

from jaxflow.kv.tiers.policy import Fetch, TierPolicy
from jaxflow.request import QueueFull, Request
from jaxflow.scheduler.admission import Forecast, OutputLengths
from jaxflow.scheduler.config import SchedulerConfig, limit_of, salt_of
from jaxflow.scheduler.policies import POLICIES, bucket_of, surplus
from jaxflow.scheduler.running import Running
from jaxflow.scheduler.state import Chunk, Interval, Sequence, StepWork, Waiting, sequences_of

__all__ = ["Chunk", "Scheduler", "SchedulerConfig", "StepWork"]


class Scheduler:
    """Owns the requests and the pages.

    A step, with the default policy:
      1. Every decode gets its token. Where pages run out, the youngest running sequence is pre-empted: it
      gives up its
         slot and pages, waits, and later goes on from what the host has of it, or computes its known tokens
         again.
      2. Sequences whose prefill has begun go on, oldest first.
      3. Unless this step pre-empted, waiting sequences are admitted, oldest first, while a slot is free and
      the forecast
         peak of memory fits (`jaxflow.scheduler.admission`). The first that does not fit ends it: nobody
         overtakes it, so the pages it waits for are not given to others. One of which the host has more than
         the device is set aside until its pages have come (`jaxflow.kv.tiers.policy`); its slot and its
         memory are kept, and others go on.
      4. The step is filled to the budget exactly, or holds all there is to do; a chunk that fills little of
      the last tile
         is cut back to the tile's border.
    Older means smaller `Sequence.key`: by priority, then arrival.

    Fairness. A prompt is long if it has more tokens than a step. Long prompts together get at most half
    (rounded up) of the room that decodes leave, as long as shorter prompts can use the other half; what those
    leave falls to the long ones. So a short prompt that comes behind a very long one starts in the next step
    that has room, memory and a slot, not after the long one; and the long one is slowed to half at most.
    While a long one uses up that share, waiting long prompts are passed over for short ones; that ends with
    the long prompt in progress. Prompts of one kind are served one after the other: taking turns would only
    make the first ones wait for the last. Nothing starves: the oldest prefilling sequence gets at least half
    of the room in every step that has any, decodes are bounded in number and length, and the head of the
    queue is not overtaken once a long prompt's share is free.

    Never stuck: a sequence that could not run alone in the pool is refused at the door; the oldest running
    one can take every page of the others, so it ends, and then the next is the oldest.
    """

    def __init__(self, config: SchedulerConfig, tiers: TierPolicy[Sequence] | None = None):
        self.config, self.tiers = config, tiers
        self.running = Running(config, tiers)
        self.lengths = OutputLengths()
        self.num_preemptions = self._times_room_was_made = 0
        self._policy = POLICIES[config.policy]
        self._waiting = Waiting(config.token_budget)
        self._admitted: list[Sequence] = []
        self._requests = 0  # that ever came
        self._unbegun = 0
        self._open = True  # lockstep: the batch still takes requests
        self._batch_rows = 0
        self._random = random.Random(config.seed)
        self._begins = Interval()

    # ---- what there is

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return self.running.by_slot.num_taken

    @property
    def num_waiting(self) -> int:
        """Requests not yet begun."""
        return self._unbegun

    @property
    def pages_free(self) -> int:
        """Pages that can be given out, of all groups."""
        return sum(self.running.tables.available())

    def seconds_until_room(self) -> float:
        """A guess at when a waiting request's place gets free: the recent time between two requests'
        beginnings.
        """
        return min(60.0, max(0.1, self._begins.seconds))

    # ---- requests

    def check(self, request: Request) -> None:
        """Refuses a request that could never run. Reads nothing that changes: any thread may call it. Raises:
        InvalidRequest.
        """
        limit_of(self.config, request)

    def add(self, request: Request, now: float) -> list[Sequence]:
        """Takes a request in; returns its n sequences. Raises: InvalidRequest, QueueFull."""
        limit = limit_of(self.config, request)
        if self._unbegun >= self.config.max_waiting:
            raise QueueFull(self._unbegun, self.seconds_until_room())
        arrival, self._requests = self._requests, self._requests + 1
        seed = self._random.getrandbits(64) if request.sampling.seed is None else request.sampling.seed
        sequences = sequences_of(
            request,
            seed=seed,
            limit=limit,
            arrival=arrival,
            now=now,
            salt=salt_of(self.config, request, arrival),
        )
        self._unbegun += 1
        self._waiting.add(sequences[0])
        if self.tiers is not None:
            self.tiers.read_ahead(sequences[0])
        return sequences

    def commit(self, sequences: list[Sequence], tokens: list[int] | np.ndarray) -> None:
        """Sampled tokens became known, one for each sequence, in the order of their steps.

        Tokens of sequences that are finished are surplus and are dropped.
        """
        tokens = np.asarray(tokens, np.int32)
        slots = np.array([seq.slot for seq in sequences], np.int32)
        in_slot = slots >= 0
        for i in np.flatnonzero(~in_slot).tolist():
            seq = sequences[i]
            if not seq.finished:  # it left while the step ran: pre-empted, or with its last token
                seq.append(int(tokens[i]))
                if seq.num_known == seq.num_total < seq.limit:
                    self._waiting.add(seq)
        self.running.commit(slots[in_slot], tokens[in_slot])

    def in_slot(self, work: StepWork) -> np.ndarray:
        """bool [n]: which of the step's decodes still have the slot that they had in it."""
        return self.running.by_slot.sequences[work.decode_slots] == work.decodes

    def commit_in_slot(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Like `commit`, for sequences that are known to have these slots, int32 [n]."""
        self.running.commit(slots, tokens)

    def finish(self, seq: Sequence) -> None:
        """Its output is complete: gives back its pages and slot, at once. Does nothing the second time."""
        if not seq.finished:
            self.lengths.record(seq.num_known - seq.num_prompt)
            self.abort(seq)

    def abort(self, seq: Sequence) -> None:
        """Gives up a sequence, running or waiting, like `finish`; its length teaches nothing."""
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
            self._unbegun -= 1
        self._start_siblings(seq)

    def _start_siblings(self, seq: Sequence) -> None:
        siblings, seq.siblings = seq.siblings, ()
        for sibling in siblings:
            if not sibling.finished:
                self._waiting.add(sibling)

    # ---- a step

    def schedule(self, now: float) -> StepWork | None:
        """Decides the next step; None if there is nothing to compute. `now` in seconds.

        Counts move at once: `num_computed` by the tokens, `num_total` by one where a token is sampled.
        """
        for seq in self.running.computed:
            if seq.siblings and seq.num_computed >= seq.num_prompt:
                self._start_siblings(seq)
        self.running.settle()
        for seq in self.tiers.take_retries() if self.tiers is not None else ():
            self._waiting.add(seq)
        if not self.num_running:
            self._open, self._batch_rows = True, 0
        policy, taken = self._policy, self._times_room_was_made
        slots, grants = np.zeros(0, np.int32), []
        if policy.mixes:
            slots = self._decode()
            grants = self._prefill(len(slots), taken == self._times_room_was_made, now)
        else:
            grants = self._prefill(0, self._open, now)
            if not grants:
                self._open = not policy.lockstep
                slots = self._decode()
        while (
            not grants
            and not len(slots)
            and (self.num_running > 1 or (self.num_running and self.running.num_fetches))
        ):
            self._make_room()  # prefills hold the pages that each of them needs: the forecast was wrong
            grants = self._prefill(0, False, now)
        if not grants and not len(slots):
            return None
        return self._dispatch(slots, grants)

    def _decode(self) -> np.ndarray:
        """Slots that decode, each with a page for its token, after pre-empting as many of the youngest as
        that takes.
        """
        by_slot, tables = self.running.by_slot, self.running.tables
        while True:
            slots = np.flatnonzero(by_slot.decoding).astype(np.int32)
            crossing = tables.crossing(slots, by_slot.num_computed[slots])
            if (crossing.sum(axis=1) <= tables.available()).all():
                tables.grow_crossing(slots, crossing)
                return slots
            self._make_room()

    def _prefill(self, decodes: int, admit: bool, now: float) -> list[tuple[Sequence, int]]:
        """Chunks as (sequence, tokens), oldest first, beside so many decodes."""
        policy, config = self._policy, self.config
        left = config.token_budget - decodes
        if policy.chunked:
            left = min(left, config.chunk_size or 0)
        planned = [0] * len(config.windows)
        grants: dict[Sequence, int] = {}
        forecast: Forecast | None = None
        for fetch in self.tiers.complete_fetches() if admit and self.tiers is not None else ():
            if self.running.by_slot.free:
                self._admit_fetched(fetch, now)
        # Long prompts may have half of the room at first, then what nobody else could use.
        for share in (left - left // 2, left) if policy.shares else (left,):
            begun = iter(list(self.running.prefilling))
            while left > 0 and len(grants) < (policy.max_chunks or config.max_num_seqs):
                seq = next(begun, None)
                if seq is None:
                    free = len(self.running.by_slot.free) > self.running.num_fetches
                    head = self._waiting.head(long_too=share > 0) if admit and free else None
                    if head is None:
                        break
                    forecast = forecast or self.running.forecast(self.lengths)
                    if not self._admit(head, forecast, left, now):
                        admit = False
                        break
                    if head.slot < 0:  # it waits for pages from the host
                        continue
                    seq = head
                done = seq.num_computed + grants.get(seq, 0)
                remaining = seq.num_total - done
                is_long = seq.num_total > config.token_budget
                tokens = self.running.tables.fit(
                    seq.slot, done, min(remaining, left, share if is_long else left), planned
                )
                if tokens:
                    grants[seq] = grants.get(seq, 0) + tokens
                    left -= tokens
                    share -= tokens * is_long
        over = surplus(decodes + sum(grants.values()), config.buckets)
        for seq in reversed(grants) if over else ():
            if seq.num_computed + grants[seq] < seq.num_total and grants[seq] > over:
                grants[seq] -= over
                break
        return sorted(grants.items(), key=lambda grant: grant[0].key)

    def _dispatch(self, slots: np.ndarray, grants: list[tuple[Sequence, int]]) -> StepWork:
        """Counts the step as done."""
        num_tokens = len(slots) + sum(tokens for _, tokens in grants)
        padded = min(self._batch_rows, self.config.token_budget) if self._policy.pads else 0
        admitted, self._admitted = tuple(seq for seq in self._admitted if seq.slot >= 0), []
        return StepWork(
            decodes=self.running.by_slot.sequences[slots],
            decode_slots=slots,
            decode_positions=self.running.advance_decodes(slots),
            chunks=tuple(self.running.advance_chunk(seq, tokens) for seq, tokens in grants),
            admitted=admitted,
            num_tokens=num_tokens,
            bucket=bucket_of(max(num_tokens, padded), self.config.buckets),
            page_appends=self.running.tables.take_appends(),
        )

    # ---- admission and pre-emption

    def _admit(self, seq: Sequence, forecast: Forecast, room: int, now: float) -> bool:
        """SlotTable a waiting sequence on the pages it finds, or has it wait for what the host has of them, if
        memory will do.
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
        if self._policy.whole and room < seq.num_total - len(names) * size <= self.config.token_budget:
            return False
        if not self.running.fits(seq, names, forecast, self.lengths):
            return False
        self._waiting.remove(seq)
        self.running.enter(seq, names)
        self._entered(seq, len(names) * size, None, now)
        return True

    def _admit_fetched(self, fetch: Fetch[Sequence], now: float) -> None:
        """Give a slot to a sequence of a complete fetch. Its memory was reserved when the fetch began."""
        assert self.tiers is not None
        self.tiers.finish(fetch)
        self.running.enter(fetch.seq, fetch.names, fetch.start)
        self._entered(fetch.seq, fetch.seq.num_computed, fetch, now)

    def _entered(self, seq: Sequence, found: int, fetch: Fetch[Sequence] | None, now: float) -> None:
        """Record a sequence that got a slot; `found` of its positions are computed, some by a `fetch`."""
        self._admitted.append(seq)
        self._batch_rows += 1
        if self.tiers is not None:
            self.tiers.admitted(seq, found, fetch)
        if seq.t_first_schedule is None:
            seq.t_first_schedule, seq.cached_tokens = now, found
            if seq.index == 0:
                self._unbegun -= 1
                self._begins.count(now)

    def _make_room(self) -> None:
        """Takes the pages of who came last: those that are only held go first."""
        self._times_room_was_made += 1
        if self.tiers is not None and self.tiers.fetches:
            self._waiting.add(self.tiers.cancel(max(self.tiers.fetches, key=lambda fetch: fetch.seq.key)))
        else:
            self._preempt_youngest()

    def _preempt_youngest(self) -> None:
        seq = self.running.youngest()
        if self.tiers is not None:
            self.tiers.swap_out(seq)
        self.running.leave(seq)
        seq.preemptions += 1
        self.num_preemptions += 1
        if seq.num_known == seq.num_total:
            self._waiting.add(seq)
