"""A draw from each row of logits, for Hopper: one pass over the logits, with the noise made on the way.

The logits are cut into groups of columns. A CTA examines consecutive groups of one row. Each thread keeps the
largest score of its columns and the group of this score. At the end, the CTA computes the scores of one group
again, to find the column. A small reduction over the CTAs of a row follows.

The two logarithms of the noise are the approximate ones of the hardware. With a series for small arguments,
the noise differs from the reference by less than 7e-6.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pointwise.draw import reference
from pallas_kernels.pointwise.draw.noise import hash_bits

_UNIT = 128 * 4  # columns that a CTA reads at a time
_TILES = 4  # units in a group
_CTAS = 4096  # CTAs of a launch, if the rows have enough groups
_NONE = 2**31 - 1  # above any column and any group
# -log2(1 - u) is u · (a + b·u + c·u² + d·u³) to 5e-7 of its value for u below 1/8 (minimax).
_SERIES_BELOW = 1 / 8
_SERIES = (1.4426943, 0.7215275, 0.4739202, 0.4452541)


def draw(
    x: jax.Array,
    temperature: jax.Array,
    keys: jax.Array,
    limit: jax.Array | None = None,
    *,
    interpret=None,
) -> jax.Array:
    """Return the token of the largest x + temperature · noise in each row, the first of equal ones.

    The reference implementation is `pallas_kernels.pointwise.draw.reference.draw`. It also runs here for
    fewer than 512 columns, and for columns that are not a multiple of 4.

    Args:
      x: [R, V] float32, finite or -inf. A row of -inf gives 0.
      temperature: [R] float32. 0 draws the largest x, and makes no noise.
      keys: [R, 3] uint32, random words of each row.
      limit: [R] float32: smaller x cannot be drawn. A row with a limit of +inf is not read, and gives 0.

    Returns: [R] int32.
    """
    rows, n = x.shape
    if n < _UNIT or n % 4:
        return reference.draw(x, temperature, keys, limit)
    tiles = min(_TILES, n // _UNIT)
    groups = -(-n // (tiles * _UNIT))
    steps = -(-groups // max(1, min(groups, _CTAS // rows)))  # groups of a CTA
    shape = (rows, -(-groups // steps))
    values, tokens = plgpu.kernel(
        functools.partial(_examine, tiles=tiles, groups=groups, steps=steps, limited=limit is not None),
        out_type=(jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)),
        grid=shape,
        grid_names=("row", "part"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name="draw",
        interpret=interpret,
    )(x, temperature, keys, *(() if limit is None else (limit,)))
    best = values.argmax(-1)
    return jnp.take_along_axis(tokens, best[:, None], axis=1)[:, 0]


def _examine(x_ref, temperature_ref, keys_ref, *refs, tiles, groups, steps, limited):
    """Write the largest score of this CTA's part of a row, and its token."""
    limit_ref, value_ref, token_ref = refs if limited else (None, *refs)
    row, part = lax.axis_index("row"), lax.axis_index("part")
    temperature = temperature_ref[row]
    first = part * steps
    find = functools.partial(_largest, x_ref.at[row], first, jnp.minimum(steps, groups - first), tiles=tiles)
    limit = None if limit_ref is None else limit_ref[row]

    def found():
        words = [keys_ref[row, i] for i in range(3)]
        return lax.cond(temperature > 0, lambda: find(limit, (temperature, words)), lambda: find(limit, None))

    def nothing():
        return jnp.float32(-jnp.inf), jnp.int32(0)

    value, token = found() if limit is None else lax.cond(limit < jnp.inf, found, nothing)
    value_ref[row, part] = value
    token_ref[row, part] = token


def _largest(x_ref, first, steps, limit, noise, *, tiles):
    """Return the largest score in `steps` groups of a row from group `first`, and its first column.

    noise: the temperature and the words of the row's key; None: the scores are the logits.
    """
    (n,) = x_ref.shape
    layout = plgpu.Layout.WG_STRIDED((_UNIT,), 4)
    lane = plgpu.broadcasted_iota(jnp.int32, (_UNIT,), 0, layout=layout)

    def splat(value, dtype=jnp.float32):
        return plgpu.layout_cast(jnp.full((_UNIT,), value, dtype), layout)

    def starts(group):
        """Return the first columns of a group's tiles. The last group overlaps the group before it."""
        begin = jnp.minimum(group * (tiles * _UNIT), n - tiles * _UNIT)
        return [begin + i * _UNIT for i in range(tiles)]

    def read(group):
        return [plgpu.load(x_ref.at[pl.ds(start, _UNIT)], layout=layout) for start in starts(group)]

    if noise is not None:
        temperature, words = noise
        rate, words = splat(temperature * -math.log(2)), [splat(word, jnp.uint32) for word in words]

    def score(x, start):
        if noise is not None:
            scored = x + rate * _log2_exponential(hash_bits(words, lane + start))
        else:
            scored = x
        return scored if limit is None else jnp.where(x >= limit, scored, -jnp.inf)

    def scores(xs, group):
        return [score(x, start) for x, start in zip(xs, starts(group), strict=True)]

    def step(i, carry):
        xs, best, at = carry
        group = first + i
        following = read(jnp.minimum(group + 1, first + steps - 1))  # loaded while xs are processed
        new = functools.reduce(jnp.maximum, scores(xs, group), best)
        return following, new, jnp.where(_bits(new) != _bits(best), splat(group, jnp.int32), at)

    start = read(first), splat(-jnp.inf), splat(first, jnp.int32)
    _, best, at = lax.fori_loop(0, steps, step, start)
    group = jnp.min(jnp.where(_bits(best) == _bits(splat(jnp.max(best))), at, _NONE))
    group = jnp.minimum(group, first + steps - 1)
    again = scores(read(group), group)
    largest = jnp.max(functools.reduce(jnp.maximum, again))
    columns = [
        jnp.where((s >= largest) | (s != s), lane + start, _NONE)  # a NaN counts as the largest
        for s, start in zip(again, starts(group), strict=True)
    ]
    return largest, jnp.min(functools.reduce(jnp.minimum, columns))


def _log2_exponential(bits):
    """Return log2(-log2(1 - u)) for the uniform number u of the bits: -1/ln 2 of Gumbel noise, shifted."""
    u = jnp.minimum(bits.astype(jnp.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
    series = functools.reduce(lambda total, c: total * u + c, reversed(_SERIES))
    return jnp.log2(jnp.where(u < _SERIES_BELOW, u * series, -jnp.log2(1.0 - u)))


def _bits(x):
    """Return the bits of float32 numbers: unlike NaNs, they equal themselves."""
    return lax.bitcast_convert_type(x, jnp.int32)
