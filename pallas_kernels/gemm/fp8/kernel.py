"""The fp8 dense GEMM kernel: one warpgroup copies operands and scales ahead, two multiply 64 rows each.

The tiles of an incomplete last round are split along K. The worker of each part adds up its share of the
columns and stores it.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.fp8.epilogue import BY_ROW, E4M3, WIDTH, finished_columns, load, store
from pallas_kernels.gemm.fp8.tile_schedule import FIELDS, Fp8Tile
from pallas_kernels.hopper.layouts import swizzled
from pallas_kernels.quantized import BLOCK_ROWS

DEPTH = 128  # K of a step: one swizzled row of e4m3, and one block of an activation's scales
HALF = 64  # rows of one compute warpgroup


def scratch(tile: Fp8Tile, operands: dict, out_dtype) -> dict:
    """Return the kernel's shared memory and barriers."""
    stages, per_token = tile.stages, operands["tokens"].ndim == 1 and operands["tokens"].shape[0] > 1
    empty = (
        functools.partial(plgpu.ClusterBarrier, collective_axes=("pair",))
        if tile.cluster > 1
        else plgpu.Barrier
    )
    arrays = {
        "x_s": plgpu.SMEM((stages, 128, DEPTH), E4M3, transforms=swizzled(E4M3, DEPTH)),
        "w_s": plgpu.SMEM((stages, tile.columns, DEPTH), E4M3, transforms=swizzled(E4M3, DEPTH)),
        "o_s": plgpu.SMEM((2, tile.slots, HALF, WIDTH), out_dtype, transforms=swizzled(out_dtype, WIDTH)),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "empty": empty(num_arrivals=2, num_barriers=stages),
    }
    if "channels" in operands:
        arrays["channel_s"] = plgpu.SMEM((tile.columns,), jnp.float32)
        arrays["scales_full"] = plgpu.Barrier(num_arrivals=1 + per_token)
        arrays["scales_empty"] = plgpu.Barrier(num_arrivals=2)
    if per_token:
        arrays["token_s"] = plgpu.SMEM((128,), jnp.float32)
    if "residual" in operands:
        arrays["read"] = plgpu.Barrier(num_barriers=2 * tile.slots)
    return arrays


