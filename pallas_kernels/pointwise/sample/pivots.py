"""A search for the limits of top-k and top-p in one row of logits, by a warpgroup on Hopper.

Each pass over the row sums the weights above seven pivots, and finds the smallest and the largest logit
between the current bounds. The limit is found when these two are equal: after about six passes for any
numbers.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_EVENLY = tuple(i / 8 for i in range(1, 8))  # pivots, as fractions of the interval
_NEARBY = (-1 / 4, -1 / 16, -1 / 64, 0.0, 1 / 64, 1 / 16, 1 / 4)
_UNIT = 128 * 4  # logits in a step
_PASSES = 200  # more than any interval of float32 needs
_BELOW = -3.0e38  # below any bound


def limit(x_ref, peak, heat, total, floor, k, p):
    """Return the smallest logit of x_ref [V] that min-p, top-k and top-p keep.

    The other arguments are those of `limits.token_limits` for this row.
    """
    search = functools.partial(_search, x_ref, peak, heat)
    low = lax.cond(k < x_ref.shape[0], lambda: jnp.maximum(floor, search(k, weighs=False)), lambda: floor)

    def kept():
        return _measure(x_ref, [low], low, low, peak, heat, weighs=True)[0][0]

    def nucleus():
        left = lax.cond(low > _BELOW, kept, lambda: total)
        return jnp.maximum(low, search(left * p, weighs=True))

    return lax.cond(p < 1.0, nucleus, lambda: low)


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
