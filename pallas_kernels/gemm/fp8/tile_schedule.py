"""The schedule of an fp8 product: full tiles in rounds, and the tiles of an incomplete last round split
evenly along K.

Decode's products need this: 256 tokens times 4,096 channels are 16 tiles of 256 x 256 for 66 pairs of SMs.
The workers of a split tile write their sums to memory. Then each adds up and stores its share of the
columns. Parts wait for one another, so a grid never has more CTAs than SMs.
"""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from pallas_kernels.cards import this_card
from pallas_kernels.gemm.tile_schedule import snake
from pallas_kernels.hopper.limits import SMS

# Fields of an item: tile row, tile column, first step, steps, part, number of its split tile or -1.
FIELDS = 6


@dataclasses.dataclass(frozen=True)
class Fp8Tile:
    """An output tile of 128 rows and `columns` columns.

    stages: steps of 128 of K in flight. cluster: CTAs that share weights, 1 or 2. slots: pieces of a
    warpgroup's output in flight to memory. moved: columns whose sums leave the tensor core together after
    each step; 0: all columns, at the end.
    """

    columns: int = 256
    stages: int = 4
    cluster: int = 1
    slots: int = 2
    moved: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """The work of each cluster.

    table: [groups, items, 6] int32, in order; items of 0 steps are unused. cut: number of split tiles.
    parts: parts of a split tile.
    """

    table: np.ndarray
    cut: int
    parts: int


@functools.cache
def work(tiles_m: int, tiles_n: int, steps: int, groups: int, parts: int = 1) -> Work:
    """Divide tiles_m x tiles_n tiles of `steps` steps each among `groups` clusters. parts > 1: split the
    tiles of the last round.

    Raises: ValueError if the last round has more parts than clusters.
    """
    order = snake(tiles_m, tiles_n)
    whole = len(order) if parts == 1 else len(order) // groups * groups
    cut = len(order) - whole
    if cut * parts > groups or parts > steps:
        raise ValueError(
            f"{cut} tiles of {steps} steps in {parts} parts each on {groups} clusters: accepted are up "
            "to as many parts as clusters and steps"
        )
    items: list[list[tuple]] = [[] for _ in range(groups)]
    for tile in range(whole):
        items[tile % groups].append((*order[tile], 0, steps, 0, -1))
    for tile in range(cut):
        for part in range(parts):
            first, end = steps * part // parts, steps * (part + 1) // parts
            items[tile * parts + part].append((*order[whole + tile], first, end - first, part, tile))
    used = [own for own in items if own]
    table = np.zeros((len(used), max(len(own) for own in used), FIELDS), np.int32)
    table[:, :, 5] = -1
    for group, own in enumerate(used):
        table[group, : len(own)] = own
    return Work(table, cut, parts)


_TILES = ((256, 1), (256, 2), (128, 1), (128, 2))  # (columns, cluster)


def _step_us(columns: int, cluster: int) -> float:
    """Return the microseconds of a step of a tile, by this device's card."""
    return this_card().fp8_gemm_cost_us["step"][f"{columns}x{cluster}"]


@functools.cache
def fp8_plan(
    m: int, n: int, k: int, sms: int, *, blocked: bool, gate_block: int | None, quantize: bool
) -> tuple[Fp8Tile, Work]:
    """Return the cheapest tile and work for x [m, k], w [n, k] on `sms` SMs."""
    options = fp8_plans(m, n, k, sms, blocked=blocked, gate_block=gate_block, quantize=quantize)
    return min(options, key=lambda option: _cost_us(*option))


def fp8_plans(
    m: int, n: int, k: int, sms: int, *, blocked: bool, gate_block: int | None, quantize: bool
) -> Iterator[tuple[Fp8Tile, Work]]:
    """Yield the candidates: every tile, with the last round's tiles full or split in two or four."""
    gated = 2 if gate_block else 1
    for columns, cluster in _TILES:
        pairs = m > 128 and sms == SMS  # next to another kernel the free SMs may not form pairs
        if (
            (cluster == 2 and not pairs)
            or columns % (2 * (gate_block or 0) or 1)
            or (quantize and columns < 128 * gated)
        ):
            continue
        tile = Fp8Tile(
            columns, stages=4 if columns == 256 else 6, cluster=cluster, moved=128 if blocked else 0
        )
        tiles_m, tiles_n, steps, groups = -(-m // (128 * cluster)), -(-n // columns), k // 128, sms // cluster
        yield tile, work(tiles_m, tiles_n, steps, groups)
        for parts in (2, 4):
            fits = tiles_m * tiles_n % groups * parts <= groups and parts <= steps
            if fits and not quantize and columns // parts % (64 * gated) == 0:
                yield tile, work(tiles_m, tiles_n, steps, groups, parts)


def _cost_us(tile: Fp8Tile, made: Work) -> float:
    """Return the estimated microseconds of the busiest cluster, by this device's card."""
    cost = this_card().fp8_gemm_cost_us
    steps = made.table[:, :, 3]
    busiest = (steps.sum(1) * _step_us(tile.columns, tile.cluster) + (steps > 0).sum(1) * cost["tile"]).max()
    return float(busiest) + (cost["parts"] if made.cut else 0.0)


@functools.cache
def filled(m: int, n: int, k: int, sms: int, *, blocked: bool, quantize: bool) -> float:
    """Return a product's time with equally many steps of the best tile on all `sms` SMs, over the time of
    the busiest SM.

    K is padded to full blocks of 128 columns.
    """
    k = -(-k // 128) * 128
    tile, made = fp8_plan(
        m, n, k, sms, blocked=blocked, gate_block=64 if quantize else None, quantize=quantize
    )
    even = m * n / (128 * 256) * (k / 128) * _step_us(256, 2 if sms == SMS else 1) / sms
    took = float(made.table[:, :, 3].sum(1).max() * _step_us(tile.columns, tile.cluster))
    if made.cut and made.table.shape[1] > 1:
        # Adding up follows the steps. A step that moves its sums waits for the other half of the tile.
        fill = this_card().fp8_gemm_fill
        took = took * (fill["waiting"] if tile.moved else 1.0) + fill["added_us"]
    return min(1.0, even / took)
