"""Grouped GEMM for Hopper (a mixture's experts) with swapped operands, for any number of rows an expert.

Rows are sorted by expert, and each expert starts at a multiple of 8 rows. The height of the tiles follows
from the rows that an expert has on average, so that nearly every expert has one tile and its weight is read
once. The expert, the rows and the number of the tiles are data. A persistent grid takes (tile of rows, tile
of columns) items: 16 neighboring tiles of rows before the next columns, so that tiles of one expert share
their reads.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.dense.api import supports
from pallas_kernels.gemm.grouped import groups as expert_groups
from pallas_kernels.gemm.grouped import reference
from pallas_kernels.gemm.grouped.groups import Groups
from pallas_kernels.gemm.grouped.kernel import GroupedForm, multiply, scratch
from pallas_kernels.gemm.grouped.tiles import (
    ACTIVATIONS,
    ALIGN,
    TALLEST,
    GroupedTile,
    grouped_tile,
    tile_rows,
)
from pallas_kernels.hopper.layouts import LANE
from pallas_kernels.hopper.limits import sms_of


def list_groups(experts: jax.Array, num_experts: int, rows: int | None = None) -> Groups:
    """Return the groups of a routing in tiles of `rows` rows; None: by the mean rows of an expert."""
    rows = rows or tile_rows(experts.shape[0], experts.shape[1], num_experts)
    return expert_groups.list_groups(experts, num_experts, rows, ALIGN)


def grouped_gemm(
    x: jax.Array,
    w: jax.Array,
    groups: Groups,
    *,
    activation: str | None = None,
    gate_block: int | None = None,
    sms: int | None = None,
    tile: GroupedTile | None = None,
    interpret=None,
) -> jax.Array:
    """Return act(x @ w[expert of the row].T), summed in float32.

    The reference implementation is `pallas_kernels.gemm.grouped.reference.grouped_gemm`.

    Args:
      x: [M, K] bfloat16, rows in the order of `groups`.
      w: [E, N, K] bfloat16. XLA computes the product if N or K is not a multiple of 64.
      groups: from `list_groups`.
      activation: silu, gelu_tanh, relu or None.
      gate_block: alternating blocks of `gate_block` gates and ups, or None. XLA computes blocks other than
        16, 32 or 64.
      sms: CTAs of the persistent grid, which is the number of SMs that the kernel may occupy, 1 to 132;
        None: all.
      tile: a tile of `groups.rows` rows; None: `grouped_tile`'s.
    Returns:
      [M, N] bfloat16, N / 2 with gates; rows after the last tile are not written.
    Raises:
      ValueError: for a shape, dtype, activation or sms outside the limits.
    """
    (m, k), (experts, n, depth), sms = x.shape, w.shape, sms_of(sms)
    if k != depth or groups.pairs.shape != (m,) or groups.rows % ALIGN or not 0 < groups.rows <= TALLEST:
        given = (
            f"x {list(x.shape)}, w {list(w.shape)}, {groups.pairs.shape[0]} rows in tiles of {groups.rows}"
        )
        raise ValueError(
            f"{given}: accepted are equal K and M, and tiles of a multiple of {ALIGN} up to {TALLEST} rows"
        )
    if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16 or activation not in ACTIVATIONS:
        raise ValueError(
            f"dtypes {x.dtype}, {w.dtype}, {activation=}: accepted are bfloat16 twice, {ACTIVATIONS}"
        )
    if not supports(m, n, k, gate_block):
        return reference.grouped_gemm(x, w, groups, activation=activation, gate_block=gate_block)
    form = GroupedForm(tile or grouped_tile(groups.rows), n, activation, gate_block)
    if form.tile.rows != groups.rows:
        raise ValueError(f"a tile of {form.tile.rows} rows: accepted are the groups' {groups.rows}")
    kernel = plgpu.kernel(
        functools.partial(multiply, form=form),
        out_type=jax.ShapeDtypeStruct((m, form.columns), x.dtype),
        grid=(sms,),
        grid_names=("worker",),
        num_threads=form.tile.warpgroups + 1,
        thread_name="wg",
        scratch_types=scratch(form),
        compiler_params=LANE,
        kernel_name=f"grouped_gemm_{sms}_{form.tile.rows}x{form.tile.columns}",
        interpret=interpret,
    )
    return kernel(groups.experts, groups.starts, groups.ends, groups.count, x, w.reshape(experts * n, k))
