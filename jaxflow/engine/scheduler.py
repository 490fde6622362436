"""Continuous batching: which sequences compute how many tokens in the next step, and on which pages.

`Scheduler.schedule` decides before the step runs, and before the results of the step before it are known: a sampled token
counts as soon as it is scheduled (`num_total`), its value comes later (`commit`). All pages are host bookkeeping; that
steps run in the order in which they are scheduled makes every hand-over of a page safe.
"""

import bisect
import dataclasses
import operator
import random

import numpy as np

from jaxflow.config import ConfigError
from jaxflow.engine.admission import Forecast, OutputLengths
from jaxflow.engine.policies import POLICIES, bucket_of, surplus
from jaxflow.engine.request import InvalidRequest, QueueFull, Request
from jaxflow.engine.sequence import NEVER, Seats, Sequence
from jaxflow.engine.work import Chunk, StepWork
from jaxflow.memory.page_tables import PageTables

__all__ = ["Chunk", "Scheduler", "SchedulerConfig", "StepWork"]

_KEY = operator.attrgetter("key")
_SEED_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: seeds of the n sequences lie far apart


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """What the scheduler works with.

    Attributes:
      token_budget: tokens of a step.
      max_num_seqs: sequences running at once (slots); no more than token_budget do.
      block_size: tokens a page.
      windows: of each layer group, its window in tokens, or None for full attention; all different.
      num_pages: of each layer group. A window group runs best with token_budget / block_size pages beyond what its windows
        hold, since a chunk has all of its own pages at once.
      max_model_len: tokens of a sequence, prompt and output.
      buckets: token counts that compiled steps have, ascending; the last holds the budget.
      policy: a name in `POLICIES`; `chunk_size` goes with "hybrid".
      max_waiting: requests not yet begun.
      seed: of the seeds drawn for requests that have none.

    Raises:
      ConfigError: naming the field.
    """

    token_budget: int
    max_num_seqs: int
    block_size: int
    windows: tuple[int | None, ...]
    num_pages: tuple[int, ...]
    max_model_len: int
    buckets: tuple[int, ...]
    policy: str = "decode-maximal"
    chunk_size: int | None = None
    enable_prefix_caching: bool = True
    max_waiting: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        def check(field: str, ok: bool, accepted: str) -> None:
            if not ok:
                raise ConfigError(field, getattr(self, field), accepted)

        for field in ("token_budget", "max_num_seqs", "block_size", "max_model_len", "max_waiting"):
            check(field, getattr(self, field) >= 1, "a positive number")
        check("windows", len(self.windows) > 0 and len(set(self.windows)) == len(self.windows), "one entry for each distinct window")
        check("num_pages", len(self.num_pages) == len(self.windows) and min(self.num_pages) >= 1, "pages of each layer group")
        check("buckets", list(self.buckets) == sorted(set(self.buckets)) and len(self.buckets) > 0, "ascending token counts")
        check("buckets", max(self.buckets) >= self.token_budget, f"the last must hold token_budget={self.token_budget}")
        check("policy", self.policy in POLICIES, " or ".join(POLICIES))
        chunked = POLICIES[self.policy].chunked
        check(
            "chunk_size", (self.chunk_size or 0) >= 1 if chunked else self.chunk_size is None, "a positive number, with policy hybrid only"
        )


