"""Copies of pages between the cache and contiguous arrays of words: `gather_pages` and `scatter_pages`.

The unit of the KV tiers is one page of one page group: the keys, values and scales of all layers of the
group. In the cache a page consists of two or more pieces a layer, of a few KB each. Across PCIe a page goes
as one array for each shard (NanoFlow §4.2.2 copies to a contiguous space on the device, and scatters from
there).

NanoFlow offloads k and v that `qkv` has just written, contiguous over the step's tokens. Here complete pages
are gathered from the cache one step later: a page has a name, a fixed length and one place for its scatter,
while a step's tokens are parts of pages of many sequences, and 8-bit values and their scales exist only in
the cache. The second read of the written data costs about 0.1 % of a step's reads.

The programs are compiled for a few numbers of pages, `sizes`. Each page is a separate array, so that each can
stay on the host, and come back, together with any other pages.
"""

import concurrent.futures
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jaxflow.kv.device_cache import PageGroup, cache_spec
from jaxflow.parallel.mesh import TP, axis_of, over_shards, place

SIZES = (1, 4, 16)
MOST_BYTES = 256 << 20  # limit of one call, on one shard
WORD = 4  # bytes


def sizes_of(bytes_a_page: int, sizes: Sequence[int] = SIZES) -> tuple[int, ...]:
    """Return the `sizes` (the first is 1) of calls with at most MOST_BYTES of temporary space."""
    return tuple(n for n in sizes if n == 1 or n * bytes_a_page <= MOST_BYTES)


def split(count: int, sizes: Sequence[int]) -> list[int]:
    """Return the sizes of the calls that copy `count` pages.

    Each call has the smallest size for the remaining pages, unless more than half of the call would be
    padding.
    """
    calls = []
    while count > 0:
        size = next((n for n in sizes if n >= count), sizes[-1])
        if size > 2 * count:
            size = max(n for n in sizes if n <= count)
        calls.append(size)
        count -= size
    return calls


