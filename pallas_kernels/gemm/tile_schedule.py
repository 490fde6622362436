"""The schedule of a persistent GEMM: output tiles in an order that suits the L2 cache, with the last tiles
split along K.

T output tiles on s CTAs take ceil(T / s) rounds of full tiles, and the last round may be nearly empty. So
the last tiles (the remainder, or the remainder and one full round) form one line of k steps, which is split
into s equal pieces (stream-K, Osama et al. 2023). Several CTAs contribute to a split tile, and the CTA with
its end adds up. The schedule is data: a table of work items, built once by numpy.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

from pallas_kernels.cards import this_card
from pallas_kernels.hopper.limits import SMS

# Fields of an item: tile row, tile column, first k step, k steps, slot to write the part to or -1, first slot
# to read, slots to read.
FIELDS = 7
_SNAP = 3  # a bound within this many k steps of a tile's border moves there, because a part costs more


@dataclasses.dataclass(frozen=True)
class GemmTile:
    """An output tile of rows x cols, computed by two warpgroups of rows / 2 each.

    depth: K of a step. stages: steps in flight. cluster: 1, or 2 CTAs on vertically adjacent tiles that
    share the weight's tile; the schedule treats them as one worker with a tile of twice the rows.
    """

    rows: int
    cols: int
    stages: int
    depth: int = 64
    cluster: int = 1

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        """Return the rows and columns of tiles (or of pairs of tiles) of a product."""
        return -(-m // (self.rows * self.cluster)), -(-n // self.cols)


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The work of each CTA, in order.

    table: [s, items, 7] int32; unused items come last and have 0 k steps. slots: the number of partial sums
    that are passed between CTAs, each in its own slot. A CTA receives only from earlier CTAs, and sends
    before it receives, so no CTA waits for a CTA that has not started.
    """

    table: np.ndarray
    slots: int


def snake(tiles_m: int, tiles_n: int, width: int = 8) -> np.ndarray:
    """Return [T, 2] (row, column) of the tiles in order: strips of `width` rows, back and forth, so that
    neighbors share operands.
    """
    order = []
    for strip, first in enumerate(range(0, tiles_m, width)):
        columns = range(tiles_n) if strip % 2 == 0 else reversed(range(tiles_n))
        order += [(row, column) for column in columns for row in range(first, min(first + width, tiles_m))]
    return np.asarray(order, np.int32).reshape(-1, 2)


@functools.cache
def schedule(
    tiles_m: int, tiles_n: int, steps: int, sms: int, whole_rounds: int | None = None, width: int = 8
) -> Schedule:
    """Divide tiles_m x tiles_n output tiles of `steps` k steps each among `sms` CTAs.

    whole_rounds: rounds of full tiles, before the remaining tiles are split into equal pieces; None: no
    tile is split. width: rows of a strip of `snake`.
    """
    order = snake(tiles_m, tiles_n, width)
    tiles = len(order)
    whole = tiles if whole_rounds is None else min(whole_rounds * sms, tiles)
    items: list[list[tuple]] = [[] for _ in range(sms)]
    for tile in range(whole):
        items[tile % sms].append((*order[tile], 0, steps, -1, 0, 0))
    slots = 0
    cuts = _cuts((tiles - whole) * steps, steps, sms)
    owed: dict[int, list[int]] = {}  # slots of each tile's written parts
    for cta in range(sms):
        pieces = []
        start = cuts[cta]
        while start < cuts[cta + 1]:
            tile, first = divmod(start, steps)
            end = min(cuts[cta + 1], (tile + 1) * steps)
            last = end == (tile + 1) * steps
            taken = owed.get(tile, [])
            if last:
                give, take = -1, (taken[0] if taken else 0, len(taken))
            else:
                give, take = slots, (0, 0)
                owed.setdefault(tile, []).append(slots)
                slots += 1
            pieces.append((*order[whole + tile], first, end - start, give, *take))
            start = end
        items[cta] += reversed(pieces)  # parts for other CTAs first, so that these CTAs do not wait
    most = max(len(own) for own in items)
    table = np.zeros((sms, most, FIELDS), np.int32)
    table[:, :, 4] = -1
    for cta, own in enumerate(items):
        if own:
            table[cta, : len(own)] = own
    return Schedule(table=table, slots=slots)


def _cuts(units: int, steps: int, sms: int) -> list[int]:
    """Return s + 1 bounds of equal pieces of a line of `units` k steps. A bound near the border of a tile
    moves to the border.
    """
    cuts = []
    for i in range(sms + 1):
        at = i * units // sms
        border = round(at / steps) * steps
        cuts.append(border if abs(at - border) <= min(_SNAP, units // sms // 4) else at)
    return cuts


_TILES = (GemmTile(128, 256, 4), GemmTile(128, 192, 4), GemmTile(128, 128, 6))
_STRIP_ROWS = 2048  # 16 x 8 concurrent tiles of 128 x 256 read the fewest bytes of operands


@dataclasses.dataclass(frozen=True, eq=False)
class GemmPlan:
    """The tile of a product and the schedule of its tiles."""

    tile: GemmTile
    schedule: Schedule


def plan_of(tile: GemmTile, m: int, n: int, k: int, sms: int, whole_rounds: int | None = None) -> GemmPlan:
    """Return the plan for a tile and a number of rounds of full tiles (None: all)."""
    strip = _STRIP_ROWS // (tile.rows * tile.cluster)
    return GemmPlan(
        tile, schedule(*tile.tiles(m, n), k // tile.depth, sms // tile.cluster, whole_rounds, strip)
    )


def plans(m: int, n: int, k: int, sms: int, gate_block: int | None = None) -> Iterator[GemmPlan]:
    """Yield the candidate plans: every tile, with the last tiles full or split.

    Pairs of CTAs need all SMs: next to another kernel the free SMs may not form pairs, and a pair that
    waits for two SMs doubles the time.
    """
    for tile in _TILES:
        if gate_block is not None and tile.cols % (2 * gate_block):
            continue
        if sms == SMS and -(-m // tile.rows) % 2 == 0:
            tile = dataclasses.replace(tile, cluster=2)
        tiles, workers = math.prod(tile.tiles(m, n)), sms // tile.cluster
        full = tiles // workers
        for rounds in (None, full, full - 1):
            if rounds is None or rounds >= 0:
                yield plan_of(tile, m, n, k, sms, rounds)
        if full == 0:  # equally many workers a tile, so that no tile has more parts than necessary
            yield plan_of(tile, m, n, k, workers // tiles * tiles * tile.cluster, 0)


@functools.cache
def gemm_plan(m: int, n: int, k: int, sms: int, gate_block: int | None = None) -> GemmPlan:
    """Return the cheapest plan for a product [m, k] x [n, k] on `sms` SMs."""
    return min(plans(m, n, k, sms, gate_block), key=cost_us)


def cost_us(plan: GemmPlan) -> float:
    """Return the estimated microseconds of a product: the time of its busiest CTA, by this device's card."""
    cost, tile = this_card().dense_gemm_cost_us, plan.tile
    steps, give, taken = (plan.schedule.table[:, :, field] for field in (3, 4, 6))
    stored, given = (steps > 0) & (give < 0), give >= 0
    busy = (
        steps.sum(1) * cost["step"][f"{tile.cols}x{tile.cluster}"]
        + stored.sum(1) * cost["tile"]
        + (given + taken).sum(1) * cost["part"][str(tile.cols)]
    )
    return float(busy.max()) + (cost["split"] if plan.schedule.slots else 0.0)
