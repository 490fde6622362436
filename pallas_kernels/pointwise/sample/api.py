"""Where top-k and top-p cut the rows of logits whose limits are not found cheaply, for Hopper: a row a CTA at
a time, the rest skipped.

A row's limit is closed in on by passes over the row, each of which sums up what lies beyond seven pivots and
notes the least and the largest logit between the bounds so far. It is found when these two are one: after six
passes or so, whatever the numbers.
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
_UNIT = 128 * 4  # logits a step
_PASSES = 200  # more than it can take to narrow any interval of float32 to one number
_PER_SM = 4  # CTAs dealt out an SM where SMs are counted
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
    """The smallest logit that min-p, top-k and top-p leave in each row, of the same meaning as its twin,
    `reference.token_limits`.

    Args:
      x: [R, V] float32, V a multiple of 4 and at least 512.
      peak, heat, total, floor, k, p: [R] float32. wanted: [R] bool: rows that are searched at all.
      sms: how many SMs' worth of CTAs it starts, 1 to 132; by default a CTA for each row, of which an SM
      takes the next when it has room.
    Returns:
      [R] float32; the floor of rows that nobody wants.
    Raises:
      ValueError: for a shape, dtype or sms that the kernel does not take.
    """
    rows, n = x.shape
    if n < _UNIT or n % 4 or x.dtype != jnp.float32:
        raise ValueError(
            f"logits are {x.dtype}{list(x.shape)}: float32 [R, V], V a multiple of 4 and at least {_UNIT}"
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
    """This CTA's rows, every `ctas`-th."""
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
    """The largest logit such that those not below it weigh (or count) at least the target."""

    def narrow(state):
        low, high, above_low, above_high, straight, _, _, passes = state
        # Where a pass has narrowed the interval well, sums run nearly straight within it: pivots close around
        # where they should meet the target. Else they are spread evenly.
        guess = (above_low - target) / jnp.maximum(above_low - above_high, 1e-30)
        begin = jnp.where(low <= _BELOW, peak - 64.0 * heat, low)
        pivots = []
        for even, near in zip(_EVENLY, _NEARBY, strict=True):
            at = jnp.where(straight, jnp.clip(guess + near, 1 / 256, 255 / 256), even)
            pivots.append(begin * (1.0 - at) + high * at)
        sums, least, largest = _measure(x_ref, pivots, low, high, peak, heat, weighs=weighs)
        width = high - low
        above_low, low = jnp.where(least > low, -1.0, above_low), jnp.maximum(low, least)  # -1: not known
        for pivot, above in zip(pivots, sums, strict=True):
            up, down = (above >= target) & (pivot >= low), (above < target) & (pivot < high)
            low, above_low = jnp.where(up, pivot, low), jnp.where(up, above, above_low)
            high, above_high = jnp.where(down, pivot, high), jnp.where(down, above, above_high)
        straight = (high - low <= 0.25 * width) & (above_low >= 0.0)
        return low, high, above_low, above_high, straight, least, largest, passes + 1

    # The interval is [low, high): a little above the peak, lest it be left out.
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
    """What the logits not below each pivot weigh (or how many they are), and the least and the largest in
    [low, high).
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
        following = read(jnp.minimum((i + 1) * _UNIT, n - _UNIT))  # on its way while x is looked at
        return following, add(x, state)

    state = (*(splat(0.0) for _ in pivots), splat(jnp.inf), splat(-jnp.inf))
    x, state = lax.fori_loop(0, n // _UNIT, step, (read(0), state))
    if n % _UNIT:  # what remains, and before it what was seen already
        seen = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout) < _UNIT - n % _UNIT
        state = add(jnp.where(seen, -jnp.inf, x), state)
    *sums, least, largest = state
    return [jnp.sum(total) for total in sums], jnp.min(least), jnp.max(largest)
