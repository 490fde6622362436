"""The transposed values of `rope_append`: columns of bytes in the pages [P, K, H, S] of an 8-bit cache, one
block of tokens at once.

The H bytes of a token lie S bytes apart, each in a separate sector. The bytes of neighboring tokens of a
chunk are adjacent: with lanes of a warp as tokens, a chunk writes one sector for up to 32 tokens, at any
offset in a page. The columns of decodes remain. They occupy the path to the L2 for as long as a kernel that
only copies. So a separate warpgroup writes columns from the first token on, while others move queries and
keys.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_kernels.pointwise.rope_append.rows import transform_rows
from pallas_kernels.quantized import Quantized

BLOCKS = (8, 16, 32)  # tokens in a block: powers of two, which divide a warp's lanes
_STAGES = 2  # one block arrives while one is processed and written
# Minimum blocks for each SM in a large step: a block of decodes takes 32 times as long as a block of a chunk.
_ITEMS = 8


def block_of(limit: int | None, tokens: int, kv: int, sms: int) -> int:
    """Return the tokens in a block of values, for a step of `tokens`; 1: each token's warpgroup writes its
    own column.

    limit: the maximum; None: the largest that gives each SM `_ITEMS` blocks, or the smallest block.
    """
    fitting = [n for n in BLOCKS if n <= tokens]
    if limit is not None:
        return max([1, *(n for n in fitting if n <= limit)])
    return max([1, *fitting[:1], *(n for n in fitting if -(-tokens // n) * kv >= _ITEMS * sms)])


def columns_scratch(block: int, h: int, dtype, kv_dtype) -> dict:
    """Return a CTA's shared memory for `append_columns`."""
    scratch = {
        "v": plgpu.SMEM((_STAGES, block, h), dtype),
        # Rows start in different banks, because threads read columns, and at multiples of 16 bytes, as
        # `stmatrix` requires.
        "v8": plgpu.SMEM((_STAGES, block, h + 16), kv_dtype),
        "full": plgpu.Barrier(num_barriers=_STAGES),
    }
    if kv_dtype == jnp.int8:
        scratch["scale"] = plgpu.SMEM((_STAGES, block), jnp.float32)
    return scratch


def columns_bytes(block: int, h: int) -> int:
    """Return an upper bound of the bytes of `columns_scratch`."""
    return _STAGES * block * (3 * h + 20) + 128


