"""The second pass of latent attention: add up the rows that are split between workers.

The parts of a row are added in the order of their keys, so equal batches give equal bits.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.latent.work_list import LatentWork
from pallas_kernels.attention.paged import LOWEST
from pallas_kernels.hopper.layouts import LANE

_CTAS = 4096  # more CTAs take longer to start than to work
_TOGETHER = 4  # parts in flight
_THREADS = 128


def combine(
    parts: jax.Array,
    levels: jax.Array,
    *,
    work: LatentWork,
    heads: int,
    together: int,
    fill: bool,
    interpret,
):
    """Return a function that writes the split rows into a reference of the output [T * N, R].

    Args:
      parts: [workers * 2 * N * together, R] bfloat16, the normalized output of each part (`kernel`).
      levels: [workers, 2, tiles * 64] float32, log2 of a part's sum of weights.
      together: most tokens of a row.
      fill: write 0 to rows without keys. Row i is then token i.
    """

    def into(o):
        rank, (tokens, rows) = o.shape[1], (o.shape[0] // heads, work.parts.shape[0])
        owner = jnp.concatenate([work.parts, work.rows[:, 3:]], axis=1)
        if fill:
            token = jnp.arange(tokens, dtype=jnp.int32)[:, None]
            parts_of = jnp.pad(work.parts, ((0, tokens - rows), (0, 0)))
            owner = jnp.concatenate([parts_of, token, jnp.ones_like(token)], axis=1)
        part = heads * together
        group = next(
            (n for n in range(1, part) if part % n == 0 and owner.shape[0] * part // n <= _CTAS), part
        )
        body = functools.partial(_combine, heads=heads, part=part, group=group, rank=rank, fill=fill)
        plgpu.kernel(
            body,
            out_type=(),
            grid=(owner.shape[0], part // group),
            grid_names=("row", "group"),
            compiler_params=LANE,
            kernel_name="latent_combine",
            interpret=interpret,
        )(parts, levels, owner, o)

    return into


def _combine(parts, levels, owner, o, *, heads: int, part: int, group: int, rank: int, fill: bool):
    row = lax.axis_index("row")
    first, count, token, tokens = (owner[row, i] for i in range(4))
    layout = plgpu.Layout.WG_STRIDED((rank,), vec_size=rank // _THREADS)
    empty = plgpu.layout_cast(jnp.zeros((rank,), jnp.float32), layout)

    @pl.when(count > 1)
    def _():
        @pl.loop(0, group)
        def _(i):
            place = lax.axis_index("group") * group + i

            def read(number):
                begun = jnp.where(number == 0, jnp.int32(1), jnp.int32(0))
                worker = first + number
                values = plgpu.load(
                    parts.at[(worker * 2 + begun) * part + place], layout=layout, optimized=False
                )
                return levels[worker, begun, place], values

            def step(j, state):
                # Past the last part the last part is read again, without weight.
                numbers = [j * _TOGETHER + n for n in range(_TOGETHER)]
                for number, (level, values) in zip(
                    numbers, [read(jnp.minimum(number, count - 1)) for number in numbers], strict=True
                ):
                    top, total, out = state
                    level = jnp.where(number < count, level, 2 * LOWEST)
                    new_top = jnp.maximum(top, level)
                    keep, weight = jnp.exp2(top - new_top), jnp.exp2(level - new_top)
                    state = new_top, total * keep + weight, out * keep + values.astype(jnp.float32) * weight
                return state

            start = jnp.float32(LOWEST), jnp.float32(0), empty
            _top, total, out = lax.fori_loop(0, pl.cdiv(count, jnp.int32(_TOGETHER)), step, start)

            @pl.when(place < tokens * heads)
            def _():
                o.at[token * heads + place][...] = (out / total).astype(o.dtype)

    if fill:

        @pl.when(count == 0)
        def _():
            @pl.loop(0, group)
            def _(i):
                o.at[row * heads + lax.axis_index("group") * group + i][...] = empty.astype(o.dtype)
