"""The preparation of programs on a thread, while the weights are loaded, and of memory before that.

A program depends on the shapes of the weights, and these are known before the weights exist. The loading
stays on the caller's thread, so that an interrupt ends it at once.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxflow.engine.start_times import StartTimes

_ALIGNMENT = 256  # XLA's allocator rounds the bytes of an array up to a multiple of it


def open_pools(devices: Iterable[Any]) -> None:
    """Begin to allocate the memory of GPUs, which their first arrays would wait for, on a thread a GPU.

    The allocation runs without the interpreter. A fault is left to the first array of the weights.
    """

    def touch(device: Any) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.block_until_ready(jax.device_put(np.zeros(1, np.float32), device))

    for device in devices:
        if device.platform == "gpu":
            threading.Thread(target=touch, args=(device,), name=f"pool-{device.id}").start()


def load_and_prepare[L, P](
    load: Callable[[], L],
    prepare: Callable[[Callable[..., None]], P],
    fits: Callable[[L], bool],
    times: StartTimes,
) -> tuple[L, P | None]:
    """Run `load` on this thread and `prepare` on another. Return both results. No thread is left at the end.

    Args:
      prepare: its argument is a function to call often. The function raises CancelledError
        once nobody needs the result.
      fits: returns False if what was prepared does not fit the weights. The result of `prepare` is then None.
      times: the phase `memory` takes the wait for `prepare` after the loading.

    Raises:
      Exception: an error of `load`, or else one of `prepare`.
    """
    unneeded = threading.Event()

    def check(*_: Any) -> None:
        if unneeded.is_set():
            raise CancelledError("the programs are not needed")

    with ThreadPoolExecutor(1, thread_name_prefix="prepare") as pool:
        prepared = pool.submit(prepare, check)
        try:
            loaded = load()
            if fits(loaded):
                with times.phase("memory"):
                    return loaded, prepared.result()
            return loaded, None
        finally:  # nobody waits for `prepare` after an error or an interrupt
            unneeded.set()


def have_same_shapes(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if a program for one sequence of trees runs on the other. The leaves have shape, dtype
    and sharding.
    """
    (leaves, tree), (other_leaves, other_tree) = jax.tree.flatten(some), jax.tree.flatten(others)
    return tree == other_tree and all(
        a.shape == b.shape and a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, len(a.shape))
        for a, b in zip(leaves, other_leaves, strict=True)
    )


def device_bytes_of(weights: Any) -> int:
    """Return the bytes of weights on each of their devices. weights: a tree of shapes with shardings."""

    def size(array: Any) -> int:
        own = int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize
        return -(-own // _ALIGNMENT) * _ALIGNMENT

    return sum(map(size, jax.tree.leaves(weights)))
