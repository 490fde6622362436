"""Execution of the tier policy: page copies between device and host, concurrent with the steps.

In the order of the device's stream, pages that have arrived are scattered, pages of the last step are
gathered, then the step runs. The copies `store_kv` and `load_kv` cross PCIe outside this order: they read the
output of a gather, and make the input of a later scatter.

A copy is a `jax.device_put` between memory kinds of one sharding: each shard to and from its own device's
host memory. Over pipeline stages a page is copied in parts, and each stage has its own order: its scatters
and gathers come between its own steps. On a GPU the call enqueues the copy on a separate stream, ordered
behind the program that made the source and behind everything enqueued before the call. So the engine's thread
starts the copies, before it enqueues the step that runs at the same time; a copy started by another thread
would come after that step and run a step later. A start costs the engine about 20 us a page.

One call copies 4 pages, and the calls alternate between the directions. A call inspects all of its arrays
before it starts the first copy, 35 us each: 64 pages in one call leave the link idle for 2 ms of 12. One page
a call costs four times the CPU time. XLA distributes the copies of both directions over four streams of a
device in turn, and each stream runs in order: without the alternation, pages to the device wait for earlier
pages to the host, although the link carries both directions at once. Groups of 4 gave the highest total rate
on an H200.
"""

import collections
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.profiler

from jaxflow.kv.tiers.host_machine import bind
from jaxflow.kv.tiers.host_store import Key
from jaxflow.kv.tiers.page import HOST_MEMORY, Page, copy_to
from jaxflow.kv.tiers.policy import Fetch, FetchPage, TierPolicy

log = logging.getLogger(__name__)

PAGES_A_CALL = 4
IDLE_S = 0.0005  # polling interval of a loop that waits for nothing but copies
Batch = Sequence[tuple[Any, Page]]  # (tag, source) of each copy
CopyPages = Callable[[Sequence[Page], str | None], list[Page]]


def in_calls(pages: Sequence[Page], memory_kind: str | None, pages_a_call: int = PAGES_A_CALL) -> list[Page]:
    """Start copies of pages to a memory kind, `pages_a_call` in a call. Return the copies."""
    return [copy for some in itertools.batched(pages, pages_a_call) for copy in copy_to(some, memory_kind)]


class Channel:
    """Copies to one memory kind of the pages' devices.

    Args:
      copy: starts copies, as `copy_to`.

    Attributes:
      bytes: bytes copied since the start.
    """

    def __init__(self, memory_kind: str | None, copy: CopyPages = copy_to):
        self.memory_kind, self.bytes, self._copy = memory_kind, 0, copy
        self._under_way: collections.deque[tuple[list[Any], list[Any] | None]] = collections.deque()
        self._failed = False

    def copy(self, batch: Batch) -> None:
        """Start copies. `TierPolicy.staging_bytes` limits their number."""
        for some in itertools.batched(batch, PAGES_A_CALL):
            self._under_way.append(([tag for tag, _ in some], self._start([array for _, array in some])))

    def done(self) -> list[tuple[Any, Page | None]]:
        """Return (tag, copy) of the ended copies since the last call, in order; None is a failed copy."""
        found: list[tuple[Any, Page | None]] = []
        while self._under_way:
            tags, copies = self._under_way[0]
            if copies is not None and not all(part.is_ready() for part in jax.tree.leaves(copies)):
                break
            self._under_way.popleft()
            found += zip(tags, self._end(copies) or [None] * len(tags), strict=True)
        return found

    def close(self) -> None:
        """Wait for the copies under way."""
        for _, copies in self._under_way:
            with contextlib.suppress(Exception):  # `done` reports the error
                jax.block_until_ready(copies)

    def _start(self, sources: list[Page]) -> list[Page] | None:
        try:
            return self._copy(sources, self.memory_kind)
        except Exception as error:
            return self._fail(error)

    def _end(self, copies: list[Page] | None) -> list[Page] | None:
        """Wait for copies. Return None after an error."""
        try:
            jax.block_until_ready(copies)
        except Exception as error:
            return self._fail(error)
        self.bytes += sum(part.nbytes for part in jax.tree.leaves(copies))
        return copies

    def _fail(self, error: Exception) -> None:
        if not self._failed:  # most likely the pinned memory is used up; the engine continues without copies
            log.warning("KV pages cannot be copied to %s: %s", self.memory_kind or "the device", error)
        self._failed = True


class Transfers:
    """Page copies in both directions.

    Args:
      copy: starts copies, as `copy_to`.

    Attributes:
      to_host, to_device: the channels.
    """

    def __init__(self, copy: CopyPages = copy_to):
        self.to_host, self.to_device = Channel(HOST_MEMORY, copy), Channel(None, copy)

    def copy(self, down: Batch, up: Batch) -> None:
        """Start copies to the host (`down`) and to the device (`up`), in turns."""
        for to_host, to_device in itertools.zip_longest(
            itertools.batched(down, PAGES_A_CALL), itertools.batched(up, PAGES_A_CALL)
        ):
            if to_host:
                with jax.profiler.TraceAnnotation("store_kv"):
                    self.to_host.copy(to_host)
            if to_device:
                with jax.profiler.TraceAnnotation("load_kv"):
                    self.to_device.copy(to_device)

    def wait(self, timeout_s: float) -> None:
        """Sleep, so that copies can end."""
        time.sleep(timeout_s)

    def close(self) -> None:
        """Wait for the copies under way."""
        self.to_host.close()
        self.to_device.close()


