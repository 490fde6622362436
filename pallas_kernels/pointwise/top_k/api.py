"""A router's choice for Hopper: the largest scores of each row, and their softmax.

XLA sorts all scores of a row, cuts, and computes the softmax in a third kernel. It also compiles its sort
anew for each layer. Here a row belongs to one warpgroup, whose threads hold its scores. The warpgroup
finds one maximum after another.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.limits import sms_of
from pallas_kernels.pointwise.top_k import reference

# With 8 columns XLA takes 0.7 to 0.85 of the kernel's time, and with 128 columns 1.5 to 2.1 times its time.
FEWEST = 9  # minimum columns of the kernel
WIDEST = 1024  # maximum columns of the kernel: 8 scores in a thread's registers
_PER_SM = 12  # CTAs for each SM: most of their time is a wait for other warps
_TAKEN = -(2**31)  # below the keys of all scores
_LARGEST = 2**31 - 1


def top_k(
    scores: jax.Array, chosen: int, *, softmax: bool = False, sms: int | None = None, interpret=None
) -> tuple[jax.Array, jax.Array]:
    """Return the largest scores of each row and their columns, as
    `pallas_kernels.pointwise.top_k.reference.top_k`.

    NaN counts as less than all numbers, and -0 as less than 0.

    Args:
      scores: [T, E] float32. XLA chooses among at most 8 scores and among more than 1,024.
      chosen: the number of scores to return for each row, 1 to E.
      softmax: return the softmax of the chosen scores instead of the scores.
      sms: the number of CTAs as a number of SMs, 1 to 132; default: all.
    Returns:
      Values [T, chosen] float32, the largest first, and columns [T, chosen] int32. Of equal scores the first
      column comes first.
    Raises:
      ValueError: for a shape, dtype, chosen or sms outside the limits.
    """
    (t, number), full = scores.shape, sms_of(sms)
    if scores.dtype != jnp.float32 or not 0 < chosen <= number:
        raise ValueError(
            f"scores {scores.dtype}{list(scores.shape)}, {chosen=}: accepted are float32 [T, E] and 1 to E"
        )
    if not FEWEST <= number <= WIDEST:
        return reference.top_k(scores, chosen, softmax=softmax)
    scores = jnp.pad(scores, ((0, 0), (0, -number % 128)), constant_values=jnp.nan)  # NaN is chosen last
    ctas = min(t, full * _PER_SM)
    values, columns = plgpu.kernel(
        functools.partial(_rows, chosen=chosen, softmax=softmax, ctas=ctas),
        out_type=(
            jax.ShapeDtypeStruct((t, chosen), jnp.float32),
            jax.ShapeDtypeStruct((t, chosen), jnp.int32),
        ),
        grid=(ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name="top_k",
        interpret=interpret,
    )(scores)
    return values, columns


def _rows(scores_ref, values_ref, columns_ref, *, chosen, softmax, ctas):
    """Process this CTA's rows, every `ctas`-th row."""
    t, number = scores_ref.shape
    vector = next(v for v in (4, 2, 1) if number % (128 * v) == 0)  # elements of one load
    layout = plgpu.Layout.WG_STRIDED((number,), vector)
    column = plgpu.broadcasted_iota(jnp.int32, (number,), 0, layout=layout)

    @pl.loop(lax.axis_index("cta"), t, step=ctas)
    def _(row):
        keys = ordered(plgpu.load(scores_ref.at[row], layout=layout))
        values = []
        for choice in range(chosen):
            best = jnp.max(keys)
            at = jnp.min(jnp.where(keys == best, column, _LARGEST))
            columns_ref[row, choice] = at
            keys = jnp.where(column != at, keys, _TAKEN)  # a constant first would make them unsigned
            values.append(_score(best))
        if softmax:
            parts = [jnp.exp(value - values[0]) for value in values]
            inverse = 1.0 / sum(parts[1:], parts[0])
            values = [part * inverse for part in parts]
        for choice, value in enumerate(values):
            values_ref[row, choice] = value


def ordered(scores: jax.Array) -> jax.Array:
    """Return int32 in the order of the scores. NaN comes after `_TAKEN`, before all numbers."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    return jnp.where(scores == scores, _flipped(bits), _TAKEN + 1)


def _score(key: jax.Array) -> jax.Array:
    """Return the score of a key of `ordered`."""
    return lax.bitcast_convert_type(_flipped(key), jnp.float32)


def _flipped(bits: jax.Array) -> jax.Array:
    """Return the bits of a float32 as an int32 in the order of the numbers, and the bits again from it.

    The integers of negative numbers have the opposite order.
    """
    return jnp.where(bits < 0, bits ^ _LARGEST, bits)
