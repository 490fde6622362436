"""A KV page outside the cache: its shape, its memory, and its bytes on the disk.

A page is one array: uint32 [tp, W], W words of each shard, on the shard's device or in the memory of its
host. Over pipeline stages a page consists of such arrays, the parts: one for each stage with layers of the
page's group, first stage first. If the stages lie in several processes, a process has the parts of its own
stages, which may be none. On the disk, a page of any number of stages has the same bytes: for each shard, the
words of all parts in order, which is the order of the layers.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxflow.parallel.mesh import place


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a page over pipeline stages.

    Weak references tell the end of a page, which a tuple has none of.
    """

    parts: tuple[Any, ...]


jax.tree_util.register_pytree_node(
    Parts, lambda page: (page.parts, None), lambda _, parts: Parts(tuple(parts))
)

type Page = jax.Array | Parts
type PageShape = jax.ShapeDtypeStruct | Parts  # with the sharding on the devices

HOST_MEMORY = "pinned_host"


# ---- sizes


def page_size(page: PageShape) -> int:
    """Return the bytes of a page over all devices."""
    return sum(math.prod(part.shape) * part.dtype.itemsize for part in jax.tree.leaves(page))


def own_parts(page: PageShape) -> PageShape:
    """Return a page without the parts that lie in other processes."""
    if isinstance(page, Parts):
        return Parts(tuple(part for part in page.parts if part.sharding.addressable_devices))
    return page


def own_size(page: PageShape) -> int:
    """Return the bytes of a page on the devices of this process."""
    return sum(
        len(part.sharding.addressable_devices)
        * math.prod(part.sharding.shard_shape(part.shape))
        * part.dtype.itemsize
        for part in jax.tree.leaves(page)
    )


def largest_shard(page: PageShape) -> int:
    """Return the bytes of a page on the device that holds most of it."""
    return max(
        math.prod(part.sharding.shard_shape(part.shape)) * part.dtype.itemsize
        for part in jax.tree.leaves(page)
    )


# ---- memory


def blank_page(page: PageShape) -> Page:
    """Return a page of zeros on the devices of this process."""
    own = own_parts(page)
    return jax.tree.map(lambda part: place(np.zeros(part.shape, part.dtype), part.sharding), own)


def copy_to(pages: Sequence[Page], memory_kind: str | None) -> list[Page]:
    """Start copies of pages to a memory kind of their devices; None: the device's own. Return the copies."""
    given = list(pages)
    return jax.device_put(given, jax.tree.map(lambda part: _placed(part.sharding, memory_kind), given))


@functools.cache
def _placed(sharding: Sharding, memory_kind: str | None) -> Sharding:
    return sharding.with_memory_kind(memory_kind)  # pyright: ignore[reportArgumentType]


# ---- bytes


def to_bytes(page: Page) -> list[np.ndarray]:
    """Return the words of a page in the order of the disk, as views or copies of the host memory."""
    by_part = [_shards(part) for part in jax.tree.leaves(page)]
    return [words for shard in zip(*by_part, strict=True) for words in shard]


def _shards(part: jax.Array) -> list[np.ndarray]:
    shards = sorted(part.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return [np.asarray(shard.data) for shard in shards]


def from_bytes(payload: np.ndarray, page: PageShape) -> Page:
    """Return a page in the host memory of its devices, from uint8 [length] in the order of the disk.

    payload: the words of all shards and parts, or of several processes those of this process.
    """
    parts, structure = jax.tree.flatten(own_parts(page))
    if not parts:
        return jax.tree.unflatten(structure, ())
    ends = itertools.accumulate(part.shape[1] for part in parts)
    words = payload.view(np.uint32).reshape(-1, sum(part.shape[1] for part in parts))
    cut: list[Any] = [words[:, end - part.shape[1] : end] for part, end in zip(parts, ends, strict=True)]
    placed = [_placed(part.sharding, HOST_MEMORY) for part in parts]
    if all(sharding.is_fully_addressable for sharding in placed):
        made = jax.device_put(cut, placed)
    else:
        made = [
            _of_own(own, part.shape, sharding) for own, part, sharding in zip(cut, parts, placed, strict=True)
        ]
    return jax.tree.unflatten(structure, jax.block_until_ready(made))


def _of_own(own: np.ndarray, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    """Return an array of `shape` from the words of this process's shards, a row each, in their order."""
    places = sharding.addressable_devices_indices_map(shape)
    devices = sorted(places, key=lambda device: places[device][0].start or 0)  # pyright: ignore[reportOptionalSubscript]
    memory = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
    shards = jax.device_put(list(own[:, None]), memory)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)
