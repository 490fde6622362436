"""The running sequences: their by_slot and their pages, kept in step with each other."""

import bisect
import collections

import numpy as np

from jaxflow.kv.page_tables import PageTables
from jaxflow.kv.tiers.policy import TierPolicy
from jaxflow.scheduler.admission import FOREVER, Forecast, OutputLengths
from jaxflow.scheduler.config import SchedulerConfig, window_pages
from jaxflow.scheduler.state import BY_AGE, Chunk, Sequence, SlotTable


def make_page_tables(config: SchedulerConfig, *, record_named: bool = False) -> PageTables:
    """Return empty page tables for the slots of a scheduler. `record_named`: for a tier policy."""
    return PageTables(
        config.num_pages,
        config.windows,
        config.block_size,
        config.num_slots,
        keep=config.enable_prefix_caching,
        record_named=record_named,
    )


class Running:
    """What runs, and what it holds.

    Attributes:
      by_slot, tables: counts and pages, by slot.
      prefilling: the sequences whose known tokens are not all computed, oldest first.
      computed: the sequences of the last step's chunks.
      tiers: the policy of the KV tiers, over `tables`; None without tiers.
    """

    def __init__(self, config: SchedulerConfig, tiers: TierPolicy[Sequence] | None = None):
        self.config = config
        self.by_slot = SlotTable(config.num_slots, config.block_size)
        self.tables = make_page_tables(config) if tiers is None else tiers.tables
        self.prefilling: list[Sequence] = []
        self.computed: list[Sequence] = []
        self.tiers = tiers
        # by slot, steps after which the forecast has it release its pages
        self._remaining = np.zeros(config.num_slots, np.int32)
        self._full = config.windows.index(None) if None in config.windows else None
        self._has_windows = any(window is not None for window in config.windows)

    # ---- coming and going

    def enter(self, seq: Sequence, names: list[bytes], part: tuple[int, list[int]] | None = None) -> None:
        """SlotTable a sequence on the pages of its prefix that are known by these names.

        `part`: positions computed if some of the page after those are too, and that page in each group.
        """
        self.by_slot.take_slot(seq, part[0] if part else len(names) * self.config.block_size)
        self.tables.adopt(seq.slot, names)
        for group, page in enumerate(part[1] if part else ()):
            self.tables.append(seq.slot, group, page)
        seq.pages = self.tables.rows[seq.slot]
        bisect.insort(self.prefilling, seq, key=BY_AGE)

    def leave(self, seq: Sequence) -> None:
        """Takes back a sequence's pages and slot."""
        self._register(seq)
        if self.tiers is not None and seq.chain is not None:
            self.tiers.touch(seq.chain[1:])
        self.tables.release(seq.slot)
        if seq in self.prefilling:
            self.prefilling.remove(seq)
        self.by_slot.free_slot(seq)
        seq.pages = []

    @property
    def num_fetches(self) -> int:
        """Slots that are reserved for sequences with a fetch."""
        return 0 if self.tiers is None else len(self.tiers.fetches)

    def youngest(self) -> Sequence:
        """Never the only one, whose needs the door has checked."""
        running = self.by_slot.sequences[self.by_slot.taken].tolist()
        if len(running) < 2:
            raise RuntimeError(
                f"{running} cannot go on, though nothing else holds any of {self.config.num_pages} pages"
            )
        return max(running, key=BY_AGE)

    # ---- from step to step

    def settle(self) -> None:
        """What the last step makes possible: others find the pages it completes, and what is not needed any
        more is free.

        A sequence whose last token is scheduled has nothing left to compute. It leaves now, before that token
        is known.
        """
        by_slot = self.by_slot
        for seq in self.computed:
            if seq.slot >= 0:
                self._register(seq)
        self.computed = []
        for slot in np.flatnonzero(by_slot.taken & (by_slot.num_total >= by_slot.limit)).tolist():
            self.leave(self._at(slot))
        if self._has_windows:
            taken = np.flatnonzero(by_slot.taken)
            self.tables.drop_unseen(taken, by_slot.num_computed[taken])

    def advance_decodes(self, slots: np.ndarray) -> np.ndarray:
        """Counts a token computed and one sampled for each slot; returns the positions computed, int32 [n]."""
        positions = self.by_slot.num_computed[slots]
        self.by_slot.num_computed[slots] += 1
        self.by_slot.num_total[slots] += 1
        return positions

    def advance_chunk(self, seq: Sequence, tokens: int) -> Chunk:
        """Counts a chunk as computed, on pages that it gets now."""
        by_slot, slot, start = self.by_slot, seq.slot, seq.num_computed
        end = start + tokens
        samples = end == seq.num_total
        self.tables.grow(slot, end)
        by_slot.num_computed[slot] = end
        if samples:
            by_slot.num_total[slot] += 1
            by_slot.decoding[slot] = True
            self.prefilling.remove(seq)
        self.computed.append(seq)
        return Chunk(seq, slot, start, tokens, samples)

    def commit(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """One token more is known of each slot."""
        by_slot = self.by_slot
        by_slot.append(slots, tokens)
        whole = np.minimum(by_slot.num_known[slots], by_slot.num_computed[slots]) // self.config.block_size
        for slot in slots[whole > by_slot.registered[slots]].tolist():
            self._register(self._at(slot))

    def _at(self, slot: int) -> Sequence:
        return self.by_slot.sequences.item(slot)

    def _register(self, seq: Sequence) -> None:
        """Lets others find the pages whose tokens are all known and computed."""
        slot, size = seq.slot, self.config.block_size
        by_slot = self.by_slot
        begin, whole = (
            by_slot.registered.item(slot),
            min(by_slot.num_known.item(slot), by_slot.num_computed.item(slot)) // size,
        )
        if whole > begin:
            self.tables.register(slot, seq.names(whole, size), begin)
            by_slot.registered[slot] = whole

    # ---- what will be

    def forecast(self, lengths: OutputLengths) -> Forecast:
        """Of the full-attention group's pages. Without such a group: of no pages, which always fits."""
        by_slot, tables, full, size = self.by_slot, self.tables, self._full, self.config.block_size
        if full is None:
            nothing = np.zeros(0, np.int32)
            return Forecast(nothing, nothing, nothing, 0, size)
        slots = np.flatnonzero(by_slot.decoding)
        computed, final = by_slot.num_computed[slots], by_slot.limit[slots] - 1
        guessed = slots[~by_slot.exact[slots]]
        if len(guessed):
            prompt = by_slot.num_prompt[guessed]
            expected = prompt + lengths.expect(by_slot.num_total[guessed] - prompt, by_slot.rank[guessed]) - 1
            final[~by_slot.exact[slots]] = np.minimum(by_slot.limit[guessed] - 1, expected)
        self._remaining[:] = FOREVER
        self._remaining[slots] = final - computed
        discount = tables.count[full] - tables.charged[full]
        forecast = Forecast(computed, final - computed, discount[slots], tables.common(full), size)
        for seq in self.prefilling:
            forecast.use = forecast.use_with(seq.num_total, lengths.final(seq), int(discount[seq.slot]))
        for fetch in self.tiers.fetches if self.tiers is not None else ():
            held = len(fetch.held[full]) + (fetch.partial is not None)
            forecast.use = forecast.use_with(fetch.seq.num_total, lengths.final(fetch.seq), held)
        return forecast

    def fits(self, seq: Sequence, names: list[bytes], forecast: Forecast, lengths: OutputLengths) -> bool:
        """Whether one more would never run out of pages, as far as lengths are known; if so it is added to
        the forecast.
        """
        config, limits = self.config, self.by_slot.limit[self.by_slot.taken]
        if self.tiers is not None and self.tiers.fetches:
            limits = np.append(limits, [fetch.seq.limit for fetch in self.tiers.fetches])
        for pages, window in zip(config.num_pages, config.windows, strict=True):
            if window is not None:
                needs = -(-(np.append(limits, seq.limit) - 1) // config.block_size)
                if np.minimum(needs, window_pages(window, config.block_size)).sum() > pages:
                    return False
        if self._full is not None:
            payers = self.tables.payers(self._full, names)
            lent = collections.Counter(self._remaining[[slot for slot in payers if slot >= 0]].tolist())
            use = forecast.use_with(seq.num_total, lengths.final(seq), len(payers), lent)
            if use.max() > config.num_pages[self._full]:
                return False
            forecast.use = use
        return True
