"""Shared resources of the stores: devices, pinned memory, scratch files, threads, traffic counters.

The block loop itself enqueues the transfers between host and device, in its order, because the position of a
transfer relative to the computation decides whether they overlap. Threads do the work that would block the
loop: they read files ahead, wait for copies from the device, and write files.
"""

import concurrent.futures
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh

from jaxflow.flexgen.geometry import device_sharding, pinned_sharding, spec_of
from jaxflow.flexgen.host_attention import usable_cores
from jaxflow.flexgen.pinned_memory import HostArray, Staging, host_array
from jaxflow.flexgen.scratch_files import DiskFolder
from jaxflow.flexgen.waits import Waits

_MOST_COPIERS = 8  # threads that copy rows of V
VERBS = (
    "fetch_layer",
    "load_kv",
    "store_kv",
    "load_activation",
    "store_activation",
    "host_attention",
    "compute",
)


class VerbTraffic(msgspec.Struct):
    """Traffic of one verb.

    Attributes:
      times: number of layers, splits of a batch, or batches.
      link_down_bytes, link_up_bytes: bytes to and from the device.
      seconds: time of the verb, in runs without overlap only.
    """

    times: int = 0
    link_down_bytes: int = 0
    link_up_bytes: int = 0
    disk_read_bytes: int = 0
    disk_write_bytes: int = 0
    host_kv_bytes: int = 0  # read by attention on the host
    seconds: float = 0.0


def added(found: Iterable[Mapping[str, VerbTraffic]]) -> dict[str, VerbTraffic]:
    """Return the sum of traffic, by verb."""
    sums: dict[str, VerbTraffic] = {}
    for verb, one in itertools.chain.from_iterable(traffic.items() for traffic in found):
        total = sums.setdefault(verb, VerbTraffic())
        for field in msgspec.structs.fields(VerbTraffic):
            setattr(total, field.name, getattr(total, field.name) + getattr(one, field.name))
    return sums


class Traffic:
    """Traffic counters of one run. Thread-safe."""

    def __init__(self) -> None:
        self._moved: defaultdict[str, VerbTraffic] = defaultdict(VerbTraffic)
        self._lock = threading.Lock()

    def add(
        self,
        verb: str,
        *,
        times: int = 0,
        down: int = 0,
        up: int = 0,
        read: int = 0,
        written: int = 0,
        host_kv: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Add to the counters of a verb."""
        with self._lock:
            one = self._moved[verb]
            one.times += times
            one.link_down_bytes += down
            one.link_up_bytes += up
            one.disk_read_bytes += read
            one.disk_write_bytes += written
            one.host_kv_bytes += host_kv
            one.seconds += seconds

    def crossed(self) -> tuple[int, int]:
        """Return the bytes to and from the device since the last `take`."""
        with self._lock:
            return sum(one.link_down_bytes for one in self._moved.values()), sum(
                one.link_up_bytes for one in self._moved.values()
            )

    def take(self) -> dict[str, VerbTraffic]:
        """Return the counters since the last call, by verb."""
        with self._lock:
            found, self._moved = self._moved, defaultdict(VerbTraffic)
        return {verb: found[verb] for verb in VERBS if verb in found}


class Tiers:
    """What moves the tensors of one run between device, host and disk: threads, buffers, counters.

    folder: of the tensors on disk; None without any.
    """

    def __init__(self, mesh: Mesh, folder: DiskFolder | None):
        self.mesh, self.folder = mesh, folder
        self.traffic, self.staging, self.waits = Traffic(), Staging(), Waits()
        self._weights = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="read-weights")
        self._reads = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="read-kv")
        self._copiers = min(_MOST_COPIERS, usable_cores())
        self._copies = concurrent.futures.ThreadPoolExecutor(self._copiers, thread_name_prefix="copy-rows")
        self._writes = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="write")

    def down(self, tree: Any) -> Any:
        """Start to copy `HostArray`s, or results of `up`, to the devices of their shards."""

        arrays = jax.tree.map(lambda a: a.array if isinstance(a, HostArray) else a, tree)
        return self._put(arrays, lambda a: device_sharding(self.mesh, spec_of(a)))

    def up(self, tree: Any) -> Any:
        """Start to copy device arrays to pinned host memory."""
        return self._put(tree, lambda a: pinned_sharding(device_sharding(self.mesh, spec_of(a))))

    def _put(self, tree: Any, where: Callable[[jax.Array], Any]) -> Any:
        """Copy all arrays of a tree by one call: a call for each of a dozen takes 80 us instead of 20."""
        arrays, structure = jax.tree.flatten(tree)
        if not arrays:
            return tree
        with self.waits.of("copies"):
            return jax.tree.unflatten(structure, jax.device_put(arrays, [where(a) for a in arrays]))

    def arrived(self, tree: Any) -> Any:
        """Wait for results of `up`, and return their `HostArray`s."""
        return jax.tree.map(host_array, tree)

    def read_weights(self, work: Callable[[], Any]) -> concurrent.futures.Future:
        """Run `work` on the thread that reads weights."""
        return self._weights.submit(work)

    def read(self, work: Callable[[], Any]) -> concurrent.futures.Future:
        """Run `work` on the thread that reads KV and activations."""
        return self._reads.submit(work)

    def write(self, work: Callable[[], Any]) -> concurrent.futures.Future:
        """Run `work` on the thread that writes."""
        return self._writes.submit(work)

    def share(self, rows: int, work: Callable[[slice], object]) -> None:
        """Run `work` on parts of `rows` on several threads, and wait for all parts."""
        parts = min(rows, self._copiers)
        cuts = [rows * part // parts for part in range(parts + 1)]
        for done in [self._copies.submit(work, slice(*cut)) for cut in itertools.pairwise(cuts)]:
            done.result()

    def close(self) -> None:
        """Stop the threads after their current work, and remove the files."""
        self.staging.close()
        for pool in (self._weights, self._reads, self._copies, self._writes):
            pool.shutdown(wait=True, cancel_futures=True)
        if self.folder is not None:
            self.folder.close()
