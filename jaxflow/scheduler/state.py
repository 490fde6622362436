"""The scheduler's data: sequences, the slots of the running ones, the waiting
queue, and the work of one step.
"""

import bisect
import dataclasses
import operator

import numpy as np

from jaxflow.kv import prefix
from jaxflow.request import BATCH_PRIORITY, Request

NEVER = 2**30  # more pages than any row has
GOLDEN = (5**0.5 - 1) / 2  # multiples of the golden ratio modulo 1 are spread evenly, however many there are
SEED_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the seeds of the n sequences lie far apart
LOWEST_RANK = 0.1  # the forecast takes no sequence for one of the shortest tenth
KNOWN, TOTAL, COMPUTED = range(3)  # rows of `SlotTable.counts`
BY_AGE = operator.attrgetter("key")


class Sequence:
    """A prompt and the tokens sampled after it.

    The three counts of a running sequence are a column of `SlotTable.counts`, so that a step updates the
    counts of all its decodes in a few numpy calls. The counts of other sequences are an array of three.

    Attributes:
      request: the request.
      index: 0..n-1, the place among the request's n sequences.
      seed: 64 bits, unsigned. Index 0 has the request's seed; the other seeds are derived from it.
      key: (priority, arrival + index, index). A sequence with a smaller key is older: served first and
        pre-empted last. The sequences of one request take turns with later requests.
      slot: row of the device's tables, -1 for a sequence that does not run. The call of `schedule` after the
        call for the sequence's last token frees the slot.
      limit: maximum number of tokens, prompt and output.
      rank: quantile of the usual output lengths that the forecast assumes, see `OutputLengths`.
      num_prompt: prompt tokens.
      pages: for each layer group, the page of every `block_size` positions; -1 after a window layer
        released the page.
      chain: the root of its prefix names, then the content names of its leading full pages; None for a
        sequence that shares no pages.
      siblings: sequences of the same request that wait until this one has computed their prompt.
      cached_tokens: prompt tokens that a prefix hit saved at the first start.
      preemptions: how many times the sequence was pre-empted.
      swapped: after a pre-emption, the number of computed positions, and the name of the partial page that
        went to the host; None without one.
      finished: True when no further token is wanted.
      is_batch: the sequence belongs to a batch request, not to an online one.
      t_first_schedule: seconds on the caller's clock.
    """

    __slots__ = (
        "_counts",
        "_recent",
        "_stored",
        "_tokens",
        "cached_tokens",
        "chain",
        "finished",
        "index",
        "is_batch",
        "key",
        "limit",
        "num_prompt",
        "pages",
        "preemptions",
        "rank",
        "request",
        "seed",
        "siblings",
        "slot",
        "swapped",
        "t_first_schedule",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        *,
        seed: int,
        limit: int,
        arrival: int,
        salt: bytes | None,
    ):
        """`salt`: sequences of the same salt share prefixes; a sequence without a salt shares none."""
        self.request, self.index, self.seed, self.limit = request, index, seed, limit
        self.key = (request.priority, arrival + index, index)
        self.is_batch = request.priority >= BATCH_PRIORITY
        self.rank = LOWEST_RANK + (1 - LOWEST_RANK) * ((arrival + index) * GOLDEN % 1)
        self._tokens = np.array(request.prompt_token_ids, np.int32)  # the first `_stored` are valid
        self._recent: np.ndarray | None = None  # tokens after those, while running; token p at p mod its size
        self.num_prompt = self._stored = len(self._tokens)
        self._counts = np.array([self.num_prompt, self.num_prompt, 0], np.int32)
        self.slot = -1
        self.pages: list[list[int]] = []
        self.chain = None if salt is None else [prefix.root(salt)]
        self.siblings: tuple[Sequence, ...] = ()
        self.cached_tokens = self.preemptions = 0
        self.swapped: tuple[int, bytes] | None = None
        self.finished = False
        self.t_first_schedule: float | None = None

    @property
    def num_known(self) -> int:
        """Tokens with a value known to the host."""
        return int(self._counts[KNOWN])

    @property
    def num_total(self) -> int:
        """Known tokens and the sampled ones in flight."""
        return int(self._counts[TOTAL])

    @property
    def num_computed(self) -> int:
        """Positions with KV from the steps scheduled so far."""
        return int(self._counts[COMPUTED])

    @property
    def token_ids(self) -> np.ndarray:
        """The known tokens, int32 [num_known]: a view, valid until the next step."""
        self.store_recent()
        return self._tokens[: self._stored]

    def names(self, pages: int, block_size: int) -> list[bytes]:
        """Return the content names of the first `pages` pages, all of known tokens; [] if it shares none."""
        if self.chain is None:
            return []
        prefix.extend(self.chain, self.token_ids, pages, block_size)
        return self.chain[1 : pages + 1]

    def store_recent(self) -> None:
        """Copy the tokens that became known in the slot since the last copy, at most a page."""
        known = self.num_known
        count = known - self._stored
        if count:
            assert self._recent is not None
            if known > len(self._tokens):
                self._tokens = np.append(self._tokens, np.zeros(known, np.int32))
            begin = self._stored % len(self._recent)
            self._tokens[self._stored : known] = self._recent[begin : begin + count]
            self._stored = known

    def append(self, token: int) -> None:
        """Add a known token to a sequence that has no slot."""
        self._tokens = np.append(self._tokens[: self._stored], np.int32(token))
        self._stored += 1
        self._counts[KNOWN] += 1

    def enter_slot(self, slot: int, counts: np.ndarray, recent: np.ndarray) -> None:
        """Count in the slot table from here on: `counts` int32 [3] and
        `recent` int32 [block_size] are its.
        """
        self.slot, self._counts, self._recent = slot, counts, recent

    def leave_slot(self) -> None:
        """Take the counts and tokens out of the slot table. None of its positions counts as computed."""
        self.store_recent()
        self._counts = np.array([self.num_known, self.num_total, 0], np.int32)
        self.slot, self._recent = -1, None

    def __repr__(self) -> str:
        counts = f"computed {self.num_computed}, known {self.num_known}, total {self.num_total}"
        place = f"{self.request.request_id!r}[{self.index}], slot {self.slot}"
        return f"Sequence({place}, {counts}, limit {self.limit})"


