"""Quantization of rows to e4m3 with one scale each, in one pass over memory, for Hopper.

XLA needs two kernels, one for the maximum and one for the numbers. Here a row stays in a warpgroup's
registers between its maximum and its quantized numbers, as in `add_norm`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.limits import sms_of
from pallas_kernels.hopper.pdl import launch_next, wait_for_last
from pallas_kernels.hopper.row_parts import row_parts, takes_row
from pallas_kernels.quantized import Quantized

_PER_SM = 12  # CTAs for each SM; the registers of a row limit how many run at once
WIDEST = 16384  # maximum columns: 128 numbers in a thread's registers
_E4M3_MAX = 448.0
_SMALLEST = 1e-12  # a row of zeros needs a nonzero scale


def quantize_rows(
    x: jax.Array,
    top: jax.Array | None = None,
    top_rows: jax.Array | None = None,
    *,
    start: int = 0,
    sms: int | None = None,
    pdl: bool = False,
    interpret=None,
) -> Quantized:
    """Return x as e4m3 with a scale for each row, as
    `pallas_kernels.pointwise.quantize.reference.quantize_rows` does.

    Args:
      x: [M, C] bfloat16, C a multiple of 128, or of 64 from 192 on, at most 16,384.
      top, top_rows: an array like x, and an int32; both or none. x's row 0 is row `start` of a longer
        array, and the first `top_rows` rows of this longer array come from top instead of x.
      sms: the number of CTAs as a number of SMs, 1 to 132; default: all.
      pdl: start before the previous kernel has ended (`pallas_kernels.hopper.pdl`).
    Returns:
      Values [M, C] e4m3 and scales [M] float32: the row's largest number / 448.
    Raises:
      ValueError: for a shape, dtype or sms outside the limits.
    """
    m, c = x.shape
    if x.dtype != jnp.bfloat16 or not takes_row(c) or c > WIDEST:
        raise ValueError(
            f"x {x.dtype}{list(x.shape)}: accepted is bfloat16 [M, C], C a multiple of 128 up to {WIDEST}, "
            "or of 64 from 192 on"
        )
    if (top is None) != (top_rows is None) or (
        top is not None and (top.shape, top.dtype) != (x.shape, x.dtype)
    ):
        given = None if top is None else f"{top.dtype}{list(top.shape)}"
        raise ValueError(
            f"top {given}, {top_rows=}: accepted are an array like x {x.dtype}{list(x.shape)} and a number, "
            "or None twice"
        )
    ctas = min(m, sms_of(sms) * _PER_SM)
    values, scale = plgpu.kernel(
        functools.partial(_rows, start=start, ctas=ctas, pdl=pdl),
        out_type=(jax.ShapeDtypeStruct((m, c), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((m,), jnp.float32)),
        grid=(ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name="quantize_rows",
        interpret=interpret,
    )(*([x] if top is None or top_rows is None else [x, top, top_rows.astype(jnp.int32).reshape(1)]))
    return Quantized(values, scale)


def _rows(x_ref, *refs, start, ctas, pdl):
    """Process this CTA's rows, every `ctas`-th row."""
    launch_next(pdl)
    wait_for_last(pdl)
    *tops, values_ref, scale_ref = refs
    m, c = x_ref.shape
    parts = row_parts(c)

    def quantize(row, ref):
        loaded = [plgpu.load(ref.at[row, part.columns], layout=part.layout) for part in parts]
        found, scale_ref[row] = scaled([x.astype(jnp.float32) for x in loaded])
        for part, values in zip(parts, found, strict=True):
            values_ref.at[row, part.columns][...] = values.astype(values_ref.dtype)

    @pl.loop(lax.axis_index("cta"), m, step=ctas)
    def _(row):
        if not tops:
            return quantize(row, x_ref)
        top_ref, top_rows = tops[0], tops[1][0] - start
        pl.when(row < top_rows)(lambda: quantize(row, top_ref))
        pl.when(row >= top_rows)(lambda: quantize(row, x_ref))


def scaled(parts: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """Return a row of float32 in a warpgroup's registers divided by its scale, for e4m3, and the scale.

    parts: all columns of the row (`pallas_kernels.hopper.row_parts`).
    """
    top = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(part)) for part in parts])
    scale = jnp.maximum(top, _SMALLEST) * (1.0 / _E4M3_MAX)
    return [part * (1.0 / scale) for part in parts], scale
