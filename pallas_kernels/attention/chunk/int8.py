"""How chunk attention reads a cache of int8, which has a scale for each token and head.

The warpgroup that copies brings a block's numbers into shared memory and makes bfloat16 of them there, times
their scales, in the form that the other two multiply; they know of no int8. While it does so the next block's
come, the keys' under the values' and the other way round.
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

_PIECE = 16  # numbers that a thread takes at once


def scratch(tile: ChunkTile, h: int) -> dict:
    """The blocks as they come, and the barriers for them."""
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
    """Brings keys and values of blocks [block, block_end) to the rings from step `step` on; returns the steps
    done.

    k_ref, v_ref, scales: rows of all pages and heads, and (keys', values') scales [P * K, 64]. m: the
    kernel's shared memory and barriers. pages_of(block): the pages of a block.
    """
    sides = [("k", k_ref, PAGE, True, 0), ("v", v_ref, v_ref.shape[0] // k_ref.shape[0] * PAGE, False, 1)]

    def ask(i, name, source, height, which):
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
                ask(i + 1, name, source, height, which)

        return step + 1

    @pl.when(block < block_end)
    def _():
        for name, source, height, _, which in sides:
            ask(block, name, source, height, which)

    return lax.fori_loop(block, block_end, make, step)


def _widen(source, scale, target, by_row: bool, interpret: bool) -> None:
    """target = source * scale, rounded, for source [R, C] int8, plain, and target [R, C] bfloat16, tiled.

    scale: float32 of the rows, or of the columns. NaN, which no token wrote, is 0: values that are not there
    must be numbers.
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
    across = columns // _PIECE  # pieces of a row; a thread takes the same of several rows
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
        # Tiles of 8 rows of 128 bytes; the 16-byte pieces of a row lie at their place xor the row.
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
    """`count` scales from `index` on, NaN as 0."""
    f32 = ir.F32Type.get()
    zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
    found = [
        mgpu.utils.bitcast(word, f32) for word in lanes.read_words(scale, arith.muli(index, const(4)), count)
    ]
    return [arith.select(arith.cmpf(arith.CmpFPredicate.ORD, x, x), x, zero) for x in found]


def _pair(low: ir.Value, high: ir.Value) -> ir.Value:
    """Two float32 as bfloat16 in a register."""
    return mgpu.utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high, result_types=lanes.i32())


def _times(pair: ir.Value, factor: ir.Value) -> ir.Value:
    return mgpu.utils.inline_ptx("mul.rn.bf16x2 $0, $1, $2;", pair, factor, result_types=lanes.i32())


# Bytes 0 and 1 of a word, then 2 and 3, as bfloat16: of a byte b, 0x4300 | (b & 127) is 128 + (b & 127), and
# 0x4300 | (b & 128) is 128, or 256 where b is negative: their difference is b, exactly.
_TWO_PAIRS = (
    "{ .reg .b32 v, n, x, y; and.b32 v, $2, 0x7f7f7f7f; and.b32 n, $2, 0x80808080;\n"
    + "".join(
        f"prmt.b32 x, v, 0x43434343, {order}; prmt.b32 y, n, 0x43434343, {order}; sub.rn.bf16x2 ${i}, x, y;\n"
        for i, order in enumerate(("0x4140", "0x4342"))
    )
    + "}"
)
