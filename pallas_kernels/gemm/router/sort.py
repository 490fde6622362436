"""The sort of a cluster's tokens by expert, after the choice of their experts."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.sorted_rows.form import Form, numbers, sizes_of, write_parts
from pallas_kernels.hopper.threads import row_layout, scatter, sums_before

_TILES = 16  # bits of a packed number that hold rows; those above hold tiles


def count(form: Form, flags_s, token) -> tuple[jax.Array, jax.Array]:
    """Return the pairs of each expert, and those of tokens before `token`.

    flags_s: [tokens, experts], 1 where a token has chosen an expert and gets rows.
    """
    none = numbers(form.wide) * 0
    counts = earlier = none
    for other in range(flags_s.shape[0]):
        hits = plgpu.load(flags_s.at[other], layout=row_layout(form.wide))
        counts = counts + hits
        earlier = earlier + hits * jnp.where(other < token, 1, 0)
    return counts, earlier


def begins(form: Form, counts: jax.Array, warps_s, interpret: bool):
    """Return the sizes, the first rows and the first tiles of the experts, and the number of all tiles."""
    sizes = sizes_of(counts)
    tiles = lax.div(sizes + (form.rows - 1), jnp.int32(form.rows))
    before, total = sums_before(sizes | (tiles << _TILES), warps_s, interpret)
    return sizes, before & (1 << _TILES) - 1, before >> _TILES, total >> _TILES


def list_tiles(form: Form, begun, refs, interpret: bool) -> None:
    """Write the tiles of all experts.

    begun: of `begins`. refs: experts, starts, ends, count, sizes and arrived of `Form.listed`.
    """
    sizes, rows, tiles, total = begun
    experts_ref, starts_ref, ends_ref, count_ref, sizes_ref, arrived_ref = refs
    for i in range(pl.cdiv(form.tokens, form.rows)):  # a token chooses an expert once
        start, at = rows + i * form.rows, tiles + i
        here = jnp.where(sizes > i * form.rows, 1, 0)
        end = jnp.minimum(start + form.rows, rows + sizes)
        for ref, values in ((experts_ref, numbers(form.wide)), (starts_ref, start), (ends_ref, end)):
            scatter(ref, at, values, here, interpret)
    sizes_ref[...] = sizes
    arrived_ref[...] = numbers(arrived_ref.shape[0]) * 0
    count_ref[0] = total


def write_rows(form: Form, token, places_s, row: list[jax.Array], scale, refs) -> None:
    """Write a token's row to its places.

    places_s: the places in the order of the choice. row: its parts. scale: of the row, or None. refs: pairs,
    rows and perhaps scales.
    """
    pairs_ref, rows_ref, *scale_refs = refs
    for choice in range(form.chosen):
        place = places_s[choice]
        pairs_ref[place] = token * form.chosen + choice
        write_parts(rows_ref.at[place], row)
        for ref in scale_refs:
            ref[place] = scale
