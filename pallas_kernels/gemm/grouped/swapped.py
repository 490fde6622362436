"""Grouped GEMM for Hopper (a mixture's experts) with swapped operands, for any number of rows an expert.

Rows are sorted by expert, and each expert starts at a multiple of 8 rows. The height of the tiles follows
from the rows that an expert has on average, so that nearly every expert has one tile and its weight is read
once. The expert, the rows and the number of the tiles are data. A persistent grid takes (tile of rows, tile
of columns) items: 16 neighboring tiles of rows before the next columns, so that tiles of one expert share
their reads. The operands are bfloat16, or e4m3 with a scale for each row or for each block. A
weight may also be MXFP4 or int4.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.fp8 import api as fp8
from pallas_kernels.gemm.grouped import groups as expert_groups
from pallas_kernels.gemm.grouped import mxfp4_rows, reference
from pallas_kernels.gemm.grouped.groups import Groups, HeldExperts
from pallas_kernels.gemm.grouped.int4_format import dequantize_experts
from pallas_kernels.gemm.grouped.kernel import GroupedForm, multiply, scratch
from pallas_kernels.gemm.grouped.mxfp4_blocks import dequantize_blocks
from pallas_kernels.gemm.grouped.mxfp4_format import dequantize_mxfp4
from pallas_kernels.gemm.grouped.mxfp4_rows import chosen_tile, supports_rows
from pallas_kernels.gemm.grouped.tiles import (
    ALIGN,
    TALLEST,
    ExpertWeight,
    GroupedTile,
    block_tile,
    blocks_tile,
    check_operands,
    grouped_tile,
    int4_tile,
    mxfp4_tile,
    supports_bfloat16,
    supports_blocks,
    supports_int4,
    supports_mxfp4,
    supports_mxfp4_blocks,
    tile_rows,
)
from pallas_kernels.gemm.reference import CLAMPED_SWIGLU
from pallas_kernels.hopper.layouts import LANE
from pallas_kernels.hopper.limits import sms_of
from pallas_kernels.quantized import BlockFp8, ExpertInt4, Mxfp4, Mxfp4Blocks, Quantized


def list_groups(
    experts: jax.Array,
    num_experts: int,
    rows: int | None = None,
    held: HeldExperts | None = None,
    used: jax.Array | None = None,
) -> Groups:
    """Return the groups of a routing in tiles of `rows` rows; None: by the mean rows of an expert."""
    rows = rows or tile_rows(experts.shape[0], experts.shape[1], num_experts)
    return expert_groups.list_groups(experts, num_experts, rows, ALIGN, held, used)


def grouped_gemm(
    x: jax.Array | Quantized,
    w: ExpertWeight,
    groups: Groups,
    *,
    bias: jax.Array | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
    sms: int | None = None,
    tile: GroupedTile | None = None,
    interpret=None,
) -> jax.Array:
    """Return `pallas_kernels.gemm.grouped.api.grouped_gemm` by this kernel.

    Args:
      bias, activation: a bias and clamped_swiglu only where `adds_bias` is True.
      groups: from `list_groups`, in tiles of at most `TALLEST` rows.
      tile: a tile of `groups.rows` rows; None: `grouped_tile`'s.
    Raises:
      ValueError: for a shape, dtype, activation or sms outside the limits.
    """
    (m, k), (_, n, depth), sms = x.shape, w.shape, sms_of(sms)
    if k != depth or groups.pairs.shape != (m,) or groups.rows % ALIGN or not 0 < groups.rows <= TALLEST:
        given = (
            f"x {list(x.shape)}, w {list(w.shape)}, {groups.pairs.shape[0]} rows in tiles of {groups.rows}"
        )
        raise ValueError(
            f"{given}: accepted are equal K and M, and tiles of a multiple of {ALIGN} up to {TALLEST} rows"
        )
    clamped = activation == CLAMPED_SWIGLU and gate_block is not None
    check_operands(x, w, None if clamped else activation)
    epilogue: dict[str, Any] = {"bias": bias, "activation": activation, "gate_block": gate_block}
    if isinstance(w, Mxfp4Blocks) and tile is None:
        few = chosen_tile(groups.rows, k) if groups.rows <= mxfp4_rows.FEW else None
        if few and supports_rows(n, k, few, gate_block):
            assert not isinstance(x, Quantized)  # `check_operands`
            how = {"sms": sms, "tile": few, "interpret": interpret}
            return mxfp4_rows.multiply_rows(x, w, groups, **epilogue, **how)
    if isinstance(w, Mxfp4) and not supports_mxfp4(n, k, gate_block, groups.rows):
        w = dequantize_mxfp4(w)
    if isinstance(w, Mxfp4Blocks) and not supports_mxfp4_blocks(n, k, gate_block):
        w = dequantize_blocks(w)
    if isinstance(w, ExpertInt4) and not supports_int4(n, k, gate_block):
        w = dequantize_experts(w)
    if isinstance(w, BlockFp8) and not supports_blocks(n, k, gate_block):
        return reference.grouped_gemm(x, w, groups, **epilogue)
    supports = fp8.supports if isinstance(w, Quantized) else functools.partial(supports_bfloat16, m)
    if not isinstance(w, Mxfp4 | Mxfp4Blocks | ExpertInt4 | BlockFp8) and not supports(n, k, gate_block):
        return reference.grouped_gemm(x, w, groups, **epilogue)
    tile = tile or _tile(w, groups.rows)
    x_values, w_values, scales, kind = _arrays(x, w)
    form = GroupedForm(
        tile,
        n,
        activation,
        gate_block,
        k=k if isinstance(w, Mxfp4) else None,
        group=w.group if isinstance(w, ExpertInt4) else None,
        in_blocks=isinstance(w, Mxfp4Blocks),
        zero_points=isinstance(w, ExpertInt4) and w.factors.dtype == jnp.int16,
        blocks=isinstance(w, BlockFp8),
        bias=bias is not None,
        interpret=interpret is not None,
    )
    if form.tile.rows != groups.rows:
        raise ValueError(f"a tile of {form.tile.rows} rows: accepted are the groups' {groups.rows}")
    kernel = plgpu.kernel(
        functools.partial(multiply, form=form),
        out_type=jax.ShapeDtypeStruct((m, form.columns), jnp.bfloat16),
        grid=(sms,),
        grid_names=("worker",),
        num_threads=form.tile.warpgroups + 1,
        thread_name="wg",
        scratch_types=scratch(form, x_values.dtype),
        compiler_params=LANE,
        kernel_name=f"grouped_gemm_{kind}{sms}_{form.tile.rows}x{form.tile.columns}",
        interpret=interpret,
    )
    listed = groups.experts, groups.starts, groups.ends, groups.count
    added = [] if bias is None else [bias.reshape(-1)]
    return kernel(*listed, x_values, w_values.reshape(-1, *w_values.shape[2:]), *scales, *added)


def _tile(w: ExpertWeight, rows: int) -> GroupedTile:
    """Return the tile of so many rows for a weight."""
    if isinstance(w, BlockFp8):
        return block_tile(rows)
    if isinstance(w, Mxfp4):
        return mxfp4_tile(rows, w.shape[-1])
    if isinstance(w, Mxfp4Blocks):
        return blocks_tile(rows)
    if isinstance(w, ExpertInt4):
        return int4_tile(rows, w.group)
    return grouped_tile(rows, (w.values if isinstance(w, Quantized) else w).dtype.itemsize)


def _arrays(x: jax.Array | Quantized, w: ExpertWeight) -> tuple[jax.Array, jax.Array, list[jax.Array], str]:
    """Return the rows, the weight, the scales as the kernel reads them, and a part of the kernel's name."""
    if isinstance(w, BlockFp8):
        assert isinstance(x, Quantized)  # `check_operands`
        return x.values, w.values, [x.scale.T, w.scale.reshape(-1, w.scale.shape[2])], "fp8_blocks_"
    if isinstance(x, Quantized):
        assert isinstance(w, Quantized)  # `check_operands`
        return x.values, w.values, [x.scale, w.scale.reshape(-1)], "fp8_"
    if isinstance(w, Mxfp4):
        # A copy has a multiple of 16 bytes, as 8 rows always have.
        return x, w.packed, [w.scale.reshape(-1, w.shape[-1] // 64, 16)], "mxfp4_"
    if isinstance(w, Mxfp4Blocks):
        return x, w.words, [], "mxfp4_blocks_"
    if isinstance(w, ExpertInt4):
        *_, n, two = w.factors.shape
        return x, w.packed, [w.factors.reshape(-1, n * two)], "int4_"
    assert not isinstance(w, Quantized)
    return x, w, [], ""