def sequences_of(
    request: Request, *, seed: int, limit: int, arrival: int, salt: bytes | None
) -> list[Sequence]:
    """Return the n sequences of a request. The first one holds the others as `siblings`."""
    seeds = [(seed + i * SEED_STEP) % 2**64 for i in range(request.sampling.n)]
    sequences = [
        Sequence(request, i, seed=seed, limit=limit, arrival=arrival, salt=salt)
        for i, seed in enumerate(seeds)
    ]
    sequences[0].siblings = tuple(sequences[1:])
    return sequences


class SlotTable:
    """Arrays over the slots of the running sequences. The entries of a free slot are 0, False or None.

    Attributes (arrays of [slots] where not stated otherwise):
      sequences: the sequence of each slot.
      counts: int32 [3, slots]; its rows are `num_known`, `num_total` and `num_computed`.
      num_prompt, limit, rank: as the attributes of `Sequence`.
      registered: leading pages that have their content name, or that were considered for one.
      ignores_eos: the sequence runs to its limit, whatever it samples.
      taken: a sequence has the slot.
      is_batch: the sequence belongs to a batch request.
      constrained: the host must know each token before the device draws the next one.
      decoding: the next input is the token that the device sampled last.
      sampled_at: int64, the call of `Scheduler.schedule` that scheduled the slot's last sample.
      recent: int32 [slots, block_size], the known tokens of the page being filled, token p at p mod its size.
    """

    def __init__(self, slots: int, block_size: int):
        self.sequences = np.full(slots, None, object)
        self.counts = np.zeros((3, slots), np.int32)
        self.num_known, self.num_total, self.num_computed = self.counts
        self.num_prompt = np.zeros(slots, np.int32)
        self.limit = np.zeros(slots, np.int32)
        self.registered = np.zeros(slots, np.int32)
        self.ignores_eos = np.zeros(slots, bool)
        self.rank = np.zeros(slots, np.float32)
        self.taken = np.zeros(slots, bool)
        self.is_batch = np.zeros(slots, bool)
        self.constrained = np.zeros(slots, bool)
        self.decoding = np.zeros(slots, bool)
        self.sampled_at = np.zeros(slots, np.int64)
        self.recent = np.zeros((slots, block_size), np.int32)
        self.free = list(range(slots - 1, -1, -1))
        self._block_size = block_size

    def awaited(self) -> np.ndarray:
        """Return bool [slots]: constrained decodes with a sampled token that the host does not know yet."""
        return self.constrained & self.decoding & (self.num_known < self.num_total)

    @property
    def num_taken(self) -> int:
        """Slots that have a sequence."""
        return len(self.sequences) - len(self.free)

    def take(self, seq: Sequence, computed: int) -> None:
        """Give a sequence a slot. The KV of its first `computed` positions exists."""
        slot = self.free.pop()
        self.sequences[slot] = seq
        self.counts[:, slot] = seq.num_known, seq.num_total, computed
        self.num_prompt[slot] = seq.num_prompt
        self.limit[slot] = seq.limit
        self.registered[slot] = NEVER if seq.chain is None else computed // self._block_size
        self.ignores_eos[slot] = seq.request.sampling.ignore_eos
        self.rank[slot] = seq.rank
        self.taken[slot] = True
        self.is_batch[slot] = seq.is_batch
        self.constrained[slot] = seq.request.make_constraint is not None
        seq.enter_slot(slot, self.counts[:, slot], self.recent[slot])

    def release(self, seq: Sequence) -> None:
        """Take the slot back. The sequence keeps its tokens."""
        slot = seq.slot
        seq.leave_slot()
        self.sequences[slot] = None
        for array in (
            self.num_prompt,
            self.limit,
            self.registered,
            self.ignores_eos,
            self.taken,
            self.is_batch,
            self.constrained,
            self.decoding,
        ):
            array[slot] = 0
        self.counts[:, slot] = 0
        self.free.append(slot)

    def append(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Add one known token to the sequence of each slot."""
        known, size = self.num_known[slots], self._block_size
        self.recent[slots, known % size] = tokens
        known += 1
        self.num_known[slots] = known
        for slot in slots[
            known % size == 0
        ].tolist():  # the page is full, the next token overwrites its first
            self.sequences.item(slot).store_recent()


class WaitingQueue:
    """The sequences that wait for a slot, oldest first: those longer than a step, and the others.

    The tokens of a sequence must not change while it waits.

    Attributes:
      num_tokens: of all waiting sequences.
    """

    def __init__(self, token_budget: int):
        self._budget, self.num_tokens = token_budget, 0
        self._short: list[Sequence] = []
        self._long: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        """Add a sequence in its place by age."""
        bisect.insort(self._queue_of(seq), seq, key=BY_AGE)
        self.num_tokens += seq.num_total

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence. Does nothing if it does not wait."""
        queue = self._queue_of(seq)
        i = bisect.bisect_left(queue, seq.key, key=BY_AGE)
        if queue[i : i + 1] == [seq]:
            del queue[i]
            self.num_tokens -= seq.num_total

    def head(self, *, include_long: bool) -> Sequence | None:
        """Return the oldest sequence, the long ones left out unless `include_long`; None if there is none."""
        heads = self._short[:1] + (self._long[:1] if include_long else [])
        return min(heads, key=BY_AGE, default=None)

    @property
    def has_batch(self) -> bool:
        """Return True if a batch request waits."""
        return any(queue[-1].is_batch for queue in (self._short, self._long) if queue)

    @property
    def has_online(self) -> bool:
        """Return True if an online request waits."""
        return not all(queue[0].is_batch for queue in (self._short, self._long) if queue)

    def _queue_of(self, seq: Sequence) -> list[Sequence]:
        return self._long if seq.num_total > self._budget else self._short


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive positions that a step prefills: in a prompt, or in the known
    tokens of a pre-empted sequence.

    Attributes:
      start, tokens: the first position, and the number of positions.
      samples: True if the chunk reaches the sequence's end, so that the step samples a token after it.
    """

    seq: Sequence
    slot: int
    start: int
    tokens: int
    samples: bool

    @property
    def token_ids(self) -> np.ndarray:
        """The chunk's tokens, int32 [tokens]: a view, valid until the next `schedule`."""
        return self.seq.token_ids[self.start : self.start + self.tokens]


@dataclasses.dataclass(frozen=True)
class StepWork:
    """The work of one step: one token of each decode, then the tokens of the chunks, in order.

    Attributes:
      decodes: object [n], the sequences that decode.
      decode_slots: int32 [n].
      decode_positions: int32 [n], the computed position; its token is the last one sampled in the slot.
      chunks: oldest sequence first, one chunk a sequence.
      admitted: sequences that got their slot in this step. Their chunks are in this step or a later one.
      num_tokens: tokens computed.
      bucket: tokens of the compiled step that runs the work; the surplus is padding.
      page_appends: int32 [m, 4] of (group, slot, index, page), the changes of the page table since the last
        step.
    """

    decodes: np.ndarray
    decode_slots: np.ndarray
    decode_positions: np.ndarray
    chunks: tuple[Chunk, ...]
    admitted: tuple[Sequence, ...]
    num_tokens: int
    bucket: int
    page_appends: np.ndarray

    @property
    def mean_context_tokens(self) -> float:
        """Mean number of KV tokens that a decode reads, its own token included; 0 without decodes."""
        if not len(self.decode_positions):
            return 0.0
        return 1 + float(self.decode_positions.sum()) / len(self.decode_positions)

    @property
    def slots(self) -> np.ndarray:
        """Slots of the decodes, then of the chunks: int32."""
        if not self.chunks:
            return self.decode_slots
        return np.concatenate([self.decode_slots, np.array([chunk.slot for chunk in self.chunks], np.int32)])

    @property
    def sampled(self) -> list[Sequence]:
        """Sequences that get a token: the decodes, then those of the chunks that sample."""
        return [*self.decodes.tolist(), *(chunk.seq for chunk in self.chunks if chunk.samples)]
