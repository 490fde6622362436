"""Copies of the pages of data-parallel ranks, whose caches lie in the same arrays, one after another.

The tiers see one rank: its pages have its own numbers, and lie on its devices. So a rank has the copies of an
engine of its own, over the rank's part of each array. A part shares the memory of its array.
"""

from collections.abc import Callable, Collection, Sequence

import jax
from jax.sharding import Mesh, NamedSharding

from jaxflow.kv.device_cache import PageGroup, cache_spec
from jaxflow.kv.tiers.page_copies import SIZES, PageCopies
from jaxflow.parallel.mesh import TP, ranks_of


class RankCopies:
    """Compiled programs that copy pages of every page group, for each rank.

    Args:
      num_pages: of each page group of a rank's cache.
      sizes: see `PageCopies`.

    Attributes:
      of_rank: the copies of each rank.
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        num_pages: tuple[int, ...],
        block_size: int,
        mesh: Mesh,
        sizes: Sequence[int] = SIZES,
    ):
        self._mesh = mesh
        self._meshes = [Mesh(mesh.devices[rank], (TP,)) for rank in range(ranks_of(mesh))]
        self.of_rank = [PageCopies(groups, num_pages, block_size, own, sizes) for own in self._meshes]

    def warm_up(self, kv: list) -> list:
        """Compile all programs and run each once. Return the cache, which is donated and unchanged."""
        for rank, copies in enumerate(self.of_rank):
            kv = self._replaced(kv, rank, range(len(kv)), copies.warm_up)
        return kv

    def gather(self, kv: list, rank: int, group: int, ids: Sequence[int]) -> list[jax.Array]:
        """Return pages of a rank, see `PageCopies.gather`. ids: among the rank's pages."""
        return self.of_rank[rank].gather(self._part(kv, rank, self._layers(group)), group, ids)

    def scatter(
        self, kv: list, rank: int, group: int, ids: Sequence[int], pages: Sequence[jax.Array]
    ) -> list:
        """Return the cache with pages of a rank, see `PageCopies.scatter`. The group's layers are donated."""
        copies = self.of_rank[rank]
        return self._replaced(
            kv, rank, self._layers(group), lambda part: copies.scatter(part, group, ids, pages)
        )

    def _layers(self, group: int) -> Sequence[int]:
        return self.of_rank[0].programs[group].group.layers

    def _part(self, kv: list, rank: int, layers: Collection[int]) -> list:
        """Return a rank's part of the cache in some layers, and None in the others."""
        sharding = NamedSharding(self._meshes[rank], cache_spec(self._meshes[rank]))
        tp = sharding.mesh.size

        def part(array: jax.Array) -> jax.Array:
            shards = [array.addressable_data(rank * tp + i) for i in range(tp)]
            if tp == 1:  # a gather before each step reads some hundred arrays
                return shards[0]
            shape = (array.shape[0] // len(self._meshes), *array.shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, shards)

        return [jax.tree.map(part, layer) if i in layers else None for i, layer in enumerate(kv)]

    def _replaced(self, kv: list, rank: int, layers: Collection[int], write: Callable[[list], list]) -> list:
        """Return the cache after `write`, which donates a rank's part in some layers and returns it anew."""
        arrays, tree = jax.tree.flatten([kv[i] for i in layers])
        # A donated part would make its array unreadable.
        shards = [[array.addressable_data(i) for i in range(self._mesh.size)] for array in arrays]
        written = write(self._part(kv, rank, layers))
        tp, sharding = self._meshes[rank].size, NamedSharding(self._mesh, cache_spec(self._mesh))
        for own, part in zip(shards, jax.tree.leaves([written[i] for i in layers]), strict=True):
            own[rank * tp : (rank + 1) * tp] = [part.addressable_data(i) for i in range(tp)]
        made = [
            jax.make_array_from_single_device_arrays(array.shape, sharding, own)
            for array, own in zip(arrays, shards, strict=True)
        ]
        replaced = dict(zip(layers, jax.tree.unflatten(tree, made), strict=True))
        return [replaced.get(i, layer) for i, layer in enumerate(kv)]
