"""The tiles of flat GEMM and int4 GEMM, and their choice by shape."""

import dataclasses

from pallas_kernels.hopper.limits import SMEM_BYTES, SMS


@dataclasses.dataclass(frozen=True)
class FlatTile:
    """A tile of a flat GEMM.

    rows: weight rows of a warpgroup. warpgroups: warpgroups on different rows. depth: K of a stage. stages:
    stages of the ring.
    cluster: CTAs that split a tile along K. turns: groups of warpgroups that take stages in turns, and add
    up at the end of a tile.
    """

    rows: int
    warpgroups: int
    depth: int
    stages: int
    cluster: int
    turns: int = 1

    @property
    def columns(self) -> int:
        """Return the tile's columns of the result, which are rows of the weight."""
        return self.rows * self.warpgroups


def filled(
    m: int, rows: int, warpgroups: int, depth: int, cluster: int, weight_bits: float, turns: int = 1
) -> FlatTile:
    """Return the tile with the stages that shared memory holds, for m tokens and weights of `weight_bits`
    bits with their scales.
    """
    m, one = -(-m // 8) * 8, FlatTile(rows, warpgroups, depth, 1, cluster, turns)
    # Memory outside the ring: a 32-bit result, a 16-bit residual, partial sums of the cluster and of the
    # other turns, and barriers.
    extra = one.columns * m * (6 + 4 * (cluster - 1) + 4 * (turns - 1)) + 4096
    stage = int(one.columns * depth * weight_bits) // 8 + m * depth * 2
    return dataclasses.replace(one, stages=min(16, (SMEM_BYTES - extra) // stage) // turns * turns)


def flat_tile(m: int, n: int, k: int, sms: int, gated: bool) -> FlatTile:
    """Return the tile of flat GEMM for x [m, k], w [n, k].

    A CTA has 64 weight rows, so that there are many CTAs. Two CTAs split a tile if tiles would leave half
    of the SMs idle. Above 32 tokens, x needs as many bytes from the L2 as the weight; tiles of 128 rows
    halve this if they still occupy most SMs. Deep stages read longer pieces of a row from memory.
    """
    tall = -(-n // 128)
    rows = 128 if gated or (m > 32 and 10 * tall * (2 if 2 * tall <= sms == SMS else 1) >= 7 * sms) else 64
    idle = 2 * -(-n // rows) <= sms
    # Next to another kernel the free SMs may not form pairs.
    cluster = 2 if (idle or (gated and m <= 16)) and k >= 512 and sms == SMS else 1
    if rows == 128:
        depth = 128 if m <= 16 else 64
    else:
        depth = 256 if cluster == 1 and m <= 16 else 128
    return filled(m, rows, 1, depth, cluster, 16)


def int4_tile(m: int, n: int, k: int, sms: int, gated: bool) -> FlatTile:
    """Return the tile of int4 GEMM for x [m, k], w [n, k].

    Warpgroups take the stages in turns: with wgmma as many as registers and shared memory hold, with `mma`
    fewer, as measured.
    """
    rows = 128 if gated else 64
    cluster = 2 if 2 * -(-n // rows) <= sms and k >= 1024 and sms == SMS else 1
    most = (3 if m <= 8 else 4 if m <= 16 else 3 if m <= 32 else 2) if not gated else 3 if 8 < m <= 16 else 2
    tiles = [filled(m, rows, 1, 512, cluster, 4.5, turns) for turns in range(most, 0, -1)]
    return next((tile for tile in tiles if tile.stages >= max(tile.turns, 2)), tiles[-1])
