"""Store of KV pages in host memory: keys, states, and least-recently-used eviction (NanoFlow §4.2.2).

The store copies nothing and does not look into a page. A lower tier, the disk, takes the pages that leave the
host, and pages are read ahead from the lower tier. The engine's thread owns the store.
"""

import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

Key = bytes  # one byte of page group, then the digest of the content (`jaxflow.kv.prefix`)
READ_AHEAD_SHARE = 0.5  # pages under way cannot be evicted: the rest of the host stays free for new pages


def key_of(group: int, digest: bytes) -> Key:
    """Return the key of a page of a group."""
    return bytes((group,)) + digest


class PageState(enum.Enum):
    """State of a page on its way between the tiers.

    On the host: STORING or READING, then STORED. On its way to the device, for a fetch of
    `jaxflow.kv.tiers.policy`: QUEUED, LOADING, LOADED.
    """

    STORING = enum.auto()  # host memory is reserved, and the copy from the device is under way
    READING = enum.auto()  # host memory is reserved, and the read from the lower tier is under way
    STORED = enum.auto()  # the page is in host memory
    QUEUED = enum.auto()  # a place on the device is reserved; the page on the host is pinned
    LOADING = enum.auto()  # the copy to the device is under way
    LOADED = enum.auto()  # the page is on the device, and enters its place before the next step


class LowerTier(Protocol):
    """The tier below the host store."""

    def contains(self, key: Key) -> bool:
        """Return True for a page of the tier."""
        ...

    def put(self, key: Key, page: Any, *, opportunistic: bool) -> object:
        """Take a page; `opportunistic`: only if this costs nothing, because the page is offered again."""
        ...

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark pages as used now, the last page as the most recent one."""
        ...

    def read(self, key: Key) -> None:
        """Request a page for `take_read`."""
        ...

    def take_read(self) -> list[tuple[Key, Any]]:
        """Return (key, page) of the ended reads; None is a page after an error."""
        ...

    @property
    def pending(self) -> int:
        """The number of requested pages that `take_read` has not returned."""
        ...

    def read_seconds(self, num_bytes: int) -> float:
        """Predict the seconds until `num_bytes` more are read."""
        ...

    def counters(self) -> Any:
        """Return a dataclass of the counts since the start."""
        ...

    def close(self, pages: Sequence[tuple[Key, Any]]) -> None:
        """Take the host's pages, the most recently used first, and close the tier."""
        ...


@dataclasses.dataclass(slots=True)
class HostPage:
    """A page of the host store."""

    state: PageState
    data: Any = None  # None until the state is STORED
    pins: int = 0  # the number of fetches that need the page
    newly_read: bool = False  # read from the lower tier, and not loaded by a fetch yet
    partial: bool = False  # some positions only, for one pre-empted sequence: never offered to the lower tier


@dataclasses.dataclass
class HostCounters:
    """Counts since the start, in pages."""

    stored: int = 0
    refused: int = 0  # pages without room: all others were pinned or under way
    evicted: int = 0
    loaded: int = 0  # pages copied to the device


