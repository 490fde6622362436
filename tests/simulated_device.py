"""A device of plain Python that runs the scheduler's decisions, and a loop that drives both.

The cache of a layer group maps (page, offset) to the last written position and a number. The number depends
on every earlier token, as a real key does. A step writes all its tokens first and then reads, as the compiled
step does, so a page that changes its owner early is noticed. The sampled token is a function of the number. A
sequence's output is therefore known without a scheduler (`alone`), and a wrong read, page or position changes
the output.
"""

import dataclasses
import hashlib
from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from jaxflow.config import Span
from jaxflow.request import Request, SamplingParams
from jaxflow.scheduler.admission import OutputLengths
from jaxflow.scheduler.config import SchedulerConfig
from jaxflow.scheduler.scheduler import Scheduler, StepPolicy
from jaxflow.scheduler.state import Sequence, StepWork

VOCABULARY = 29
EOS = 0

# A drawn request.
requests = st.tuples(
    st.integers(1, 16),  # tokens of its own
    st.sampled_from([0, 0, 8, 15]),  # after a beginning that others share
    st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 32),
            "n": st.sampled_from([1, 1, 1, 3]),
            "ignore_eos": st.booleans(),
            "priority": st.sampled_from([0, 0, 1]),
            "salt": st.sampled_from(["", "", "x"]),
            "seed": st.sampled_from([None, 5]),
            "prompt_logprobs": st.sampled_from([None, None, 0]),
        }
    ),
)

# Two groups of heads with spans: a window that grows slowly, and one that grows fast behind sink tokens.
SPANS = (Span(sinks=0, alpha=4, beta=256), Span(sinks=5, alpha=2, beta=768))


def link(chain: int, token: int) -> int:
    """The number of a prefix, from that of the prefix without its last token."""
    return int.from_bytes(hashlib.sha256(b"%d,%d" % (chain, token)).digest()[:8], "little")


def draw(chain: int, seed: int) -> int:
    return link(chain, seed) % VOCABULARY


def output(prompt: list[int], seed: int, most: int, *, ignore_eos: bool = False) -> list[int]:
    """Return the continuation of a prompt."""
    chain, tokens = 0, []
    for token in prompt:
        chain = link(chain, token)
    while len(tokens) < most and (ignore_eos or EOS not in tokens):
        tokens.append(draw(chain, seed))
        chain = link(chain, tokens[-1])
    return tokens


def alone(seq: Sequence) -> list[int]:
    """The output of a sequence that has the device to itself."""
    request = seq.request
    return output(
        list(request.prompt_token_ids),
        seq.seed,
        seq.limit - seq.num_prompt,
        ignore_eos=request.sampling.ignore_eos,
    )


NOTHING = (-1, -1)  # the content of a place that was never written


