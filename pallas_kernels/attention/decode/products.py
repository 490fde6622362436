"""The steps of decode attention around its softmax: matrix products, 8-bit queries, and stores."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import operand_pairs as pairs
from pallas_kernels.hopper.layouts import store_transposed, swizzled

_WGMMA = plgpu.Layout.WGMMA


def product(operands, shape):
    """Return the sum of a @ b over pairs (a, b) of shared-memory operands, in float32."""

    def scoped(acc):
        for a, b in operands:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(scoped, plgpu.ACC(shape, jnp.float32))


def split_queries(q, q_8, group, across, interpret):
    """Write q [rows, H] to q_8 [cols, H] as a pair of columns for each head (`operand_pairs.split`).

    Return the factor [cols] of the scores.
    """
    cols, h = q_8.shape
    column = plgpu.broadcasted_iota(jnp.int32, (h, cols), 1, layout=_WGMMA)
    values = plgpu.layout_cast(jnp.zeros((h, cols), jnp.float32), _WGMMA)

    def fill(head, values):
        row = plgpu.load(q.at[head], layout=_WGMMA.reduce(1)).astype(jnp.float32)
        return jnp.where((column >> 1) == head, lax.broadcast_in_dim(row, (h, cols), [0]), values)

    if group <= 8:
        values = functools.reduce(lambda values, head: fill(head, values), range(group), values)
    else:
        values = lax.fori_loop(0, group, fill, values)
    unit = jnp.maximum(across(jnp.abs(values), "max"), 1e-20) / 448.0
    store_transposed(pairs.split(values / lax.broadcast_in_dim(unit, values.shape, [1])), q_8, interpret)
    plgpu.commit_smem()
    return unit


def put_weights(place, weights, first, interpret):
    """Store weights [keys, cols] to place [cols, keys] in shared memory, rounded.

    Pallas' own store has a barrier before and after it. This store has one barrier, before the first page,
    which protects reads of the previous round. The barrier of the softmax vote follows the store.
    """
    weights = weights.astype(place.dtype)
    if interpret:
        place.transpose((1, 0))[...] = weights
        return

    @plgpu.inline_mgpu(arg_types=(_WGMMA, plgpu.RefType(swizzled(jnp.bfloat16))))
    def store(_, weights, place):
        if first:
            mgpu.warpgroup_barrier()
        weights.store_tiled(mgpu.memref_transpose(place, (1, 0, 3, 2)), swizzle=128)

    store(weights, place)  # pyright: ignore[reportCallIssue]


def put(place, out):
    """Store out [H, cols] to place [cols, H] in shared memory, rounded."""
    place.transpose((1, 0))[...] = out.astype(place.dtype)
    plgpu.commit_smem()


def copy_heads(place, o_ref, row, group, e4m3):
    """Copy `group` heads of place [cols, H] to o_ref from row `row` on.

    With pairs of columns (e4m3) a head's result is in the even column.
    """
    if not e4m3:
        plgpu.copy_smem_to_gmem(place.at[pl.ds(0, group)], o_ref.at[pl.ds(row, group)])
        return
    for head in range(group):
        plgpu.copy_smem_to_gmem(place.at[2 * head], o_ref.at[row + head])
