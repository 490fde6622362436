"""Memory of the host that the device's copy engine reads and writes at the link's speed, seen from numpy at
the same time.

An array in `pinned_host` memory is what `jax.device_put` moves at full speed; through numpy's own memory the
link is 25 times slower.
`HostArray.views` are the same bytes as numpy arrays, so that the CPU can add a token's KV, attend, or read a
file into them without a copy. JAX takes arrays for constant: nobody may write to a view while a transfer of
its array is under way, which the driver sees to.
"""

import ctypes
import dataclasses
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxflow.flexgen.shards import CUT, home_of, on_device, placed, spec_of


@dataclasses.dataclass(frozen=True)
class HostArray:
    """An array in pinned host memory, and the bytes of each device's piece as numpy sees them. Both live as
    long as this does.
    """

    array: jax.Array
    views: tuple[np.ndarray, ...]


def host_array(array: jax.Array) -> HostArray:
    """The views of an array in pinned memory; waits until the array is there."""
    array.block_until_ready()
    return HostArray(array, tuple(_view(shard.data) for shard in array.addressable_shards))


def _view(piece: jax.Array) -> np.ndarray:
    buffer = (ctypes.c_uint8 * piece.nbytes).from_address(piece.unsafe_buffer_pointer())
    return np.frombuffer(buffer, np.uint8).view(piece.dtype).reshape(piece.shape)


def views(tree: Any) -> list[np.ndarray]:
    """Of all pieces of all arrays of a pytree of `HostArray`s, in order."""
    return [view for a in jax.tree.leaves(tree) for view in a.views]


def reserve(struct: Any) -> HostArray:
    """An array of zeros, cut as its shape says: the first use of pinned memory is slow, so that it is made
    before the clock runs.

    The zeros are the device's: numpy's memory crosses to the pinned one 25 times slower than they do.
    """
    return host_array(
        jax.device_put(
            jnp.zeros(struct.shape, struct.dtype, device=struct.sharding), home_of(struct.sharding)
        )
    )


def check_views(mesh: Mesh) -> None:
    """Whether views and their array are the same bytes here, as everything in this folder takes for granted.
    Raises: RuntimeError.
    """
    made = reserve(placed(mesh, jax.ShapeDtypeStruct((8, 64), np.int32), CUT))
    for i, view in enumerate(made.views):
        view[:] = 7 + i
    found = jax.device_put(made.array, on_device(mesh, CUT))
    for i, shard in enumerate(found.addressable_shards):
        if not (np.asarray(shard.data) == 7 + i).all():
            raise RuntimeError(
                f"{shard.device}: what is written to pinned host memory through its pointer does not "
                f"reach the device"
            )


def bits(a: np.ndarray) -> np.ndarray:
    """The same bytes as unsigned integers: numpy copies a dtype that is not its own element by element."""
    return a.view(f"u{a.dtype.itemsize}")


class Staging:
    """Host buffers that files are read into before they cross to the device: as many as are reserved, used in
    turn.

    A buffer that was given back waits for the transfer that read it, at its next use and not before.
    """

    def __init__(self) -> None:
        self._reserved: Counter = Counter()
        self._free: dict[Any, list[tuple[HostArray, Any]]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def reserve(self, structs: Iterable[Any]) -> None:
        """Sees to it that all of these can be out at once."""
        by_key: dict[Any, list[Any]] = {}
        for struct in structs:
            by_key.setdefault(buffer_key(struct), []).append(struct)
        for key, alike in by_key.items():
            for struct in alike[self._reserved[key] :]:
                self._free.setdefault(key, []).append((reserve(struct), None))
                self._reserved[key] += 1

    def take(self, struct: Any) -> HostArray:
        """A buffer of this shape; waits for one to be given back."""
        key = buffer_key(struct)
        with self._changed:
            if not self._reserved[key]:
                raise ValueError(f"no buffer of {key} was reserved")
            self._changed.wait_for(lambda: self._closed or self._free[key])
            if self._closed:
                raise RuntimeError("closed while a read waited for its buffer")
            buffer, after = self._free[key].pop(0)
        jax.block_until_ready(after)
        return buffer

    def give(self, buffer: HostArray, after: Any = None) -> None:
        """Gives a buffer back; `after`: arrays that are still being made of it."""
        with self._changed:
            self._free[buffer_key(buffer.array)].append((buffer, after))
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits for a buffer any more: who does is refused."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def free(self) -> None:
        """Lets go of all buffers; those that are out are gone when they are dropped."""
        with self._changed:
            for entries in self._free.values():
                entries.clear()

    def forget_transfers(self) -> None:
        """Drops the arrays that free buffers wait for, once they are made: what the device holds no longer
        hangs on them.
        """
        with self._changed:
            for key, entries in self._free.items():
                jax.block_until_ready([after for _, after in entries])
                self._free[key] = [(buffer, None) for buffer, _ in entries]


def buffer_key(a: Any) -> tuple[tuple[int, ...], Any, Any]:
    """What a buffer must share with an array to take its place: shape, dtype, how they are cut."""
    return tuple(a.shape), np.dtype(a.dtype), spec_of(a)
