"""What the stores of weights, KV and activations share: the devices, their host's memory, a folder on disk,
and threads.

Transfers between host and device are enqueued by the driver itself, in its order, since where a transfer is
issued relative to compute decides what it can overlap with. Threads do what would keep the driver waiting:
they read files ahead, wait for what comes up from the device, and write it to its home.
"""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxflow.flexgen.pinned_memory import HostArray, Staging, host_array
from jaxflow.flexgen.scratch_files import DiskFolder
from jaxflow.flexgen.shards import home_of, on_device, spec_of
from jaxflow.flexgen.traffic import Traffic


class Tiers:
    """folder: None where nothing lives on disk."""

    def __init__(self, mesh: Mesh, folder: DiskFolder | None):
        self.mesh, self.folder = mesh, folder
        self.traffic, self.staging = Traffic(), Staging()
        self._weights = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="read-weights")
        self._reads = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="read-kv")
        self._writes = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="write")

    def down(self, tree: Any) -> Any:
        """`HostArray`s, or what `up` returned, on their way to the device, each piece to its own; returns
        before they are there.
        """

        arrays = jax.tree.map(lambda a: a.array if isinstance(a, HostArray) else a, tree)
        return self._put(arrays, lambda a: on_device(self.mesh, spec_of(a)))

    def up(self, tree: Any) -> Any:
        """Device arrays on their way to pinned host memory; returns before they are there."""
        return self._put(tree, lambda a: home_of(on_device(self.mesh, spec_of(a))))

    def _put(self, tree: Any, where: Callable[[jax.Array], Any]) -> Any:
        """All of a tree by one call: of 4 bits a layer is a dozen arrays and more, and a call for each takes
        the driver 80 us, not 20.
        """
        arrays, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(
            structure, jax.device_put(arrays, [where(a) for a in arrays]) if arrays else []
        )

    def arrived(self, tree: Any) -> Any:
        """The `HostArray`s of what `up` returned; waits for them."""
        return jax.tree.map(host_array, tree)

    def read_weights(self, work: Callable[[], Any]) -> concurrent.futures.Future:
        return self._weights.submit(work)

    def read(self, work: Callable[[], Any]) -> concurrent.futures.Future:
        return self._reads.submit(work)

    def write(self, work: Callable[[], Any]) -> concurrent.futures.Future:
        return self._writes.submit(work)

    def close(self) -> None:
        """Ends the threads, once what they were given is done, and removes the files."""
        self.staging.close()
        for pool in (self._weights, self._reads, self._writes):
            pool.shutdown(wait=True, cancel_futures=True)
        if self.folder is not None:
            self.folder.close()