class Device:
    """Page tables, KV and last tokens, in the executor's layout."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.table: dict[tuple[int, int], dict[int, int]] = {}  # of (group, slot): index -> page
        self.kv: dict[tuple[int, int], list[tuple[int, int]]] = {}  # of (group, page): (position, number)
        self.last: dict[int, int] = {}

    def content(self, group: int, page: int) -> list[tuple[int, int]]:
        """Return the places of a page."""
        return self.kv.setdefault((group, page), [NOTHING] * self.config.block_size)

    def stretch(self, group: int, slot: int, start: int, end: int) -> list[tuple[int, int]]:
        """Return what the pages of a row hold at positions start..end-1."""
        size, pages, found = self.config.block_size, self.table[group, slot], []
        for index in range(start // size, -(-end // size)):
            places = self.kv[group, pages[index]]
            found += places[max(0, start - index * size) : end - index * size]
        return found

    def run(self, work: StepWork) -> list[int]:
        """Tokens sampled after the decodes and the sampling chunks, in order."""
        size = self.config.block_size
        for group, slot, index, page in work.page_appends.tolist():
            assert 0 <= page < self.config.num_pages[group]
            self.table.setdefault((group, slot), {})[index] = page
        rows = [
            (int(s), int(p), [self.last[int(s)]])
            for s, p in zip(work.decode_slots, work.decode_positions, strict=True)
        ]
        rows += [(chunk.slot, chunk.start, chunk.token_ids.tolist()) for chunk in work.chunks]
        groups = range(len(self.config.windows))
        ends = []
        for slot, start, tokens in rows:
            chain = self.stretch(0, slot, start - 1, start)[0][1] if start else 0
            for position, token in enumerate(tokens, start):
                chain = link(chain, token)
                for group in groups:
                    page = self.table[group, slot][position // size]
                    self.content(group, page)[position % size] = (position, chain)
            ends.append(chain)
        for slot, start, tokens in rows:
            for group in groups:
                self.read(group, slot, start, start + len(tokens))
        seeds = [seq.seed for seq in work.decodes] + [chunk.seq.seed for chunk in work.chunks]
        samples = [True] * len(work.decodes) + [chunk.samples for chunk in work.chunks]
        out = []
        for (slot, _, _), chain, seed, wanted in zip(rows, ends, seeds, samples, strict=True):
            if wanted:
                self.last[slot] = draw(chain, seed)
                out.append(self.last[slot])
        return out

    def page(self, group: int, page: int) -> dict[int, tuple[int, int]]:
        """Return the content of a page by offset."""
        return {
            offset: place for offset, place in enumerate(self.content(group, page)) if place is not NOTHING
        }

    def write_page(self, group: int, page: int, content: dict[int, tuple[int, int]]) -> None:
        self.kv[group, page] = [content.get(offset, NOTHING) for offset in range(self.config.block_size)]

    def read(self, group: int, slot: int, start: int, end: int) -> None:
        """Queries start..end-1 see what their sequence wrote, at its positions, and one same prefix."""
        window = self.config.windows[group]
        sinks = min(window.sinks, start) if isinstance(window, Span) else 0
        last_keys = window.window(start) if isinstance(window, Span) else window
        first = 0 if last_keys is None else max(0, start - last_keys + 1)
        for a, b in ((0, min(sinks, first)), (first, end)):
            seen = self.stretch(group, slot, a, b)
            assert [at for at, _ in seen] == list(range(a, b)), (group, slot, a, seen)
            if self.config.windows[0] is None:
                assert seen == self.stretch(0, slot, a, b)


@dataclasses.dataclass
class World:
    """A scheduler and its device.

    `lag` steps are under way when the results of the first of them are read. `hope` is the output length that
    the forecast expects at first: a small one admits too much, so that sequences are pre-empted.
    """

    config: SchedulerConfig
    lag: int = 1
    hope: int = 512
    policy: StepPolicy | None = None

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, policy=self.policy)
        self.scheduler.lengths = OutputLengths(self.hope)
        self.device = Device(self.config)
        self.sequences: list[Sequence] = []
        self.outputs: dict[Sequence, list[int]] = {}
        self.under_way: list[tuple[StepWork, list[int]]] = []
        self.now = 0.0
        self.aborted: set[Sequence] = set()

    def add(self, prompt: list[int], *, priority: int = 0, salt: str = "", **sampling) -> list[Sequence]:
        request = Request(
            f"r{len(self.sequences)}", prompt, SamplingParams(**sampling), priority=priority, cache_salt=salt
        )
        new = self.scheduler.add(request)
        self.sequences += new
        self.outputs.update({seq: [] for seq in new})
        return new

    def step(self) -> StepWork | None:
        """Schedule and enqueue a step, then read the step `lag` steps earlier."""
        self.now += 1.0
        before = self.scheduler.num_preemptions
        work = self.scheduler.schedule(self.now)
        self.before_step()
        if work is not None:
            self.check_step(work, self.scheduler.num_preemptions - before)
            self.under_way.append((work, self.device.run(work)))
        self.check_pages()
        while self.under_way and (work is None or len(self.under_way) > self.lag):
            self.read(*self.under_way.pop(0))
        return work

    def before_step(self) -> None:
        """Apply the device operations that precede the scheduled step."""

    def read(self, work: StepWork, tokens: list[int]) -> None:
        sampled = work.sampled
        assert len(sampled) == len(tokens)
        self.scheduler.commit(sampled, tokens)
        for seq, token in zip(sampled, tokens, strict=True):
            if seq.finished:
                continue
            self.outputs[seq].append(token)
            assert seq.token_ids.tolist() == [*seq.request.prompt_token_ids, *self.outputs[seq]]
            assert seq.num_known == len(seq.token_ids)
            if seq.num_known == seq.limit or (token == EOS and not seq.request.sampling.ignore_eos):
                self.scheduler.finish(seq)

    def steps(self, most_steps: int = 10_000) -> Iterator[StepWork]:
        """Steps until all have ended."""
        for _ in range(most_steps):
            if all(seq.finished for seq in self.sequences) and not self.under_way:
                self.check_idle()
                return
            if (work := self.step()) is not None:
                yield work
        raise AssertionError(
            f"not done after {most_steps} steps: {[seq for seq in self.sequences if not seq.finished]}"
        )

    def run(self) -> None:
        """Until all have ended."""
        for _ in self.steps():
            pass

    def check_step(self, work: StepWork, preempted: int) -> None:
        config = self.config
        assert work.num_tokens == len(work.decodes) + sum(chunk.tokens for chunk in work.chunks)
        assert 0 < work.num_tokens <= config.token_budget
        assert work.bucket in config.buckets and work.bucket >= work.num_tokens
        assert work.decodes.tolist() == [
            self.scheduler.running.slots.sequences[slot] for slot in work.decode_slots
        ]
        slots = work.slots.tolist()
        assert len(set(slots)) == len(slots) <= config.max_num_seqs
        keys = [chunk.seq.key for chunk in work.chunks]
        assert keys == sorted(keys)
        assert all(chunk.tokens > 0 and chunk.seq.slot == chunk.slot for chunk in work.chunks)
        assert all(
            chunk.start + chunk.tokens == chunk.seq.num_computed <= chunk.seq.num_known
            for chunk in work.chunks
        )
        assert not (preempted and work.admitted)
        assert self.scheduler.running.computed == [chunk.seq for chunk in work.chunks]
        for seq in work.sampled:
            assert seq.num_computed < seq.num_total <= seq.limit

    def check_pages(self) -> None:
        """Every page is free, cached or held, and as often as it is counted; only whole pages of equal
        content are shared.
        """
        tables, size = self.scheduler.running.tables, self.config.block_size
        for group, pool in enumerate(tables.pools):
            holders: dict[int, list[tuple[int, int]]] = {}
            assert tables.count[group].tolist() == [len(rows[group]) for rows in tables.rows]
            for slot, rows in enumerate(tables.rows):
                for index, page in enumerate(rows[group]):
                    if page >= 0:
                        holders.setdefault(page, []).append((slot, index))
            for fetch in self.scheduler.tiers.fetches if self.scheduler.tiers is not None else ():
                for page in [*fetch.held[group], *fetch.partial_pages[group : group + 1]]:
                    holders.setdefault(page, []).append((-1, -1))
            counts = [pool.references(page) for page in range(pool.num_pages)]
            assert counts == [len(holders.get(page, ())) for page in range(pool.num_pages)]
            assert pool.available == counts.count(0)
            for places in holders.values():
                places = [place for place in places if place != (-1, -1)]
                if len(places) > 1:
                    seqs = [self.scheduler.running.slots.sequences[slot] for slot, _ in places]
                    assert len({index for _, index in places}) == 1
                    end = (places[0][1] + 1) * size
                    assert len({(seq.token_ids[:end].tobytes(), seq.request.cache_salt) for seq in seqs}) == 1
                    assert all(seq.num_known >= end for seq in seqs)
            # Each release frees the pages that the forecast expects.
            for charged, rows in zip(tables.charged[group].tolist(), tables.rows, strict=True):
                assert 0 <= charged <= sum(page >= 0 and counts[page] == 1 for page in rows[group])
            assert tables.common(group) >= 0

    def check_idle(self) -> None:
        scheduler = self.scheduler
        assert scheduler.num_running == scheduler.num_waiting == 0
        assert scheduler.running.tables.available() == list(self.config.num_pages)
        assert scheduler.schedule(self.now) is None
        for seq in self.sequences:
            assert seq.slot == -1
            expected = alone(seq)
            assert self.outputs[seq] == expected or (
                seq in self.aborted and self.outputs[seq] == expected[: len(self.outputs[seq])]
            )

    def abort(self, seq: Sequence) -> None:
        self.scheduler.abort(seq)
        self.aborted.add(seq)


def config(**changes) -> SchedulerConfig:
    """A small machine."""
    base = {
        "token_budget": 16,
        "max_num_seqs": 6,
        "block_size": 4,
        "windows": (None,),
        "num_pages": (64,),
        "max_model_len": 64,
        "buckets": (4, 8, 16),
    }
    return SchedulerConfig(**{**base, **changes})


def prompt(rng: np.random.Generator, length: int, *, shared: int = 0) -> list[int]:
    """Random tokens after `shared` tokens that all prompts begin with."""
    return [1 + i % 3 for i in range(shared)] + rng.integers(0, VOCABULARY, length).tolist()


def roomy(**changes) -> World:
    """A world that wants for neither pages nor slots."""
    return World(
        config(**{"num_pages": (300,), "max_num_seqs": 16, "enable_prefix_caching": False, **changes})
    )
