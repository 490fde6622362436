"""Both products of a tile in e4m3, for the multiplying warpgroup.

The first product leaves e4m3 with a scale for each row and 64 columns, because one warpgroup holds 64
columns of a row. Tiles of shared memory have 128 columns. So each row of the result is two rows, with the
even and with the odd blocks of 64 columns, and zeros between them. The second product then has a sum for
each of both.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.expert_mlp.arrivals import arrive
from pallas_kernels.gemm.expert_mlp.work import Work
from pallas_kernels.gemm.fp8.epilogue import BY_COLUMN, E4M3, load, scale_of
from pallas_kernels.gemm.grouped.epilogue import channel_values, epilogue, token_scales
from pallas_kernels.gemm.grouped.tiles import ALIGN, PART
from pallas_kernels.hopper.layouts import store_transposed
from pallas_kernels.quantized import BLOCK, BLOCK_ROWS

_ONE_BY_ONE = plgpu.Layout._WGMMA_ACC_32BIT  # the accumulator's layout with single values instead of pairs


def begin(work: Work) -> None:
    """Fill the piece of zeros that the first product stores."""
    if work.form.up is not None:
        zeros = plgpu.layout_cast(jnp.zeros((BLOCK_ROWS, ALIGN), jnp.float32), plgpu.Layout.WGMMA)
        store_transposed(zeros.astype(E4M3), work.pieces["zero_s"], work.form.interpret)
        plgpu.commit_smem()


def up(work: Work, before, at, expert, start, end, column) -> None:
    """Store act(gate) · up of a tile with its scales, and count the tile.

    A tile has 64 columns of the result.
    """
    form, tile, of = work.form, work.form.tile, work.of
    one: Any = form.up
    q_s, zero_s = work.pieces["q_s"], work.pieces["zero_s"]
    row, scales = expert * one.n + column * PART, (of["x_scale"], of["up_scale"])
    early = channel_values(one, of["up_scale"], row), token_scales(one, scales, start)
    y = work.sums(before, "up")
    sums_of = lambda half, token, count: y[64 * half : 64 * half + 64, token : token + count]
    (finished,) = epilogue(one, sums_of, scales, start, row, early)(0, tile.rows)
    odd, columns = lax.rem(column, jnp.int32(2)), pl.ds(column * BLOCK_ROWS, BLOCK_ROWS)
    for number_of, token in enumerate(range(0, tile.rows, ALIGN)):
        value = plgpu.layout_cast(finished[:, token : token + ALIGN], _ONE_BY_ONE)
        scale = scale_of(jnp.abs(value).max(axis=0))
        inverse = lax.broadcast_in_dim(1.0 / scale, value.shape, [1])
        value = plgpu.layout_cast(value * plgpu.layout_cast(inverse, _ONE_BY_ONE), plgpu.Layout.WGMMA)
        to = q_s.at[number_of % 2]
        plgpu.wait_smem_to_gmem(min(number_of, 1), wait_read_only=True)
        store_transposed(value.astype(E4M3), to, form.interpret)
        plgpu.commit_smem()

        @pl.when(start + token < end)
        def _(token=token, to=to, scale=scale):
            for source, part in ((to, odd), (zero_s, 1 - odd)):
                rows = pl.ds(2 * (start + token) + part * ALIGN, ALIGN)
                plgpu.copy_smem_to_gmem(source, of["a"].at[rows, columns], commit_group=False)
            of["a_scale"].at[column, pl.ds(start + token, ALIGN)][...] = scale

        plgpu.commit_smem_to_gmem_group()
    if form.waits:
        plgpu.wait_smem_to_gmem(0)
        arrive(of["arrived"], at)


def down(work: Work, before, at, expert, start, end, column) -> None:
    """Store the second product of a tile."""
    tile, of, stages = work.form.tile, work.of, jnp.int32(work.form.tile.stages)
    one: Any = work.form.down
    o_s = work.pieces["o_s"]
    channels = channel_values(one, of["down_scale"], expert * one.n + column * PART)
    blocks, tokens = of["a_scale"].shape[0], range(0, tile.rows, ALIGN)

    def add(step, sums):
        found, slot = list(sums), lax.rem(before + step, stages)
        plgpu.barrier_wait(work.full.at[slot])
        for line in range(tile.depth // BLOCK):
            block = 2 * (step * (tile.depth // BLOCK) + line)
            # Columns past the last block are zeros, so their scales need only be finite.
            scales = [
                load(
                    of["a_scale"].at[jnp.minimum(block + odd, blocks - 1), pl.ds(start + token, ALIGN)],
                    BY_COLUMN,
                )
                for token in tokens
                for odd in (0, 1)
            ]
            columns = pl.ds(line * BLOCK, BLOCK)

            def product(acc, columns=columns):
                plgpu.wgmma(
                    acc, work.w_s.at[slot, :, columns], work.x_s.at[slot, :, columns].transpose((1, 0))
                )
                return acc[...]

            part = pl.run_scoped(product, plgpu.ACC((PART, 2 * tile.rows), jnp.float32))
            if line == tile.depth // BLOCK - 1:
                plgpu.barrier_arrive(work.empty.at[slot])
            for i, token in enumerate(tokens):
                for odd in (0, 1):
                    sums_of = part[:, 2 * token + odd * ALIGN : 2 * token + (odd + 1) * ALIGN]
                    found[i] += sums_of * lax.broadcast_in_dim(scales[2 * i + odd], sums_of.shape, [1])
        return tuple(found)

    zero = plgpu.layout_cast(jnp.zeros((PART, ALIGN), jnp.float32), plgpu.Layout.WGMMA)
    sums = lax.fori_loop(0, work.steps["down"], add, tuple(zero for _ in tokens))
    turn = 0
    for token, y in zip(tokens, sums, strict=True):
        for half, by_row in enumerate(channels):
            value = y[64 * half : 64 * half + 64]
            value = value * lax.broadcast_in_dim(by_row, value.shape, [0])
            left, to = column * PART + 64 * half, o_s.at[turn % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            to.transpose((1, 0))[...] = value.astype(jnp.bfloat16)
            plgpu.commit_smem()

            @pl.when((start + token < end) & (left < one.n))
            def _(token=token, left=left, to=to):
                rows = pl.ds(start + token, ALIGN)
                plgpu.copy_smem_to_gmem(to, of["y"].at[rows, pl.ds(left, 64)], commit_group=False)

            plgpu.commit_smem_to_gmem_group()
            turn += 1
