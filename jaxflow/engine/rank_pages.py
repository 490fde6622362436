"""The KV pages of data-parallel ranks, which share an executor."""

from collections.abc import Sequence

import jax

from jaxflow.engine.executor import Executor


def rank_pages(executor: Executor) -> list["RankPages"]:
    """Return the pages of each rank, of an executor with `RankCopies`."""
    return [RankPages(executor, rank) for rank in range(executor.ranks)]


class RankPages:
    """The pages of a data-parallel rank. The methods are those of an `Executor` of one rank."""

    def __init__(self, executor: Executor, rank: int):
        self._executor, self._rank = executor, rank

    def page_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shape of a page of each layer group, see `Executor.page_shapes`."""
        return self._executor.rank_copies.page_shapes(self._rank)

    def gather_pages(self, group: int, pages: Sequence[int]) -> list[jax.Array]:
        """Enqueue a read of the rank's pages, see `Executor.gather_pages`."""
        return self._executor.rank_copies.gather(self._executor.kv, self._rank, group, pages)

    def scatter_pages(self, group: int, pages: Sequence[int], data: Sequence[jax.Array]) -> None:
        """Enqueue a write of the rank's pages, see `Executor.scatter_pages`."""
        self._executor.scatter_to_rank(self._rank, group, pages, data)
