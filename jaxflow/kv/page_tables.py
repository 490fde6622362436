"""Page tables on the host: the pages of each slot's sequence, in every page group.

A row is a list of page ids of one group, one for every `block_size` positions; -1 marks a page that a window
layer, or a group of heads with spans, gave back. The device's copy of the table follows by the entries of
`take_appends`. Entries that become -1 are not sent to the device, because no later query sees their pages.

For the memory forecast (`jaxflow.scheduler.admission`) each page in use is charged to the slot whose release
frees the page. A shared page is charged to no slot (`common`), because no single release frees the page.
"""

import functools
from collections.abc import Sequence

import numpy as np

from jaxflow.config import Window
from jaxflow.kv.pages import PagePool, held
from jaxflow.kv.prefix import longest_hit
from jaxflow.kv.visible import first_seen, sink_pages, unseen


class PageTables:
    """Pages of `num_slots` sequences in G page groups.

    Args:
      num_pages, windows: of each group.
      keep: see `PagePool`.
      record_named: record the newly named pages for `take_named`.

    Attributes (arrays are int32 [G, num_slots]):
      pools: the `PagePool` of each group.
      rows: rows[slot][group] is the list of page ids.
      count: entries of each row.
      charged: pages that the slot's release frees.
      named: (group, page, digest) of the pages that were named since the last `take_named`.
    """

    def __init__(
        self,
        num_pages: Sequence[int],
        windows: Sequence[Window],
        block_size: int,
        num_slots: int,
        *,
        keep: bool,
        record_named: bool = False,
    ):
        self.windows = tuple(windows)
        self.block_size = block_size
        self.named: list[tuple[int, int, bytes]] = []
        self.pools = [
            PagePool(n, keep=keep, on_named=functools.partial(self._record, g) if record_named else None)
            for g, n in enumerate(num_pages)
        ]
        self.rows = [[[] for _ in windows] for _ in range(num_slots)]
        self.count = np.zeros((len(windows), num_slots), np.int32)
        self.charged = np.zeros((len(windows), num_slots), np.int32)
        self._gone = np.zeros((len(windows), num_slots), np.int32)  # entries before the window
        self._owner = [[-1] * n for n in num_pages]  # slot that is charged for each page
        self._appends: list[np.ndarray] = []

    def available(self) -> list[int]:
        """Return the number of free or cached pages of each group."""
        return [pool.available for pool in self.pools]

    def common(self, group: int) -> int:
        """Return the number of pages in use that no single release frees."""
        pool = self.pools[group]
        return pool.num_pages - pool.available - int(self.charged[group].sum())

    def hit(self, names: Sequence[bytes]) -> int:
        """Return the number of leading pages that are on the device, see `longest_hit`."""
        return longest_hit(self.pools, self.windows, names, self.block_size)

    def payers(self, group: int, names: Sequence[bytes]) -> list[int]:
        """Return the slot to which each page in use of a hit is charged, -1 for no slot."""
        pool, owner = self.pools[group], self._owner[group]
        pages = (pool.find(name) for name in names)
        return [owner[page] for page in pages if page >= 0 and pool.references(page)]

    def adopt(self, slot: int, names: Sequence[bytes]) -> None:
        """Fill an empty row with the pages of a hit."""
        m = len(names)
        for g, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
            gap = unseen(m * self.block_size, window, self.block_size)
            sinks = [pool.find(name) for name in names[: gap.start]]
            pages = sinks + [pool.find(name) for name in names[gap.stop :]]
            owner = self._owner[g]
            for page in pages:
                if pool.references(page) == 0:
                    owner[page] = slot
                    self.charged[g, slot] += 1
                elif owner[page] >= 0:
                    self.charged[g, owner[page]] -= 1
                    owner[page] = -1
            pool.reference(pages)
            self.rows[slot][g] += sinks + [-1] * len(gap) + pages[len(sinks) :]
            self._gone[g, slot] = gap.stop
            self._add_entries(g, slot, 0, sinks)
            self._add_entries(g, slot, gap.stop, pages[len(sinks) :])
        self.count[:, slot] = m

    def append(self, slot: int, group: int, page: int) -> None:
        """Append a page of `hold` to a row."""
        index = int(self.count[group, slot])
        self.rows[slot][group].append(page)
        self._owner[group][page] = slot
        self.charged[group, slot] += 1
        self.count[group, slot] = index + 1
        self._add_entries(group, slot, index, [page])

    def hold(self, group: int, names: Sequence[bytes], more: int) -> tuple[list[int], list[int]] | None:
        """Reference pages of a group for a sequence without a slot, until `release_held`.

        Returns the page of each name, a new page for content that is not on the device, and `more` further
        pages; None if there are not enough pages.
        """
        pool, owner = self.pools[group], self._owner[group]
        found = [pool.find(name) for name in names]
        present = [page for page in found if page >= 0]
        needed = len(found) - len(present) + more
        if needed > pool.available - sum(not pool.references(page) for page in present):
            return None
        for page in present:
            if pool.references(page) and owner[page] >= 0:
                self.charged[group, owner[page]] -= 1
            owner[page] = -1
        pool.reference(present)
        new = pool.allocate(needed)
        for page in new:
            owner[page] = -1
        fresh = iter(new)
        return [page if page >= 0 else next(fresh) for page in found], list(fresh)

    def release_held(self, group: int, pages: Sequence[int]) -> None:
        """Give back pages of `hold`."""
        self.pools[group].release(reversed(pages))

    def fit(self, slot: int, end: int, tokens: int, planned: list[int]) -> int:
        """Return how many of `tokens` positions after the first `end` have pages.

        Args:
          end: may lie beyond the row, if the pages up to `end` are planned.
          planned: [G] pages already planned in this step; the pages of the result are added.
        """
        size = self.block_size
        have = [max(int(self.count[g, slot]), -(-end // size)) for g in range(len(self.pools))]
        for g, pool in enumerate(self.pools):
            tokens = min(tokens, (have[g] + pool.available - planned[g]) * size - end)
        for g in range(len(self.pools)):
            planned[g] += max(0, -(-(end + tokens) // size) - have[g])
        return max(0, tokens)

    def grow(self, slot: int, end: int) -> None:
        """Allocate the slot's pages up to its first `end` positions. Raises: OutOfPages."""
        needed = -(-end // self.block_size)
        for g, pool in enumerate(self.pools):
            count = int(self.count[g, slot])
            if needed > count:
                pages = pool.allocate(needed - count)
                self.rows[slot][g] += pages
                for page in pages:
                    self._owner[g][page] = slot
                self.charged[g, slot] += len(pages)
                self.count[g, slot] = needed
                self._add_entries(g, slot, count, pages)

    def crossing(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return which slots lack a page for the token at their position: bool [G, n], from int [n] each."""
        return positions // self.block_size >= self.count[:, slots]

    def grow_crossing(self, slots: np.ndarray, crossing: np.ndarray) -> None:
        """Allocate one page for every slot of `crossing`. Raises: OutOfPages."""
        for g, pool in enumerate(self.pools):
            rows = slots[crossing[g]]
            if not len(rows):
                continue
            pages = pool.allocate(len(rows))
            self._appends.append(_entries(g, rows, self.count[g, rows], pages))
            self.charged[g, rows] += 1
            self.count[g, rows] += 1
            for slot, page in zip(rows.tolist(), pages, strict=True):
                self.rows[slot][g].append(page)
                self._owner[g][page] = slot

    def drop_unseen(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Release the pages that groups with a window do not see from the slots'
        next positions on (int [n] each).

        Called before the step's work is chosen, because the step may write to a released page.
        """
        for g, window in enumerate(self.windows):
            if window is None:
                continue
            gone = np.minimum(first_seen(positions, window, self.block_size), self.count[g, slots])
            sinks = sink_pages(window, self.block_size)
            for i in np.flatnonzero(gone > self._gone[g, slots]):
                slot = int(slots[i])
                row = self.rows[slot][g]
                span = range(max(sinks, int(self._gone[g, slot])), int(gone[i]))
                pages = [row[j] for j in span]
                self.charged[g, slot] -= sum(self._owner[g][page] == slot for page in pages)
                self.pools[g].release(reversed(pages))
                for j in span:
                    row[j] = -1
                self._gone[g, slot] = gone[i]

    def register(self, slot: int, names: Sequence[bytes], begin: int) -> None:
        """Name the pages of a slot from page `begin` on. `names`: names of the computed leading pages."""
        for pool, row in zip(self.pools, self.rows[slot], strict=True):
            for i in range(begin, len(names)):
                if row[i] >= 0:
                    pool.register(row[i], names[i])

    def release(self, slot: int) -> None:
        """Release all pages of a slot."""
        for pool, row in zip(self.pools, self.rows[slot], strict=True):
            pool.release(held(row))
        self.rows[slot] = [[] for _ in self.windows]
        self.count[:, slot] = 0
        self.charged[:, slot] = 0
        self._gone[:, slot] = 0

    def take_appends(self) -> np.ndarray:
        """Return the entries since the last call, in order: int32 [n, 4] of (group, slot, index, page)."""
        appends, self._appends = self._appends, []
        return np.concatenate(appends) if appends else np.zeros((0, 4), np.int32)

    def take_named(self) -> list[tuple[int, int, bytes]]:
        """Return (group, page, digest) of the pages that were named since the last call, in order."""
        named, self.named = self.named, []
        return named

    def _record(self, group: int, page: int, digest: bytes) -> None:
        self.named.append((group, page, digest))

    def _add_entries(self, group: int, slot: int, index: int, pages: list[int]) -> None:
        if pages:
            self._appends.append(_entries(group, slot, np.arange(index, index + len(pages)), pages))


def _entries(group: int, slots: np.ndarray | int, index: np.ndarray, pages: list[int]) -> np.ndarray:
    entries = np.empty((len(pages), 4), np.int32)
    entries[:, 0] = group
    entries[:, 1] = slots
    entries[:, 2] = index
    entries[:, 3] = pages
    return entries
