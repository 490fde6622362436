"""The epilogue of the grouped GEMM in registers: scales, bias, activation and gates, before the store.

`form` is a `pallas_kernels.gemm.grouped.kernel.GroupedForm`.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.dense.epilogue import activate
from pallas_kernels.gemm.fp8.epilogue import BY_COLUMN, BY_ROW, load
from pallas_kernels.gemm.grouped import gate_pairs
from pallas_kernels.gemm.grouped.mxfp4_operand import SHIFT
from pallas_kernels.gemm.reference import CLAMPED_SWIGLU, SWIGLU_ALPHA, SWIGLU_LIMIT
from pallas_kernels.hopper.layouts import LOG2E


def epilogue(form, sums_of, scales, start, row, early=None, shifts=None):
    """Return finished(token, count): the pieces [64, count] of the result of some tokens.

    sums_of(half, token, count): the sums of 64 rows of the weight. start: the first row of x. row: the first
    row of the weight among the rows of all experts. early: the scales of the channels and of all tokens of a
    low tile, or None. Registers then hold the scales of few tokens at a time, and those of the channels where
    these are costly to find. shifts: the bias of both halves' rows, or None.
    """
    gated = form.gate_block is not None
    of_channels = channel_values(form, scales[1], row) if scales and gated and not early else None

    def finished(token: int, count: int):
        halves = [sums_of(half, token, count) for half in (0, 1)]
        if scales:
            channels, by_token = early or (
                of_channels or channel_values(form, scales[1], row),
                token_scales(form, scales, start + token, count),
            )
            halves = [
                half
                * lax.broadcast_in_dim(by_row, half.shape, [0])
                * lax.broadcast_in_dim(by_token, half.shape, [1])
                for half, by_row in zip(halves, channels, strict=True)
            ]
        if form.k or form.in_blocks:
            halves = [half * 2.0**SHIFT for half in halves]
        return finish_halves(form, halves, shifts)

    return finished


def finish_halves(form, halves, shifts):
    """Return the pieces of the result. halves: of the sums. shifts: the bias of the halves' rows, or None."""
    gated = form.gate_block is not None
    if form.paired:
        halves = gate_pairs.split(*halves, form.interpret)
    if shifts is not None:
        halves = [
            half + lax.broadcast_in_dim(own, half.shape, [0])
            for half, own in zip(halves, shifts, strict=True)
        ]
    if gated:
        return [gate(*halves, form.activation)]
    return [activate(half, form.activation) for half in halves]


def gate(gates, ups, activation):
    """Return act(gates) · ups, as `pallas_kernels.gemm.reference.gate_mul`."""
    if activation != CLAMPED_SWIGLU:
        return activate(gates, activation) * ups
    gates, ups = jnp.minimum(gates, SWIGLU_LIMIT), jnp.clip(ups, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gates / (1.0 + jnp.exp2(gates * (-SWIGLU_ALPHA * LOG2E))) * (ups + 1.0)


def token_scales(form, scales, start, count: int | None = None):
    """Return the scales of `count` rows of x from row `start`; None: of all rows of the tile."""
    return load(scales[0].at[pl.ds(start, count or form.tile.rows)], BY_COLUMN)


def biases(form, ref, row):
    """Return the bias, in float32, of both halves of 128 rows of the weight, of which `row` is the first."""
    return gate_pairs.biases(ref, row, form.interpret) if form.paired else channel_values(form, ref, row)


def channel_values(form, channels, row):
    """Return the scales or the bias, in float32, of both halves of `PART` rows of the weight, of which `row`
    is the first.
    """

    def rows_from(at):
        """Return the values of 64 rows. Rows past the last expert do not exist, and are not stored."""
        first = jnp.minimum(row + at, channels.shape[0] - 64)
        return load(channels.at[pl.ds(first, 64)], BY_ROW).astype(jnp.float32)

    if form.gate_block is None:
        return rows_from(0), rows_from(64)
    # Row r of the gates lies in block r // b, behind as many blocks of ups.
    b, count = form.block, 64 // form.block
    parts = [rows_from(j * b) for j in range(count + 1)]
    block = lax.div(plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=BY_ROW), jnp.int32(b))

    def chosen(ups: int):
        found = parts[ups]
        for j in range(1, count):
            found = jnp.where(block == j, parts[ups + j], found)
        return found

    return chosen(0), chosen(1)