class PageCache(Protocol):
    """The KV cache of an executor, as pages."""

    def gather_pages(self, group: int, pages: Sequence[int]) -> Sequence[Page]:
        """Return pages of a group, with the content after all enqueued steps."""
        ...

    def scatter_pages(self, group: int, pages: Sequence[int], data: Sequence[Any]) -> None:
        """Write pages of a group."""
        ...


class KvOffload:
    """Execution of a tier policy on a cache. The engine's thread owns the object.

    Args:
      cpus: CPUs near the devices, None for all CPUs.
    """

    def __init__(
        self, policy: TierPolicy, cache: PageCache, transfers: Transfers, cpus: set[int] | None = None
    ):
        self.policy, self.transfers = policy, transfers
        self._cache, self._cpus = cache, cpus

    def begin(self) -> None:
        """Bind the calling thread, the engine's, to the CPUs near the devices."""
        bind(self._cpus)

    def receive(self) -> None:
        """Report the copies and reads that ended to the policy. Called before a step is scheduled."""
        for key, data in self.transfers.to_host.done():
            self.policy.stored(key, data)
        for (fetch, page), data in self.transfers.to_device.done():
            self.policy.loaded(fetch, page, data)
        self.policy.store.take_read()

    def send(self) -> None:
        """Enqueue the scatters and gathers that come before the scheduled step, and start copies."""
        for group, scatters in _by_group(self.policy.take_scatters(), lambda scatter: scatter[0].group):
            pages, data = [page.page for page, _ in scatters], [data for _, data in scatters]
            self._cache.scatter_pages(group, pages, data)
        down: list[tuple[Key, Page]] = []
        for group, stores in _by_group(self.policy.take_stores(), lambda store: store[0]):
            pages = self._cache.gather_pages(group, [page for _, page, _ in stores])
            down += [(key, page) for (_, _, key), page in zip(stores, pages, strict=True)]
        loads: list[tuple[Fetch, FetchPage, Page]] = self.policy.take_loads()
        self.transfers.copy(down, [((fetch, page), data) for fetch, page, data in loads])

    # ---- pages for another engine

    def find(self, keys: Sequence[Key]) -> dict[Key, Page]:
        """Return the pages of these keys that are in host memory.

        A page never changes while it is referenced.
        """
        store = self.policy.store
        return {key: store.get(key) for key in keys if store.is_stored(key)}

    def give(self, pages: Mapping[Key, Page]) -> None:
        """Take pages in host memory that another engine computed, as long as there is room for them."""
        store = self.policy.store
        for key, page in pages.items():
            if store.contains(key):
                continue
            if not store.reserve(key):
                break
            store.arrive(key, page)

    @property
    def busy(self) -> bool:
        """True while there are pages to send or to receive."""
        lower = self.policy.store.lower
        return self.policy.busy or self.policy.copying or (lower is not None and lower.pending > 0)

    def counters(self) -> dict[str, int]:
        """Return the counts of each tier since the start, and their present content. Thread-safe."""
        return self.host_counters() | self.disk_counters()

    def host_counters(self) -> dict[str, int]:
        """Return the part of `counters` that counts this engine's or this rank's pages alone."""
        policy, store = self.policy, self.policy.store
        return {
            **dataclasses.asdict(policy.counters),
            "host_pages": len(store),
            "host_bytes": store.bytes,
            "host_capacity_bytes": store.capacity_bytes,
            **{f"host_pages_{name}": value for name, value in dataclasses.asdict(store.counters).items()},
            "bytes_to_host": self.transfers.to_host.bytes,
            "bytes_to_device": self.transfers.to_device.bytes,
        }

    def disk_counters(self) -> dict[str, int]:
        """Return the part of `counters` that counts the pages of the disk, which several ranks may share."""
        lower = self.policy.store.lower
        counts = {} if lower is None else dataclasses.asdict(lower.counters())
        return {f"disk_{name}": value for name, value in counts.items()}

    def wait(self) -> None:
        """Wait a moment for a copy, when no step can run before."""
        self.transfers.wait(IDLE_S)

    def close(self) -> None:
        """Wait for the copies, and close the host store, which first writes its pages to the disk."""
        try:
            self.transfers.close()
            self.receive()
        finally:  # after an error of the engine the policy may be in any state
            self.policy.store.close()


def _by_group(items: list[Any], group_of: Callable[[Any], int]) -> Iterable[tuple[int, list[Any]]]:
    """Return (group, items) of each page group."""
    return [
        (group, list(some)) for group, some in itertools.groupby(sorted(items, key=group_of), key=group_of)
    ]
