"""The sum that brings the rows of a mixture's experts back to their tokens, for Hopper.

An item is a token and a block of columns. It belongs to one warpgroup, which reads the block of all the token's rows
before it adds them. So every row is read once, and a few tokens occupy many SMs.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.limits import sms_of
from pallas_kernels.pointwise.weighted_sum import reference

_PER_SM = 12  # CTAs for each SM: some wait for memory while others compute


def weighted_sum(
    y: jax.Array,
    places: jax.Array,
    weights: jax.Array,
    *,
    partial: bool = False,
    sms: int | None = None,
    interpret=None,
) -> jax.Array:
    """Return the weighted sums of rows, as `pallas_kernels.pointwise.weighted_sum.reference.weighted_sum`.

    Args:
      y: [M, D] bfloat16. XLA computes the sum if D is not a multiple of 128.
      places: [T, e] int32, the row of each pair.
      weights: [T, e] float32.
      partial: whether there can be pairs without a row, which add nothing. Their places are M or more.
      sms: the number of CTAs as a number of SMs, 1 to 132; default: all.
    Returns:
      [T, D] bfloat16, summed in float32 from the first choice to the last.
    Raises:
      ValueError: for a shape, dtype or sms outside the limits.
    """
    (t, chosen), d, full = places.shape, y.shape[1], sms_of(sms)
    if y.dtype != jnp.bfloat16 or weights.dtype != jnp.float32 or weights.shape != places.shape:
        given = ", ".join(
            f"{name} {v.dtype}{list(v.shape)}"
            for name, v in {"y": y, "places": places, "weights": weights}.items()
        )
        raise ValueError(
            f"{given}: accepted are y bfloat16 [M, D], places int32 [T, e] and weights float32 [T, e]"
        )
    if d % 128:
        return reference.weighted_sum(y, places, weights, partial=partial)
    width = next(
        128 * v for v in (8, 4, 2, 1) if d % (128 * v) == 0
    )  # a thread loads up to 16 bytes of a row
    ctas = min(t * (d // width), full * _PER_SM)
    return plgpu.kernel(
        functools.partial(_items, chosen=chosen, width=width, partial=partial, ctas=ctas),
        out_type=jax.ShapeDtypeStruct((t, d), y.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name="weighted_sum",
        interpret=interpret,
    )(y, places.astype(jnp.int32), weights)


def _items(y_ref, places_ref, weights_ref, o_ref, *, chosen, width, partial, ctas):
    """Process this CTA's items, every `ctas`-th item."""
    (t, d), length = o_ref.shape, y_ref.shape[0]
    blocks = d // width
    layout = plgpu.Layout.WG_STRIDED((width,), width // 128)

    @pl.loop(lax.axis_index("cta"), t * blocks, step=ctas)
    def _(item):
        token, columns = item // blocks, pl.ds(item % blocks * width, width)
        places = [places_ref[token, choice] for choice in range(chosen)]
        factors = [weights_ref[token, choice] for choice in range(chosen)]
        rows = [
            plgpu.load(y_ref.at[jnp.minimum(place, length - 1), columns], layout=layout) for place in places
        ]
        total = jnp.zeros((width,), jnp.float32)
        for place, factor, row in zip(places, factors, rows, strict=True):
            scaled = row.astype(jnp.float32) * factor
            total = total + (jnp.where(place < length, scaled, 0.0) if partial else scaled)
        o_ref.at[token, columns][...] = total.astype(o_ref.dtype)
