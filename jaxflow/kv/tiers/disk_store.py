"""Store of KV pages as files: bounded in bytes, least recently used first to leave (NanoFlow §4.2.2).

One thread writes the pages, a few threads read them, and the caller never waits. A page is dropped when the
write queue is full. A disk that fails is not written to for a while. A damaged file is removed. Each of these
events is counted and logged once; none raises an exception. A page is one file
(`jaxflow.kv.tiers.page_file`), so the pages survive the process. At the next start the index is made from the
folder's listing, and the order of use from the modification times of the files.
"""

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from jaxflow.config import ConfigError
from jaxflow.kv.tiers import page_file
from jaxflow.kv.tiers.page_file import HEADER_BYTES, BadFile, PageData, open_folder

log = logging.getLogger(__name__)

WRITE_QUEUE_BYTES = 256 << 20
READ_AHEAD = 64  # maximum number of pages that are being read or wait for a reader
READERS = 4
_NOTHING = np.empty(0, np.uint8)  # a process may have no part of a page
RETRY_S = 60.0  # time without writes after an error of the disk


@dataclasses.dataclass(frozen=True)
class DiskCounters:
    """Counts since the start; `pages` and `bytes` are the present content, `bytes_…` counts payloads."""

    hits: int = 0  # pages read
    misses: int = 0  # requested pages without a valid file
    written: int = 0
    dropped: int = 0  # pages not written, because the queue was full or the disk had failed
    evicted: int = 0
    rejected: int = 0  # files that were corrupt, truncated or of another model
    errors: int = 0  # errors of the operating system
    bytes_written: int = 0
    bytes_read: int = 0
    pages: int = 0
    bytes: int = 0


class DiskIndex:
    """Keys and file sizes of the pages on the disk, in the order of use. Not thread-safe.

    Args:
      pages: (key, bytes of its file), the least recently used first.

    Attributes:
      bytes: total size of the files.
    """

    def __init__(self, pages: Iterable[tuple[bytes, int]]):
        self._files = OrderedDict(pages)
        self.bytes = sum(self._files.values())

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the keys, the least recently used first."""
        return iter(self._files)

    def __contains__(self, key: bytes) -> bool:
        return key in self._files

    def add(self, key: bytes, size: int) -> None:
        """Add a new file as the most recently used one."""
        self._files[key] = size
        self.bytes += size

    def discard(self, key: bytes) -> None:
        """Remove a file, if the index has it."""
        self.bytes -= self._files.pop(key, 0)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark the present keys as used now, the last key as the most recent one."""
        for key in keys:
            if key in self._files:
                self._files.move_to_end(key)

    def make_room(self, size: int, capacity: int) -> list[bytes]:
        """Remove least recently used files until `size` bytes more fit in `capacity`. Return their keys."""
        victims = []
        while self._files and self.bytes + size > capacity:
            victim, freed = self._files.popitem(last=False)
            self.bytes -= freed
            victims.append(victim)
        return victims


