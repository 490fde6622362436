"""`rope_append`'s transposed values: columns of bytes in the pages [P, K, H, S] of an 8-bit cache, a block of
tokens at once.

A token's H bytes lie S bytes apart, each in a sector of its own. Those of neighbours in a chunk lie side by
side: where lanes of a warp are tokens, a chunk costs a sector for up to 32 tokens, wherever in a page it
begins. What is left are the decodes' columns, which keep the way to the L2 busy for as long as a kernel that
only copies takes: so a warpgroup of its own writes columns from the first token on, while others move queries
and keys.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_kernels.pointwise.rope_append.rows import turn_rows
from pallas_kernels.quantized import Quantized

BLOCKS = (8, 16, 32)  # tokens of a block: a power of two, so that they divide a warp's lanes
_STAGES = 2  # a block that comes, a block that is turned and written
# blocks of a head, at least, that an SM has of a large step: one of decodes is 32 times the work of a chunk's
_ITEMS = 8


def block_of(limit: int | None, tokens: int, kv: int, sms: int) -> int:
    """Tokens whose values are written at once, of a step of `tokens`; 1: each token's alone, by who moves its
    keys.

    limit: at most so many; None: the largest that deals out `_ITEMS` blocks an SM, or the smallest there is.
    """
    fitting = [n for n in BLOCKS if n <= tokens]
    if limit is not None:
        return max([1, *(n for n in fitting if n <= limit)])
    return max([1, *fitting[:1], *(n for n in fitting if -(-tokens // n) * kv >= _ITEMS * sms)])


def columns_scratch(block: int, h: int, dtype, kv_dtype) -> dict:
    """A CTA's shared memory for `append_columns`."""
    scratch = {
        "v": plgpu.SMEM((_STAGES, block, h), dtype),
        # Rows that begin in other banks, since they are read across, and at multiples of 16 bytes, as the
        # stores to them (`stmatrix`) must.
        "v8": plgpu.SMEM((_STAGES, block, h + 16), kv_dtype),
        "full": plgpu.Barrier(num_barriers=_STAGES),
    }
    if kv_dtype == jnp.int8:
        scratch["scale"] = plgpu.SMEM((_STAGES, block), jnp.float32)
    return scratch


def columns_bytes(block: int, h: int) -> int:
    """Bytes of `columns_scratch`, at most."""
    return _STAGES * block * (3 * h + 20) + 128


def append_columns(fused_ref, slots_ref, pages, given, scratch, *, block, sms, interpret):
    """Writes the values of all tokens, a (block, head) in turn, of which this CTA's warpgroup has every
    sms-th.

    pages: of the values, [P, K, H, S], or `Quantized` with their scales. given: an e4m3 cache's scales [K],
    or None.
    """
    t, kv, pitch, h = fused_ref.shape
    cta, items = lax.axis_index("cta"), -(-t // block) * kv
    pages_ref, scales_ref = (pages.values, pages.scale) if isinstance(pages, Quantized) else (pages, None)
    rows = _columns(block, h).reduce(1)

    def place(i):
        """An item's head and first token; the last block has some tokens of the one before, which are written
        twice.
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
        pl.when(i + 1 < count)(
            lambda: load(i + 1, 1 - stage)
        )  # read by all before they met in the round before
        slots = plgpu.load(slots_ref.at[pl.ds(start, block)], layout=rows, optimized=False)
        scale = None if given is None else given[head]
        plgpu.barrier_wait(scratch["full"].at[stage])
        values = scratch["v8"].at[stage, :, pl.ds(0, h)]
        found = scratch["scale"].at[stage] if "scale" in scratch else None
        turn_rows(scratch["v"].at[stage], values, scale=scale, scales=found)
        _meet(
            interpret
            # no fence: only threads read what was written, which a fence would let wait for the columns of
            # the round before
        )
        scales = None if found is None else plgpu.load(found, layout=rows, optimized=False)
        _put_columns(pages_ref, scales_ref, slots, values, scales, head, interpret)


def put_column(target, source, interpret):
    """Copies [K, H] bytes from shared memory, where rows may follow that are padding, to a reference whose
    elements lie apart, which Pallas' own stores do not take.
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
    """How a warpgroup's threads share a block [block, H]: a warp has a fourth of the columns, its lanes all
    tokens and, where lanes are left, neighbouring columns: two of them lie in one line of the L2.
    """
    across = 32 // block
    tiles = ((block, h), (block, h // 4), (block, across), (1, 1))
    made = mgpu.TiledLayout(plgpu.Tiling(tiles), (-7,), (-4, -3), -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(
        made.tiling, warp_dims=made.warp_dims, lane_dims=made.lane_dims, vector_dim=made.vector_dim
    )


def _meet(interpret):
    """All threads of the warpgroup are here, and see what each wrote to shared memory."""
    if not interpret:
        plgpu.inline_mgpu()(lambda _: mgpu_utils.warpgroup_barrier())()


def _put_columns(pages_ref, scales_ref, slots, source, scales, head, interpret):
    """Writes values [n, H] of tokens, which lie in shared memory, to their slots' columns of a head in the
    pages, and scales [n] if any.
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
        """What a thread holds of numbers [n]: its token's."""
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
        inside = arith.cmpi(
            arith.CmpIPredicate.ult, slot, arith.constant(i32, page_count * page_size)
        )  # of a slot below 0 neither
        with mgpu_utils.when(inside):
            values.foreach(lambda value, at: memref.store(value, pages_ref, [page, head, at[1], place]))
            if of_scales:
                scales, scales_ref = of_scales
                memref.store(own(scales), scales_ref, [page, head, place])

    put(plgpu.load(source, layout=layout, optimized=False), slots, head, pages_ref, *more)
