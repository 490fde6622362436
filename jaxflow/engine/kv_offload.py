"""The host tier at work: before each step pages are scattered and gathered on the device, beside the steps
they cross PCIe.

In the order of the device's stream (the chain of a layer's KV): what has come up is scattered, what the last
step completed is gathered, then the step runs. The copies themselves, `store_kv` and `load_kv`, are no part
of that chain: they read what a gather made, and make what a later scatter reads.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import jax

from jaxflow.engine.executor import Executor
from jaxflow.kv.tiers.disk_link import DiskLink
from jaxflow.kv.tiers.host_store import Key
from jaxflow.kv.tiers.numa import bind
from jaxflow.kv.tiers.transfers import Transfers
from jaxflow.scheduler.page_fetch import Load, Piece
from jaxflow.scheduler.tier_policy import HostTier

IDLE_S = 0.0005  # how often a loop that waits for nothing but copies looks around


class Offload:
    """Carries out what a `HostTier` decides, on an executor's cache. One thread owns it, the engine's.

    `cpus`: those near the devices, None for any. `link`: the disk below the host, if there is one.
    """

    def __init__(
        self, tier: HostTier, transfers: Transfers, cpus: set[int] | None = None, link: DiskLink | None = None
    ):
        self.tier, self.transfers, self.link = tier, transfers, link
        self._cpus = cpus

    def begin(self) -> None:
        """Keeps the thread that calls, the engine's, near the devices."""
        bind(self._cpus)

    def receive(self) -> None:
        """Tells the tier which copies have come. To be called before a step is decided."""
        for key, data in self.transfers.to_host.done():
            self.tier.stored(key, data)
        for (load, piece), data in self.transfers.to_device.done():
            self.tier.fetched(load, piece, data)
        if self.link is not None:
            for key, data in self.link.arrived():
                self.tier.arrived(key, data, from_below=True)

    def send(self, executor: Executor) -> None:
        """Enqueues what is to be done before the step that was just decided, and begins copies beside it."""
        for group, pieces in _by_group(self.tier.take_scatters(), lambda scatter: scatter[0].group):
            pages, data = [piece.page for piece, _ in pieces], [data for _, data in pieces]
            executor.scatter_pages(group, pages, data)
        down: list[tuple[Key, jax.Array]] = []
        for group, stores in _by_group(self.tier.take_stores(), lambda store: store[0]):
            pages = executor.gather_pages(group, [page for _, page, _ in stores])
            down += [(key, page) for (_, _, key), page in zip(stores, pages, strict=True)]
        fetches: list[tuple[Load, Piece, jax.Array]] = self.tier.take_fetches()
        self.transfers.copy(down, [((load, piece), data) for load, piece, data in fetches])

    @property
    def busy(self) -> bool:
        """Whether there is something to send or to receive, though nothing may be there to compute."""
        return self.tier.busy or self.tier.copying or (self.link is not None and self.link.pending > 0)

    def counters(self) -> dict[str, int]:
        """What each tier did since start, and what is there now; any thread may read them."""
        tier, store = self.tier, self.tier.store
        counts = {
            **dataclasses.asdict(tier.counters),
            "host_pages": len(store),
            "host_bytes": store.bytes,
            "host_capacity_bytes": store.capacity_bytes,
            **{f"host_pages_{name}": value for name, value in dataclasses.asdict(store.counters).items()},
            "bytes_to_host": self.transfers.to_host.bytes,
            "bytes_to_device": self.transfers.to_device.bytes,
        }
        if self.link is not None:
            counts |= {
                f"disk_{name}": value for name, value in dataclasses.asdict(self.link.disk.counters()).items()
            }
        return counts

    def wait(self) -> None:
        """For a copy, for a moment: nothing can be computed before one comes."""
        self.transfers.wait(IDLE_S)

    def close(self) -> None:
        """Waits for copies under way; with a disk, what only the host has is written to it."""
        try:
            self.transfers.close()
            self.receive()
        finally:  # after a fault of the engine the tier may be in any state
            if self.link is not None:
                self.link.close()
            self.tier.store.clear()


def _by_group(items: list[Any], group_of) -> Iterable[tuple[int, list[Any]]]:
    """Items by layer group."""
    return [
        (group, list(some)) for group, some in itertools.groupby(sorted(items, key=group_of), key=group_of)
    ]