class DiskStore:
    """Pages on a disk, by key (`jaxflow.kv.tiers.host_store.key_of`).

    Args:
      folder: an existing folder with write permission. The pages go to a folder inside, of mode 0700, for one
        server at a time.
      capacity_bytes: limit of all files together, those of other models included.
      fingerprint: everything except the key that determines a page's bytes. Files of another fingerprint are
        never read.
      page_bytes: length of a page of each page group.
      tiers: the number of tiers that use the store, and call `leave`.
      prepare: a function that each thread runs first, for example to bind itself to some CPUs.

    Raises:
      ConfigError: the folder cannot be used, or the capacity is less than one page of each group.
    """

    def __init__(
        self,
        folder: str | Path,
        capacity_bytes: int,
        fingerprint: bytes,
        page_bytes: Sequence[int],
        *,
        tiers: int = 1,
        write_queue_bytes: int = WRITE_QUEUE_BYTES,
        read_ahead: int = READ_AHEAD,
        retry_s: float = RETRY_S,
        prepare: Callable[[], None] = lambda: None,
    ):
        self.page_bytes = tuple(page_bytes)
        self.capacity_bytes = capacity_bytes
        least = sum(size + HEADER_BYTES for size in self.page_bytes)
        if capacity_bytes < least:
            raise ConfigError(
                "kv_disk_size",
                capacity_bytes / 2**30,
                f"at least {least / 2**30:.6f} GiB, a page of each page group",
            )
        self.folder, self._folder_lock, found = open_folder(Path(folder))
        self._fingerprint = page_file.digest(fingerprint)
        self._write_queue_bytes, self._read_ahead, self._retry_s = write_queue_bytes, read_ahead, retry_s
        self._lock = threading.Lock()  # guards all attributes below
        self._index = DiskIndex(found)
        self._queued: dict[bytes, PageData] = {}  # pages with an incomplete write
        self._queued_bytes = 0
        self._reading: dict[bytes, Future[np.ndarray | None]] = {}
        self._counts: dict[str, int] = {}
        self._failed: dict[str, bool] = {}  # True after a failed operation of this kind
        self._writes_resume_s = 0.0
        self._closed, self.tiers, self._left = False, tiers, 0
        for victim in self._make_room(0):
            page_file.remove(self._path(victim))
        self._writer = _start_threads(1, "jaxflow-kv-write", prepare)
        self._readers = _start_threads(READERS, "jaxflow-kv-read", prepare)

    # ---- any thread

    def contains(self, key: bytes) -> bool:
        """Return True for a page on the disk or in the write queue."""
        with self._lock:
            return key in self._index or key in self._queued

    @property
    def is_writable(self) -> bool:
        """True while the store is open and the disk does not fail."""
        return not self._closed and time.monotonic() >= self._writes_resume_s

    def put(self, key: bytes, data: PageData, *, opportunistic: bool = False) -> bool:
        """Queue the write of a page, without waiting and without a copy.

        Returns True if the page is on the disk or in the queue.

        Args:
          data: called on a thread of the store, now or later. Its buffers must not change.
          opportunistic: write only if the queue is half empty, because the caller can offer the page again.

        Raises: ValueError for an invalid key.
        """
        size = self._length(key)
        with self._lock:
            if key in self._index or key in self._queued:
                return True
            room = self._write_queue_bytes // 2 if opportunistic else self._write_queue_bytes
            fits = not self._queued or self._queued_bytes + size <= room
            if not fits or not self.is_writable:
                self._count("dropped", int(not opportunistic))
                return False
            self._queued[key] = data
            self._queued_bytes += size
            self._writer.submit(self._write, key, data)
        return True

    def prefetch(self, key: bytes) -> Future[np.ndarray | None] | None:
        """Start to read a page. The future returns uint8 [length], or None after an error.

        Returns None for an absent page, and while the maximum number of pages is being read.
        """
        with self._lock:
            if self._closed:
                return None
            known = self._reading.get(key)
            if known is not None:
                return known
            if key not in self._index and key not in self._queued:
                self._count("misses")
                return None
            if len(self._reading) >= self._read_ahead:
                return None
            future = self._reading[key] = self._readers.submit(self._read, key)
        return future

    def get(self, key: bytes) -> np.ndarray | None:
        """Read a page, uint8 [length], on the caller's thread. Return None for an absent or damaged page."""
        with self._lock:
            present = key in self._index or key in self._queued
            self._count("misses", int(not present))
        return self._read(key) if present else None

    def remove(self, key: bytes) -> None:
        """Remove a page. The writer's thread removes the file."""
        with self._lock:
            if not self._closed:
                self._index.discard(key)
                self._writer.submit(page_file.remove, self._path(key))

    def file_bytes(self, key: bytes) -> int:
        """Return the size of a page's file. Raises: ValueError for an invalid key."""
        return self._length(key) + HEADER_BYTES

    def counters(self) -> DiskCounters:
        """Return the counts since the start."""
        with self._lock:
            return DiskCounters(**self._counts, pages=len(self._index), bytes=self._index.bytes)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark the present pages as used now, the last page as the most recent one."""
        with self._lock:
            self._index.touch(keys)

    def flush(self, timeout_s: float) -> None:
        """Wait until the queued pages are written, for at most `timeout_s`."""
        wait([self._writer.submit(lambda: None)], timeout=timeout_s)

    def leave(self) -> None:
        """Note that a tier has ended. The last one closes the store."""
        self._left += 1
        if self._left == self.tiers:
            self.close()

    def close(self, drain_s: float = 10.0) -> None:
        """Write the queued pages, for at most `drain_s`, and stop the threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.flush(drain_s)
        self._writes_resume_s = float("inf")
        self._writer.shutdown()
        self._readers.shutdown()
        for i, key in enumerate(self._index, start=time.time_ns() - len(self._index)):
            with contextlib.suppress(OSError):
                os.utime(self._path(key), ns=(i, i))  # the order of use, for the next start
        self._folder_lock.close()

    # ---- writing

    def _write(self, key: bytes, data: PageData) -> None:
        """Write a page, on the writer's thread."""
        length, size = self._length(key), self.file_bytes(key)
        try:
            with self._lock:
                skip = time.monotonic() < self._writes_resume_s  # the page may be older than the error
                victims = [] if skip else self._make_room(size)
                if skip:
                    self._count("dropped")
                    return
            stuck = [victim for victim in victims if not page_file.remove(self._path(victim))]
            if stuck:
                raise OSError(f"{len(stuck)} evicted files cannot be removed")
            page_file.write(self._path(key), self._fingerprint, key, page_file.page_parts(data, length))
            with self._lock:
                self._index.add(key, size)
                self._count("written")
                self._count("bytes_written", length)
            self._record_outcome("written")
        except OSError as error:
            with self._lock:
                self._writes_resume_s = max(self._writes_resume_s, time.monotonic() + self._retry_s)
            self._record_outcome("written", error)
        except Exception:  # an error of the caller's `data`
            log.exception("page %s was not written", key.hex())
        finally:
            with self._lock:
                del self._queued[key]
                self._queued_bytes -= length

    def _make_room(self, size: int) -> list[bytes]:
        """Evict pages from the index until `size` bytes fit. The caller holds the lock."""
        victims = self._index.make_room(size, self.capacity_bytes)
        self._count("evicted", len(victims))
        return victims

    # ---- reading

    def _read(self, key: bytes) -> np.ndarray | None:
        """Read a page. Return None after an error."""
        path = self._path(key)
        try:
            with self._lock:
                queued, closed = self._queued.get(key), self._closed
            if closed:
                return None
            if queued is not None:
                page = np.concatenate([_NOTHING, *page_file.page_parts(queued, self._length(key))])
            else:
                page = page_file.read(path, self._fingerprint, key, self._length(key))
            with self._lock:
                self._index.touch([key])
                self._count("hits")
                self._count("bytes_read", page.nbytes)
            with contextlib.suppress(OSError):
                os.utime(path)  # the order of use, in case the process is killed
            self._record_outcome("read")
            return page
        except BadFile as error:
            log.warning("dropped %s: %s", path, error)
            self._remove(key, "rejected")
        except FileNotFoundError:  # evicted since the lookup, or removed by another process
            self._remove(key, "misses")
        except OSError as error:
            self._remove(key, "misses")
            self._record_outcome("read", error)
        except Exception:  # an error of the caller's `data`
            log.exception("page %s cannot be read", key.hex())
        finally:
            with self._lock:
                self._reading.pop(key, None)
        return None

    def _remove(self, key: bytes, count: str) -> None:
        removed = page_file.remove(self._path(key))
        with self._lock:
            self._count(count)
            if not removed or not self._path(key).exists():  # an existing file is a newer one
                self._index.discard(key)

    def _path(self, key: bytes) -> Path:
        return self.folder / page_file.name_of(key)

    def _length(self, key: bytes) -> int:
        """Return the bytes of a page of this key's group. Raises: ValueError for an invalid key."""
        page_file.name_of(key)
        if key[0] >= len(self.page_bytes):
            raise ValueError(f"a key of page group {key[0]}; accepted are 0 to {len(self.page_bytes) - 1}")
        return self.page_bytes[key[0]]

    def _count(self, name: str, number: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + number

    def _record_outcome(self, operation: str, error: OSError | None = None) -> None:
        """Count an error of the disk, and log the error if the last operation of its kind succeeded."""
        with self._lock:
            failed_before = self._failed.get(operation, False)
            self._failed[operation] = error is not None
            self._count("errors", int(error is not None))
        if error is not None and not failed_before:
            log.warning("KV pages cannot be %s at %s (%s): going on without", operation, self.folder, error)


def _start_threads(number: int, name: str, prepare: Callable[[], None]) -> ThreadPoolExecutor:
    """Return a pool with all threads started, because the system may refuse threads later."""
    pool, started = ThreadPoolExecutor(number, name, prepare), threading.Barrier(number)
    wait([pool.submit(started.wait) for _ in range(number)])
    return pool
