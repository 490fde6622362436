"""One of a request's n sequences as the scheduler knows it, and the by_slot of the running ones.

A running sequence has a slot, its place on the device. What the scheduler must look at in every step for
every running sequence lies in arrays over slots (`SlotTable`), so that a step of a thousand decodes costs a few
numpy calls and no loop. That holds for new tokens too: they gather in the slot and are carried over to their
sequence by the page.
"""

import bisect
import dataclasses
import operator

import numpy as np

from jaxflow.kv import prefix
from jaxflow.request import Request

NEVER = 2**30  # more pages than any row has
GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, spread evenly however many there are
SEED_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: seeds of the n sequences lie far apart
LOWEST_RANK = 0.1  # a little caution: nobody is expected to be the shortest


class Sequence:
    """A prompt and the tokens sampled after it.

    Attributes:
      request, index: index 0..n-1 within the request.
      seed: 64 bits unsigned, the request's for index 0 and others derived from it.
      key: (priority, arrival, index); the smaller is the older, served first and pre-empted last.
      slot: place on the device; -1 when not running, as from the next `schedule` on once its last token is
      scheduled. token_ids: int32 [num_known], a view; copy what must outlive the step. num_prompt: prompt
      tokens. limit: tokens it may grow to, prompt and output. rank: which quantile of the usual lengths its
      output is taken for, see `jaxflow.scheduler.admission`. num_known: tokens whose value the host has.
      num_total: known tokens and sampled ones in flight. num_computed: positions whose KV is computed by
      steps scheduled so far. pages: for each layer group the page of every `block_size` positions; -1 once a
      window layer gave it back. cached_tokens: prompt tokens that a prefix hit spared, at its first start.
      preemptions: how often it lost its pages and began anew. swapped: positions computed when it was last
      pre-empted, and the name of the page of which they fill a part; None if the
        host was not given that page.
      finished: no token is wanted any more.
      t_arrival, t_first_schedule: seconds, on the clock of the caller.
    """

    __slots__ = (
        "_by_slot",
        "_computed",
        "_known",
        "_stored",
        "_tokens",
        "_total",
        "cached_tokens",
        "chain",
        "finished",
        "index",
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
        "t_arrival",
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
        now: float,
        salt: bytes | None,
    ):
        """`salt`: prefixes are shared among sequences of the same salt; None: not at all."""
        self.request, self.index, self.seed, self.limit = request, index, seed, limit
        self.key = (request.priority, arrival, index)
        self.rank = LOWEST_RANK + (1 - LOWEST_RANK) * ((arrival + index) * GOLDEN % 1)
        self._tokens = np.array(request.prompt_token_ids, np.int32)  # the first `_stored` are valid
        self.num_prompt = self._stored = self._known = self._total = len(self._tokens)
        self._computed = 0
        self._by_slot: SlotTable | None = None
        self.slot = -1
        self.pages: list[list[int]] = []
        self.chain = None if salt is None else [prefix.root(salt)]
        self.siblings: tuple[Sequence, ...] = ()  # wait until this one has computed the prompt they share
        self.cached_tokens = self.preemptions = 0
        self.swapped: tuple[int, bytes] | None = None
        self.finished = False
        self.t_arrival = now
        self.t_first_schedule: float | None = None

    @property
    def token_ids(self) -> np.ndarray:
        if self._by_slot is not None:
            self.store(self._by_slot.recent[self.slot], self.num_known)
        return self._tokens[: self._stored]

    @property
    def num_known(self) -> int:
        return self._known if self._by_slot is None else int(self._by_slot.num_known[self.slot])

    @property
    def num_total(self) -> int:
        return self._total if self._by_slot is None else int(self._by_slot.num_total[self.slot])

    @property
    def num_computed(self) -> int:
        return self._computed if self._by_slot is None else int(self._by_slot.num_computed[self.slot])

    def names(self, pages: int, block_size: int) -> list[bytes]:
        """Content names of the first `pages` pages, all of whose tokens are known; none if it shares nothing."""
        if self.chain is None:
            return []
        prefix.extend(self.chain, self.token_ids, pages, block_size)
        return self.chain[1 : pages + 1]

    def store(self, recent: np.ndarray, known: int) -> None:
        """Takes over tokens up to position `known` from the page they gathered in, token p at p mod the
        page's size.
        """
        count = known - self._stored
        if count:
            if known > len(self._tokens):
                self._tokens = np.append(self._tokens, np.zeros(known, np.int32))
            begin = self._stored % len(recent)
            self._tokens[self._stored : known] = recent[begin : begin + count]
            self._stored = known

    def append(self, token: int) -> None:
        """A token became known after its sequence lost its slot."""
        self._tokens = np.append(self._tokens[: self._stored], np.int32(token))
        self._known = self._stored = self._known + 1

    def __repr__(self) -> str:
        counts = (
            f"computed {self.num_computed}, known {self.num_known}, total {self.num_total}, limit "
            f"{self.limit}"
        )
        return f"Sequence({self.request.request_id!r}[{self.index}], slot {self.slot}, {counts})"


def sequences_of(
    request: Request, *, seed: int, limit: int, arrival: int, now: float, salt: bytes | None
) -> list[Sequence]:
    """The n sequences of a request; all but the first wait for its prompt."""
    seeds = [(seed + i * SEED_STEP) % 2**64 for i in range(request.sampling.n)]
    sequences = [
        Sequence(request, i, seed=seed, limit=limit, arrival=arrival, now=now, salt=salt)
        for i, seed in enumerate(seeds)
    ]
    sequences[0].siblings = tuple(sequences[1:])
    return sequences


