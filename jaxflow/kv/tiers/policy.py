"""Tier policy: the pages that go to the host, and the pages that come back for a waiting sequence.

NanoFlow §4.2.2. A complete page is stored to the host right after the step that completed the page. A waiting
sequence with more pages on the host than on the device is set aside at its turn: places for the pages are
reserved, and the sequence gets its slot when all pages have arrived. The policy copies nothing. Before each
step, `jaxflow.kv.tiers.offload` takes `take_scatters`, `take_stores` and `take_loads`, in this order, and
reports the ends of the copies by `stored` and `loaded`.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from jaxflow.kv.page_tables import PageTables
from jaxflow.kv.prefix import longest_hit, part_name
from jaxflow.kv.tiers.host_store import HostStore, Key, PageState, key_of
from jaxflow.kv.visible import most_pages, unseen
from pallas_kernels.cards import this_card


class PagedSequence(Protocol):
    """The view of a sequence that the policy needs; see `jaxflow.scheduler`.

    Attributes:
      swapped: positions computed at the last pre-emption, and the name of the last page, which these
        positions fill partially. None if the host does not have that page.
    """

    chain: list[bytes] | None
    slot: int
    key: tuple
    swapped: tuple[int, bytes] | None
    t_first_schedule: float | None

    @property
    def token_ids(self) -> np.ndarray: ...

    @property
    def num_known(self) -> int: ...

    @property
    def num_computed(self) -> int: ...

    def names(self, pages: int, block_size: int) -> list[bytes]:
        """Return the names of the first `pages` pages."""
        ...


@dataclasses.dataclass(frozen=True)
class FetchCosts:
    """Measured costs of this machine and model.

    Attributes:
      bytes_per_s: rate of the link to the device, over all shards, in each direction.
      latency_s: time from the decision to the first step with the pages, without the time of their bytes.
      seconds_per_token: time of prefill in a full step.
    """

    bytes_per_s: float
    latency_s: float
    seconds_per_token: float

    def pays(self, tokens: int, num_bytes: int) -> bool:
        """Return True if `num_bytes` arrive before `tokens` positions are computed.

        The time of attention is left out. It grows with the square of the length, in favor of the copy.
        """
        return self.latency_s + num_bytes / self.bytes_per_s < tokens * self.seconds_per_token


@dataclasses.dataclass(eq=False)
class FetchPage:
    """A page of a fetch, and its place on the device."""

    group: int
    page: int
    digest: bytes
    partial: bool  # some positions only: the page gets no name on the device
    state: PageState = PageState.QUEUED

    @property
    def key(self) -> Key:
        return key_of(self.group, self.digest)


@dataclasses.dataclass(eq=False)
class Fetch[S: PagedSequence]:
    """The pages with which a sequence will start, and the copies of the pages that the device lacks.

    Attributes:
      names: names of the complete pages.
      tokens: positions that need no computation because of the fetch.
      partial: positions computed, and the name of the last page, if the host has a partial last page.
      missing: keys of the complete pages that the device lacks.
      held: pages of each group that are referenced for the sequence, without the partial pages.
      partial_pages: the partial page of each group, or empty.
      pages: the pages to be copied.
      from_lower: the number of pages that the host had to read from the lower tier.
      ended: the fetch was completed or cancelled.
    """

    seq: S
    names: list[bytes]
    tokens: int
    partial: tuple[int, bytes] | None
    missing: frozenset[Key]
    held: list[list[int]] = dataclasses.field(default_factory=list)
    partial_pages: list[int] = dataclasses.field(default_factory=list)
    pages: list[FetchPage] = dataclasses.field(default_factory=list)
    from_lower: int = 0
    ended: bool = False

    @property
    def complete(self) -> bool:
        return all(page.state is PageState.LOADED for page in self.pages)

    @property
    def queued(self) -> list[FetchPage]:
        """The pages without a started copy."""
        return [page for page in self.pages if page.state is PageState.QUEUED]

    @property
    def start(self) -> tuple[int, list[int]] | None:
        """The partial page, as `Running.enter` takes it: positions computed, and the page of each group."""
        return None if self.partial is None else (self.partial[0], self.partial_pages)

    def hold(self, tables: PageTables) -> bool:
        """Reserve a place for every page. Reserve nothing and return False if there are not enough pages."""
        for group, window in enumerate(tables.windows):
            gap = unseen(len(self.names) * tables.block_size, window, tables.block_size)
            names = self.names[: gap.start] + self.names[gap.stop :]
            missing = [key_of(group, name) in self.missing for name in names]
            taken = tables.hold(group, names, more=self.partial is not None)
            if taken is None:
                self.release(tables)
                self.held, self.partial_pages, self.pages = [], [], []
                return False
            pages, more = taken
            self.held.append(pages)
            self.partial_pages += more
            self.pages += [
                FetchPage(group, page, name, partial=False)
                for page, name, absent in zip(pages, names, missing, strict=True)
                if absent
            ]
            if self.partial is not None:
                self.pages.append(FetchPage(group, more[0], self.partial[1], partial=True))
        return True

    def release(self, tables: PageTables, *, keep_partial: bool = False) -> None:
        """Give back the pages of `hold`, without the partial pages if `keep_partial`."""
        for group, pages in enumerate(self.held):
            tables.release_held(group, pages)
        for group, page in enumerate(() if keep_partial else self.partial_pages):
            tables.release_held(group, [page])


@dataclasses.dataclass
class TierCounters:
    """Counts since the start."""

    device_hit_tokens: int = 0  # prompt tokens found on the device at the first start of their sequence
    host_hit_tokens: int = 0  # prompt tokens fetched from the host
    disk_hit_tokens: int = 0  # the share of these tokens that the host had to read from the disk
    swapped_in: int = 0  # pre-empted sequences that continued in the middle of a page
    cancelled: int = 0  # fetches that were given up
    stores_dropped: int = 0  # pages that left the device before there was staging space for their copy


class TierPolicy[S: PagedSequence]:
    """Stores and fetches of one scheduler.

    Args:
      tables: the scheduler's pages, with `record_named`.
      staging_bytes: limit of the copies under way in each direction, over all devices.

    Attributes:
      fetches: fetches whose sequence has no slot yet.
    """

    def __init__(self, tables: PageTables, store: HostStore, costs: FetchCosts, staging_bytes: int):
        self.tables, self.store, self.costs, self.staging_bytes = tables, store, costs, staging_bytes
        self.counters = TierCounters()
        self.fetches: list[Fetch[S]] = []
        self._followers: list[tuple[S, Fetch[S]]] = []  # sequences that wait for another's fetch
        self._retries: list[S] = []  # sequences of failed fetches
        self._partial: list[tuple[int, int, bytes]] = []  # (group, page, name) of partial pages to store
        self._delayed: collections.deque[tuple[int, bytes]] = collections.deque()  # (group, name) to store
        self._storing_bytes = self._loading_bytes = 0
        self._scatters: list[tuple[FetchPage, Any]] = []

    @property
    def busy(self) -> bool:
        """True if a page waits for its copy, or a sequence for a page."""
        return bool(
            self.tables.named
            or self._partial
            or self._delayed
            or self.fetches
            or self._followers
            or self._retries
            or self._scatters
        )

    @property
    def copying(self) -> bool:
        """True while copies are under way."""
        return self._storing_bytes > 0 or self._loading_bytes > 0

    # ---- to the host

    def swap_out(self, seq: S) -> None:
        """Store the partial last page of a sequence that is about to lose its pages.

        The sequence can then continue in the middle of the page. The complete pages were stored before. The
        page is not stored if its tokens are computed sooner than they are fetched.
        """
        size, end = self.tables.block_size, min(seq.num_known, seq.num_computed)
        seq.swapped = None
        if end % size == 0 or seq.chain is None or not self.costs.pays(end, self._sequence_bytes(end)):
            return
        seq.names(end // size, size)
        digest = part_name(seq.chain, seq.token_ids, end, size)
        self._partial += [
            (group, row[end // size], digest) for group, row in enumerate(self.tables.rows[seq.slot])
        ]
        seq.swapped = end, digest

    def take_stores(self) -> list[tuple[int, int, Key]]:
        """Return (group, page, key) of the pages to gather before the next step.

        `stored` is called for each. A named page beyond the staging space is delayed for as long as the
        device has the page. The page of a pre-empted sequence cannot be delayed.
        """
        stores: list[tuple[int, int, Key]] = []
        for group, page, digest in self._partial:
            self.counters.stores_dropped += not self._store(stores, group, page, digest, partial=True)
        self._partial = []
        while self._delayed:
            group, digest = self._delayed[0]
            page = self.tables.pools[group].find(digest)
            if page >= 0 and not self._store(stores, group, page, digest):
                break
            self.counters.stores_dropped += page < 0
            self._delayed.popleft()
        # The content of a newly named page is valid until the next step, even if the page was evicted since.
        for group, page, digest in self.tables.take_named():
            if self._delayed or not self._store(stores, group, page, digest):
                self._delayed.append((group, digest))
        return stores

    def _store(
        self,
        stores: list[tuple[int, int, Key]],
        group: int,
        page: int,
        digest: bytes,
        *,
        partial: bool = False,
    ) -> bool:
        """Add a page to `stores`, unless the host has the page. Return False without staging space."""
        key, size = key_of(group, digest), self.store.page_bytes[group]
        if self.store.contains(key):
            return True
        if self._storing_bytes + size > self.staging_bytes:
            return False
        if self.store.reserve(key, PageState.STORING, partial=partial):
            self._storing_bytes += size
            stores.append((group, page, key))
        return True

    def stored(self, key: Key, data: Any | None) -> None:
        """End the copy of a page of `take_stores`; `data` is None after an error."""
        self._storing_bytes -= self.store.page_bytes[key[0]]
        self.store.arrive(key, data)

    def touch(self, names: Sequence[bytes]) -> None:
        """Mark the pages of a chain as used now. The first page becomes the last to leave."""
        groups = range(len(self.tables.pools))
        self.store.touch([key_of(group, name) for name in reversed(names) for group in groups])

    def reach(self, names: Sequence[bytes]) -> int:
        """Return the number of leading pages that the device or the host has."""
        return reachable(list(names), self.tables, self.store.contains)[0]

    # ---- to the device

    def read_ahead(self, seq: S) -> None:
        """Start to read the pages of a new waiting sequence that only the lower tier has."""
        if self.store.lower is not None and seq.chain is not None:
            size = self.tables.block_size
            self._read_ahead(seq.names((seq.num_known - 1) // size, size))

    def consider(
        self, seq: S, names: list[bytes], hit: int, fits: Callable[[list[bytes]], bool]
    ) -> bool | None:
        """Decide whether a sequence waits, at its turn, for pages from the host.

        Args:
          names: names of the pages with which the sequence can start; the device has the first `hit`.
          fits: return True if there is memory for the sequence with pages of these names.

        Returns:
          None: no wait, because the host has nothing to gain from. True: the sequence is set aside. False:
            the sequence should wait, but there are not enough pages yet.
        """
        if self.store.lower is not None:
            self._read_ahead(names)
        fetch = plan_fetch(seq, names, hit, self.tables, self.store)
        if fetch is None:
            return None
        partial_bytes = sum(self.store.page_bytes) if fetch.partial else 0
        num_bytes = partial_bytes + sum(self.store.page_bytes[key[0]] for key in fetch.missing)
        if not self.costs.pays(fetch.tokens, num_bytes):
            return None
        for other in self.fetches:
            if not other.complete and not fetch.missing.isdisjoint(other.missing):
                self._followers.append((seq, other))
                return True
        if not fits(fetch.names) or not fetch.hold(self.tables):
            return False
        self.store.pin(page.key for page in fetch.pages)
        self.fetches.append(fetch)
        return True

    def take_loads(self) -> list[tuple[Fetch[S], FetchPage, Any]]:
        """Return the copies to the device to start now, with their data; `loaded` is called for each."""
        loads: list[tuple[Fetch[S], FetchPage, Any]] = []
        for fetch in list(self.fetches):
            queued = fetch.queued
            if any(not self.store.contains(page.key) for page in queued):  # a page failed to reach the host
                self._retries.append(self.cancel(fetch))
                continue
            for page in queued:
                size = self.store.page_bytes[page.group]
                if self.store.is_stored(page.key) and self._loading_bytes + size <= self.staging_bytes:
                    self._loading_bytes += size
                    page.state = PageState.LOADING
                    fetch.from_lower += self.store.take_newly_read(page.key)
                    self.store.unpin([page.key])
                    loads.append((fetch, page, self.store.get(page.key)))
        return loads

    def loaded(self, fetch: Fetch[S], page: FetchPage, data: Any | None) -> None:
        """End the copy of a page of `take_loads`, and name the page; `data` is None after an error."""
        self._loading_bytes -= self.store.page_bytes[page.group]
        if fetch.ended:
            return
        if data is None:
            self._retries.append(self.cancel(fetch))
            return
        page.state = PageState.LOADED
        self.store.counters.loaded += 1
        if not page.partial:
            self.tables.pools[page.group].register(page.page, page.digest)
        self._scatters.append((page, data))

    def take_scatters(self) -> list[tuple[FetchPage, Any]]:
        """Return the pages to write to the cache before the next step, with their data."""
        scatters, self._scatters = self._scatters, []
        return scatters

    def take_retries(self) -> list[S]:
        """Return the sequences to consider again: their fetch failed, or the fetch they waited for ended."""
        ended = [seq for seq, fetch in self._followers if fetch.ended or fetch.complete]
        self._followers = [
            (seq, fetch) for seq, fetch in self._followers if not (fetch.ended or fetch.complete)
        ]
        retries, self._retries = [*self._retries, *ended], []
        return retries

    def complete_fetches(self) -> list[Fetch[S]]:
        """Return the complete fetches, the oldest sequence first."""
        return sorted((fetch for fetch in self.fetches if fetch.complete), key=lambda fetch: fetch.seq.key)

    def finish(self, fetch: Fetch[S]) -> None:
        """End a complete fetch. The caller gives the pages to the sequence before any other allocation."""
        for page in fetch.pages:
            if not page.partial:  # another page may have had the name at the arrival, and lost it since
                self.tables.pools[page.group].register(page.page, page.digest)
        self._end(fetch, keep_partial=True)
        self.counters.swapped_in += fetch.partial is not None
        self._discard_partial(fetch.seq)

    def admitted(self, seq: S, found: int, fetch: Fetch[S] | None) -> None:
        """Count the hits of a sequence that got a slot: `found` positions are computed, some by a `fetch`."""
        fetched = 0 if fetch is None else fetch.tokens
        self.touch(seq.names(found // self.tables.block_size, self.tables.block_size))
        if seq.t_first_schedule is None:
            self.counters.device_hit_tokens += found - fetched
            self.counters.host_hit_tokens += fetched
            if fetch is not None and fetch.pages:
                self.counters.disk_hit_tokens += fetched * fetch.from_lower // len(fetch.pages)

    def cancel(self, fetch: Fetch[S]) -> S:
        """Give up a fetch, and return its sequence, which has to wait again. Copies are dropped later."""
        self._end(fetch)
        self.counters.cancelled += 1
        return fetch.seq

    def forget(self, seq: S) -> None:
        """Give up everything for a sequence that has finished."""
        self._followers = [(other, fetch) for other, fetch in self._followers if other is not seq]
        self._retries = [other for other in self._retries if other is not seq]
        for fetch in [fetch for fetch in self.fetches if fetch.seq is seq]:
            self._end(fetch)
        self._discard_partial(seq)

    # ----

    def _end(self, fetch: Fetch[S], *, keep_partial: bool = False) -> None:
        fetch.ended = True
        self.fetches.remove(fetch)
        self.store.unpin(page.key for page in fetch.queued)
        fetch.release(self.tables, keep_partial=keep_partial)

    def _discard_partial(self, seq: S) -> None:
        """Remove the partial page of a sequence from the host, because no other sequence can use the page."""
        if seq.swapped is not None:
            self.store.discard(key_of(group, seq.swapped[1]) for group in range(len(self.tables.pools)))
            seq.swapped = None

    def _read_ahead(self, names: list[bytes]) -> None:
        """Read the pages that only the lower tier has, unless their tokens are computed much sooner."""
        assert self.store.lower is not None
        reach, missing = reachable(names, self.tables, self.store.contains_or_lower)
        keys = [key for key in missing if not self.store.contains(key)]
        if not keys:
            return
        tokens = (reach - reachable(names, self.tables, self.store.contains)[0]) * self.tables.block_size
        seconds = self.store.lower.read_seconds(sum(self.store.page_bytes[key[0]] for key in keys))
        if seconds <= this_card().disk_patience * tokens * self.costs.seconds_per_token:
            self.store.read_ahead(keys)

    def _sequence_bytes(self, tokens: int) -> int:
        """Return the bytes of the pages of a sequence of `tokens` positions."""
        groups = zip(self.tables.windows, self.store.page_bytes, strict=True)
        return sum(size * int(most_pages(tokens, w, self.tables.block_size)) for w, size in groups)


class _DeviceOrTier:
    """The names of one page group on the device and in a tier, as an index for `longest_hit`."""

    def __init__(self, group: int, tables: PageTables, contains: Callable[[Key], bool]):
        self._group, self._pool, self._contains = group, tables.pools[group], contains

    def find(self, digest: bytes) -> int:
        page = self._pool.find(digest)
        return page if page >= 0 else 0 if self._contains(key_of(self._group, digest)) else -1


def reachable(
    names: list[bytes], tables: PageTables, contains: Callable[[Key], bool]
) -> tuple[int, list[Key]]:
    """Return the number of leading pages that the device or a tier has, and the keys that the device lacks.

    Of a group with a window, only the pages that a later query sees count. `contains`: the tier's lookup.
    """
    size, windows = tables.block_size, tables.windows
    indices = [_DeviceOrTier(group, tables, contains) for group in range(len(windows))]
    reach = longest_hit(indices, windows, names, size)
    gaps = [unseen(reach * size, window, size) for window in windows]
    wanted = ((i, group) for i in range(reach) for group, gap in enumerate(gaps) if i not in gap)
    return reach, [key_of(group, names[i]) for i, group in wanted if tables.pools[group].find(names[i]) < 0]


def plan_fetch[S: PagedSequence](
    seq: S, names: list[bytes], hit: int, tables: PageTables, host: HostStore
) -> Fetch[S] | None:
    """Return the fetch of the host's pages beyond the first `hit`, which the device has; None without any.

    `names`: names of the pages with which the sequence can start.
    """
    size, groups = tables.block_size, range(len(tables.windows))
    reach, missing = reachable(names, tables, host.contains)
    end, partial = reach * size, None
    swapped = seq.swapped
    if swapped is not None and swapped[0] // size == reach and swapped[0] < seq.num_known:
        on_host = all(host.contains(key_of(group, swapped[1])) for group in groups)
        partial, end = (swapped, swapped[0]) if on_host else (None, end)
    if end <= hit * size:
        return None
    return Fetch(seq, names[:reach], end - hit * size, partial, frozenset(missing))
