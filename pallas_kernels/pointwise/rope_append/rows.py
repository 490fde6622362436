"""The transformation of heads in shared memory by `rope_append`: norm, rotate, quantize."""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

_E4M3_MAX = 448.0
_INT8_MAX = 127.0
_SMALLEST = 1e-20  # a head of zeros needs a nonzero scale


def rows_layout(rows: int, columns: int) -> tuple:
    """Return (rows of a tile, whether several warps hold equal numbers, the layout of a tile [rows,
    columns] over a warpgroup).

    A row lies in one warp. Sums across warps would share one scratch of the CTA, which warpgroups would
    overwrite.
    """
    tile = math.gcd(rows, 16)
    warps = min(4, tile)
    vector = tile // warps * columns // 32
    tiles = ((tile, columns), (tile // warps, columns), (1, vector))
    warp_dims = (-6,) if warps == 4 else (plgpu.Replicated(4 // warps), -6)
    made = mgpu.TiledLayout(
        plgpu.Tiling(tiles), warp_dims, (-4, -3), -1, _check_canonical=False
    ).canonicalize()
    layout = plgpu.Layout.TILED(
        made.tiling, warp_dims=made.warp_dims, lane_dims=made.lane_dims, vector_dim=made.vector_dim
    )
    return tile, warps < 4, layout


def transform_rows(
    source, target, *, angles=None, norm=None, norm_offset=0.0, eps=0.0, scale=None, scales=None
):
    """Norm, rotate and quantize rows [rows, H] in shared memory, from `source` to `target`, which can be
    the same.

    angles: the token's (cos, sin) [H/2]. norm: the weight [H]. scale: a given scale, a reference to [rows]
    or a number for all. scales: [rows], where the computed scale of each row is stored.
    """
    (rows, h), half = source.shape, source.shape[1] // 2
    tile, repeated, layout = rows_layout(rows, half)
    halves = (0, half)

    def spread(x, axis):
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (tile, half), [axis]), layout)

    def column_values(ref):
        return spread(plgpu.load(ref, layout=layout.reduce(0), optimized=False).astype(jnp.float32), 1)

    if angles is not None:
        cos, sin = (column_values(ref) for ref in angles)
    if norm is not None:
        weights = [column_values(norm.at[pl.ds(at, half)]) + norm_offset for at in halves]
    for row in range(0, rows, tile):
        here = pl.ds(row, tile)
        values = [
            plgpu.load(source.at[here, pl.ds(at, half)], layout=layout, optimized=False).astype(jnp.float32)
            for at in halves
        ]
        if repeated:  # all warps read before one writes
            plgpu.commit_smem()
        if norm is not None:
            mean = jnp.sum(values[0] * values[0] + values[1] * values[1], axis=1) * (1.0 / h)
            factor = spread(lax.rsqrt(mean + eps), 0)
            values = [x * factor * w for x, w in zip(values, weights, strict=True)]
        if angles is not None:
            a, b = values
            values = [a * cos - b * sin, b * cos + a * sin]
        if scale is not None:
            one_a_row = len(scale.shape) > 0
            factor = 1.0 / (
                plgpu.load(scale.at[here], layout=layout.reduce(1), optimized=False) if one_a_row else scale
            )
            values = [x * (spread(factor, 0) if one_a_row else factor) for x in values]
        if target.dtype == jnp.float8_e4m3fn:
            values = [jnp.clip(x, -_E4M3_MAX, _E4M3_MAX) for x in values]
        if scales is not None:
            largest = jnp.max(jnp.maximum(jnp.abs(values[0]), jnp.abs(values[1])), axis=1)
            found = jnp.maximum(largest, _SMALLEST) * (1.0 / _INT8_MAX)
            scales.at[here][...] = found
            values = [jnp.round(x * spread(1.0 / found, 0)) for x in values]
        for at, x in zip(halves, values, strict=True):
            target.at[here, pl.ds(at, half)][...] = x.astype(target.dtype)
