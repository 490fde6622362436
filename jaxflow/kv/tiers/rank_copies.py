"""Copies of the pages of data-parallel ranks, whose caches lie in the same arrays, one after another.

The tiers see one rank: its pages have its own numbers, and lie on its devices. Each device has the copies of
an engine of its own, over the device's part of each array. A part shares the memory of its array, and costs
no time of the host. An array over the devices of a rank would cost 15 to 45 us, and a gather before each step
reads some hundred arrays. So only the pages are put together over the devices of a rank.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxflow.kv.device_cache import PageGroup, cache_spec
from jaxflow.kv.tiers.page_copies import SIZES, PageCopies
from jaxflow.parallel.mesh import TP, axis_of, ranks_of


class RankCopies:
    """Compiled programs that copy pages of every page group, for each rank.

    Args:
      num_pages: of each page group of a rank's cache.
      sizes: see `PageCopies`.

    Attributes:
      of_rank: for each rank the copies of each of its devices, over the device's heads.
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        num_pages: tuple[int, ...],
        block_size: int,
        mesh: Mesh,
        sizes: Sequence[int] = SIZES,
    ):
        self._mesh, self._tp = mesh, mesh.shape[TP]
        rank_meshes = [Mesh(mesh.devices[rank], (TP,)) for rank in range(ranks_of(mesh))]
        self._pages = [NamedSharding(own, PartitionSpec(axis_of(own))) for own in rank_meshes]
        held = [
            dataclasses.replace(group, kv_heads=tuple(heads // self._tp for heads in group.kv_heads))
            for group in groups
        ]
        self.of_rank = [
            [
                PageCopies(held, num_pages, block_size, Mesh([device], (TP,)), sizes)
                for device in own.devices.flat
            ]
            for own in rank_meshes
        ]

    def warm_up(self, kv: list) -> list:
        """Compile all programs and run each once. Return the cache, which is donated and unchanged."""
        for rank, devices in enumerate(self.of_rank):
            kv = self._replaced(kv, rank, range(len(kv)), lambda at, part, own=devices: own[at].warm_up(part))
        return kv

    def page_shapes(self, rank: int) -> list[jax.ShapeDtypeStruct]:
        """Return the shape of a page of each group, as `gather` returns it."""
        return [
            jax.ShapeDtypeStruct(
                (self._tp, programs.words), programs.page_shape().dtype, sharding=self._pages[rank]
            )
            for programs in self.of_rank[rank][0].programs
        ]

    def gather(self, kv: list, rank: int, group: int, ids: Sequence[int]) -> list[jax.Array]:
        """Return pages of a rank, see `PageCopies.gather`. ids: among the rank's pages."""
        layers = self._layers(group)
        parts = [
            copies.gather(self._part(kv, rank, at, layers), group, ids)
            for at, copies in enumerate(self.of_rank[rank])
        ]
        if self._tp == 1:
            return parts[0]
        return [self._page(rank, shards) for shards in zip(*parts, strict=True)]

    def scatter(
        self, kv: list, rank: int, group: int, ids: Sequence[int], pages: Sequence[jax.Array]
    ) -> list:
        """Return the cache with pages of a rank, see `PageCopies.scatter`. The group's layers are donated."""

        def write(at: int, part: list) -> list:
            own = [page.addressable_data(at) for page in pages]
            return self.of_rank[rank][at].scatter(part, group, ids, own)

        return self._replaced(kv, rank, self._layers(group), write)

    def _layers(self, group: int) -> Sequence[int]:
        return self.of_rank[0][0].programs[group].group.layers

    def _page(self, rank: int, shards: Sequence[jax.Array]) -> jax.Array:
        """Return a page, uint32 [tp, W], of its shards on the devices of a rank."""
        shape = (self._tp, *shards[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._pages[rank], list(shards))

    def _part(self, kv: list, rank: int, at: int, layers: Collection[int]) -> list:
        """Return the part of a rank's device `at` of the cache in some layers, and None in the others."""
        index = rank * self._tp + at
        arrays, tree = jax.tree.flatten([layer if i in layers else None for i, layer in enumerate(kv)])
        return jax.tree.unflatten(tree, [array.addressable_data(index) for array in arrays])

    def _replaced(
        self, kv: list, rank: int, layers: Collection[int], write: Callable[[int, list], list]
    ) -> list:
        """Return the cache after `write`, which donates the part of a device in some layers and returns it.

        write: (device of the rank, part) -> part.
        """
        arrays, tree = jax.tree.flatten([kv[i] for i in layers])
        # A donated part would make its array unreadable.
        shards = [[array.addressable_data(i) for i in range(self._mesh.size)] for array in arrays]
        sharding = NamedSharding(self._mesh, cache_spec(self._mesh))
        parts = [self._part(kv, rank, at, layers) for at in range(self._tp)]
        for at, part in enumerate(parts):
            written = write(at, part)
            for own, shard in zip(shards, jax.tree.leaves([written[i] for i in layers]), strict=True):
                own[rank * self._tp + at] = shard
        made = [
            jax.make_array_from_single_device_arrays(array.shape, sharding, own)
            for array, own in zip(arrays, shards, strict=True)
        ]
        replaced = dict(zip(layers, jax.tree.unflatten(tree, made), strict=True))
        return [replaced.get(i, layer) for i, layer in enumerate(kv)]
