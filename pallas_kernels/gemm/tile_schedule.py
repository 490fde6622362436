"""Which CTA computes what in a persistent GEMM: tiles in an order that the L2 cache likes, the last of them
cut evenly along K.

A product of T output tiles on s CTAs takes ceil(T / s) rounds of whole tiles, and the last round may be
nearly empty. Here the last tiles (what is left over, or that and one full round more) form one line of k
steps that is cut into s equal pieces (stream-K, Osama et al. 2023). A tile cut that way has several
contributors; the CTA of its end adds up. All of this is data: a table of work items, made once by numpy.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

from pallas_kernels.cards import this_card
from pallas_kernels.hopper.limits import SMS

# of an item: tile row, tile column, first k step, k steps, slot to give its part to or -1, first slot to
# take, slots to take
FIELDS = 7
_SNAP = 3  # a cut this close to a tile's border (in k steps) moves there: handing a part over costs more


@dataclasses.dataclass(frozen=True)
class GemmTile:
    """Output tiles of rows x cols by two warpgroups of rows / 2 each, `depth` of K a step, `stages` steps in
    flight.

    cluster: 1, or 2 CTAs on tiles below each other that share the weight's: one worker of the schedule, with
    a tile of twice the rows.
    """

    rows: int
    cols: int
    stages: int
    depth: int = 64
    cluster: int = 1

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        """Rows and columns of tiles (or of pairs of them) of a product."""
        return -(-m // (self.rows * self.cluster)), -(-n // self.cols)


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """What each CTA does, in order.

    table [s, items, 7] int32; items of 0 k steps come last and are none. slots: parts of tiles handed over,
    each through a slot of its own. A CTA takes parts only from CTAs before it, and gives before it takes:
    nobody waits for a CTA that the GPU has yet to start.
    """

    table: np.ndarray
    slots: int


def snake(tiles_m: int, tiles_n: int, width: int = 8) -> np.ndarray:
    """[T, 2] (row, column) of the tiles in order: strips of `width` rows, along the columns and back, so that
    neighbours share operands.
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
    """Divides tiles_m x tiles_n output tiles of `steps` k steps each among `sms` CTAs.

    `whole_rounds` rounds of whole tiles come first, the tiles after them are cut into equal pieces; None: no
    tile is cut. The tiles are in the order of `snake` with strips of `width` rows.
    """
    order = snake(tiles_m, tiles_n, width)
    tiles = len(order)
    whole = tiles if whole_rounds is None else min(whole_rounds * sms, tiles)
    items: list[list[tuple]] = [[] for _ in range(sms)]
    for tile in range(whole):
        items[tile % sms].append((*order[tile], 0, steps, -1, 0, 0))
    slots = 0
    cuts = _cuts((tiles - whole) * steps, steps, sms)
    owed: dict[int, list[int]] = {}  # slots of each tile's parts so far
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
        items[cta] += reversed(pieces)  # the beginning of a tile first, so that who waits for it need not
    most = max(len(own) for own in items)
    table = np.zeros((sms, most, FIELDS), np.int32)
    table[:, :, 4] = -1
    for cta, own in enumerate(items):
        if own:
            table[cta, : len(own)] = own
    return Schedule(table=table, slots=slots)


def _cuts(units: int, steps: int, sms: int) -> list[int]:
    """s + 1 ends of pieces of a line of `units` k steps, equal but for those that move to a tile's border
    nearby.
    """
    cuts = []
    for i in range(sms + 1):
        at = i * units // sms
        border = round(at / steps) * steps
        cuts.append(border if abs(at - border) <= min(_SNAP, units // sms // 4) else at)
    return cuts


_TILES = (GemmTile(128, 256, 4), GemmTile(128, 192, 4), GemmTile(128, 128, 6))
_STRIP_ROWS = (
    2048  # with 16 x 8 tiles of 128 x 256 at work, the operands that are read together are the fewest bytes
)


@dataclasses.dataclass(frozen=True, eq=False)
class GemmPlan:
    """A product's tile and the schedule of its tiles."""

    tile: GemmTile
    schedule: Schedule


def plan_of(tile: GemmTile, m: int, n: int, k: int, sms: int, whole_rounds: int | None = None) -> GemmPlan:
    """The plan of a given tile and number of rounds that stay whole (None: all)."""
    strip = _STRIP_ROWS // (tile.rows * tile.cluster)
    return GemmPlan(
        tile, schedule(*tile.tiles(m, n), k // tile.depth, sms // tile.cluster, whole_rounds, strip)
    )


def plans(m: int, n: int, k: int, sms: int, gate_block: int | None = None) -> Iterator[GemmPlan]:
    """The plans to choose from: every tile, its last tiles whole or cut in one way or another.

    In pairs only on all SMs: beside another kernel the SMs that are free may not be pairs, and a pair that
    waits for two doubles the time.
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
        if full == 0:  # as many workers for each tile: no tile's parts are more than they must be
            yield plan_of(tile, m, n, k, workers // tiles * tiles * tile.cluster, 0)


@functools.cache
def gemm_plan(m: int, n: int, k: int, sms: int, gate_block: int | None = None) -> GemmPlan:
    """The cheapest plan for a product [m, k] x [n, k] on `sms` SMs: which tile, and how many rounds stay
    whole.
    """
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