class SlotTable:
    """Arrays over the slots of running sequences; a free slot's entries are 0 or False."""

    def __init__(self, slots: int, block_size: int):
        self.sequences = np.full(slots, None, object)
        self.num_prompt = np.zeros(slots, np.int32)
        self.limit = np.zeros(slots, np.int32)
        self.num_known = np.zeros(slots, np.int32)
        self.num_total = np.zeros(slots, np.int32)
        self.num_computed = np.zeros(slots, np.int32)
        self.registered = np.zeros(slots, np.int32)  # pages whose content is named, or was considered for it
        self.exact = np.zeros(slots, bool)  # runs to its limit, whatever it samples
        self.rank = np.zeros(slots, np.float32)
        self.taken = np.zeros(slots, bool)
        self.decoding = np.zeros(slots, bool)  # its next input is the token that the device sampled last
        self.recent = np.zeros(
            (slots, block_size), np.int32
        )  # tokens of the page that is being filled, p at p mod its size
        self.free = list(range(slots - 1, -1, -1))
        self._block_size = block_size

    @property
    def num_taken(self) -> int:
        return len(self.sequences) - len(self.free)

    def take_slot(self, seq: Sequence, computed: int) -> None:
        """Gives a sequence a slot; its first `computed` positions are at hand."""
        slot = self.free.pop()
        self.sequences[slot] = seq
        self.num_prompt[slot] = seq.num_prompt
        self.limit[slot] = seq.limit
        self.num_known[slot] = seq.num_known
        self.num_total[slot] = seq.num_total
        self.num_computed[slot] = computed
        self.registered[slot] = NEVER if seq.chain is None else computed // self._block_size
        self.exact[slot] = seq.request.sampling.ignore_eos
        self.rank[slot] = seq.rank
        self.taken[slot] = True
        seq.slot, seq._by_slot = slot, self

    def append(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """One token more is known of each slot."""
        known, size = self.num_known[slots], self._block_size
        self.recent[slots, known % size] = tokens
        known += 1
        self.num_known[slots] = known
        for slot in slots[known % size == 0].tolist():
            self.sequences.item(slot).store(self.recent[slot], int(self.num_known[slot]))

    def free_slot(self, seq: Sequence) -> None:
        """Takes the slot back. Nothing of the sequence is computed any more, its tokens stay with it."""
        slot = seq.slot
        seq._known, seq._total, seq._computed = len(seq.token_ids), seq.num_total, 0
        seq.slot, seq._by_slot = -1, None
        self.sequences[slot] = None
        self.taken[slot] = self.decoding[slot] = self.exact[slot] = False
        for counts in (
            self.num_prompt,
            self.limit,
            self.num_known,
            self.num_total,
            self.num_computed,
            self.registered,
        ):
            counts[slot] = 0
        self.free.append(slot)


BY_AGE = operator.attrgetter("key")


class Waiting:
    """Two lines: sequences of more tokens than a step, and shorter ones.

    A sequence's tokens must not change while it waits.
    """

    def __init__(self, token_budget: int):
        self._budget = token_budget
        self._lines: tuple[list[Sequence], list[Sequence]] = ([], [])

    def add(self, seq: Sequence) -> None:
        bisect.insort(self._line(seq), seq, key=BY_AGE)

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out, if it is there."""
        line = self._line(seq)
        i = bisect.bisect_left(line, seq.key, key=BY_AGE)
        if line[i : i + 1] == [seq]:
            del line[i]

    def head(self, *, long_too: bool) -> Sequence | None:
        """The oldest; `long_too`: long ones count."""
        heads = [line[0] for line in self._lines[: 1 + long_too] if line]
        return min(heads, key=BY_AGE, default=None)

    def _line(self, seq: Sequence) -> list[Sequence]:
        return self._lines[seq.num_total > self._budget]


class Interval:
    """The recent mean time between two events."""

    def __init__(self) -> None:
        self.seconds = 1.0
        self._last_s: float | None = None

    def count(self, now: float) -> None:
        """An event at this time, in seconds."""
        if self._last_s is not None:
            self.seconds += 0.1 * (now - self._last_s - self.seconds)
        self._last_s = now


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` positions of a prompt (or of a pre-empted sequence's known tokens) from `start` on."""

    seq: Sequence
    slot: int
    start: int
    tokens: int
    samples: bool  # it reaches the sequence's end: the step samples a token after it

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [tokens], a view that is good until the next `schedule`."""
        return self.seq.token_ids[self.start : self.start + self.tokens]


@dataclasses.dataclass(frozen=True)
class StepWork:
    """One step. Its tokens are those of the decodes, one each, then those of the chunks, in order.

    Attributes:
      decodes: object [n], the sequences that decode.
      decode_slots: int32 [n].
      decode_positions: int32 [n], the position computed; its token is the one sampled last in that slot.
      chunks: in the order of their sequences' age, one a sequence.
      admitted: sequences that got their slot in this step; each has a chunk in it or in a later step.
      num_tokens: tokens computed.
      bucket: rows of the compiled step that runs it; the surplus is padding.
      page_appends: int32 [m, 4] of (group, slot, index, page): what changed in the page table since the last
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
        """Keys that a decode reads, its own included; the mean over the decodes, 0 without any."""
        return (
            1 + float(self.decode_positions.sum()) / len(self.decode_positions)
            if len(self.decode_positions)
            else 0.0
        )

    @property
    def slots(self) -> np.ndarray:
        """int32, of the decodes, then of the chunks."""
        return np.concatenate([self.decode_slots, np.array([chunk.slot for chunk in self.chunks], np.int32)])

    @property
    def sampled(self) -> list[Sequence]:
        """Who gets a token: the decodes, then the chunks that sample."""
        return [*self.decodes.tolist(), *(chunk.seq for chunk in self.chunks if chunk.samples)]
