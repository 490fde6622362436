"""The tiles of flat fp8 GEMM, and their choice by shape."""

import dataclasses

from jax.experimental import pallas as pl

from pallas_kernels.gemm.fp8.epilogue import Epilogue
from pallas_kernels.gemm.fp8.kernel import DEPTH
from pallas_kernels.hopper.limits import SMEM_BYTES


@dataclasses.dataclass(frozen=True)
class Fp8FlatTile:
    """A tile of flat fp8 GEMM.

    rows: weight rows. depth: K of a step. stages: steps in flight, a multiple of turns. cluster: CTAs that
    split a tile along K. turns: warpgroups that take the steps in turns, and add up at the end of a tile.
    """

    rows: int
    depth: int
    stages: int
    cluster: int
    turns: int = 1


def fp8_flat_tile(
    m: int, n: int, k: int, sms: int, e: Epilogue, depth: int = DEPTH, *, blocked: bool = False, **chosen
) -> Fp8FlatTile:
    """Return the tile of x [m, k], w [n, k]: a ring that fills shared memory, and clusters if there are
    more SMs than tiles.

    blocked: x has a scale for every 128 columns, so a step's sums are scaled before the next step's are
    added. Two warpgroups
    take turns: one multiplies while the other scales.
    """
    rows = chosen.get("rows") or (
        256 if e.quantize and e.gate_block else 128 if e.quantize or e.gate_block else 64
    )
    # Larger parts would leave no room for the ring.
    pairs = 2 * pl.cdiv(n, rows) <= sms and k >= 2 * depth and rows * m <= 64 * 64
    cluster = chosen.get("cluster") or (2 if pairs else 1)
    turns = chosen.get("turns") or (2 if blocked else 1)
    extra = 4 * 1024 + m * rows * 4 + (cluster - 1 + turns - 1) * rows * m * 4
    return Fp8FlatTile(
        rows, depth, min((SMEM_BYTES - extra) // ((rows + m) * depth), 16) // turns * turns, cluster, turns
    )
