"""The disk tier of an engine of several processes: each process writes and reads its own part of a page.

Process 0 decides which pages are written, read and removed. The other processes, the followers, do the same
with their parts. A page is back when every process has read its part. If a part is missing or damaged in one
process, the log of process 0 names the process, all processes remove their parts, and the page is computed
again.
"""

import dataclasses
import logging
import queue
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxflow.kv.tiers.disk_store import DiskCounters
from jaxflow.kv.tiers.disk_tier import DiskTier
from jaxflow.kv.tiers.host_store import Key

log = logging.getLogger(__name__)

_ANSWER = struct.Struct("!Q?")  # the name of a page, and whether the follower has read its part


@dataclasses.dataclass(frozen=True)
class ProcessPart:
    """The part of every page that one process has.

    Attributes:
      rank: the number of the process.
      count: the number of processes.
      page_bytes: the bytes of a page of each page group on the devices of this process.
    """

    rank: int
    count: int
    page_bytes: tuple[int, ...]


class PartCalls(Protocol):
    """Calls of process 0 that write and read the followers' parts of a page, in the order of all calls.

    A page has a number as its name (`jaxflow.engine.recorded_calls.CallRecorder`).
    """

    def write_part(self, key: Key, page: Any) -> None:
        """Let every follower write its part of a page."""
        ...

    def read_part(self, key: Key) -> int:
        """Let every follower read its part of a page, and return the page's name."""
        ...

    def found_part(self, name: int, page: Any) -> None:
        """Remember that `page` is the part of process 0 of a page that every process has read."""
        ...

    def lose_part(self, key: Key, name: int) -> None:
        """Let every follower forget what it read, and remove its part from the disk."""
        ...

    def touch_parts(self, keys: Sequence[Key]) -> None:
        """Let every follower mark pages as used now."""
        ...

    def close_parts(self, pages: Sequence[tuple[Key, Any]]) -> None:
        """Let every follower write its parts of the host's pages, and close its disk."""
        ...


@dataclasses.dataclass
class _Read:
    """A page that is being read.

    `waiting`: processes without an answer; `lost`: processes without their part.
    """

    key: Key
    waiting: int
    page: Any = None
    lost: list[int] = dataclasses.field(default_factory=list)


class SharedDiskTier:
    """The disk tier of process 0, for all processes; implements `host_store.LowerTier`.

    Args:
      own: the disk tier of process 0's parts.
      followers: the number of followers.
    """

    def __init__(self, own: DiskTier, calls: PartCalls, followers: int):
        self._own, self._calls, self._followers = own, calls, followers
        self._reads: dict[int, _Read] = {}  # by name
        self._names: dict[Key, int] = {}  # of the pages in `_reads`
        self._answers: queue.SimpleQueue[tuple[int, int, bool]] = queue.SimpleQueue()  # (rank, name, read)

    def answer(self, rank: int, payload: bytes) -> None:
        """Take a follower's answer to `read_part`. Any thread may call this method.

        Raises:
          struct.error: the payload is no answer.
        """
        self._answers.put((rank, *_ANSWER.unpack(payload)))

    # ---- down

    def put(self, key: Key, page: Any, *, opportunistic: bool) -> None:
        """Queue the writes of all parts, if the disk of process 0 takes its part. See `DiskTier.put`."""
        if self._own.put(key, page, opportunistic=opportunistic):
            self._calls.write_part(key, page)

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark pages as used now, the last page as the most recent one."""
        self._own.touch(keys)
        self._calls.touch_parts(keys)

    # ---- up

    def contains(self, key: Key) -> bool:
        """Return True for a page of which the disk of process 0 has a part."""
        return self._own.contains(key)

    def read(self, key: Key) -> None:
        """Request a page; `take_read` returns the page later."""
        name = self._calls.read_part(key)
        self._names[key], self._reads[name] = name, _Read(key, 1 + self._followers)
        self._own.read(key)

    def take_read(self) -> list[tuple[Key, Any]]:
        """Return (key, page) of the reads that ended in all processes; None is a page without all parts."""
        ended = [self._end(self._names[key], 0, page) for key, page in self._own.take_read()]
        while not self._answers.empty():
            rank, name, found = self._answers.get()
            ended.append(self._end(name, rank, found or None))
        return [self._take(name) for name in dict.fromkeys(ended) if not self._reads[name].waiting]

    def _end(self, name: int, rank: int, found: Any) -> int:
        """Note the end of a process's read, and return the page's name. found: None without a part."""
        read = self._reads[name]
        read.waiting -= 1
        if found is None:
            read.lost.append(rank)
        elif rank == 0:
            read.page = found
        return name

    def _take(self, name: int) -> tuple[Key, Any]:
        read = self._reads.pop(name)
        del self._names[read.key]
        if not read.lost:
            self._calls.found_part(name, read.page)
            return read.key, read.page
        ranks = ", ".join(map(str, sorted(read.lost)))
        log.warning(
            "page %s is computed again: no valid part on the disk of process %s", read.key.hex(), ranks
        )
        self._own.remove(read.key)
        self._calls.lose_part(read.key, name)
        return read.key, None

    @property
    def pending(self) -> int:
        """The number of requested pages that `take_read` has not returned."""
        return len(self._reads)

    def read_seconds(self, num_bytes: int) -> float:
        """Predict the seconds until `num_bytes` more are read, over all processes.

        See `DiskTier.read_seconds`.
        """
        return self._own.read_seconds(num_bytes // (1 + self._followers))

    # ---- the end

    def counters(self) -> DiskCounters:
        """Return the counts of process 0's parts."""
        return self._own.counters()

    def close(self, pages: Sequence[tuple[Key, Any]] = ()) -> None:
        """Write the missing parts of the host's pages, and close the disk of every process."""
        try:
            self._calls.close_parts(pages)
        finally:  # a follower may have ended
            self._own.close(pages)


class FollowerDisk:
    """The disk of a follower, which makes the calls of process 0's `PartCalls`.

    Args:
      tier: the disk tier of this process's parts.
      pages: the pages outside the cache, by name.
      answer: tells process 0 the end of a read. Any thread calls this function.
    """

    def __init__(self, tier: DiskTier, pages: dict[int, Any], answer: Callable[[bytes], None]):
        self._tier, self._pages, self._answer = tier, pages, answer

    def write(self, key: Key, name: int) -> None:
        """Queue the write of a part. The part is dropped when the queue is full."""
        self._tier.put(key, self._pages[name], opportunistic=False)

    def read(self, key: Key, name: int) -> None:
        """Start to read a part. The part gets its name, and process 0 an answer."""

        def take(page: Any) -> None:
            if page is not None:
                self._pages[name] = page
            self._answer(_ANSWER.pack(name, page is not None))

        self._tier.fetch(key, take)

    def lose(self, key: Key, name: int) -> None:
        """Forget what was read, and remove the part from the disk."""
        self._pages.pop(name, None)
        self._tier.remove(key)

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark parts as used now, the last one as the most recent."""
        self._tier.touch(keys)

    def close(self, keys: Sequence[Key], names: Sequence[int]) -> None:
        """Write the missing parts of the host's pages, and close the disk."""
        self._tier.close([(key, self._pages[name]) for key, name in zip(keys, names, strict=True)])