def multiply(*refs, names, tile, epilogue, parts, interpreted, **s):
    """Run the kernel over the items of this CTA."""
    ref = dict(zip(names, refs, strict=True))
    x_s, w_s, full, empty = s["x_s"], s["w_s"], s["full"], s["empty"]
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    pair = lax.axis_index("pair") if tile.cluster > 1 else jnp.int32(0)
    stages, items = jnp.int32(tile.stages), ref["work"].shape[1]
    blocked = len(ref["tokens"].shape) == 2
    given = (
        pl.get_global(plgpu.SemaphoreType.REGULAR((ref["parts"].shape[0] * tile.cluster * 2,)))
        if parts > 1
        else None
    )

    def item(i):
        i = jnp.minimum(i, items - 1)
        return tuple(ref["work"][cta, i, field] for field in range(FIELDS))

    def for_items(visit, state):
        def one(i, carry):
            own, state = carry
            following = item(i + 1)  # read during the products of this item
            return following, lax.cond(
                own[3] > 0, lambda state: visit(state, *own), lambda state: state, state
            )

        return lax.fori_loop(0, items, one, (item(0), state))[1]

    @pl.when(wg == 2)
    def _copy():
        plgpu.set_max_registers(24, action="decrease")

        def visit(state, row, column, first, count, *_):
            step, done = state
            row = pl.multiple_of((row * tile.cluster + pair) * 128, 128)
            rows, columns = pl.ds(row, 128), pl.ds(column * tile.columns, tile.columns)

            def copy(i, step):
                slot = lax.rem(step, stages)

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                at = pl.ds((first + i) * DEPTH, DEPTH)
                plgpu.copy_gmem_to_smem(ref["x"].at[rows, at], x_s.at[slot], full.at[slot])
                together = "pair" if tile.cluster > 1 else None
                plgpu.copy_gmem_to_smem(
                    ref["w"].at[columns, at], w_s.at[slot], full.at[slot], collective_axes=together
                )
                return step + 1

            step = lax.fori_loop(0, count, copy, step)

            if "channel_s" not in s:
                return step, done

            @pl.when(done > 0)
            def _():
                plgpu.barrier_wait(s["scales_empty"])

            for source, to, at in (("channels", "channel_s", columns), ("tokens", "token_s", rows)):
                if to in s:
                    plgpu.copy_gmem_to_smem(ref[source].at[at], s[to], s["scales_full"])
            return step, done + 1

        steps, done = for_items(visit, (jnp.int32(0), jnp.int32(0)))

        # Wait for every arrival, because the interpreter reports a barrier that no thread waited for.
        @pl.loop(jnp.maximum(steps - stages, 0), steps)
        def _(step):
            plgpu.barrier_wait(empty.at[lax.rem(step, stages)])

        if "channel_s" in s:

            @pl.when(done > 0)
            def _():
                plgpu.barrier_wait(s["scales_empty"])

    @pl.when(wg < 2)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        own = pl.ds(wg * HALF, HALF)

        def sums_of(step, count):
            """Return the tile's sums [64, columns], as they leave the tensor core."""

            def product(acc):
                def multiply(i, step):
                    slot = lax.rem(step, stages)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, x_s.at[slot, own], w_s.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(1)

                    @pl.when(i > 0)
                    def _():  # the step before this one is done
                        plgpu.barrier_arrive(empty.at[lax.rem(step + stages - 1, stages)])

                    return step + 1

                end = lax.fori_loop(0, count, multiply, step)
                y = acc[...]
                plgpu.barrier_arrive(empty.at[lax.rem(end - 1, stages)])
                return y

            return [pl.run_scoped(product, plgpu.ACC((HALF, tile.columns), jnp.float32))]

        def moved_sums_of(step, first, count, row, column):
            """Return the tile's sums in pieces [64, moved], each step's added to float32 registers, times
            the rows' scales for 128 of K, and those of the weight's blocks.
            """
            blocks = ref.get("blocks")
            own_blocks = range(tile.columns // BLOCK_ROWS if blocks is not None else 0)

            def block_scales(i):
                """Return a scale for every 64 columns of the tile. Columns past the last have any."""
                if blocks is None:
                    return ()
                of_rows, of_depth = blocks.shape
                of_columns = lax.div(column, jnp.int32(BLOCK_ROWS))
                at = [jnp.minimum(of_columns + j, of_rows - 1) for j in own_blocks]
                return tuple(blocks[j, jnp.minimum(i, of_depth - 1)] for j in at)

            def scaled(part, scale, of_blocks):
                """Return a piece of sums times the scales of its rows and blocks."""
                if not of_blocks:
                    return part * lax.broadcast_in_dim(scale, part.shape, [0]) if blocked else part
                pieces = [
                    part[:, j * BLOCK_ROWS : (j + 1) * BLOCK_ROWS]
                    * lax.broadcast_in_dim(scale * own, (HALF, BLOCK_ROWS), [0])
                    for j, own in enumerate(of_blocks)
                ]
                return jnp.concatenate(pieces, axis=1) if len(pieces) > 1 else pieces[0]

            def scales(i):
                i = jnp.minimum(i, ref["tokens"].shape[1] - 1)
                return load(ref["tokens"].at[pl.ds(row, HALF), i], BY_ROW)

            # A product runs, in separate registers, during the additions of the previous product. With parts
            # after full tiles ptxas spilled registers at each step, which doubled the time; waiting costs 8
            # %. So it did with a weight in blocks. The interpreter cannot start an accumulator with a value.
            ordered = ((parts > 1 and items > 1) or blocks is not None) and not interpreted
            nothing = first >> 31  # 0, but unknown to the compiler

            def multiply(i, state):
                step, scale, *rest = state
                of_blocks, sums = rest[: len(own_blocks)], rest[len(own_blocks) :]
                slot = lax.rem(step, stages)
                following = scales(first + i + 1) if blocked else scale
                blocks_after = block_scales(first + i + 1)
                plgpu.barrier_wait(full.at[slot])
                for piece in range(len(sums)):

                    def product(acc, piece=piece):
                        columns = pl.ds(piece * tile.moved, tile.moved)
                        plgpu.wgmma(acc, x_s.at[slot, own], w_s.at[slot, columns].transpose((1, 0)))
                        return acc[...]

                    def product_after(acc, product=product):
                        product(acc)

                    if piece and ordered:
                        # The start value depends on the previous sums, so that the product starts after their
                        # addition and reuses their registers.
                        bits = lax.bitcast_convert_type(sums[piece - 1], jnp.int32) & nothing
                        started: Any = plgpu.ACC.init(lax.bitcast_convert_type(bits, jnp.float32))
                        part = pl.run_state(product_after)(started)
                    else:
                        part = pl.run_scoped(product, plgpu.ACC((HALF, tile.moved), jnp.float32))
                    if piece == len(sums) - 1:
                        plgpu.barrier_arrive(empty.at[slot])
                    per = tile.moved // BLOCK_ROWS
                    sums[piece] += scaled(part, scale, of_blocks[piece * per : (piece + 1) * per])
                return step + 1, following, *blocks_after, *sums

            zero = plgpu.layout_cast(jnp.zeros((HALF, tile.moved), jnp.float32), plgpu.Layout.WGMMA)
            begun = step, scales(first) if blocked else jnp.int32(0), *block_scales(first)
            start = (*begun, *[zero] * (tile.columns // tile.moved))
            return list(lax.fori_loop(0, count, multiply, start)[len(begun) :])

        def visit(step, row, column, first, count, part, cut):
            row, column = (row * tile.cluster + pair) * 128 + wg * HALF, column * tile.columns
            sums = moved_sums_of(step, first, count, row, column) if tile.moved else sums_of(step, count)
            piece = sums[0].shape[1]

            def whole(at, width):
                return sums[at // piece][:, at % piece : at % piece + width]

            def finish(sums_at, start, columns):
                finished = finished_columns(sums_at, start, column, ref, s, wg)
                store(finished, epilogue, ref, s, wg, row, column + start, columns)

            if "channel_s" in s:
                plgpu.barrier_wait(s["scales_full"])
            if parts == 1:
                finish(whole, 0, tile.columns)
            else:

                @pl.when(cut < 0)
                def _():
                    finish(whole, 0, tile.columns)

                @pl.when(cut >= 0)
                def _():
                    share = tile.columns // parts

                    def added(at, width):
                        """This part's share of the columns, of all parts in the order of K."""
                        of = [
                            ref["parts"].at[cut, i, pair, wg, :, pl.ds(part * share + at, width)]
                            for i in range(parts)
                        ]
                        return functools.reduce(jnp.add, [load(x, plgpu.Layout.WGMMA) for x in of])

                    for i, y in enumerate(sums):
                        ref["parts"].at[cut, part, pair, wg, :, pl.ds(i * piece, piece)][...] = y
                    there = given.at[(cut * tile.cluster + pair) * 2 + wg]  # pyright: ignore[reportOptionalMemberAccess]
                    plgpu.semaphore_signal(there, memory_scope="gpu")
                    plgpu.semaphore_wait(there, parts, decrement=False, memory_scope="gpu")
                    finish(added, part * share, share)

            if "channel_s" in s:
                plgpu.barrier_arrive(s["scales_empty"])
            return step + count

        for_items(visit, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
