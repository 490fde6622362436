"""Pages between device and pinned host memory, beside the steps: one thread down, one up, neither ever waited for.

A copy is `jax.device_put` between memory kinds of one sharding, each shard to and from its own device's host memory. On a
GPU it runs on a stream of its own, ordered behind what makes its source, and so behind the gather that was enqueued
before it; copies up and down are on different streams. To begin one costs the CPU some 20 µs a page, and its end has to
be waited for somewhere: that is what the threads are for.
"""

import collections
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

log = logging.getLogger(__name__)

HOST_MEMORY = "pinned_host"


class Channel:
    """A thread that copies to one memory kind, in the order in which it is asked."""

    def __init__(self, name: str, sharding: NamedSharding, on_done: Callable[[], None], prepare: Callable[[], None]):
        self.sharding = sharding
        self.bytes, self.seconds = 0, 0.0  # copied, and how long that took; begin to end of each batch
        self._on_done, self._prepare, self._failed = on_done, prepare, False
        self._asked: queue.SimpleQueue[list[tuple[Any, jax.Array]] | None] = queue.SimpleQueue()
        self._done: collections.deque[tuple[Any, jax.Array | None]] = collections.deque()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def copy(self, batch: list[tuple[Any, jax.Array]]) -> None:
        """Asks for copies; `done` gives each back with its tag. Bounded by who asks: `HostTier.staging_bytes`."""
        if batch:
            self._asked.put(batch)

    def done(self) -> list[tuple[Any, jax.Array | None]]:
        """(tag, copy) of what has been copied since the last call; None for what could not be."""
        found = []
        while self._done:
            found.append(self._done.popleft())
        return found

    def close(self) -> None:
        """Ends the thread, after what was asked for."""
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._prepare()
        while (batch := self._asked.get()) is not None:
            tags = [tag for tag, _ in batch]
            sources = [array for _, array in batch]
            del batch  # what is copied must not stay alive until the next batch comes
            self._done.extend(zip(tags, self._copy(sources), strict=True))
            del sources
            self._on_done()

    def _copy(self, sources: list[jax.Array]) -> Sequence[jax.Array | None]:
        try:
            jax.block_until_ready(sources)  # so that the time is the copy's own
            begin = time.perf_counter()
            copies = jax.block_until_ready(jax.device_put(sources, self.sharding))
            self.seconds += time.perf_counter() - begin
            self.bytes += sum(array.nbytes for array in copies)
        except Exception as fault:
            if not self._failed:  # pinned memory that is used up, most likely; the engine goes on without
                log.warning("pages cannot be copied to %s: %s", self.sharding.memory_kind, fault)
            self._failed = True
            return [None] * len(sources)
        return copies


class Transfers:
    """Both directions.

    Args:
      spec: how a page is cut over the mesh.
      prepare: run first on each thread, to bind it to some CPUs, say.

    Attributes:
      to_host, to_device: the channels.
    """

    def __init__(self, mesh: Mesh, spec: PartitionSpec, prepare: Callable[[], None] = lambda: None):
        self._arrived = threading.Event()
        self.to_host = Channel("jaxflow-store-kv", NamedSharding(mesh, spec, memory_kind=HOST_MEMORY), self._arrived.set, prepare)
        self.to_device = Channel("jaxflow-load-kv", NamedSharding(mesh, spec), self._arrived.set, prepare)

    def wait(self, timeout_s: float) -> None:
        """Until a copy has come in either direction since the last call, or so long."""
        self._arrived.wait(timeout_s)
        self._arrived.clear()

    def close(self) -> None:
        self.to_host.close()
        self.to_device.close()
