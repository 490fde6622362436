"""Arrays of a checkpoint, read side by side."""

import concurrent.futures
import contextlib
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

FEWEST, MOST, CORES = 2, 8, 4  # readers, and the CPU cores of the machine for each
HELD_BYTES = 2 << 30  # of the arrays in host memory at a time, where they are more than FEWEST
REUSED_BYTES = 512 << 20  # the largest array in memory that a thread keeps


def readers() -> int:
    """Return how many threads read a checkpoint. Other work of a start needs cores meanwhile."""
    return min(MOST, max(FEWEST, (os.cpu_count() or 1) // CORES))


class Room:
    """Host memory for arrays: `HELD_BYTES`, or as much as FEWEST arrays need."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrays = self._bytes = 0

    @contextlib.contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Wait until there is room for an array of `size` bytes, and hold the room for the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrays < FEWEST or self._bytes + size <= HELD_BYTES)
            self._arrays, self._bytes = self._arrays + 1, self._bytes + size
        try:
            yield
        finally:
            with self._changed:
                self._arrays, self._bytes = self._arrays - 1, self._bytes - size
                self._changed.notify_all()


def read_side_by_side[S, T](
    read: Callable[[S], T], items: Sequence[S], size: Callable[[S], int], threads: int
) -> Iterator[T]:
    """Yield `read(item)` of all items in order. Threads read the next ones meanwhile.

    After a fault the items that are left are not read. size: the bytes of an item in host memory.
    """
    room = Room()

    def read_one(item: S) -> T:
        with room.hold(size(item)):
            return read(item)

    pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="read")
    try:
        yield from pool.map(read_one, items)
    finally:
        pool.shutdown(cancel_futures=True)


class ReusedMemory:
    """Memory of each thread for one array after another. Devices copy an array before the thread's next one.

    The first use of memory takes longer than the copy of an array.
    """

    def __init__(self) -> None:
        self._own = threading.local()

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array with any numbers."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size > REUSED_BYTES:
            return np.empty(shape, dtype)
        kept = getattr(self._own, "kept", None)
        if kept is None or kept.size < size:
            kept = self._own.kept = np.empty(size, np.uint8)
        return kept[:size].view(dtype).reshape(shape)


def new_memory(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array at the begin of a page of memory. A CPU device takes the array without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, max(1, size)), np.uint8)[:size].view(dtype).reshape(shape)


def read_ahead(array: np.ndarray) -> np.ndarray:
    """Return the array. If it is a view of a mapped file, the system begins to read the whole of it.

    Without it, the system reads the file in small parts, and each part waits for a copy of the one before.
    """
    mapped = getattr(array, "_mmap", None)
    if isinstance(mapped, mmap.mmap) and array.flags.c_contiguous and hasattr(mapped, "madvise"):
        begin = array.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.madvise(mmap.MADV_WILLNEED, first, begin + array.nbytes - first)
    return array
