"""Pinned host memory with numpy views: device and CPU use the same bytes.

`jax.device_put` copies an array in `pinned_host` memory at full speed; from numpy's memory the link is 25
times slower. `HostArray.views` are the bytes of such an array as numpy arrays, so that the CPU adds a token's
KV, attends, or reads a file without a copy. JAX assumes that arrays are constant: a view must not be written
while a transfer of its array is under way. The block loop keeps this order.
"""

import ctypes
import dataclasses
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxflow.flexgen.geometry import SHARDED, device_sharding, pinned_sharding, placed, spec_of

_PIECE_ROWS = 64 << 10  # KiB a device and array of `grow_pools`


@dataclasses.dataclass(frozen=True)
class HostArray:
    """An array in pinned host memory with numpy views of its shards, valid as long as this object."""

    array: jax.Array
    views: tuple[np.ndarray, ...]


def host_array(array: jax.Array) -> HostArray:
    """Wait for an array in pinned memory, and return it with its views."""
    array.block_until_ready()
    return HostArray(array, tuple(_view(shard.data) for shard in array.addressable_shards))


def _view(piece: jax.Array) -> np.ndarray:
    buffer = (ctypes.c_uint8 * piece.nbytes).from_address(piece.unsafe_buffer_pointer())
    return np.frombuffer(buffer, np.uint8).view(piece.dtype).reshape(piece.shape)


def views(tree: Any) -> list[np.ndarray]:
    """Return the views of all shards of all `HostArray`s of a pytree, in order."""
    return [view for a in jax.tree.leaves(tree) for view in a.views]


def reserve(struct: Any) -> HostArray:
    """Return an array of zeros in pinned memory, sharded like `struct`.

    The first use of pinned memory is slow, so the memory is reserved before the measured time. The zeros come
    from the device, because numpy's memory crosses to pinned memory 25 times slower.
    """
    return host_array(
        jax.device_put(
            jnp.zeros(struct.shape, struct.dtype, device=struct.sharding), pinned_sharding(struct.sharding)
        )
    )


def check_views(mesh: Mesh) -> None:
    """Check that the views and their array are the same bytes on this platform. Raises: RuntimeError."""
    made = reserve(placed(mesh, jax.ShapeDtypeStruct((8, 64), np.int32), SHARDED))
    for i, view in enumerate(made.views):
        view[:] = 7 + i
    found = jax.device_put(made.array, device_sharding(mesh, SHARDED))
    for i, shard in enumerate(found.addressable_shards):
        if not (np.asarray(shard.data) == 7 + i).all():
            raise RuntimeError(
                f"{shard.device}: data written to pinned host memory through its pointer does not reach the "
                "device"
            )


def grow_pools(mesh: Mesh, size: int, stopped: threading.Event) -> int:
    """Let the pinned pools of a mesh's devices take `size` bytes together from the system.

    Return the bytes that the pools gave; fewer if they cannot grow further, or from `stopped` on.

    The system gives about 1.5 GiB a second, so that a pool which grows later stops a run for seconds. The
    pools keep the memory when the arrays are gone.
    """
    struct = placed(mesh, jax.ShapeDtypeStruct((_PIECE_ROWS, mesh.size << 10), np.uint8), SHARDED)
    zeros = jnp.zeros(struct.shape, struct.dtype, device=struct.sharding)
    pinned, held = pinned_sharding(struct.sharding), []
    try:  # less two pieces, because regions may end in gaps below a piece
        for _ in range(size // zeros.nbytes - 2):
            if stopped.is_set():
                break
            held.append(jax.device_put(zeros, pinned))
        jax.block_until_ready(held)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
    return len(held) * zeros.nbytes


class PinnedPool:
    """Bytes that the runs of this process take from XLA's pool of pinned memory on a GPU's host.

    The pool keeps what it once took from the system. So memory of an ended run is not free for other
    processes, but for the next run of this process.
    """

    def __init__(self) -> None:
        self._runs: dict[int, int] = {}
        self._numbers = itertools.count()
        self._most = 0  # bytes of all runs together, at most

    def take(self, size: int) -> Callable[[], None]:
        """Count the bytes of a run, and return the function that ends the run. A second call does nothing."""
        number = next(self._numbers)
        self._runs[number] = size
        self._most = max(self._most, sum(self._runs.values()))

        def end() -> None:
            self._runs.pop(number, None)

        return end

    @property
    def free_bytes(self) -> int:
        """Return the bytes of ended runs that no other run uses."""
        return self._most - sum(self._runs.values())


def bits(a: np.ndarray) -> np.ndarray:
    """Return the same bytes as unsigned integers, because numpy copies foreign dtypes element by element."""
    return a.view(f"u{a.dtype.itemsize}")


class Staging:
    """Reserved host buffers for reads from disk, used in turn.

    A buffer that was given back waits, at its next use, for the transfer that reads the buffer.
    """

    def __init__(self) -> None:
        self._reserved: Counter = Counter()
        self._free: dict[Any, list[tuple[HostArray, Any]]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def reserve(self, structs: Iterable[Any]) -> None:
        """Reserve buffers, so that all of `structs` can be in use at once."""
        by_key: dict[Any, list[Any]] = {}
        for struct in structs:
            by_key.setdefault(buffer_key(struct), []).append(struct)
        for key, alike in by_key.items():
            for struct in alike[self._reserved[key] :]:
                self._free.setdefault(key, []).append((reserve(struct), None))
                self._reserved[key] += 1

    def take(self, struct: Any) -> HostArray:
        """Wait for a free buffer of a shape, and return the buffer."""
        key = buffer_key(struct)
        with self._changed:
            if not self._reserved[key]:
                raise ValueError(
                    f"buffer {key}; accepted are the shapes, dtypes and shardings of reserved buffers"
                )
            self._changed.wait_for(lambda: self._closed or self._free[key])
            if self._closed:
                raise RuntimeError("the staging was closed while a read waited for a buffer")
            buffer, after = self._free[key].pop(0)
        jax.block_until_ready(after)
        return buffer

    def give(self, buffer: HostArray, after: Any = None) -> None:
        """Give a buffer back; `after`: arrays that are still being copied from the buffer."""
        with self._changed:
            self._free[buffer_key(buffer.array)].append((buffer, after))
            self._changed.notify_all()

    def close(self) -> None:
        """Let all waiting calls of `take` fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def free(self) -> None:
        """Release all free buffers. Buffers in use are released with their last reference."""
        with self._changed:
            for entries in self._free.values():
                entries.clear()

    def forget_transfers(self) -> None:
        """Wait for the arrays that free buffers wait for, and release the arrays."""
        with self._changed:
            for key, entries in self._free.items():
                jax.block_until_ready([after for _, after in entries])
                self._free[key] = [(buffer, None) for buffer, _ in entries]


def buffer_key(a: Any) -> tuple[tuple[int, ...], Any, Any]:
    """Return the shape, dtype and sharding that a buffer and an array must share."""
    return tuple(a.shape), np.dtype(a.dtype), spec_of(a)
