"""Pages of KV on a disk: the lowest tier of NanoFlow's hierarchy (§4.2.2). LRU, bounded, and never in the
engine's way.

Pages are written by one thread and read by a few; the caller waits for neither. What cannot be done is not
done: a page that finds the queue full is not kept, a disk that fails is left alone for a while, a damaged
file is removed. Each of these is counted, and said once; none of them is an exception. A file is a page
(`jaxflow.kv.tiers.disk_file`), so what is there survives the process, however it ends: the index is made again
from the folder's listing, the order of use from the times of the files.
"""

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from jaxflow.config import ConfigError
from jaxflow.kv.tiers import disk_file
from jaxflow.kv.tiers.disk_file import HEADER_BYTES, BadFile, Parts
from jaxflow.kv.tiers.disk_folder import open_folder
from jaxflow.kv.tiers.disk_index import DiskIndex

log = logging.getLogger(__name__)

WRITE_QUEUE_BYTES = 256 << 20
READ_AHEAD = 64  # pages being read, or waiting for it, at most
READERS = 4
RETRY_S = 60.0  # how long a disk that failed is not written to


@dataclasses.dataclass(frozen=True)
class DiskCounters:
    """Since start; `pages` and `bytes` are what is there now, `bytes_...` counts payloads."""

    hits: int = 0  # pages read
    misses: int = 0  # pages asked for that were not there, or not whole
    written: int = 0
    dropped: int = 0  # not written: the queue was full, or the disk was left alone
    evicted: int = 0
    rejected: int = 0  # files that were corrupt, truncated or foreign
    errors: int = 0  # of the operating system
    bytes_written: int = 0
    bytes_read: int = 0
    pages: int = 0
    bytes: int = 0


