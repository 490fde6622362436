"""The running sequences: their slots and their pages."""

import bisect
import collections

import numpy as np

from jaxflow.kv.page_tables import PageTables
from jaxflow.kv.tiers.policy import TierPolicy
from jaxflow.kv.visible import most_pages
from jaxflow.scheduler.admission import FOREVER, Forecast, OutputLengths
from jaxflow.scheduler.config import SchedulerConfig
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
    """The running sequences, with their slots and pages.

    Attributes:
      slots: counts of the sequences, by slot.
      tables: pages of the sequences, by slot.
      prefilling: sequences whose known tokens are not all computed, oldest first.
      computed: sequences of the last step's chunks.
      tiers: the policy of the KV tiers, over `tables`; None without tiers.
    """

    def __init__(self, config: SchedulerConfig, tiers: TierPolicy[Sequence] | None = None):
        self.config = config
        self.slots = SlotTable(config.num_slots, config.block_size)
        self.tables = make_page_tables(config) if tiers is None else tiers.tables
        self.prefilling: list[Sequence] = []
        self.computed: list[Sequence] = []
        self.tiers = tiers
        self._remaining = np.zeros(
            config.num_slots, np.int32
        )  # steps until the forecast ends a slot's sequence
        self._full = config.windows.index(None) if None in config.windows else None  # group of full attention
        self._has_windows = any(window is not None for window in config.windows)

    # ---- entering and leaving

    def enter(self, seq: Sequence, names: list[bytes], partial: tuple[int, list[int]] | None = None) -> None:
        """Give a sequence a slot and the prefix-cache pages of these names.

        `partial`: for a sequence whose next page is partly computed, the number of its computed positions and
        the page in each layer group.
        """
        self.slots.take(seq, partial[0] if partial else len(names) * self.config.block_size)
        self.tables.adopt(seq.slot, names)
        for group, page in enumerate(partial[1] if partial else ()):
            self.tables.append(seq.slot, group, page)
        seq.pages = self.tables.rows[seq.slot]
        bisect.insort(self.prefilling, seq, key=BY_AGE)

    def leave(self, seq: Sequence) -> None:
        """Take back a sequence's pages and its slot."""
        self._register(seq)
        if self.tiers is not None and seq.chain is not None:
            self.tiers.touch(seq.chain[1:])
        self.tables.release(seq.slot)
        if seq in self.prefilling:
            self.prefilling.remove(seq)
        self.slots.release(seq)
        seq.pages = []

    @property
    def num_fetches(self) -> int:
        """Slots reserved for sequences whose pages are fetched from the lower tiers."""
        return 0 if self.tiers is None else len(self.tiers.fetches)

    def youngest(self) -> Sequence:
        """Return the youngest of several running sequences.

        Raises:
          RuntimeError: for a single sequence. `accept` refuses a request that does not fit by itself, so this
            is a fault of the engine.
        """
        running = self.slots.sequences[self.slots.taken].tolist()
        if len(running) < 2:
            raise RuntimeError(f"{running} holds all it can of {self.config.num_pages} pages and needs more")
        return max(running, key=BY_AGE)

    # ---- from step to step

    def settle(self) -> None:
        """Register the pages that the last step completed, and release what no later step reads.

        A sequence leaves once its last token is scheduled, before that token is known.
        """
        slots = self.slots
        for seq in self.computed:
            if seq.slot >= 0:
                self._register(seq)
        self.computed = []
        for slot in (slots.taken & (slots.num_total >= slots.limit)).nonzero()[0].tolist():
            self.leave(slots.sequences.item(slot))
        if self._has_windows:
            taken = np.flatnonzero(slots.taken)
            self.tables.drop_unseen(taken, slots.num_computed[taken])

    def advance_decodes(self, slots: np.ndarray, index: int) -> np.ndarray:
        """Count one computed and one sampled token a slot, in the call `index` of `Scheduler.schedule`.

        Returns:
          The computed positions, int32 [n].
        """
        positions = self.slots.num_computed[slots]
        self.slots.sampled_at[slots] = index
        self.slots.num_computed[slots] += 1
        self.slots.num_total[slots] += 1
        return positions

    def advance_chunk(self, seq: Sequence, tokens: int, index: int) -> Chunk:
        """Count the next `tokens` positions of a sequence as computed, and give it pages for them.

        index: see `advance_decodes`.
        """
        slots, slot, start = self.slots, seq.slot, seq.num_computed
        end = start + tokens
        samples = end == seq.num_total
        self.tables.grow(slot, end)
        slots.num_computed[slot] = end
        if samples:
            slots.num_total[slot] += 1
            slots.decoding[slot], slots.sampled_at[slot] = True, index
            self.prefilling.remove(seq)
        self.computed.append(seq)
        return Chunk(seq, slot, start, tokens, samples)

    def commit(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Add the sampled token of each slot to its known tokens."""
        table = self.slots
        table.append(slots, tokens)
        full_pages = np.minimum(table.num_known[slots], table.num_computed[slots]) // self.config.block_size
        for slot in slots[full_pages > table.registered[slots]].tolist():
            self._register(table.sequences.item(slot))

    def _register(self, seq: Sequence) -> None:
        """Give the pages whose tokens are all known and computed their content names."""
        slots, slot, size = self.slots, seq.slot, self.config.block_size
        begin = slots.registered.item(slot)
        end = min(slots.num_known.item(slot), slots.num_computed.item(slot)) // size
        if end > begin:
            self.tables.register(slot, seq.names(end, size), begin)
            slots.registered[slot] = end

    # ---- admission

    def forecast(self, lengths: OutputLengths) -> Forecast:
        """Return the forecast use of the full-attention group's pages; one of no pages without that group."""
        table, tables, full, size = self.slots, self.tables, self._full, self.config.block_size
        if full is None:
            nothing = np.zeros(0, np.int32)
            return Forecast(nothing, nothing, nothing, 0, size)
        slots = np.flatnonzero(table.decoding)
        computed, final = table.num_computed[slots], table.limit[slots] - 1
        may_stop = ~table.ignores_eos[slots]
        guessed = slots[may_stop]
        if len(guessed):
            prompt = table.num_prompt[guessed]
            expected = prompt + lengths.expect(table.num_total[guessed] - prompt, table.rank[guessed]) - 1
            final[may_stop] = np.minimum(table.limit[guessed] - 1, expected)
        self._remaining[:] = FOREVER
        self._remaining[slots] = final - computed
        shared = tables.count[full] - tables.charged[full]
        forecast = Forecast(computed, final - computed, shared[slots], tables.common(full), size)
        for seq in self.prefilling:
            forecast.use = forecast.use_with(seq.num_total, lengths.final(seq), int(shared[seq.slot]))
        for fetch in self.tiers.fetches if self.tiers is not None else ():
            held = len(fetch.held[full]) + (fetch.partial is not None)
            forecast.use = forecast.use_with(fetch.seq.num_total, lengths.final(fetch.seq), held)
        return forecast

    def fits(self, seq: Sequence, names: list[bytes], forecast: Forecast, lengths: OutputLengths) -> bool:
        """Return True if the pages will last with one more sequence, and then add it to the forecast.

        `names`: content names of the pages that the sequence finds in the prefix cache.
        """
        config, limits = self.config, self.slots.limit[self.slots.taken]
        if self.tiers is not None and self.tiers.fetches:
            limits = np.append(limits, [fetch.seq.limit for fetch in self.tiers.fetches])
        for pages, window in zip(config.num_pages, config.windows, strict=True):
            if window is not None:
                ends = np.append(limits, seq.limit) - 1
                if most_pages(ends, window, config.block_size).sum() > pages:
                    return False
        if self._full is not None:
            payers = self.tables.payers(self._full, names)
            lent = collections.Counter(self._remaining[[slot for slot in payers if slot >= 0]].tolist())
            use = forecast.use_with(seq.num_total, lengths.final(seq), len(payers), lent)
            if use.max() > config.num_pages[self._full]:
                return False
            forecast.use = use
        return True
