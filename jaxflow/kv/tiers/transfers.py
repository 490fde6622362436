"""Pages between device and pinned host memory, beside the steps: begun at once, never waited for.

A copy is `jax.device_put` between memory kinds of one sharding, each shard to and from its own device's host
memory. On a GPU that enqueues it on a stream beside the computation's, ordered behind what made its source, a
gather for instance, and behind what was enqueued when it was begun. So it is begun by the engine's thread,
before the step that it is to run beside: from a thread of its own it would come after that step was enqueued,
and run a step later. That costs the engine some 20 us a page.

A call of `jax.device_put` looks at all of its arrays before it begins the first, 35 us each, so that 64 pages
in one call leave the link idle for 2 ms of 12. And XLA deals copies of both directions out to four streams of
a device in turn, each of which runs its own in order: pages up that were begun behind many down wait for
them, though the link carries both. So a call begins a few pages (of a single one it takes four times the
CPU), and some down take turns with some up: four at a time gave both directions most on an H200.
"""

import collections
import contextlib
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.profiler
from jax.sharding import Mesh, NamedSharding, PartitionSpec

log = logging.getLogger(__name__)

HOST_MEMORY = "pinned_host"
PAGES_A_CALL = 4
Batch = Sequence[tuple[Any, jax.Array]]  # tags, and what is to be copied


def in_calls(pages: Sequence[jax.Array], sharding: Any, pages_a_call: int = PAGES_A_CALL) -> list[jax.Array]:
    """Copies of pages on their way, so many begun by a call."""
    return [copy for few in itertools.batched(pages, pages_a_call) for copy in jax.device_put(few, sharding)]


class Channel:
    """Copies to one memory kind.

    Attributes:
      bytes: copied since start.
    """

    def __init__(self, sharding: NamedSharding):
        self.sharding, self.bytes = sharding, 0
        self._flying: collections.deque[tuple[list[Any], list[Any] | None]] = (
            collections.deque()
        )  # tags, copies
        self._failed = False

    def copy(self, batch: Batch) -> None:
        """Begins copies; `done` gives each back with its tag. Bounded by who asks: `HostTier.staging_bytes`."""
        for few in itertools.batched(batch, PAGES_A_CALL):
            self._flying.append(([tag for tag, _ in few], self._begin([array for _, array in few])))

    def done(self) -> list[tuple[Any, jax.Array | None]]:
        """(tag, copy) of what has been copied since the last call, in the order of asking; None for what
        could not be.
        """
        found: list[tuple[Any, jax.Array | None]] = []
        while self._flying:
            tags, copies = self._flying[0]
            if copies is not None and not all(copy.is_ready() for copy in copies):
                break
            self._flying.popleft()
            whole = self._end(copies)
            found += zip(tags, whole or [None] * len(tags), strict=True)
        return found

    def close(self) -> None:
        """Waits for what is under way."""
        for _, copies in self._flying:
            with contextlib.suppress(Exception):  # `done` tells
                jax.block_until_ready(copies)

    def _begin(self, sources: list[jax.Array]) -> list[jax.Array] | None:
        try:
            return jax.device_put(sources, self.sharding)
        except Exception as fault:
            return self._fail(fault)

    def _end(self, copies: list[jax.Array] | None) -> list[jax.Array] | None:
        """The copies, if they have come without a fault; waits for them."""
        try:
            jax.block_until_ready(copies)
        except Exception as fault:
            return self._fail(fault)
        self.bytes += sum(copy.nbytes for copy in copies or ())
        return copies

    def _fail(self, fault: Exception) -> None:
        if not self._failed:  # pinned memory that is used up, most likely; the engine goes on without
            log.warning("pages cannot be copied to %s: %s", self.sharding.memory_kind, fault)
        self._failed = True


class Transfers:
    """Both directions.

    Args:
      spec: how a page is cut over the mesh.

    Attributes:
      to_host, to_device: the channels.
    """

    def __init__(self, mesh: Mesh, spec: PartitionSpec):
        self.to_host = Channel(NamedSharding(mesh, spec, memory_kind=HOST_MEMORY))
        self.to_device = Channel(NamedSharding(mesh, spec))

    def copy(self, down: Batch, up: Batch) -> None:
        """Begins copies to the host and to the device, in turns."""
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
        """Lets some time pass in which copies may come."""
        time.sleep(timeout_s)

    def close(self) -> None:
        self.to_host.close()
        self.to_device.close()