def append_columns(fused_ref, slots_ref, pages, given, scratch, *, block, sms, interpret):
    """Write the values of all tokens, one (block, head) at a time. This CTA's warpgroup processes every
    sms-th.

    pages: the values [P, K, H, S], or `Quantized` with their scales. given: an e4m3 cache's scales [K], or
    None.
    """
    t, kv, pitch, h = fused_ref.shape
    cta, items = lax.axis_index("cta"), -(-t // block) * kv
    pages_ref, scales_ref = (pages.values, pages.scale) if isinstance(pages, Quantized) else (pages, None)
    rows = _columns(block, h).reduce(1)

    def place(i):
        """Return an item's head and first token.

        The last block overlaps the block before it, and writes the overlap twice.
        """
        item = cta + i * sms
        return lax.rem(item, jnp.int32(kv)), jnp.minimum(lax.div(item, jnp.int32(kv)) * block, t - block)

    def load(i, stage):
        head, start = place(i)
        tokens = fused_ref.at[pl.ds(start, block), head, pitch - 1]
        plgpu.copy_gmem_to_smem(tokens, scratch["v"].at[stage], scratch["full"].at[stage])

    count = pl.cdiv(items - cta, jnp.int32(sms))
    pl.when(count > 0)(lambda: load(jnp.int32(0), jnp.int32(0)))

    @pl.loop(0, count)
    def _(i):
        stage, (head, start) = lax.rem(i, jnp.int32(_STAGES)), place(i)
        # All threads read this stage before the barrier of the previous round.
        pl.when(i + 1 < count)(lambda: load(i + 1, 1 - stage))
        slots = plgpu.load(slots_ref.at[pl.ds(start, block)], layout=rows, optimized=False)
        scale = None if given is None else given[head]
        plgpu.barrier_wait(scratch["full"].at[stage])
        values = scratch["v8"].at[stage, :, pl.ds(0, h)]
        found = scratch["scale"].at[stage] if "scale" in scratch else None
        transform_rows(scratch["v"].at[stage], values, scale=scale, scales=found)
        # No fence: only threads read the values. A fence would wait for the columns of the previous round.
        _meet(interpret)
        scales = None if found is None else plgpu.load(found, layout=rows, optimized=False)
        _put_columns(pages_ref, scales_ref, slots, values, scales, head, interpret)


def put_column(target, source, interpret):
    """Copy [K, H] bytes from shared memory, possibly followed by rows of padding, to a reference with
    strided elements.

    Pallas' own stores do not support this.
    """
    heads, layout = target.shape[0], plgpu.Layout.WG_STRIDED(source.shape, 1)
    values = plgpu.load(source, layout=layout)
    if interpret:
        target[...] = values[:heads]
        return

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def put(_, values, ref):
        def one(value, at):
            if heads == source.shape[0]:
                memref.store(value, ref, list(at))
                return
            with mgpu_utils.when(
                arith.cmpi(arith.CmpIPredicate.ult, at[0], arith.constant(ir.IndexType.get(), heads))
            ):
                memref.store(value, ref, list(at))

        values.foreach(one)

    put(values, target)  # pyright: ignore[reportCallIssue]


def _columns(block: int, h: int):
    """Return the layout of a block [block, H] over a warpgroup's threads.

    A warp has a fourth of the columns. Its lanes are all tokens and, with lanes left, neighboring columns,
    two of which share a line of the L2.
    """
    across = 32 // block
    tiles = ((block, h), (block, h // 4), (block, across), (1, 1))
    made = mgpu.TiledLayout(plgpu.Tiling(tiles), (-7,), (-4, -3), -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(
        made.tiling, warp_dims=made.warp_dims, lane_dims=made.lane_dims, vector_dim=made.vector_dim
    )


def _meet(interpret):
    """Synchronize the warpgroup's threads, so that each sees the others' writes to shared memory."""
    if not interpret:
        plgpu.inline_mgpu()(lambda _: mgpu_utils.warpgroup_barrier())()


def _put_columns(pages_ref, scales_ref, slots, source, scales, head, interpret):
    """Write values [n, H] of tokens from shared memory to their slots' columns of a head, and scales [n],
    if given.
    """
    n, (page_count, _, h, page_size) = source.shape[0], pages_ref.shape
    if interpret:
        for i in range(n):
            page, place = lax.div(slots[i], jnp.int32(page_size)), lax.rem(slots[i], jnp.int32(page_size))

            @pl.when((slots[i] >= 0) & (slots[i] < page_count * page_size))
            def _(i=i, page=page, place=place):
                pages_ref.at[page, head, :, place][...] = source[i]
                if scales_ref is not None:
                    scales_ref[page, head, place] = scales[i]

        return
    layout = _columns(n, h)
    rows, more = layout.reduce(1), [] if scales is None else [scales, scales_ref]

    def own(of_tokens):
        """Return a thread's number of numbers [n]: the number of its token."""
        return vector.extract(of_tokens.registers.item(), dynamic_position=[], static_position=[0])

    @plgpu.inline_mgpu(
        arg_types=(
            layout,
            rows,
            plgpu.Layout.WG_SPLAT(()),
            plgpu.RefType(),
            *([rows, plgpu.RefType()] if more else []),
        )
    )
    def put(_, values, slots, head, pages_ref, *of_scales):
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        slot, size = own(slots), arith.constant(i32, page_size)
        head = arith.index_cast(index, head.registers.item())
        page, place = (arith.index_cast(index, op(slot, size)) for op in (arith.divui, arith.remui))
        # The unsigned comparison excludes slots below 0.
        inside = arith.cmpi(arith.CmpIPredicate.ult, slot, arith.constant(i32, page_count * page_size))
        with mgpu_utils.when(inside):
            values.foreach(lambda value, at: memref.store(value, pages_ref, [page, head, at[1], place]))
            if of_scales:
                scales, scales_ref = of_scales
                memref.store(own(scales), scales_ref, [page, head, place])

    put(plgpu.load(source, layout=layout, optimized=False), slots, head, pages_ref, *more)