@dataclasses.dataclass(frozen=True)
class PagePrograms:
    """The functions that copy pages of one page group on a mesh.

    A page is uint32 [tp, W], each shard's W words on its device: for each layer of the group the keys, the
    values and, for int8, their scales, in the cache's layout.
    """

    group: PageGroup
    num_pages: int
    block_size: int
    mesh: Mesh

    @property
    def words(self) -> int:
        """W, the words of a page on one shard."""
        return self.group.page_bytes(self.block_size, self.mesh.shape[TP]) // WORD

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(axis_of(self.mesh))

    def gather(self, n: int) -> Wrapped:
        """Return a function from (the group's layers, pages int32 [n]) to n pages, uint32 [tp, W]."""

        def run(kv, ids):
            with jax.named_scope("gather_pages"):
                pieces = [_words(jnp.take(array, ids, axis=0, mode="clip")) for array in jax.tree.leaves(kv)]
                whole = jnp.concatenate(pieces, axis=1)
                return [whole[i : i + 1] for i in range(n)]

        kv, replicated = self._specs(), PartitionSpec()
        return jax.jit(over_shards(run, self.mesh, (kv, replicated), [self.spec] * n))

    def scatter(self, n: int) -> Wrapped:
        """Return a function from (the group's layers, pages int32 [n], n pages uint32 [tp, W]) to the layers.

        The layers are donated. The page ids are distinct; ids from P on write nothing.
        """

        def run(kv, ids, pages):
            with jax.named_scope("scatter_pages"):
                whole, arrays, offset = jnp.concatenate(pages, axis=0), [], 0
                leaves, structure = jax.tree.flatten(kv)
                for array in leaves:
                    shape = (n, *array.shape[1:])
                    words = math.prod(shape[1:]) * array.dtype.itemsize // WORD
                    values = _from_words(whole[:, offset : offset + words], shape, array.dtype)
                    offset += words
                    arrays.append(
                        array.at[ids].set(
                            values, mode="drop", unique_indices=True, wrap_negative_indices=False
                        )
                    )
                return jax.tree.unflatten(structure, arrays)

        kv, replicated = self._specs(), PartitionSpec()
        return jax.jit(
            over_shards(run, self.mesh, (kv, replicated, [self.spec] * n), kv), donate_argnums=(0,)
        )

    def shapes(self) -> list[Any]:
        """Return the shapes of the group's layers of the cache on the mesh."""
        sharding = NamedSharding(self.mesh, cache_spec(self.mesh))
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
            self.group.shapes(self.num_pages, self.block_size),
        )

    def page_shape(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (self.mesh.shape[TP], self.words), jnp.uint32, sharding=NamedSharding(self.mesh, self.spec)
        )

    def ids_shape(self, n: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((n,), jnp.int32, sharding=NamedSharding(self.mesh, PartitionSpec()))

    def lower_gather(self, n: int):
        return self.gather(n).lower(self.shapes(), self.ids_shape(n))

    def lower_scatter(self, n: int):
        return self.scatter(n).lower(self.shapes(), self.ids_shape(n), [self.page_shape()] * n)

    def _specs(self) -> Any:
        return [(cache_spec(self.mesh),) * 2 for _ in self.group.layers]


def _words(array: jax.Array) -> jax.Array:
    """Return [n, ...] of any dtype as uint32 [n, words]."""
    flat = array.reshape(array.shape[0], -1)
    if array.dtype.itemsize < WORD:
        flat = flat.reshape(array.shape[0], -1, WORD // array.dtype.itemsize)
    return lax.bitcast_convert_type(flat, jnp.uint32)


def _from_words(words: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Invert `_words`."""
    return lax.bitcast_convert_type(words, dtype).reshape(shape)


class PageCopies:
    """Compiled programs that copy pages of every page group.

    Args:
      num_pages: of each page group of the cache.
      sizes: numbers of pages in a call, ascending from 1; large pages use the smaller sizes only.
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        num_pages: tuple[int, ...],
        block_size: int,
        mesh: Mesh,
        sizes: Sequence[int] = SIZES,
    ):
        self.programs = [
            PagePrograms(group, pages, block_size, mesh)
            for group, pages in zip(groups, num_pages, strict=True)
        ]
        self.sizes = [sizes_of(group.words * WORD, sizes) for group in self.programs]
        self.num_pages, self.mesh = num_pages, mesh
        self._gathers: list[dict[int, Callable]] = []
        self._scatters: list[dict[int, Callable]] = []
        self._blanks: list[jax.Array] = []  # a padding page of each group

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of a page of each group on one shard."""
        return tuple(group.words * WORD for group in self.programs)

    def warm_up(self, kv: list) -> list:
        """Compile all programs and run each once. Return the cache, which is donated and unchanged."""
        with concurrent.futures.ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1))) as pool:
            for group, sizes in zip(self.programs, self.sizes, strict=True):
                gathers = {n: pool.submit(group.lower_gather(n).compile) for n in sizes}
                scatters = {n: pool.submit(group.lower_scatter(n).compile) for n in sizes}
                self._gathers.append({n: future.result() for n, future in gathers.items()})
                self._scatters.append({n: future.result() for n, future in scatters.items()})
                shape = group.page_shape()
                self._blanks.append(place(np.zeros(shape.shape, np.uint32), shape.sharding))
        for g, sizes in enumerate(self.sizes):
            for n in sizes:
                pages = self.gather(kv, g, [0] * n)
                kv = self.scatter(kv, g, [0], pages[:1])
        return kv

    def gather(self, kv: list, group: int, ids: Sequence[int]) -> list[jax.Array]:
        """Return pages of a group, uint32 [tp, W] each on the device, after all enqueued steps."""
        programs, layers, out = self._gathers[group], self._layers(kv, group), []
        for begin, n, count in _calls(len(ids), self.sizes[group]):
            padded = np.zeros(n, np.int32)
            padded[:count] = ids[begin : begin + count]
            out += programs[n](layers, self._put(padded))[:count]
        return out

    def scatter(self, kv: list, group: int, ids: Sequence[int], pages: Sequence[jax.Array]) -> list:
        """Return the cache with `pages` at distinct places `ids`. The group's layers are donated."""
        programs, kv = self._scatters[group], list(kv)
        for begin, n, count in _calls(len(ids), self.sizes[group]):
            padded = np.arange(self.num_pages[group], self.num_pages[group] + n, dtype=np.int32)
            padded[:count] = ids[begin : begin + count]
            given = [*pages[begin : begin + count], *[self._blanks[group]] * (n - count)]
            written = programs[n](self._layers(kv, group), self._put(padded), given)
            for i, pair in zip(self.programs[group].group.layers, written, strict=True):
                kv[i] = self._with_part(kv[i], i, group, pair)
        return kv

    def _layers(self, kv: list, group: int) -> list:
        """Return (keys, values) of the group in each of its layers."""
        own = self.programs[group].group
        if not own.splits_heads:
            return [kv[i] for i in own.layers]
        return [tuple(arrays[self._place(i, group)] for arrays in kv[i]) for i in own.layers]

    def _with_part(self, layer: tuple, index: int, group: int, pair: tuple) -> tuple:
        """Return a layer's cache with (keys, values) of the group replaced."""
        if not self.programs[group].group.splits_heads:
            return pair
        at = self._place(index, group)
        return tuple((*old[:at], new, *old[at + 1 :]) for old, new in zip(layer, pair, strict=True))

    def _place(self, layer: int, group: int) -> int:
        """Return the place of a group's arrays among those of a layer whose heads are split."""
        return sum(layer in other.group.layers for other in self.programs[:group])

    def _put(self, ids: np.ndarray) -> jax.Array:
        return place(ids, NamedSharding(self.mesh, PartitionSpec()))


def _calls(count: int, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (first page, size, pages) of each call."""
    calls, begin = [], 0
    for n in split(count, sizes):
        calls.append((begin, n, min(n, count - begin)))
        begin += n
    return calls
