"""The limits of top-k and top-p in rows of logits, for Hopper: one row at a time on a CTA; other rows are
skipped.

Each pass over a row sums the weights above seven pivots, and finds the smallest and the largest logit
between the current bounds. The
limit is found when these two are equal: after about six passes for any numbers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.limits import sms_of

_EVENLY = tuple(i / 8 for i in range(1, 8))  # pivots, as fractions of the interval
_NEARBY = (-1 / 4, -1 / 16, -1 / 64, 0.0, 1 / 64, 1 / 16, 1 / 4)
_UNIT = 128 * 4  # logits in a step
_PASSES = 200  # more than any interval of float32 needs
_PER_SM = 4  # CTAs for each SM, if `sms` is given
_BELOW = -3.0e38  # below any bound


def token_limits(
    x: jax.Array,
    peak: jax.Array,
    heat: jax.Array,
    total: jax.Array,
    floor: jax.Array,
    k: jax.Array,
    p: jax.Array,
    wanted: jax.Array,
    *,
    sms: int | None = None,
    interpret=None,
) -> jax.Array:
    """Return the smallest logit that min-p, top-k and top-p keep in each row.

    The reference implementation is `pallas_kernels.pointwise.sample.reference.token_limits`.

    Args:
      x: [R, V] float32, V a multiple of 4 and at least 512.
      peak, heat, total, floor, k, p: [R] float32. wanted: [R] bool: rows to search.
      sms: the number of CTAs as a number of SMs, 1 to 132; default: one CTA for each row.
    Returns:
      [R] float32; the floor of rows that are not searched.
    Raises:
      ValueError: for a shape, dtype or sms outside the limits.
    """
    rows, n = x.shape
    if n < _UNIT or n % 4 or x.dtype != jnp.float32:
        raise ValueError(
            f"logits are {x.dtype}{list(x.shape)}: accepted is float32 [R, V], V a multiple of 4 and at "
            f"least {_UNIT}"
        )
    ctas = rows if sms is None else min(rows, sms_of(sms) * _PER_SM)
    return plgpu.kernel(
        functools.partial(_rows, ctas=ctas),
        out_type=jax.ShapeDtypeStruct((rows,), jnp.float32),
        grid=(ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name="token_limits",
        interpret=interpret,
    )(x, peak, heat, total, floor, k, p, wanted.astype(jnp.int32))


def _rows(*refs, ctas):
    """Process this CTA's rows, every `ctas`-th row."""
    pl.loop(lax.axis_index("cta"), refs[0].shape[0], step=ctas)(lambda row: _row(row, *refs))


def _row(row, x_ref, peak_ref, heat_ref, total_ref, floor_ref, k_ref, p_ref, wanted_ref, limit_ref):
    floor = floor_ref[row]

    @pl.when(wanted_ref[row] == 0)
    def _():
        limit_ref[row] = floor

    @pl.when(wanted_ref[row] != 0)
    def _():
        peak, heat, k, p = peak_ref[row], heat_ref[row], k_ref[row], p_ref[row]
        search = functools.partial(_search, x_ref.at[row], peak, heat)
        n = x_ref.shape[1]
        low = lax.cond(k < n, lambda: jnp.maximum(floor, search(k, weighs=False)), lambda: floor)

        def kept():
            return _measure(x_ref.at[row], [low], low, low, peak, heat, weighs=True)[0][0]

        def nucleus():
            left = lax.cond(low > _BELOW, kept, lambda: total_ref[row])
            return jnp.maximum(low, search(left * p, weighs=True))

        limit_ref[row] = lax.cond(p < 1.0, nucleus, lambda: low)


def _search(x_ref, peak, heat, target, *, weighs):
    """Return the largest logit such that the logits not below it weigh (or number) at least the target."""

    def narrow(state):
        low, high, above_low, above_high, straight, _, _, passes = state
        # After a pass that narrows the interval much, sums are nearly linear in it, so pivots surround the
        # interpolated position of the target. Otherwise pivots are evenly spaced.
        guess = (above_low - target) / jnp.maximum(above_low - above_high, 1e-30)
        begin = jnp.where(low <= _BELOW, peak - 64.0 * heat, low)
        pivots = []
        for even, near in zip(_EVENLY, _NEARBY, strict=True):
            at = jnp.where(straight, jnp.clip(guess + near, 1 / 256, 255 / 256), even)
            pivots.append(begin * (1.0 - at) + high * at)
        sums, least, largest = _measure(x_ref, pivots, low, high, peak, heat, weighs=weighs)
        width = high - low
        above_low, low = jnp.where(least > low, -1.0, above_low), jnp.maximum(low, least)  # -1: unknown
        for pivot, above in zip(pivots, sums, strict=True):
            up, down = (above >= target) & (pivot >= low), (above < target) & (pivot < high)
            low, above_low = jnp.where(up, pivot, low), jnp.where(up, above, above_low)
            high, above_high = jnp.where(down, pivot, high), jnp.where(down, above, above_high)
        straight = (high - low <= 0.25 * width) & (above_low >= 0.0)
        return low, high, above_low, above_high, straight, least, largest, passes + 1

    # The interval [low, high) ends slightly above the peak, to include the peak.
    high = peak + jnp.maximum(jnp.abs(peak) * 1e-6, 1e-30)
    start = (
        jnp.float32(_BELOW),
        high,
        jnp.float32(-1),
        jnp.float32(0),
        jnp.bool_(False),
        jnp.float32(-jnp.inf),
        jnp.float32(jnp.inf),
        jnp.int32(0),
    )
    return lax.while_loop(lambda state: (state[5] < state[6]) & (state[7] < _PASSES), narrow, start)[6]


def _measure(x_ref, pivots, low, high, peak, heat, *, weighs):
    """Return the weight (or the number) of the logits not below each pivot, and the smallest and the
    largest in [low, high).
    """
    (n,) = x_ref.shape
    layout = plgpu.Layout.WG_STRIDED((_UNIT,), 4)
    rate = 1.4426950408889634 / heat

    def splat(value):
        return plgpu.layout_cast(jnp.full((_UNIT,), value, jnp.float32), layout)

    def read(start):
        return plgpu.load(x_ref.at[pl.ds(start, _UNIT)], layout=layout)

    def add(x, state):
        *sums, least, largest = state
        weight = jnp.exp2((x - peak) * rate) if weighs else splat(1.0)
        sums = [total + jnp.where(x >= pivot, weight, 0.0) for total, pivot in zip(sums, pivots, strict=True)]
        within = (x >= low) & (x < high)
        return (
            *sums,
            jnp.minimum(least, jnp.where(within, x, jnp.inf)),
            jnp.maximum(largest, jnp.where(within, x, -jnp.inf)),
        )

    def step(i, carry):
        x, state = carry
        following = read(jnp.minimum((i + 1) * _UNIT, n - _UNIT))  # loaded while x is processed
        return following, add(x, state)

    state = (*(splat(0.0) for _ in pivots), splat(jnp.inf), splat(-jnp.inf))
    x, state = lax.fori_loop(0, n // _UNIT, step, (read(0), state))
    if n % _UNIT:  # the last step overlaps the step before it
        seen = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout) < _UNIT - n % _UNIT
        state = add(jnp.where(seen, -jnp.inf, x), state)
    *sums, least, largest = state
    return [jnp.sum(total) for total in sums], jnp.min(least), jnp.max(largest)
