"""Frozen tile configurations of the Hopper kernels, and the choice of one by shape.

A tile is data: kernels take one; the functions below say which is best or fits. Sizes are in elements unless
a name says bytes.
"""

import dataclasses

from pallas_kernels.hopper.limits import SMEM_BYTES, SMS

FEW_SMS = 64  # so many cannot saturate the memory: what each of them takes in counts


@dataclasses.dataclass(frozen=True)
class DecodeTile:
    """Decode attention: `workers` compute warpgroups a CTA, each with rings of `blocks` K and V pages
    together.

    `pages` of keys are taken in one round of the softmax (1 or 2). One or two workers have a copying
    warpgroup each, three or four share one, a warp for each.
    """

    workers: int
    blocks: int
    pages: int = 2

    @property
    def key_pages(self) -> int:
        return (self.blocks + 1) // 2

    @property
    def value_pages(self) -> int:
        return self.blocks // 2

    @property
    def copy_registers(self) -> int:
        """Of a copying thread; with `registers` they make up what the CTA was launched with."""
        return 64 if self.workers == 4 else 56

    @property
    def registers(self) -> int:
        """Of a computing thread."""
        return {2: 192, 3: 152, 4: 104}[self.workers]


def wgmma_columns(group: int, eight: bool) -> int:
    """wgmma's N for a group of query heads: a column each, or a pair of them beside a cache of 8 bits."""
    return next(n for n in (8, 16, 32) if group * (2 if eight else 1) <= n)


def decode_tile(
    head_width: int, group: int, itemsize: int = 2, sms: int = SMS, int8: bool = False
) -> DecodeTile:
    """The tile for pages of 64 keys of `head_width` and `group` query heads a KV head: rings that fill the
    SM's shared memory.

    int8: of such a cache, not of e4m3, which has as many workers and rounds of as many pages, but smaller
    rings beside its own numbers. On few SMs a third worker hides what the other two wait for (products, the
    ends of pairs): there what one SM takes in counts.
    """
    eight = itemsize == 1
    cols = wgmma_columns(group, eight)

    def fill(workers: int, pages: int) -> DecodeTile:
        # Beside its rings a worker has queries twice, the output, pages' weights, and 2 KiB for sums across
        # warps.
        beside = cols * head_width * (5 if eight else 6) + pages * cols * 64 * itemsize + 2048
        block = 64 * head_width * itemsize
        # queries come, are turned, and are bfloat16, as weights are; a key page brings two scales a token,
        # half of them a block
        if int8:
            wide = wgmma_columns(group, False)
            beside, block = wide * head_width * 8 + pages * wide * 64 * 2 + 2048 + 256, block + 256
        blocks = (SMEM_BYTES - 2 * 1024 - workers * beside) // (workers * block)
        return DecodeTile(workers=workers, blocks=min(12, blocks), pages=pages)

    if eight and head_width <= 128 and cols <= 16:
        return fill(4 if cols == 8 else 3, 1)
    if not eight and sms <= FEW_SMS and cols <= 16 and fill(3, 1).blocks >= 4:
        return fill(3, 1)
    if cols == 32:
        return fill(2 if head_width == 64 else 1, 1)  # two workers would spill
    return fill(2, 2) if fill(2, 2).blocks >= 4 else fill(1, 2)


@dataclasses.dataclass(frozen=True)
class ChunkTile:
    """Chunk attention: 2 compute warpgroups of 64 query rows each, `keys` keys a step (64 or 128), `stages`
    steps of K and V in flight.

    `queries`: how many items' queries are in shared memory: with 2 the next item's come while this one's are
    multiplied.
    """

    keys: int
    stages: int
    queries: int = 2

    @property
    def rows(self) -> int:
        return 128


def chunk_tile(head_width: int, itemsize: int = 2) -> ChunkTile:
    """The tile for a head width: as many keys a step as the registers hold beside the output, and what fits
    shared memory.
    """
    if head_width == 256:
        return ChunkTile(keys=64, stages=2, queries=1)
    return ChunkTile(keys=128, stages=4 if head_width == 64 else 2 if itemsize == 2 else 3)


def int8_chunk_tile(head_width: int) -> ChunkTile:
    """The same for a cache of int8, beside whose blocks of bfloat16 lies one as it came, where the next
    item's queries do elsewhere.
    """
    return dataclasses.replace(chunk_tile(head_width, 2), queries=1)
