"""The tiles of the GEMMs of few rows, and the choice of one by shape."""

import dataclasses

from pallas_kernels.hopper.limits import SMEM_BYTES, SMS


@dataclasses.dataclass(frozen=True)
class FlatTile:
    """`warpgroups` of `rows` weight rows each, `depth` along K a stage of the ring, `cluster` CTAs that share
    a tile along K.

    turns: that many times `warpgroups` take the stages in turns, and add up at the end of a tile.
    """

    rows: int
    warpgroups: int
    depth: int
    stages: int
    cluster: int
    turns: int = 1

    @property
    def columns(self) -> int:
        """Columns of the result, which are rows of the weight, in a tile."""
        return self.rows * self.warpgroups


def filled(
    m: int, rows: int, warpgroups: int, depth: int, cluster: int, weight_bits: float, turns: int = 1
) -> FlatTile:
    """The tile with as many stages as shared memory holds for m tokens, weights of `weight_bits` with what
    belongs to them.
    """
    m, one = -(-m // 8) * 8, FlatTile(rows, warpgroups, depth, 1, cluster, turns)
    # Beside the ring: a result of 32 bits and a residual of 16; what the rest of the cluster and the other
    # turns bring; barriers.
    beside = one.columns * m * (6 + 4 * (cluster - 1) + 4 * (turns - 1)) + 4096
    stage = int(one.columns * depth * weight_bits) // 8 + m * depth * 2
    return dataclasses.replace(one, stages=min(16, (SMEM_BYTES - beside) // stage) // turns * turns)


def flat_tile(m: int, n: int, k: int, sms: int, gated: bool) -> FlatTile:
    """The tile of flat GEMM for x [m, k], w [n, k].

    64 weight rows a CTA, so that there are many, and two CTAs a tile where tiles would leave half of the SMs
    idle. Beyond 32 tokens x is as many bytes from the L2 as the weight: tiles of 128 rows halve that, where
    they still occupy most SMs. Deep stages read longer pieces of a row from memory.
    """
    wide = -(-n // 128)
    rows = 128 if gated or (m > 32 and 10 * wide * (2 if 2 * wide <= sms == SMS else 1) >= 7 * sms) else 64
    few = 2 * -(-n // rows) <= sms
    cluster = (
        2 if (few or (gated and m <= 16)) and k >= 512 and sms == SMS else 1
    )  # beside another kernel free SMs may not be pairs
    if rows == 128:
        depth = 128 if m <= 16 else 64
    else:
        depth = 256 if cluster == 1 and m <= 16 else 128
    return filled(m, rows, 1, depth, cluster, 16)


def int4_tile(m: int, n: int, k: int, sms: int, gated: bool) -> FlatTile:
    """The tile of int4 GEMM for x [m, k], w [n, k].

    Warpgroups take the stages in turns: as many as registers and shared memory hold with wgmma, fewer, by
    measurement, with `mma`.
    """
    rows = 128 if gated else 64
    cluster = 2 if 2 * -(-n // rows) <= sms and k >= 1024 and sms == SMS else 1
    most = (3 if m <= 8 else 4 if m <= 16 else 3 if m <= 32 else 2) if not gated else 3 if 8 < m <= 16 else 2
    tiles = [filled(m, rows, 1, 512, cluster, 4.5, turns) for turns in range(most, 0, -1)]
    return next((tile for tile in tiles if tile.stages >= max(tile.turns, 2)), tiles[-1])