class Scheduler:
    """Owns the requests and the pages.

    A step, with the default policy:
      1. Every decode gets its token. Where pages run out, the youngest running sequence is pre-empted: it gives up its
         slot and pages, waits, and later computes its known tokens again.
      2. Sequences whose prefill has begun go on, oldest first.
      3. Unless this step pre-empted, waiting sequences are admitted, oldest first, while a slot is free and the forecast
         peak of memory fits (`jaxflow.engine.admission`). The first that does not fit ends it: nobody overtakes it, so
         the pages it waits for are not given to others.
      4. The step is filled to the budget exactly, or holds all there is to do; a chunk that fills little of the last tile
         is cut back to the tile's border.
    Older means smaller `Sequence.key`: by priority, then arrival.

    Fairness. A prompt is long if it has more tokens than a step. Long prompts together get at most half (rounded up) of the
    room that decodes leave, as long as shorter prompts can use the other half; what those leave falls to the long ones. So
    a short prompt that comes behind a very long one starts in the next step that has room, memory and a slot, not after
    the long one; and the long one is slowed to half at most. While a long one uses up that share, waiting long prompts are
    passed over for short ones; that ends with the long prompt in progress. Prompts of one kind are served one after the
    other: taking turns would only make the first ones wait for the last. Nothing starves: the oldest prefilling sequence
    gets at least half of the room in every step that has any, decodes are bounded in number and length, and the head of
    the queue is not overtaken once a long prompt's share is free.

    Never stuck: a sequence that could not run alone in the pool is refused at the door; the oldest running one can take
    every page of the others, so it ends, and then the next is the oldest.
    """

    def __init__(self, config: SchedulerConfig):
        self.config = config
        slots = min(config.max_num_seqs, config.token_budget)  # so that every decode has its token in every step
        self.tables = PageTables(config.num_pages, config.windows, config.block_size, slots, keep=config.enable_prefix_caching)
        self.seats = Seats(slots, config.block_size)
        self.lengths = OutputLengths()
        self.num_preemptions = 0
        self._policy = POLICIES[config.policy]
        self._full = config.windows.index(None) if None in config.windows else None
        self._waiting: tuple[list[Sequence], list[Sequence]] = ([], [])  # short and long ones, oldest first
        self._prefilling: list[Sequence] = []  # running, oldest first
        self._unpublished: list[Sequence] = []  # had a chunk in the last step
        self._admitted: list[Sequence] = []
        self._requests = 0  # that ever came
        self._unbegun = 0
        self._open = True  # lockstep: the batch still takes requests
        self._batch_rows = 0
        self._random = random.Random(config.seed)
        self._last_begin_s: float | None = None
        self._begin_interval_s = 1.0

    # ---- what there is

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return self.seats.num_taken

    @property
    def num_waiting(self) -> int:
        """Requests not yet begun."""
        return self._unbegun

    @property
    def num_preempted(self) -> int:
        """Sequences that lost their pages and wait to go on."""
        return sum(seq.preemptions > 0 for line in self._waiting for seq in line)

    @property
    def pages_free(self) -> int:
        """Pages that can be given out, of all groups."""
        return sum(self.tables.available())

    def seconds_until_room(self) -> float:
        """A guess at when a waiting request's place gets free: the recent time between two requests' beginnings."""
        return min(60.0, max(0.1, self._begin_interval_s))

    # ---- the door

    def check(self, request: Request) -> None:
        """Refuses a request that could never run. Reads nothing that changes: any thread may call it. Raises: InvalidRequest."""
        self._limit(request)

    def add(self, request: Request, now: float) -> list[Sequence]:
        """Takes a request in; returns its n sequences. Raises: InvalidRequest, QueueFull."""
        limit = self._limit(request)
        if self._unbegun >= self.config.max_waiting:
            raise QueueFull(self._unbegun, self.seconds_until_room())
        arrival, self._requests = self._requests, self._requests + 1
        sampling = request.sampling
        seed = self._random.getrandbits(64) if sampling.seed is None else sampling.seed
        salt = None
        if self.config.enable_prefix_caching:
            salt = b"shared:" + request.cache_salt.encode("utf-8", "surrogatepass")
        elif sampling.n > 1:
            salt = b"private:%d" % arrival
        sequences = [
            Sequence(request, i, seed=(seed + i * _SEED_STEP) % 2**64, limit=limit, arrival=arrival, now=now, salt=salt)
            for i in range(sampling.n)
        ]
        sequences[0].siblings = tuple(sequences[1:])
        self._unbegun += 1
        self._wait(sequences[0])
        return sequences

    def _limit(self, request: Request) -> int:
        """The tokens it may grow to. max_tokens=None means as many as the context and the pages hold."""
        config, prompt, sampling = self.config, len(request.prompt_token_ids), request.sampling
        # The last token is sampled, never computed: a pool of p positions holds a sequence of p + 1 tokens.
        longest = config.max_model_len
        for pages, window in zip(config.num_pages, config.windows, strict=True):
            if window is None or pages < self._window_pages(window):
                longest = min(longest, pages * config.block_size + 1)
        if prompt == 0:
            raise InvalidRequest("prompt_token_ids", [], "at least one token")
        if prompt >= longest:
            raise InvalidRequest("prompt_token_ids", f"{prompt} tokens", f"at most {longest - 1} tokens, and room for one to follow")
        if sampling.max_tokens is None:
            return longest
        if prompt + sampling.max_tokens > longest:
            raise InvalidRequest("max_tokens", sampling.max_tokens, f"at most {longest - prompt} after a prompt of {prompt} tokens")
        return prompt + sampling.max_tokens

    def _window_pages(self, window: int) -> int:
        """Pages that one query of a window group can see, at most."""
        return -(-(window - 1) // self.config.block_size) + 1

    def _wait(self, seq: Sequence) -> None:
        bisect.insort(self._waiting[seq.num_total > self.config.token_budget], seq, key=_KEY)

    # ---- a step

    def schedule(self, now: float) -> StepWork | None:
        """Decides the next step; None if there is nothing to compute. `now` in seconds.

        Counts move at once: `num_computed` by the tokens, `num_total` by one where a token is sampled.
        """
        self._settle()
        policy, budget, preempted = self._policy, self.config.token_budget, self.num_preemptions
        slots, chunks = np.zeros(0, np.int32), []
        if policy.mixes:
            slots = self._decode()
            chunks = self._prefill(len(slots), preempted == self.num_preemptions, now)
        else:
            chunks = self._prefill(0, self._open, now)
            if not chunks:
                self._open = not policy.lockstep
                slots = self._decode()
        while not chunks and not len(slots) and np.count_nonzero(self.seats.growing) > 1:
            self._preempt_youngest()  # prefills hold the pages that each of them needs to go on
            chunks = self._prefill(0, False, now)
        if not chunks and not len(slots):
            return None
        return self._dispatch(slots, chunks, budget)

    def _settle(self) -> None:
        """What the last step makes possible: pages to share, siblings to start, pages to give back."""
        seats = self.seats
        for seq in self._unpublished:
            if seq.slot >= 0:
                self._register(seq)
                if seq.siblings and seq.num_computed >= seq.num_prompt:
                    self._start_siblings(seq)
        self._unpublished = []
        for slot in np.flatnonzero(seats.decoding & (seats.num_total >= seats.limit)).tolist():
            # Its last token is on its way, nothing more will be computed: only the slot waits for `finish`.
            self._register(self._at(slot))
            self.tables.release(slot)
            seats.decoding[slot] = seats.growing[slot] = False
            seats.registered[slot] = NEVER
        if self._full is None or len(self.config.windows) > 1:
            growing = np.flatnonzero(seats.growing)
            self.tables.drop_unseen(growing, seats.num_computed[growing])
        if not seats.growing.any():
            self._open, self._batch_rows = True, 0

    def _decode(self) -> np.ndarray:
        """Slots that decode, each with a page for its token, after pre-empting as many of the youngest as that takes."""
        seats, tables = self.seats, self.tables
        while True:
            slots = np.flatnonzero(seats.decoding).astype(np.int32)
            crossing = tables.crossing(slots, seats.num_computed[slots])
            if (crossing.sum(axis=1) <= tables.available()).all():
                tables.grow_crossing(slots, crossing)
                return slots
            self._preempt_youngest()

    def _prefill(self, decodes: int, admit: bool, now: float) -> list[tuple[Sequence, int]]:
        """Chunks as (sequence, tokens), oldest first, beside so many decodes."""
        policy, config = self._policy, self.config
        left = config.token_budget - decodes
        if policy.chunked:
            left = min(left, config.chunk_size or 0)
        planned = [0] * len(config.windows)
        grants: dict[Sequence, int] = {}
        forecast: Forecast | None = None
        # Long prompts may have half of the room at first, then what nobody else could use.
        for share in (left - left // 2, left) if policy.shares else (left,):
            begun = iter(list(self._prefilling))
            while left > 0 and len(grants) < (policy.max_chunks or config.max_num_seqs):
                seq = next(begun, None)
                if seq is None:
                    head = self._head(long_too=share > 0) if admit and self.seats.free else None
                    if head is None:
                        break
                    forecast = forecast or self._forecast()
                    if not self._admit(head, forecast, left, now):
                        admit = False
                        break
                    seq = head
                done = seq.num_computed + grants.get(seq, 0)
                remaining = seq.num_total - done
                is_long = seq.num_total > config.token_budget
                if policy.whole and left < remaining <= config.token_budget:
                    break
                tokens = self.tables.fit(seq.slot, done, min(remaining, left, share if is_long else left), planned)
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

    def _dispatch(self, slots: np.ndarray, chunks: list[tuple[Sequence, int]], budget: int) -> StepWork:
        """Counts the step as done."""
        seats = self.seats
        positions = seats.num_computed[slots]
        seats.num_computed[slots] += 1
        seats.num_total[slots] += 1
        pieces = []
        for seq, tokens in chunks:
            slot, start = seq.slot, seq.num_computed
            end = start + tokens
            samples = end == seq.num_total
            self.tables.grow(slot, end)
            seats.num_computed[slot] = end
            if samples:
                seats.num_total[slot] += 1
                seats.decoding[slot] = True
                self._prefilling.remove(seq)
            pieces.append(Chunk(seq, slot, start, tokens, samples))
            self._unpublished.append(seq)
        num_tokens = len(slots) + sum(tokens for _, tokens in chunks)
        rows = max(num_tokens, min(self._batch_rows, budget)) if self._policy.pads else num_tokens
        admitted, self._admitted = tuple(self._admitted), []
        return StepWork(
            decodes=seats.sequences[slots],
            decode_slots=slots,
            decode_positions=positions,
            chunks=tuple(pieces),
            admitted=admitted,
            num_tokens=num_tokens,
            bucket=bucket_of(rows, self.config.buckets),
            page_appends=self.tables.take_appends(),
        )

    # ---- admission and pre-emption

    def _head(self, long_too: bool) -> Sequence | None:
        """The oldest waiting sequence."""
        heads = [line[0] for line in self._waiting[: 1 + long_too] if line]
        return min(heads, key=_KEY, default=None)

    def _final(self, seq: Sequence) -> int:
        """Positions a waiting sequence is expected to compute, in the end."""
        if seq.request.sampling.ignore_eos:
            return seq.limit - 1
        expected = self.lengths.expect(np.array([seq.num_total - seq.num_prompt]), np.array([seq.rank]))
        return min(seq.limit, seq.num_prompt + int(expected[0])) - 1

    def _forecast(self) -> Forecast:
        """Of what runs; a forecast of no pages if there is no full-attention group."""
        seats, tables, full = self.seats, self.tables, self._full
        slots = np.flatnonzero(seats.decoding if full is not None else np.zeros(0, bool))
        computed, final = seats.num_computed[slots], seats.limit[slots] - 1
        guessed = ~seats.exact[slots]
        if guessed.any():
            prompt = seats.num_prompt[slots[guessed]]
            expected = prompt + self.lengths.expect(seats.num_total[slots[guessed]] - prompt, seats.rank[slots[guessed]]) - 1
            final[guessed] = np.minimum(final[guessed], expected)
        discount = 0 if full is None else tables.count[full, slots] - tables.charged[full, slots]
        common = 0 if full is None else tables.common(full)
        forecast = Forecast(computed, final - computed, np.broadcast_to(discount, len(slots)), common, self.config.block_size)
        for seq in self._prefilling if full is not None else ():
            own = int(tables.count[full, seq.slot] - tables.charged[full, seq.slot])
            forecast.add(seq.num_total, self._final(seq), own)
        return forecast

    def _admit(self, seq: Sequence, forecast: Forecast, room: int, now: float) -> bool:
        """Seats a waiting sequence on the pages it finds, if memory will do."""
        tables, size = self.tables, self.config.block_size
        names: list[bytes] = []
        if seq.index > 0 or seq.request.sampling.prompt_logprobs is None:
            names = seq.names((seq.num_known - 1) // size, size)
            names = names[: tables.hit(names)]
        remaining = seq.num_total - len(names) * size
        if self._policy.whole and room < remaining <= self.config.token_budget:
            return False
        if not self._windows_fit(seq):
            return False
        if self._full is not None:
            growth = seq.num_total, self._final(seq), tables.shared(self._full, names)
            if forecast.peak_with(*growth) > self.config.num_pages[self._full]:
                return False
            forecast.add(*growth)
        self._waiting[seq.num_total > self.config.token_budget].remove(seq)
        self.seats.seat(seq, len(names) * size)
        tables.adopt(seq.slot, names)
        seq.pages = tables.rows[seq.slot]
        bisect.insort(self._prefilling, seq, key=_KEY)
        self._admitted.append(seq)
        self._batch_rows += 1
        if seq.t_first_schedule is None:
            seq.t_first_schedule, seq.cached_tokens = now, len(names) * size
            if seq.index == 0:
                self._unbegun -= 1
                self._begin_interval_s += 0.1 * (now - (self._last_begin_s or now) - self._begin_interval_s)
                self._last_begin_s = now
        return True

    def _windows_fit(self, seq: Sequence) -> bool:
        """Whether every window group holds the windows of what runs and of one more."""
        config, slots = self.config, np.flatnonzero(self.seats.growing)
        for pages, window in zip(config.num_pages, config.windows, strict=True):
            if window is not None:
                most = np.append(self.seats.limit[slots], seq.limit) - 1
                if np.minimum(-(-most // config.block_size), self._window_pages(window)).sum() > pages:
                    return False
        return True

    def _preempt_youngest(self) -> None:
        """Of those that hold pages; never the only one, whose needs the door has checked."""
        running = self.seats.sequences[self.seats.growing].tolist()
        if len(running) < 2:
            raise RuntimeError(f"{running} cannot go on, though nothing else holds any of {self.config.num_pages} pages")
        seq = max(running, key=_KEY)
        self._leave(seq)
        seq.preemptions += 1
        self.num_preemptions += 1
        if seq.num_known == seq.num_total:
            self._wait(seq)

    def _leave(self, seq: Sequence) -> None:
        """Takes back a running sequence's pages and slot."""
        if self.seats.growing[seq.slot]:
            self._register(seq)
            self.tables.release(seq.slot)
        if not self.seats.decoding[seq.slot] and seq in self._prefilling:
            self._prefilling.remove(seq)
        self.seats.unseat(seq)
        seq.pages = []

    # ---- results

    def commit(self, sequences: list[Sequence], tokens: list[int] | np.ndarray) -> None:
        """Sampled tokens became known, one for each sequence, in the order of their steps.

        Tokens of sequences that are finished are surplus and are dropped.
        """
        seats, tokens = self.seats, np.asarray(tokens, np.int32)
        slots = np.array([seq.slot for seq in sequences], np.int32)
        seated = slots >= 0
        for i in np.flatnonzero(~seated).tolist():
            self._commit_late(sequences[i], int(tokens[i]))
        slots = slots[seated]
        seats.append(slots, tokens[seated])
        whole = np.minimum(seats.num_known[slots], seats.num_computed[slots]) // self.config.block_size
        for slot in slots[whole > seats.registered[slots]].tolist():
            self._register(self._at(slot))

    def _commit_late(self, seq: Sequence, token: int) -> None:
        """The token of a sequence that lost its seat while the step ran."""
        if not seq.finished:
            seq.append(token)
            if seq.num_known == seq.num_total < seq.limit:
                self._wait(seq)

    def _at(self, slot: int) -> Sequence:
        return self.seats.sequences.item(slot)

    def _register(self, seq: Sequence) -> None:
        """Lets others find the pages whose tokens are all known and computed."""
        slot, size = seq.slot, self.config.block_size
        begin, whole = int(self.seats.registered[slot]), min(seq.num_known, seq.num_computed) // size
        if whole > begin:
            self.tables.register(slot, seq.names(whole, size), begin)
            self.seats.registered[slot] = whole

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
        if seq.slot >= 0:
            self._leave(seq)
        else:
            for line in self._waiting:
                if seq in line:
                    line.remove(seq)
        if seq.index == 0 and seq.t_first_schedule is None:
            self._unbegun -= 1
        self._start_siblings(seq)

    def _start_siblings(self, seq: Sequence) -> None:
        siblings, seq.siblings = seq.siblings, ()
        for sibling in siblings:
            if not sibling.finished:
                self._wait(sibling)
