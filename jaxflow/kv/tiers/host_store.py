"""Which pages the host keeps: names, bytes and the order of use. No JAX here, and no copying: what a page is,
others know.

NanoFlow §4.2.2: least recently used first. One owner, the engine's thread.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Key = bytes  # one byte of layer group, then the digest of the content (`jaxflow.kv.prefix`)


def key_of(group: int, digest: bytes) -> Key:
    return bytes((group,)) + digest


@dataclasses.dataclass(slots=True)
class Entry:
    data: Any = None  # None: on its way to the host
    pins: int = 0  # loads that read it
    from_below: bool = False  # it was read for a load that has not taken it yet
    part: bool = False  # a page filled in part, for which nobody asks the tier below: it is not told of it


@dataclasses.dataclass
class HostCounters:
    """Since start."""

    stored: int = 0  # pages that arrived
    refused: int = 0  # that found no room
    evicted: int = 0
    loaded: int = 0  # pages taken to the device


class HostStore:
    """Pages by key, at most `capacity_bytes` of them, those on their way included.

    Args:
      page_bytes: of a page of each layer group, over all shards.

    Attributes:
      on_put: told of each whole page that has arrived, with its data: the tier below may take a copy.
      on_evict: told of each whole page that makes room, with its data: the tier below may take it.
    """

    def __init__(self, capacity_bytes: int, page_bytes: Sequence[int]):
        self.capacity_bytes, self.page_bytes = capacity_bytes, tuple(page_bytes)
        self.counters = HostCounters()
        self.on_put: Callable[[Key, Any], None] = lambda key, data: None
        self.on_evict: Callable[[Key, Any], None] = lambda key, data: None
        self._entries: OrderedDict[Key, Entry] = OrderedDict()  # least recently used first
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        return self._bytes

    def contains(self, key: Key) -> bool:
        """Whether it is there, or on its way."""
        return key in self._entries

    def ready(self, key: Key) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.data is not None

    def get(self, key: Key) -> Any:
        """A page that is ready; it is used most recently now. Raises: KeyError."""
        data = self._entries[key].data
        if data is None:
            raise KeyError(key)
        self._entries.move_to_end(key)
        return data

    def was_read(self, key: Key) -> bool:
        """Whether a page came from the tier below and this is asked for the first time."""
        entry = self._entries[key]
        found, entry.from_below = entry.from_below, False
        return found

    def touch(self, keys: Iterable[Key]) -> None:
        """Those that are there are used now, the last of them most recently."""
        entries = self._entries
        for key in keys:
            if key in entries:
                entries.move_to_end(key)

    def reserve(self, key: Key, *, part: bool = False) -> bool:
        """Makes room for a page that is not there yet; it is on its way from now on. False if nothing can be
        evicted for it.

        part: the page is filled in part, and goes no further down than here.
        """
        size = self.page_bytes[key[0]]
        if not self._evict(size):
            self.counters.refused += 1
            return False
        self._entries[key] = Entry(part=part)
        self._bytes += size
        return True

    def put(self, key: Key, data: Any, *, from_below: bool = False) -> None:
        """A page for which room was reserved has arrived, from the device or from the tier below."""
        entry = self._entries[key]
        entry.data, entry.from_below = data, from_below
        self.counters.stored += 1
        if not entry.part:
            self.on_put(key, data)

    def drop(self, key: Key) -> None:
        """A page that will not arrive."""
        del self._entries[key]
        self._bytes -= self.page_bytes[key[0]]

    def pin(self, keys: Iterable[Key]) -> None:
        """They stay until `unpin`."""
        for key in keys:
            self._entries[key].pins += 1

    def unpin(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if key in self._entries:  # it may have been on its way, and dropped
                self._entries[key].pins = max(0, self._entries[key].pins - 1)

    def discard(self, keys: Iterable[Key]) -> None:
        """Forgets those that are there and that nobody has pinned: they are of no more use."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.data is not None and not entry.pins:
                self.drop(key)

    def newest_first(self) -> list[tuple[Key, Any]]:
        """The whole pages that are there, the last used first."""
        return [
            (key, entry.data)
            for key, entry in reversed(self._entries.items())
            if entry.data is not None and not entry.part
        ]

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()
        self._bytes = 0

    def _evict(self, size: int) -> bool:
        """Makes room for `size` bytes, if what may go is enough; else nothing goes."""
        short = self._bytes + size - self.capacity_bytes
        if short <= 0:
            return True
        victims: list[Key] = []
        for key, entry in self._entries.items():
            if entry.data is not None and not entry.pins:
                victims.append(key)
                short -= self.page_bytes[key[0]]
                if short <= 0:
                    break
        if short > 0:
            return False
        for key in victims:
            entry = self._entries.pop(key)
            self._bytes -= self.page_bytes[key[0]]
            self.counters.evicted += 1
            if not entry.part:
                self.on_evict(key, entry.data)
        return True