class HostStore:
    """Pages by key, in at most `capacity_bytes`, pages under way included.

    Args:
      page_bytes: bytes of a page of each page group, over all shards.
      lower: takes a copy of each complete page that arrives, and each complete page that is evicted.
    """

    def __init__(self, capacity_bytes: int, page_bytes: Sequence[int], lower: LowerTier | None = None):
        self.capacity_bytes, self.page_bytes, self.lower = capacity_bytes, tuple(page_bytes), lower
        self.counters = HostCounters()
        self._entries: OrderedDict[Key, HostPage] = OrderedDict()  # least recently used first
        self._bytes = self._reading_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Bytes of all pages, pages under way included."""
        return self._bytes

    # ---- lookup

    def contains(self, key: Key) -> bool:
        """Return True for a page that is on the host or on its way to the host."""
        return key in self._entries

    def contains_or_lower(self, key: Key) -> bool:
        """Return True for a page of this store or of the lower tier."""
        return key in self._entries or (self.lower is not None and self.lower.contains(key))

    def is_stored(self, key: Key) -> bool:
        """Return True for a page in host memory."""
        entry = self._entries.get(key)
        return entry is not None and entry.state is PageState.STORED

    def get(self, key: Key) -> Any:
        """Return a stored page, and mark the page as used now. Raises: KeyError."""
        entry = self._entries[key]
        if entry.state is not PageState.STORED:
            raise KeyError(key)
        self._entries.move_to_end(key)
        return entry.data

    def take_newly_read(self, key: Key) -> bool:
        """Return True for the first call after a page was read from the lower tier."""
        entry = self._entries[key]
        newly_read, entry.newly_read = entry.newly_read, False
        return newly_read

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark pages of all tiers as used now, the last page as the most recent one."""
        for key in keys:
            if key in self._entries:
                self._entries.move_to_end(key)
        if self.lower is not None:
            self.lower.touch(keys)

    # ---- arrival

    def reserve(self, key: Key, state: PageState = PageState.STORING, *, partial: bool = False) -> bool:
        """Reserve memory for a page that is not on the host, by eviction if necessary.

        Returns False if the pages that can be evicted are too small.

        Args:
          state: STORING or READING.
          partial: the page has some positions only.
        """
        size = self.page_bytes[key[0]]
        if not self._evict(size):
            self.counters.refused += 1
            return False
        self._entries[key] = HostPage(state, partial=partial)
        self._bytes += size
        return True

    def arrive(self, key: Key, data: Any | None) -> None:
        """End the copy or the read of a reserved page; `data` is None after an error."""
        entry = self._entries[key]
        reading = entry.state is PageState.READING
        self._reading_bytes -= self.page_bytes[key[0]] * reading
        if data is None:
            self._drop(key)
            return
        entry.data, entry.state, entry.newly_read = data, PageState.STORED, reading
        self.counters.stored += 1
        if self.lower is not None and not entry.partial:
            self.lower.put(key, data, opportunistic=True)

    def read_ahead(self, keys: Iterable[Key]) -> None:
        """Start to read pages of the lower tier, in this order, into at most half of the host."""
        assert self.lower is not None
        for key in keys:
            if self.contains(key) or not self.lower.contains(key):
                continue
            size = self.page_bytes[key[0]]
            if self._reading_bytes + size > READ_AHEAD_SHARE * self.capacity_bytes or not self.reserve(
                key, PageState.READING
            ):
                break
            self._reading_bytes += size
            self.lower.read(key)

    def take_read(self) -> None:
        """Take the pages that the lower tier has read."""
        if self.lower is not None:
            for key, data in self.lower.take_read():
                self.arrive(key, data)

    # ---- departure

    def pin(self, keys: Iterable[Key]) -> None:
        """Protect pages from eviction until `unpin`."""
        for key in keys:
            self._entries[key].pins += 1

    def unpin(self, keys: Iterable[Key]) -> None:
        """Release one pin of each page."""
        for key in keys:
            if key in self._entries:  # a page that did not arrive was dropped
                self._entries[key].pins = max(0, self._entries[key].pins - 1)

    def discard(self, keys: Iterable[Key]) -> None:
        """Remove the stored pages without pins."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.state is PageState.STORED and not entry.pins:
                self._drop(key)

    def newest_first(self) -> list[tuple[Key, Any]]:
        """Return (key, page) of the complete pages, the most recently used first."""
        return [
            (key, entry.data)
            for key, entry in reversed(self._entries.items())
            if entry.state is PageState.STORED and not entry.partial
        ]

    def close(self) -> None:
        """Give the complete pages to the lower tier, close the lower tier, and remove all pages."""
        try:
            if self.lower is not None:
                self.lower.close(self.newest_first())
        finally:
            self._entries.clear()
            self._bytes = self._reading_bytes = 0

    def _drop(self, key: Key) -> None:
        del self._entries[key]
        self._bytes -= self.page_bytes[key[0]]

    def _evict(self, size: int) -> bool:
        """Make room for `size` bytes. Evict nothing and return False if all candidates are too small."""
        short = self._bytes + size - self.capacity_bytes
        if short <= 0:
            return True
        victims: list[Key] = []
        for key, entry in self._entries.items():
            if entry.state is PageState.STORED and not entry.pins:
                victims.append(key)
                short -= self.page_bytes[key[0]]
                if short <= 0:
                    break
        if short > 0:
            return False
        for key in victims:
            entry = self._entries[key]
            self._drop(key)
            self.counters.evicted += 1
            if self.lower is not None and not entry.partial:
                self.lower.put(key, entry.data, opportunistic=False)
        return True
