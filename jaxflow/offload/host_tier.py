"""Memory of the host that the device's copy engine reads and writes at the link's speed, seen from numpy at the same time.

An array in `pinned_host` memory is what `jax.device_put` moves at full speed; through numpy's own memory the link is 25 times slower.
`HostArray.view` is the same bytes as a numpy array, so that the CPU can add a token's KV, attend, or read a file into them without a
copy. JAX takes arrays for constant: nobody may write to a view while a transfer of its array is under way, which the driver sees to.
"""

import ctypes
import dataclasses
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

PINNED = "pinned_host"


@dataclasses.dataclass(frozen=True)
class HostArray:
    """An array in pinned host memory, and its bytes as numpy sees them. Both live as long as this does."""

    array: jax.Array
    view: np.ndarray


def on_host(device: Any) -> SingleDeviceSharding:
    """Where arrays of the host tier lie."""
    return SingleDeviceSharding(device, memory_kind=PINNED)


def host_array(array: jax.Array) -> HostArray:
    """The view of an array in pinned memory; waits until the array is there."""
    array.block_until_ready()
    buffer = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return HostArray(array, np.frombuffer(buffer, np.uint8).view(array.dtype).reshape(array.shape))


def reserve(struct: Any, device: Any) -> HostArray:
    """An array of zeros: the first use of pinned memory is slow, so that it is made before the clock runs."""
    return host_array(jax.device_put(np.zeros(struct.shape, struct.dtype), on_host(device)))


def check_views(device: Any) -> None:
    """Whether a view and its array are the same bytes here, as everything in this folder takes for granted. Raises: RuntimeError."""
    made = reserve(jax.ShapeDtypeStruct((64,), np.int32), device)
    made.view[:] = 7
    if not (np.asarray(jax.device_put(made.array, SingleDeviceSharding(device))) == 7).all():
        raise RuntimeError(f"{device}: what is written to pinned host memory through its pointer does not reach the device")


def bits(a: np.ndarray) -> np.ndarray:
    """The same bytes as unsigned integers: numpy copies a dtype that is not its own element by element."""
    return a.view(f"u{a.dtype.itemsize}")


class Staging:
    """Host buffers that files are read into before they cross to the device: as many as are reserved, used in turn.

    A buffer that was given back waits for the transfer that read it, at its next use and not before.
    """

    def __init__(self, device: Any):
        self._device = device
        self._reserved: Counter = Counter()
        self._free: dict[Any, list[tuple[HostArray, Any]]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def reserve(self, structs: Iterable[Any]) -> None:
        """Sees to it that all of these can be out at once."""
        for key, count in Counter(_key(struct) for struct in structs).items():
            while self._reserved[key] < count:
                struct = jax.ShapeDtypeStruct(*key)
                self._free.setdefault(key, []).append((reserve(struct, self._device), None))
                self._reserved[key] += 1

    @property
    def reserved_bytes(self) -> int:
        return sum(np.dtype(dtype).itemsize * int(np.prod(shape)) * n for (shape, dtype), n in self._reserved.items())

    def take(self, struct: Any) -> HostArray:
        """A buffer of this shape; waits for one to be given back."""
        key = _key(struct)
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
            self._free[_key(buffer.view)].append((buffer, after))
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits for a buffer any more: who does is refused."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def forget_transfers(self) -> None:
        """Drops the arrays that free buffers wait for, once they are made: what the device holds no longer hangs on them."""
        with self._changed:
            for key, entries in self._free.items():
                jax.block_until_ready([after for _, after in entries])
                self._free[key] = [(buffer, None) for buffer, _ in entries]


def _key(a: Any) -> tuple[tuple[int, ...], Any]:
    return tuple(a.shape), np.dtype(a.dtype)
