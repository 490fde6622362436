"""Rows to e4m3 with a scale each, in one pass over memory, for Hopper: XLA takes two kernels, one for the
largest and one for the rest.

A row stays in the registers of a warpgroup between its maximum and its quantised numbers, as in `rms_norm`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.limits import sms_of
from pallas_kernels.hopper.pdl import launch_next, wait_for_last
from pallas_kernels.quantized import Quantized

_PER_SM = 12  # CTAs dealt out an SM; as many run at once as the registers of a row leave room for
WIDEST = 16384  # columns whose 128 a thread fit its registers
_E4M3_MAX = 448.0
_SMALLEST = 1e-12  # a row of zeros needs a scale too


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
    """x as e4m3 with a scale for each row (the twin: `reference.quantize_rows`).

    Args:
      x: [M, C] bfloat16, C a multiple of 128, at most 16,384.
      top, top_rows: like x, and an int32; both or none. Of a longer array that x's row 0 is row `start` of,
      the first `top_rows` rows are
        top's, not x's.
      sms: how many SMs' worth of CTAs it starts, 1 to 132; all by default.
      pdl: it begins before the kernel before it has ended (`pallas_kernels.hopper.pdl`).
    Returns:
      values [M, C] e4m3 and scales [M] float32, the row's largest / 448.
    Raises:
      ValueError: for a shape, dtype or sms that the kernel does not take.
    """
    m, c = x.shape
    if x.dtype != jnp.bfloat16 or c % 128 or not 0 < c <= WIDEST:
        raise ValueError(f"x {x.dtype}{list(x.shape)}: bfloat16 [M, C], C a multiple of 128 up to {WIDEST}")
    if (top is None) != (top_rows is None) or (
        top is not None and (top.shape, top.dtype) != (x.shape, x.dtype)
    ):
        given = None if top is None else f"{top.dtype}{list(top.shape)}"
        raise ValueError(
            f"top {given}, {top_rows=}: like x {x.dtype}{list(x.shape)} and a number, or none of both"
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
    """This CTA's rows, every `ctas`-th."""
    launch_next(pdl)
    wait_for_last(pdl)
    *tops, values_ref, scale_ref = refs
    m, c = x_ref.shape
    vector = next(
        v for v in (8, 4, 2, 1) if c % (128 * v) == 0
    )  # elements a thread reads at once: 16 bytes, where they divide the row
    layout = plgpu.Layout.WG_STRIDED((c,), vector)

    def quantize(row, ref):
        x = plgpu.load(ref.at[row], layout=layout).astype(jnp.float32)
        scale = jnp.maximum(jnp.max(jnp.abs(x)), _SMALLEST) * (1.0 / _E4M3_MAX)
        scale_ref[row] = scale
        values_ref.at[row][...] = (x * (1.0 / scale)).astype(values_ref.dtype)

    @pl.loop(lax.axis_index("cta"), m, step=ctas)
    def _(row):
        if not tops:
            return quantize(row, x_ref)
        top_ref, top_rows = tops[0], tops[1][0] - start
        pl.when(row < top_rows)(lambda: quantize(row, top_ref))
        pl.when(row >= top_rows)(lambda: quantize(row, x_ref))