class DiskTier:
    """Pages by key: one byte of layer group, then the digest of the content (`jaxflow.kv.prefix`).

    Args:
      folder: must exist and be writable; the pages go to a folder of mode 0700 inside it, one server at a
      time. capacity_bytes: of all files together, those of other models that are found there included.
      fingerprint: of all that the bytes of a page depend on beside its key; files of another one are never
      served. page_bytes: the length of a page of each layer group. prepare: run first on each thread, to bind
      it to some CPUs, say.

    Raises:
      ConfigError: for a folder that cannot be used, and a capacity below one page of each group.
    """

    def __init__(
        self,
        folder: str | Path,
        capacity_bytes: int,
        fingerprint: bytes,
        page_bytes: Sequence[int],
        *,
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
                f"at least {least / 2**30:.6f} GiB, a page of each layer group",
            )
        self.folder, self._lock_file, found = open_folder(Path(folder))
        self._fingerprint = disk_file.digest(fingerprint)
        self._write_queue_bytes, self._read_ahead, self._retry_s = write_queue_bytes, read_ahead, retry_s
        self._lock = threading.Lock()  # of all that follows
        self._index = DiskIndex(found)
        self._queued: dict[bytes, Parts] = {}  # not written yet, or being written
        self._queued_bytes = 0
        self._reading: dict[bytes, Future[np.ndarray | None]] = {}
        self._counts: dict[str, int] = {}
        self._failed: dict[str, bool] = {}  # what was warned of, by the kind of operation
        self._writes_resume_s = 0.0
        self._closed = False
        for victim in self._make_room(0):
            disk_file.remove(self._path(victim))
        self._writer = _threads(1, "jaxflow-kv-write", prepare)
        self._readers = _threads(READERS, "jaxflow-kv-read", prepare)

    # ---- any thread

    def contains(self, key: bytes) -> bool:
        with self._lock:
            return key in self._index or key in self._queued

    @property
    def works(self) -> bool:
        """Whether it is written to: not closed, and not failing."""
        return not self._closed and time.monotonic() >= self._writes_resume_s

    def put(self, key: bytes, parts: Parts, *, at_leisure: bool = False) -> bool:
        """Has a page written, soon; returns whether it is there or will be, if nothing fails. Never waits,
        and copies nothing.

        parts: gives the page's bytes, one piece after the other; called on a thread of the tier, now or
        later, so they must not change. at_leisure: only if the queue is half empty, since the page can be put
        again.

        Raises: ValueError for a key that no page has.
        """
        size = self._length(key)
        with self._lock:
            if key in self._index or key in self._queued:
                return True
            room = self._write_queue_bytes // 2 if at_leisure else self._write_queue_bytes
            fits = not self._queued or self._queued_bytes + size <= room
            if not fits or not self.works:
                self._count("dropped", int(not at_leisure))
                return False
            self._queued[key] = parts
            self._queued_bytes += size
            self._writer.submit(self._write, key, parts)
        return True

    def prefetch(self, key: bytes) -> Future[np.ndarray | None] | None:
        """Begins to read a page, uint8 [length], into memory of its own; the future gives None if that fails.

        None at once: the page is not there, or so many are being read already that one more has to wait its
        turn outside.
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
        """A page, uint8 [length], read on the caller's thread; None if it is not there or cannot be read."""
        with self._lock:
            there = key in self._index or key in self._queued
            self._count("misses", int(not there))
        return self._read(key) if there else None

    def file_bytes(self, key: bytes) -> int:
        """What a page takes of the capacity. Raises: ValueError for a key that no page has."""
        return self._length(key) + HEADER_BYTES

    def counters(self) -> DiskCounters:
        with self._lock:
            return DiskCounters(**self._counts, pages=len(self._index), bytes=self._index.bytes)

    def used(self, keys: Sequence[bytes]) -> None:
        """Makes those of these pages that are there the last to go, the last of them last of all."""
        with self._lock:
            self._index.use(keys)

    def flush(self, timeout_s: float) -> None:
        """Waits until what is queued is written, for so many seconds at most."""
        wait([self._writer.submit(lambda: None)], timeout=timeout_s)

    def close(self, drain_s: float = 10.0) -> None:
        """Writes what is queued, for so many seconds at most, and ends the threads. Nothing is taken or read
        from then on.
        """
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
        self._lock_file.close()

    # ---- writing

    def _write(self, key: bytes, parts: Parts) -> None:
        """The writer's work."""
        length, size = self._length(key), self.file_bytes(key)
        try:
            with self._lock:
                skip = time.monotonic() < self._writes_resume_s  # the queue may be older than the fault
                victims = [] if skip else self._make_room(size)
                if skip:
                    self._count("dropped")
                    return
            stuck = [victim for victim in victims if not disk_file.remove(self._path(victim))]
            if stuck:
                raise OSError(f"{len(stuck)} files that should make room cannot be removed")
            disk_file.write(self._path(key), self._fingerprint, key, disk_file.pieces(parts, length))
            with self._lock:
                self._index.add(key, size)
                self._count("written")
                self._count("bytes_written", length)
            self._went("written")
        except OSError as error:
            with self._lock:
                self._writes_resume_s = max(self._writes_resume_s, time.monotonic() + self._retry_s)
            self._went("written", error)
        except Exception:  # the caller's, in `parts`
            log.exception("page %s was not written", key.hex())
        finally:
            with self._lock:
                del self._queued[key]
                self._queued_bytes -= length

    def _make_room(self, size: int) -> list[bytes]:
        """The least recently used pages, until `size` bytes fit without them; they are not in the index any
        more. The lock is held.
        """
        victims = self._index.make_room(size, self.capacity_bytes)
        self._count("evicted", len(victims))
        return victims

    # ---- reading

    def _read(self, key: bytes) -> np.ndarray | None:
        """A reader's work."""
        path = self._path(key)
        try:
            with self._lock:
                queued, closed = self._queued.get(key), self._closed
            if closed:
                return None
            if queued is not None:
                page = np.concatenate(disk_file.pieces(queued, self._length(key)))
            else:
                page = disk_file.read(path, self._fingerprint, key, self._length(key))
            with self._lock:
                self._index.use([key])
                self._count("hits")
                self._count("bytes_read", page.nbytes)
            with contextlib.suppress(OSError):
                os.utime(path)  # the order of use, should the process be killed
            self._went("read")
            return page
        except BadFile as error:
            log.warning("dropped %s: %s", path, error)
            self._remove(key, "rejected")
        except FileNotFoundError:  # evicted meanwhile, or removed by somebody else
            self._remove(key, "misses")
        except OSError as error:
            self._remove(key, "misses")
            self._went("read", error)
        except Exception:  # the caller's, in `parts`
            log.exception("page %s cannot be had", key.hex())
        finally:
            with self._lock:
                self._reading.pop(key, None)
        return None

    def _remove(self, key: bytes, count: str) -> None:
        gone = disk_file.remove(self._path(key))
        with self._lock:
            self._count(count)
            if not gone or not self._path(key).exists():  # else it was written again meanwhile
                self._index.forget(key)

    def _path(self, key: bytes) -> Path:
        return self.folder / disk_file.name_of(key)

    def _length(self, key: bytes) -> int:
        """Bytes of a page of this key's group. Raises: ValueError for a key that no page has."""
        disk_file.name_of(key)
        if key[0] >= len(self.page_bytes):
            raise ValueError(f"a page of group {key[0]}: there are {len(self.page_bytes)}")
        return self.page_bytes[key[0]]

    def _count(self, name: str, number: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + number

    def _went(self, operation: str, error: OSError | None = None) -> None:
        """Counts a fault of the disk, and says it if the same operation did not fail the last time."""
        with self._lock:
            said, self._failed[operation] = self._failed.get(operation, False), error is not None
            self._count("errors", int(error is not None))
        if error is not None and not said:
            log.warning(
                "pages of KV cannot be %s at %s (%s): going on without", operation, self.folder, error
            )


def _threads(number: int, name: str, prepare: Callable[[], None]) -> ThreadPoolExecutor:
    """All of them started: later there may be no more to be had."""
    pool, started = ThreadPoolExecutor(number, name, prepare), threading.Barrier(number)
    wait([pool.submit(started.wait) for _ in range(number)])
    return pool
