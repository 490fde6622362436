"""Disk tier below the host store: pages leave the host to files, and are read ahead for waiting sequences.

NanoFlow §4.2.2. The paper writes a page to the disk when the page leaves the host. Here a page is also
written when it reaches the host and the write queue is half empty, and when the server stops. So a killed
server loses only the pages that were not written yet. The engine's thread calls this tier and waits only in
`close`: the threads of the disk store convert, read and write the pages.
"""

import collections
import functools
import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from jaxflow.kv.tiers.disk_store import READ_AHEAD, DiskCounters, DiskStore
from jaxflow.kv.tiers.host_store import Key
from jaxflow.kv.tiers.page_file import PageData

log = logging.getLogger(__name__)

FLUSH_S = 30.0
RATE_DECAY = 0.9  # weight of the earlier rate after each group of pages that was read


class DiskTier:
    """Writes host pages to a disk store, and reads them ahead; implements `host_store.LowerTier`.

    Args:
      to_bytes: return the buffers of a host page.
      from_bytes: return a host page from its group and uint8 [length].
    """

    def __init__(
        self,
        disk: DiskStore,
        to_bytes: Callable[[Any], Sequence[Any]],
        from_bytes: Callable[[int, np.ndarray], Any],
    ):
        self.disk, self._to_bytes, self._from_bytes = disk, to_bytes, from_bytes
        self._requested: collections.deque[Key] = collections.deque()  # pages without a started read
        self._num_reading = self._pending_bytes = 0
        self._begin_s = self._end_s = 0.0  # begin of the reads under way, and the end of the last read
        self._rate_bytes = self._rate_seconds = 0.0
        self._read_pages: queue.SimpleQueue[tuple[Key, Any, float]] = queue.SimpleQueue()  # (key, page, end)

    # ---- down

    def put(self, key: Key, page: Any, *, opportunistic: bool) -> bool:
        """Queue the write of a host page, and return True if the disk or the queue has it.

        See `DiskStore.put`.
        """
        return self.disk.put(key, self._data(page), opportunistic=opportunistic)

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark pages as used now, the last page as the most recent one."""
        self.disk.touch(keys)

    # ---- up

    def contains(self, key: Key) -> bool:
        """Return True for a page on the disk."""
        return self.disk.contains(key)

    def read(self, key: Key) -> None:
        """Request a page; `take_read` returns the page later."""
        self._pending_bytes += self.disk.page_bytes[key[0]]
        self._requested.append(key)
        self._start_reads()

    def take_read(self) -> list[tuple[Key, Any]]:
        """Return (key, page) of the reads that ended since the last call; None is a page after an error."""
        found = []
        while True:
            try:
                key, page, self._end_s = self._read_pages.get_nowait()
            except queue.Empty:
                break
            found.append((key, page))
        if found:
            num_bytes = sum(self.disk.page_bytes[key[0]] for key, _ in found)
            self._num_reading -= len(found)
            self._pending_bytes -= num_bytes
            seconds = max(0.0, self._end_s - self._begin_s)
            self._rate_bytes = RATE_DECAY * self._rate_bytes + num_bytes
            self._rate_seconds = RATE_DECAY * self._rate_seconds + seconds
            self._begin_s = self._end_s
        self._start_reads()
        return found

    @property
    def pending(self) -> int:
        """The number of requested pages that `take_read` has not returned."""
        return len(self._requested) + self._num_reading

    def read_seconds(self, num_bytes: int) -> float:
        """Predict the seconds until `num_bytes` more are read, from the recent rate; 0 before any read."""
        if not self._rate_bytes:
            return 0.0
        return self._rate_seconds / self._rate_bytes * (self._pending_bytes + num_bytes)

    def _start_reads(self) -> None:
        while self._requested and self._num_reading < READ_AHEAD:
            key = self._requested.popleft()
            if not self._num_reading:
                self._begin_s = time.monotonic()
            self._num_reading += 1
            self.fetch(key, functools.partial(self._take, key))

    def _take(self, key: Key, page: Any) -> None:
        self._read_pages.put((key, page, time.monotonic()))

    def fetch(self, key: Key, take: Callable[[Any], None]) -> None:
        """Start to read a page at once.

        `take` gets the page, or None after an error, maybe on another thread.
        """
        future = self.disk.prefetch(key)
        if future is None:
            take(None)
        else:
            future.add_done_callback(lambda future: take(self._page(key, future)))

    def _page(self, key: Key, future: Future[np.ndarray | None]) -> Any:
        """Return a page that was read, or None after an error."""
        try:
            payload = future.result()
            return None if payload is None else self._from_bytes(key[0], payload)
        except Exception:
            log.exception("page %s cannot be read", key.hex())
            return None

    def remove(self, key: Key) -> None:
        """Remove a page from the disk."""
        self.disk.remove(key)

    # ---- the end

    def counters(self) -> DiskCounters:
        """Return the counts of the disk store."""
        return self.disk.counters()

    def close(self, pages: Sequence[tuple[Key, Any]] = (), flush_s: float = FLUSH_S) -> None:
        """Write the missing pages of the host, and leave the disk store.

        `pages`: (key, page) of the host, the most recently used first. flush_s: most seconds of all tiers of
        the store together.
        """
        if self.disk.is_writable:
            self._flush(pages, time.monotonic() + flush_s / self.disk.tiers)
        self.disk.leave()

    def _flush(self, pages: Sequence[tuple[Key, Any]], deadline: float) -> None:
        # The write queue is flushed first, because the host's pages may evict its pages.
        self.disk.flush(max(0.1, deadline - time.monotonic()))
        kept, room = {}, self.disk.capacity_bytes
        for key, page in pages:
            room -= self.disk.file_bytes(key)
            if room < 0:
                break
            kept[key] = page
        oldest_first = [*reversed(kept)]
        self.disk.touch(oldest_first)  # so that pages on the disk are not evicted for the others
        for key, page in kept.items():
            while (
                not self.disk.put(key, self._data(page), opportunistic=True)
                and self.disk.is_writable
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)
        self.disk.flush(max(0.1, deadline - time.monotonic()))
        self.disk.touch(oldest_first)

    def _data(self, page: Any) -> PageData:
        return lambda: self._to_bytes(page)
