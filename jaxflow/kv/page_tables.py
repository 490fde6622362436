"""Which pages each slot's sequence holds, in every layer group: the host's half of the page table.

A row of a layer group is a list of page ids, one for every `block_size` positions; -1 where a window layer
has given the page back. The device's copy of the table is brought up to date by the entries that
`take_appends` tells. Entries that become -1 are not told: no query sees them any more.

For the forecast of memory (`jaxflow.scheduler.admission`) each page in use is charged to one slot, the one whose
release will free it, or, as soon as it is shared, to nobody (`common`), since no single release frees it.
"""

from collections.abc import Sequence

import numpy as np

from jaxflow.kv.pages import PagePool, held
from jaxflow.kv.prefix import first_seen, longest_hit


class PageTables:
    """Pages of `num_slots` sequences in G layer groups.

    Attributes (arrays are int32 [G, num_slots]):
      pools: the group's `PagePool`.
      rows: rows[slot][group] is the list of page ids.
      count: entries of each row.
      charged: pages that are freed when the slot is released.
    """

    def __init__(
        self,
        num_pages: Sequence[int],
        windows: Sequence[int | None],
        block_size: int,
        num_slots: int,
        *,
        keep: bool,
    ):
        self.windows = tuple(windows)
        self.block_size = block_size
        self.pools = [PagePool(n, keep=keep) for n in num_pages]
        self.rows = [[[] for _ in windows] for _ in range(num_slots)]
        self.count = np.zeros((len(windows), num_slots), np.int32)
        self.charged = np.zeros((len(windows), num_slots), np.int32)
        self._gone = np.zeros((len(windows), num_slots), np.int32)  # leading entries that are -1
        self._owner = [[-1] * n for n in num_pages]  # the slot each page is charged to
        self._appends: list[np.ndarray] = []

    def available(self) -> list[int]:
        """Free or cached pages, of each group."""
        return [pool.available for pool in self.pools]

    def common(self, group: int) -> int:
        """Pages in use that no single release will free."""
        pool = self.pools[group]
        return pool.num_pages - pool.available - int(self.charged[group].sum())

    def hit(self, names: Sequence[bytes]) -> int:
        """Leading pages whose content is at hand, see `longest_hit`."""
        return longest_hit(self.pools, self.windows, names, self.block_size)

    def payers(self, group: int, names: Sequence[bytes]) -> list[int]:
        """For each page of a hit that is in use, and so costs nothing: the slot it is charged to, or -1 for
        nobody.
        """
        pool, owner = self.pools[group], self._owner[group]
        pages = (pool.find(name) for name in names)
        return [owner[page] for page in pages if page >= 0 and pool.references(page)]

    def adopt(self, slot: int, names: Sequence[bytes]) -> None:
        """Makes the pages of a hit the beginning of an empty row."""
        m = len(names)
        for g, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
            gone = first_seen(m * self.block_size, window, self.block_size)
            pages = [pool.find(name) for name in names[gone:]]
            owner = self._owner[g]
            for page in pages:
                if pool.references(page) == 0:
                    owner[page] = slot
                    self.charged[g, slot] += 1
                elif owner[page] >= 0:
                    self.charged[g, owner[page]] -= 1
                    owner[page] = -1
            pool.reference(pages)
            self.rows[slot][g] += [-1] * gone + pages
            self._gone[g, slot] = gone
            self._tell(g, slot, gone, pages)
        self.count[:, slot] = m

    def append(self, slot: int, group: int, page: int) -> None:
        """Makes a page that was allocated for nobody (`hold`) the next of a row."""
        index = int(self.count[group, slot])
        self.rows[slot][group].append(page)
        self._owner[group][page] = slot
        self.charged[group, slot] += 1
        self.count[group, slot] = index + 1
        self._tell(group, slot, index, [page])

    def hold(self, group: int, names: Sequence[bytes], more: int) -> tuple[list[int], list[int]] | None:
        """References pages of a group on nobody's behalf, until `release_held`: they stay, and are free to be
        filled.

        Returns the page of each name, a new one where the content is not at hand, and `more` pages beside
        them; None if there are not so many.
        """
        pool, owner = self.pools[group], self._owner[group]
        found = [pool.find(name) for name in names]
        there = [page for page in found if page >= 0]
        needed = len(found) - len(there) + more
        if needed > pool.available - sum(not pool.references(page) for page in there):
            return None
        for page in there:
            if pool.references(page) and owner[page] >= 0:
                self.charged[group, owner[page]] -= 1
            owner[page] = -1
        pool.reference(there)
        new = pool.allocate(needed)
        for page in new:
            owner[page] = -1
        fresh = iter(new)
        return [page if page >= 0 else next(fresh) for page in found], list(fresh)

    def release_held(self, group: int, pages: Sequence[int]) -> None:
        """Gives back what `hold` gave."""
        self.pools[group].release(reversed(pages))

    def fit(self, slot: int, end: int, tokens: int, planned: list[int]) -> int:
        """Of `tokens` positions after the first `end`, how many there are pages for.

        `planned` [G]: pages promised in this step already; those of the answer are added. `end` may lie
        beyond the row if the pages up to it are promised too.
        """
        size = self.block_size
        have = [max(int(self.count[g, slot]), -(-end // size)) for g in range(len(self.pools))]
        for g, pool in enumerate(self.pools):
            tokens = min(tokens, (have[g] + pool.available - planned[g]) * size - end)
        for g in range(len(self.pools)):
            planned[g] += max(0, -(-(end + tokens) // size) - have[g])
        return max(0, tokens)

    def grow(self, slot: int, end: int) -> None:
        """Gives the slot pages for its first `end` positions. Raises: OutOfPages."""
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
                self._tell(g, slot, count, pages)

    def crossing(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Which slots lack a page for the token at their position: bool [G, n] for slots and positions int
        [n].
        """
        return positions // self.block_size >= self.count[:, slots]

    def grow_crossing(self, slots: np.ndarray, crossing: np.ndarray) -> None:
        """Gives one page to every slot of `crossing` (see there). Raises: OutOfPages."""
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
        """Gives back what window layers no longer see from the slots' next positions on (int [n] each).

        To be called before the step's work is chosen: a page given back here may be written in this very
        step.
        """
        for g, window in enumerate(self.windows):
            if window is None:
                continue
            gone = np.minimum(
                np.maximum(positions - (window - 1), 0) // self.block_size, self.count[g, slots]
            )
            for i in np.flatnonzero(gone > self._gone[g, slots]):
                slot = int(slots[i])
                row = self.rows[slot][g]
                span = range(int(self._gone[g, slot]), int(gone[i]))
                pages = [row[j] for j in span]
                self.charged[g, slot] -= sum(self._owner[g][page] == slot for page in pages)
                self.pools[g].release(reversed(pages))
                for j in span:
                    row[j] = -1
                self._gone[g, slot] = gone[i]

    def register(self, slot: int, names: Sequence[bytes], begin: int) -> None:
        """Names pages begin.. of a row: `names` are those of its leading pages, all of them computed."""
        for pool, row in zip(self.pools, self.rows[slot], strict=True):
            for i in range(begin, len(names)):
                if row[i] >= 0:
                    pool.register(row[i], names[i])

    def release(self, slot: int) -> None:
        """Gives back all pages of a slot."""
        for pool, row in zip(self.pools, self.rows[slot], strict=True):
            pool.release(held(row))
        self.rows[slot] = [[] for _ in self.windows]
        self.count[:, slot] = 0
        self.charged[:, slot] = 0
        self._gone[:, slot] = 0

    def take_appends(self) -> np.ndarray:
        """Entries set since the last call, in order: int32 [n, 4] of (group, slot, index, page)."""
        appends, self._appends = self._appends, []
        return np.concatenate(appends) if appends else np.zeros((0, 4), np.int32)

    def _tell(self, group: int, slot: int, index: int, pages: list[int]) -> None:
        if pages:
            self._appends.append(_entries(group, slot, np.arange(index, index + len(pages)), pages))


def _entries(group: int, slots: np.ndarray | int, index: np.ndarray, pages: list[int]) -> np.ndarray:
    entries = np.empty((len(pages), 4), np.int32)
    entries[:, 0] = group
    entries[:, 1] = slots
    entries[:, 2] = index
    entries[:, 3] = pages
    return entries
