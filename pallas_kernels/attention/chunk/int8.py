"""Chunk attention over an int8 cache, which has a scale for each token and head.

The copying warpgroup loads a block's numbers into shared memory and converts them there to bfloat16, times
their scales. The computing warpgroups see only bfloat16. During a conversion the next block arrives: keys
while values are converted, and the other way round.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.attention.paged import PAGE
from pallas_kernels.attention.tiles import ChunkTile
from pallas_kernels.hopper import wgmma_registers as lanes
from pallas_kernels.hopper.layouts import swizzled
from pallas_kernels.hopper.wgmma_registers import const

_PIECE = 16  # numbers that a thread converts at once


def scratch(tile: ChunkTile, h: int) -> dict:
    """Return the shared memory of incoming int8 blocks, and their barriers."""
    pages = tile.keys // PAGE
    return {
        "k8_s": plgpu.SMEM((pages, PAGE, h), jnp.int8),
        "v8_s": plgpu.SMEM((pages, h, PAGE), jnp.int8),
        "scale_s": plgpu.SMEM((2, pages, PAGE), jnp.float32),
        "k8_full": plgpu.Barrier(num_arrivals=2 * pages),
        "v8_full": plgpu.Barrier(num_arrivals=2 * pages),
    }


def copy_blocks(
    k_ref,
    v_ref,
    scales,
    m: dict,
    block,
    block_end,
    step,
    pages_of,
    *,
    kv,
    kv_head,
    stages: int,
    interpret: bool,
):
    """Copy keys and values of blocks [block, block_end) to the rings from step `step` on. Return the next
    step.

    k_ref, v_ref: rows of all pages and heads. scales: scales of keys and of values, [P * K, 64] each. m:
    the kernel's shared memory and barriers. pages_of(block): the pages of a block.
    """
    sides = [("k", k_ref, PAGE, True, 0), ("v", v_ref, v_ref.shape[0] // k_ref.shape[0] * PAGE, False, 1)]

    def load(i, name, source, height, which):
        for j, page_id in enumerate(pages_of(i)):
            head = page_id * kv + kv_head
            plgpu.copy_gmem_to_smem(
                source.at[pl.ds(head * height, height)], m[f"{name}8_s"].at[j], m[f"{name}8_full"]
            )
            plgpu.copy_gmem_to_smem(scales[which].at[head], m["scale_s"].at[which, j], m[f"{name}8_full"])

    def make(i, step):
        slot = lax.rem(step, jnp.int32(stages))
        for name, source, height, by_row, which in sides:
            plgpu.barrier_wait(m[f"{name}8_full"])

            @pl.when(step >= stages)
            def _(name=name):
                plgpu.barrier_wait(m[f"{name}_empty"].at[slot])

            ring = m[f"{name}_s"].at[slot]
            for j in range(m["k8_s"].shape[0]):
                target = ring.at[pl.ds(j * PAGE, PAGE)] if by_row else ring.at[j]
                _widen(m[f"{name}8_s"].at[j], m["scale_s"].at[which, j], target, by_row, interpret)
            plgpu.commit_smem()
            plgpu.barrier_arrive(m[f"{name}_full"].at[slot])

            @pl.when(i + 1 < block_end)
            def _(name=name, source=source, height=height, which=which):
                load(i + 1, name, source, height, which)

        return step + 1

    @pl.when(block < block_end)
    def _():
        for name, source, height, _, which in sides:
            load(block, name, source, height, which)

    return lax.fori_loop(block, block_end, make, step)


def _widen(source, scale, target, by_row: bool, interpret: bool) -> None:
    """Store target = source * scale, rounded, for source [R, C] int8 and a tiled target [R, C] bfloat16.

    scale: float32 for rows or for columns. The NaN scale of an unwritten token counts as 0, because values
    must be finite.
    """
    if interpret:
        known = jnp.where(jnp.isnan(scale[...]), 0.0, scale[...])
        values = source[...].astype(jnp.float32) * (known[:, None] if by_row else known[None])
        target[...] = values.astype(target.dtype)
        return
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(swizzled(jnp.bfloat16)))
    )
    run(lambda _, source, scale, target: _widen_pieces(source, scale, target, by_row))(source, scale, target)


def _widen_pieces(source: ir.Value, scale: ir.Value, target: ir.Value, by_row: bool) -> None:
    rows, columns = ir.MemRefType(source.type).shape
    thread = arith.remui(mgpu.utils.thread_idx(), const(128))
    across = columns // _PIECE  # pieces of a row; a thread converts one piece of several rows
    piece, first = arith.remui(thread, const(across)), arith.divui(thread, const(across))
    column = arith.muli(piece, const(_PIECE))
    if not by_row:
        factors = [_pair(*_scales(scale, arith.addi(column, const(2 * i)), 2)) for i in range(_PIECE // 2)]
    strides, _ = ir.MemRefType(target.type).get_strides_and_offset()
    for start in range(0, rows, 128 // across):
        row = arith.addi(first, const(start))
        if by_row:
            factors = [_pair(*_scales(scale, row, 1) * 2)] * (_PIECE // 2)
        words = lanes.read_words(source, arith.addi(arith.muli(row, const(columns)), column), 4)
        made = [
            value
            for word in words
            for value in mgpu.utils.inline_ptx(_TWO_PAIRS, word, result_types=[lanes.i32()] * 2)
        ]
        made = [_times(value, factor) for value, factor in zip(made, factors, strict=True)]
        # A tile has 8 rows of 128 bytes. The swizzle places a 16-byte piece at its number xor the row.
        line = arith.remui(row, const(8))
        tile = arith.addi(
            arith.muli(arith.divui(row, const(8)), const(strides[0] * 2)),
            arith.muli(arith.divui(column, const(64)), const(strides[1] * 2)),
        )
        base = arith.addi(tile, arith.muli(line, const(128)))
        for half in range(2):
            place = arith.addi(arith.divui(arith.remui(column, const(64)), const(8)), const(half))
            four = llvm.mlir_undef(ir.VectorType.get((4,), lanes.i32()))
            for i in range(4):
                four = llvm.insertelement(four, made[4 * half + i], const(i))
            offset = arith.addi(base, arith.muli(arith.xori(place, line), const(16)))
            llvm.store(four, lanes.at(target, offset), alignment=16)


def _scales(scale: ir.Value, index: ir.Value, count: int) -> list[ir.Value]:
    """Return `count` scales from `index` on, with 0 for NaN."""
    f32 = ir.F32Type.get()
    zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
    found = [
        mgpu.utils.bitcast(word, f32) for word in lanes.read_words(scale, arith.muli(index, const(4)), count)
    ]
    return [arith.select(arith.cmpf(arith.CmpFPredicate.ORD, x, x), x, zero) for x in found]


def _pair(low: ir.Value, high: ir.Value) -> ir.Value:
    """Return two float32 values as bfloat16 in one register."""
    return mgpu.utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high, result_types=lanes.i32())


def _times(pair: ir.Value, factor: ir.Value) -> ir.Value:
    return mgpu.utils.inline_ptx("mul.rn.bf16x2 $0, $1, $2;", pair, factor, result_types=lanes.i32())


# Bytes 0 and 1 of a word, then bytes 2 and 3, as bfloat16. For a byte b, 0x4300 | (b & 127) is 128 + (b &
# 127). 0x4300 | (b & 128) is 128, or 256 for a negative b. The difference of the two is exactly b.
_TWO_PAIRS = (
    "{ .reg .b32 v, n, x, y; and.b32 v, $2, 0x7f7f7f7f; and.b32 n, $2, 0x80808080;\n"
    + "".join(
        f"prmt.b32 x, v, 0x43434343, {order}; prmt.b32 y, n, 0x43434343, {order}; sub.rn.bf16x2 ${i}, x, y;\n"
        for i, order in enumerate(("0x4140", "0x4342"))
    )
    + "}"
)
