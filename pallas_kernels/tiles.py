"""Frozen tile configurations of the Hopper kernels, and the choice of one by shape.

A tile is data: kernels take one, and the table below says which was best where. Sizes are in elements unless a name says bytes.
"""

import dataclasses

SMEM_BYTES = 227 * 1024  # what one CTA may have of an SM's shared memory on Hopper
SMS = 132  # of an H100 or H200


@dataclasses.dataclass(frozen=True)
class DecodeTile:
    """Decode attention: `workers` (compute warpgroup + copying warpgroup) a CTA, each with a ring of `blocks` K or V pages."""

    workers: int
    blocks: int


def decode_tile(head_width: int, group: int, itemsize: int = 2) -> DecodeTile:
    """The tile for pages of 64 keys of `head_width` and `group` query heads a KV head: rings that fill the SM's shared memory."""
    workers, cols = 2, 8 if group <= 8 else 16
    # Beside its ring a worker has queries twice, the output, two pages' weights, and 2 KiB for sums across warps.
    beside = 3 * cols * head_width * itemsize + 2 * cols * 64 * itemsize + 2048
    ring = (SMEM_BYTES - 8 * 1024 - workers * beside) // (workers * 64 * head_width * itemsize)
    return DecodeTile(workers=workers, blocks=min(ring, 12))


@dataclasses.dataclass(frozen=True)
class ChunkTile:
    """Chunk attention: 2 compute warpgroups of 64 query rows each, `keys` keys a step (64 or 128), `stages` steps of K and V in flight."""

    keys: int
    stages: int

    @property
    def rows(self) -> int:
        return 128


def chunk_tile(head_width: int, itemsize: int = 2) -> ChunkTile:
    """The tile for a head width: as many keys a step as the registers hold beside the output."""
    return ChunkTile(keys=64 if head_width == 256 else 128, stages=4 if head_width == 64 else 2)
