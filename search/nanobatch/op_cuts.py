"""Structures whose ops are cut one by one (NanoFlow §4.1.2): each op has its own number of nano-ops.

The token boundaries are shared, and each block of a layer uses some of them. The blocks are `qkv`, attention,
`out_proj` with its sums over devices, the first product of the MLP, and the rest. A round changes structures
by one boundary: each block keeps its cuts, takes the boundary in addition or in place of another, or leaves
one of several out. Bounds and list schedules order the structures, and the MILP solves the most promising.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

from search.nanobatch.bounds import Piece, Prices, Span, cost_s, pieces, prices
from search.nanobatch.layer_tasks import APPEND, Task
from search.nanobatch.problem import SearchProblem

Cuts = tuple[int, ...]
Structure = tuple[Cuts, ...]  # the cuts of each block
_STARTS = (APPEND, "out_proj", "mlp_norm", "down", "expert_down")  # the first op of each block but the first


@dataclasses.dataclass(frozen=True)
class Layer:
    """The blocks of a layer, with the pieces of each chain, and the prices of a bound."""

    tokens: int
    blocks: tuple[tuple[dict[Span, Piece], ...], ...]
    given: Prices

    @classmethod
    def of(cls, setting: SearchProblem, places: Sequence[int]) -> "Layer":
        """Return the layer of a problem that may be cut at these places."""
        blocks: list[list[dict[Span, Piece]]] = []
        for own, chain in zip(pieces(setting, places), setting.chains, strict=True):
            if not blocks or any(name in _STARTS for name in chain.names):
                blocks.append([])
            blocks[-1].append(own)
        given = prices(pieces(setting, places[len(places) // 2 :][:1]), setting.capacity)
        return cls(setting.load.tokens, tuple(map(tuple, blocks)), given)

    def tasks(self, structure: Structure) -> list[Task]:
        """Return the tasks of a structure, in the order of the chains."""
        return [piece.task for at, cuts in enumerate(structure) for piece in self._pieces(at, cuts)]

    def structure(self, tasks: Sequence[Task]) -> Structure | None:
        """Return the structure of these tasks; None where the chains of a block have unlike cuts."""
        cuts = [
            [
                tuple(sorted(task.start for task in tasks if task.chain == chain and task.start))
                for chain in (next(iter(own.values())).task.chain for own in block)
            ]
            for block in self.blocks
        ]
        return None if any(len(set(own)) > 1 for own in cuts) else tuple(own[0] for own in cuts)

    def cost_s(self, structure: Structure) -> float:
        """Return the bound of the period of a structure."""
        return sum(self.block_cost_s(at, cuts) for at, cuts in enumerate(structure))

    def block_cost_s(self, at: int, cuts: Cuts) -> float:
        if (at, cuts) not in self._costs:
            self._costs[at, cuts] = sum(cost_s(piece, self.given) for piece in self._pieces(at, cuts))
        return self._costs[at, cuts]

    @functools.cached_property
    def _costs(self) -> dict[tuple[int, Cuts], float]:
        return {}

    def _pieces(self, at: int, cuts: Cuts) -> list[Piece]:
        spans = list(itertools.pairwise((0, *cuts, self.tokens)))
        return [own[span] for own in self.blocks[at] for span in spans]


def structures(
    layer: Layer, bases: Sequence[Structure], places: Sequence[int], most: int, below_s: float
) -> list[Structure]:
    """Return the changes of these structures by one boundary with a bound below `below_s`, by rising bound.

    most: the largest number of nano-ops of an op.
    """
    found = {}
    for base, place in itertools.product(bases, places):
        ways = [
            [(layer.block_cost_s(at, cuts), cuts) for cuts in _changes(own, place, most)]
            for at, own in enumerate(base)
        ]
        for some in _below(ways, below_s):
            found[tuple(cuts for _, cuts in some)] = sum(took for took, _ in some)
    return sorted(found.keys() - set(bases), key=lambda one: (found[one], one))


def _changes(own: Cuts, place: int, most: int) -> list[Cuts]:
    """Return the cuts of a block after a change by one boundary."""
    fewer = [tuple(cut for cut in own if cut != left) for left in own]
    more = [tuple(sorted({*cuts, place})) for cuts in (own, *fewer)]
    return sorted({cuts for cuts in (own, *fewer, *more) if cuts and len(cuts) < most})


def _below(
    ways: Sequence[list[tuple[float, Cuts]]], below_s: float
) -> Iterator[tuple[tuple[float, Cuts], ...]]:
    """Yield one way of each block, with a sum below `below_s`."""
    if not ways:
        yield ()
        return
    rest_s = sum(min(own)[0] for own in ways[1:])
    for way in ways[0]:
        if way[0] + rest_s < below_s:
            yield from ((way, *others) for others in _below(ways[1:], below_s - way[0]))
