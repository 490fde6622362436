"""Between the host's pages and the disk's: what the host has goes down, what a waiting sequence needs comes
up.

NanoFlow §4.2.2. The paper's pages go to the disk when they must leave the host. Here they also go when they
reach the host and the disk has nothing better to do, so that a server that is killed leaves what it had, and
when the server ends. Called by the engine's thread, which never waits here but at the end: pages change their
form, and are read and written, on the disk tier's threads.
"""

import collections
import logging
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from jaxflow.kv.tiers.disk_file import Parts
from jaxflow.kv.tiers.disk_store import READ_AHEAD, DiskTier
from jaxflow.kv.tiers.host_store import HostStore, Key

log = logging.getLogger(__name__)

FLUSH_S = 30.0
FORGET = 0.9  # of the rate seen before, with each batch of pages that comes
MOST_OF_THE_HOST = 0.5  # what is on its way cannot be evicted: the rest stays free for what the device stores


class DiskLink:
    """Read-ahead and writing for one store.

    Args:
      store: whose `on_put` and `on_evict` become this link's.
      to_bytes: the bytes of a page of the store, of which the caller may hold on to what it is given.
      from_bytes: a page of the store from its key and bytes, uint8 [length].
    """

    def __init__(
        self,
        disk: DiskTier,
        store: HostStore,
        to_bytes: Callable[[Any], Sequence[Any]],
        from_bytes: Callable[[Key, np.ndarray], Any],
    ):
        self.disk, self._store, self._to_bytes, self._from_bytes = disk, store, to_bytes, from_bytes
        store.on_put, store.on_evict = self.on_put, self.on_evict
        self._wanted: collections.deque[Key] = collections.deque()  # room is reserved for each
        self._reading = self._coming_bytes = 0
        self._begun_s = self._ended_s = (
            0.0  # of the reads under way: the first one's begin, the last one's end so far
        )
        self._rate_bytes = self._rate_seconds = 0.0
        self._read: queue.SimpleQueue[tuple[Key, Any, float]] = (
            queue.SimpleQueue()
        )  # (key, page, when it was there)

    def on_put(self, key: Key, data: Any) -> None:
        """A page has reached the host."""
        self.disk.put(key, self._parts(data), at_leisure=True)

    def on_evict(self, key: Key, data: Any) -> None:
        """A page leaves the host."""
        self.disk.put(key, self._parts(data))

    def contains(self, key: Key) -> bool:
        return self.disk.contains(key)

    def used(self, keys: Sequence[Key]) -> None:
        """Pages that were used on another tier are used here too, the last of them most recently."""
        self.disk.used(keys)

    def read_ahead(self, keys: Iterable[Key]) -> None:
        """Pages that will be needed, in the order of their need: those that only the disk has are on their
        way from now on.

        As many as half of the host has room for.
        """
        for key in keys:
            if self._store.contains(key) or not self.disk.contains(key):
                continue
            size = self._store.page_bytes[key[0]]
            if (
                self._coming_bytes + size > MOST_OF_THE_HOST * self._store.capacity_bytes
                or not self._store.reserve(key)
            ):
                break
            self._coming_bytes += size
            self._wanted.append(key)
        self._ask()

    def seconds(self, num_bytes: int) -> float:
        """When so much more would have been read, at the rate seen lately; 0 before anything was."""
        return (
            self._rate_seconds / self._rate_bytes * (self._coming_bytes + num_bytes)
            if self._rate_bytes
            else 0.0
        )

    def arrived(self) -> list[tuple[Key, Any]]:
        """(key, page) of what was read since the last call; None for a page that cannot be had after all."""
        found = []
        while True:
            try:
                key, data, self._ended_s = self._read.get_nowait()
            except queue.Empty:
                break
            found.append((key, data))
        if found:
            num_bytes = sum(self._store.page_bytes[key[0]] for key, _ in found)
            self._reading -= len(found)
            self._coming_bytes -= num_bytes
            seconds = max(0.0, self._ended_s - self._begun_s)
            self._rate_bytes = FORGET * self._rate_bytes + num_bytes
            self._rate_seconds = FORGET * self._rate_seconds + seconds
            self._begun_s = self._ended_s
        self._ask()
        return found

    @property
    def pending(self) -> int:
        """Pages for which room is reserved and that `arrived` has not told of."""
        return len(self._wanted) + self._reading

    def close(self, flush_s: float = FLUSH_S) -> None:
        """Writes what only the host has, the last used first, for so many seconds at most; then closes the
        disk.
        """
        if self.disk.works:
            self._flush(time.monotonic() + flush_s)
        self.disk.close()

    def _flush(self, deadline: float) -> None:
        self.disk.flush(
            max(0.1, deadline - time.monotonic())
        )  # what is queued may yet be evicted by what is behind it
        kept, room = {}, self.disk.capacity_bytes
        for key, data in self._store.newest_first():
            room -= self.disk.file_bytes(key)
            if room < 0:
                break
            kept[key] = data
        oldest_first = [*reversed(kept)]
        self.disk.used(oldest_first)  # those that are there do not make room for the others
        for key, data in kept.items():
            while (
                not self.disk.put(key, self._parts(data), at_leisure=True)
                and self.disk.works
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)
        self.disk.flush(max(0.1, deadline - time.monotonic()))
        self.disk.used(oldest_first)

    def _ask(self) -> None:
        while self._wanted and self._reading < READ_AHEAD:
            key = self._wanted.popleft()
            if not self._reading:
                self._begun_s = time.monotonic()
            future = self.disk.prefetch(key)
            self._reading += 1
            if future is None:
                self._read.put((key, None, time.monotonic()))
            else:
                future.add_done_callback(lambda future, key=key: self._on_read(key, future))

    def _on_read(self, key: Key, future: Future[np.ndarray | None]) -> None:
        """On the disk's thread."""
        data = None
        try:
            page = future.result()
            data = None if page is None else self._from_bytes(key, page)
        except Exception:
            log.exception("page %s cannot be had", key.hex())
        self._read.put((key, data, time.monotonic()))

    def _parts(self, data: Any) -> Parts:
        return lambda: self._to_bytes(data)
