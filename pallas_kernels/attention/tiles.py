"""Tile configurations of the attention kernels for Hopper, and their choice by shape.

Sizes are in elements unless a name says bytes.
"""

import dataclasses

from pallas_kernels.hopper.limits import SMEM_BYTES, SMS

WIDTHS = (64, 128, 256, 512)  # head widths
# The widest heads, and their most query heads for each KV head in decode attention. The sums of 16 query
# heads of 512 columns, and the product to add, would spill registers.
WIDEST, WIDEST_GROUP = 512, 8
FEW_SMS = 64  # up to this number of SMs, the throughput of an SM limits the kernel, not the memory


@dataclasses.dataclass(frozen=True)
class DecodeTile:
    """A tile of decode attention.

    workers: compute warpgroups in a CTA. blocks: K and V pages in the rings of one worker. pages: pages in
    one round of the softmax, 1 or 2. One or two workers have one copying warpgroup each. Three or four
    workers share one copying warpgroup, which has a warp for each of them.
    """

    workers: int
    blocks: int
    pages: int = 2

    @property
    def key_pages(self) -> int:
        """Return the pages in the ring of keys."""
        return (self.blocks + 1) // 2

    @property
    def value_pages(self) -> int:
        """Return the pages in the ring of values."""
        return self.blocks // 2

    @property
    def copy_registers(self) -> int:
        """Return the registers of a copying thread. With `registers` they add up to those of the launch."""
        return 64 if self.workers == 4 else 56

    @property
    def registers(self) -> int:
        """Return the registers of a computing thread."""
        return {2: 192, 3: 152, 4: 104}[self.workers]


def wgmma_columns(group: int, e4m3: bool) -> int:
    """Return wgmma's N for a group of query heads: one column a head, or two with a cache of e4m3."""
    return next(n for n in (8, 16, 32) if group * (2 if e4m3 else 1) <= n)


def decode_tile(
    head_width: int, group: int, itemsize: int = 2, sms: int = SMS, int8: bool = False
) -> DecodeTile:
    """Return the tile for pages of 64 keys, with rings that fill an SM's shared memory.

    group: query heads for each KV head. int8: a cache of int8 instead of e4m3, which has smaller rings
    because of its 16-bit operands. On few SMs a third worker hides the latency of the others, because the
    throughput of each SM limits the kernel.
    """
    e4m3 = itemsize == 1
    cols = wgmma_columns(group, e4m3)

    def fill(workers: int, pages: int) -> DecodeTile:
        # A worker also has queries twice, the output, the pages' weights, and 2 KiB for sums across warps.
        extra = cols * head_width * (5 if e4m3 else 6) + pages * cols * 64 * itemsize + 2048
        block = 64 * head_width * itemsize
        # Queries are stored as copied and as permuted, both in bfloat16. A key page has two scales a token.
        if int8:
            wide = wgmma_columns(group, False)
            extra, block = wide * head_width * 8 + pages * wide * 64 * 2 + 2048 + 256, block + 256
        blocks = (SMEM_BYTES - 2 * 1024 - workers * extra) // (workers * block)
        return DecodeTile(workers=workers, blocks=min(12, blocks), pages=pages)

    if head_width == WIDEST:  # a page has 64 KiB, so that few pages fit
        return fill(1, 1)
    if e4m3 and head_width <= 128 and cols <= 16:
        return fill(4 if cols == 8 else 3, 1)
    if not e4m3 and sms <= FEW_SMS and cols <= 16 and fill(3, 1).blocks >= 4:
        return fill(3, 1)
    if cols == 32:
        return fill(2 if head_width == 64 else 1, 1)  # two workers would spill registers
    if head_width == 64 and cols == 8:
        return fill(4, 2)  # benchmarks/h200/kernels/decode-attention-tiles-gpt-oss.json
    return fill(2, 2) if fill(2, 2).blocks >= 4 else fill(1, 2)


@dataclasses.dataclass(frozen=True)
class ChunkTile:
    """A tile of chunk attention: two compute warpgroups with 64 query rows each, or with half of the columns
    of 64 rows each.

    keys: keys in a step, 64 or 128. stages: steps of K and V in flight. queries: query tiles in shared
    memory; with 2 the next tile's queries are copied during the current tile.
    """

    keys: int
    stages: int
    queries: int = 2
    rows: int = 128


def chunk_tile(head_width: int, itemsize: int = 2) -> ChunkTile:
    """Return the tile for a head width: as many keys a step as registers and shared memory hold."""
    if head_width == WIDEST:  # see `pallas_kernels.attention.chunk.wide`
        return ChunkTile(keys=64, stages=1, queries=1, rows=64)
    if head_width == 256:
        return ChunkTile(keys=64, stages=2, queries=1)
    return ChunkTile(keys=128, stages=4 if head_width == 64 else 2 if itemsize == 2 else 3)


def int8_chunk_tile(head_width: int) -> ChunkTile:
    """Return the tile for a cache of int8, which uses the space of the second query tile for int8 blocks."""
    return dataclasses.replace(chunk_tile(head_width, 2), queries=1)
