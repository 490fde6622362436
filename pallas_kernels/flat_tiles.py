"""The tiles of the GEMMs of few rows, and the choice of one by shape."""

import dataclasses

from pallas_kernels.tiles import SMEM_BYTES


@dataclasses.dataclass(frozen=True)
class FlatTile:
    """`warpgroups` of `rows` weight rows each, `depth` along K a stage of the ring, `cluster` CTAs that share a tile along K."""

    rows: int
    warpgroups: int
    depth: int
    stages: int
    cluster: int

    @property
    def columns(self) -> int:
        """Columns of the result, which are rows of the weight, in a tile."""
        return self.rows * self.warpgroups


def filled(m: int, rows: int, warpgroups: int, depth: int, cluster: int, weight_bits: float) -> FlatTile:
    """The tile with as many stages as shared memory holds for m tokens, weights of `weight_bits` with what belongs to them."""
    m, columns = -(-m // 8) * 8, rows * warpgroups
    # Beside the ring: a result and a residual of 16 bits, or a result of 32; a cluster's parts; barriers.
    beside = columns * m * 4 * cluster + 4096
    stage = int(columns * depth * weight_bits) // 8 + m * depth * 2
    return FlatTile(rows, warpgroups, depth, min(16, (SMEM_BYTES - beside) // stage), cluster)


def flat_tile(m: int, n: int, k: int, sms: int, gated: bool) -> FlatTile:
    """The tile of flat GEMM for x [m, k], w [n, k]."""
    return filled(m, 128 if gated else 64, 1, 64, 1, 16)


def int4_tile(m: int, n: int, k: int, sms: int, gated: bool) -> FlatTile:
    """The tile of int4 GEMM for x [m, k], w [n, k]."""
    rows, warpgroups = (128, 1) if gated else (64, 2 if m <= 32 else 1)
    return filled(m, rows, warpgroups, 512, 1, 4.5)
