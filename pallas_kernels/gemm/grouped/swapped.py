"""Grouped GEMM for Hopper (a mixture's experts) with swapped operands, for any number of rows an expert.

Rows are sorted by expert, and each expert starts at a multiple of 8 rows. The height of the tiles follows
from the rows that an expert has on average, so that nearly every expert has one tile and its weight is read
once. The expert, the rows and the number of the tiles are data. A persistent grid takes (tile of rows, tile
of columns) items: 16 neighboring tiles of rows before the next columns, so that tiles of one expert share
their reads. The operands are bfloat16, or e4m3 with a scale for each row.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.dense import api as dense
from pallas_kernels.gemm.fp8 import api as fp8
from pallas_kernels.gemm.grouped import groups as expert_groups
from pallas_kernels.gemm.grouped import reference
from pallas_kernels.gemm.grouped.groups import Groups, HeldExperts
from pallas_kernels.gemm.grouped.kernel import GroupedForm, multiply, scratch
from pallas_kernels.gemm.grouped.tiles import (
    ALIGN,
    TALLEST,
    GroupedTile,
    check_operands,
    grouped_tile,
    tile_rows,
)
from pallas_kernels.hopper.layouts import LANE
from pallas_kernels.hopper.limits import sms_of
from pallas_kernels.quantized import Quantized


def list_groups(
    experts: jax.Array, num_experts: int, rows: int | None = None, held: HeldExperts | None = None
) -> Groups:
    """Return the groups of a routing in tiles of `rows` rows; None: by the mean rows of an expert."""
    rows = rows or tile_rows(experts.shape[0], experts.shape[1], num_experts)
    return expert_groups.list_groups(experts, num_experts, rows, ALIGN, held)


def grouped_gemm(
    x: jax.Array | Quantized,
    w: jax.Array | Quantized,
    groups: Groups,
    *,
    activation: str | None = None,
    gate_block: int | None = None,
    sms: int | None = None,
    tile: GroupedTile | None = None,
    interpret=None,
) -> jax.Array:
    """Return `pallas_kernels.gemm.grouped.api.grouped_gemm` by this kernel, without a bias and clamped_swiglu.

    Args:
      groups: from `list_groups`, in tiles of at most `TALLEST` rows.
      tile: a tile of `groups.rows` rows; None: `grouped_tile`'s.
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
    check_operands(x, w, activation)
    narrow = isinstance(w, Quantized)
    if not (fp8.supports(n, k, gate_block) if narrow else dense.supports(m, n, k, gate_block)):
        return reference.grouped_gemm(x, w, groups, activation=activation, gate_block=gate_block)
    x_values, w_values = (one.values if isinstance(one, Quantized) else one for one in (x, w))
    form = GroupedForm(tile or grouped_tile(groups.rows, w_values.dtype.itemsize), n, activation, gate_block)
    if form.tile.rows != groups.rows:
        raise ValueError(f"a tile of {form.tile.rows} rows: accepted are the groups' {groups.rows}")
    scales = [x.scale, w.scale.reshape(-1)] if isinstance(x, Quantized) and isinstance(w, Quantized) else []
    kernel = plgpu.kernel(
        functools.partial(multiply, form=form),
        out_type=jax.ShapeDtypeStruct((m, form.columns), jnp.bfloat16),
        grid=(sms,),
        grid_names=("worker",),
        num_threads=form.tile.warpgroups + 1,
        thread_name="wg",
        scratch_types=scratch(form, w_values.dtype),
        compiler_params=LANE,
        kernel_name=f"grouped_gemm_{'fp8_' if narrow else ''}{sms}_{form.tile.rows}x{form.tile.columns}",
        interpret=interpret,
    )
    listed = groups.experts, groups.starts, groups.ends, groups.count
    return kernel(*listed, x_values, w_values.reshape(experts * n, k), *scales)
