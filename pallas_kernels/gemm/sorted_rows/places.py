"""Parts of a sort in which each thread of a CTA has experts: their first rows, their tiles, and the places of
a token.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.sorted_rows.form import Form, numbers, sizes_of, write_parts
from pallas_kernels.hopper.threads import row_layout, scatter, sums_before

_TILES = 16  # bits of a packed number that hold rows; those above hold tiles


def begins(form: Form, counts: jax.Array, warps_s, interpret: bool):
    """Return the sizes, the first rows and the first tiles of the experts, and the number of all tiles.

    counts: the pairs of each expert.
    """
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


def write_token(form: Form, token, choice, places, here, row, scale, places_s, refs, interpret: bool) -> None:
    """Write a token's places, and its row to them.

    choice: of each expert for the token, `Form.wide` or more where the token has not chosen the expert.
    places: the token's row of each expert. here: 0 or 1, whether the pair gets a row. row: its parts.
    scale: of the row, or None. places_s: [Form.wide], `Form.length` at choices without an expert.
    refs: places, pairs, rows and perhaps scales.
    """
    places_ref, pairs_ref, rows_ref, *scale_refs = refs
    column = numbers(form.wide)
    is_choice = jnp.where(choice < form.chosen, 1, 0)
    scatter(places_s, choice, jnp.where(here != 0, places, form.length), is_choice, interpret)
    plgpu.commit_smem()
    of_choices = plgpu.load(places_s, layout=row_layout(form.wide))
    scatter(places_ref.at[token], column, of_choices, jnp.where(column < form.chosen, 1, 0), interpret)
    scatter(pairs_ref, places, token * form.chosen + choice, here, interpret)
    for ref in scale_refs:
        scatter(ref, places, (column * 0).astype(jnp.float32) + scale, here, interpret)
    for place in [places_s[choice] for choice in range(form.chosen)]:

        def write(place=place):
            write_parts(rows_ref.at[place], row)

        pl.when(place < form.length)(write) if form.padded or form.held else write()
