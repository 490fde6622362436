"""The sort of up to 2,048 tokens in two kernels.

The first kernel counts the pairs of each expert in blocks of tokens. In the second kernel a CTA has some
tokens of one block. It adds the counts of all blocks, which are at most 64, and counts the earlier tokens of
its own block. So no CTA waits for another. The places of its tokens follow, and it writes each token's row to
them. Other CTAs have 128 tiles each.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.grouped.groups import Groups, HeldExperts
from pallas_kernels.gemm.sorted_rows.form import (
    AT_ONCE,
    LANES,
    PARAMS,
    Form,
    form_of,
    groups_of,
    limits_of,
    numbers,
    own_expert,
    read_limits,
    read_row,
    results_of,
    sizes_of,
    tiles_from,
    write_parts,
)
from pallas_kernels.pointwise.quantize import api as quantize_api

_BLOCKS = 64  # each CTA of the second kernel reads the counts of all blocks
_PER_SM = 4  # CTAs of the second kernel for each SM


def sort_counted(
    x: jax.Array,
    experts: jax.Array,
    num_experts: int,
    *,
    quantize: bool,
    held: HeldExperts | None,
    used: jax.Array | None,
    sms: int,
    interpret=None,
) -> tuple[Groups, list[jax.Array]]:
    """Return the groups, and the rows with their scales if they are quantized.

    The arguments are those of `pallas_kernels.gemm.sorted_rows.api.sort_rows`.
    """
    form = form_of(experts.shape[0], experts.shape[1], num_experts, held, used)
    block = _power_of_two(form.tokens, _BLOCKS, AT_ONCE)
    together = min(_power_of_two(form.tokens, sms * _PER_SM, 1), block)
    blocks = pl.cdiv(form.tokens, block)
    given = *limits_of(held, used), experts.astype(jnp.int32)
    counts = plgpu.kernel(
        functools.partial(_count_block, form=form, block=block),
        out_type=jax.ShapeDtypeStruct((blocks, form.wide), jnp.int32),
        grid=(blocks,),
        grid_names=("cta",),
        compiler_params=PARAMS,
        kernel_name="count_pairs",
        interpret=interpret,
    )(*given)
    ctas = min(form.tile_items + pl.cdiv(form.tokens, together), sms * _PER_SM)
    made = plgpu.kernel(
        functools.partial(_place, form=form, block=block, together=together, ctas=ctas),
        out_type=results_of(form, x, quantize),
        grid=(ctas,),
        grid_names=("cta",),
        scratch_types={
            "sizes_s": plgpu.SMEM((form.wide,), jnp.int32),
            "places_s": plgpu.SMEM((form.wide,), jnp.int32),
        },
        compiler_params=PARAMS,
        kernel_name="place_rows",
        interpret=interpret,
    )(*given, counts, x)
    return groups_of(form, made[:8]), made[8:]


def _power_of_two(tokens: int, parts: int, least: int) -> int:
    """Return the tokens of a part, a power of two from `least`, so that there are at most `parts` parts."""
    return max(least, 1 << (pl.cdiv(tokens, parts) - 1).bit_length())


def _count_block(*refs, form: Form, block: int):
    """Count the pairs of each expert in this CTA's block of tokens."""
    used, first = read_limits(form, refs)
    experts_ref, counts_ref = refs[form.limits :]
    at, stop = lax.axis_index("cta") * block, _stop(form, used)

    def add(i, counts):
        return counts + sum(_hits(form, experts_ref, at + i * AT_ONCE, AT_ONCE, stop, first))

    counts_ref.at[lax.axis_index("cta")][...] = lax.fori_loop(
        0, block // AT_ONCE, add, numbers(form.wide) * 0
    )


def _place(*refs, form: Form, block: int, together: int, ctas: int, sizes_s, places_s):
    """Process this CTA's items, every `ctas`-th item. The items of `together` tokens follow those of the
    tiles.
    """
    used, first = read_limits(form, refs)
    experts_ref, counts_ref, x_ref, places_ref, pairs_ref, *rest = refs[form.limits :]
    of_tiles_ref, starts_ref, ends_ref, count_ref, sizes_ref, arrived_ref, rows_ref, *scale_refs = rest
    stop = _stop(form, used)

    @pl.loop(lax.axis_index("cta"), form.tile_items + pl.cdiv(form.tokens, together), step=ctas)
    def _(item):
        token = jnp.maximum(item - form.tile_items, 0) * together
        counts, earlier = _add_blocks(form, counts_ref, lax.div(token, jnp.int32(block)))
        sizes = sizes_of(counts)
        plgpu.commit_smem()  # the last item of this CTA has read its sizes
        sizes_s[...] = sizes
        plgpu.commit_smem()

        @pl.when(item < form.tile_items)
        def _():
            *found, count = tiles_from(form, item * LANES, sizes_s)
            for ref, values in zip((of_tiles_ref, starts_ref, ends_ref), found, strict=True):
                ref[pl.ds(item * LANES, LANES)] = values
            arrived_ref[pl.ds(item * LANES, LANES)] = numbers(LANES) * 0

            @pl.when(item == 0)
            def _():
                sizes_ref[...] = sizes
                count_ref[0] = count

        def write_row(at):
            row = read_row(x_ref.at[at])
            scale = None
            if scale_refs:
                row, scale = quantize_api.scaled([part.astype(jnp.float32) for part in row])
            for choice in range(form.chosen):
                own = _own(form, experts_ref, at, choice, stop, first)
                place = jnp.where(own < 0, form.length, places_s[jnp.maximum(own, 0)])
                places_ref[at, choice] = place

                def write(place=place, choice=choice):
                    pairs_ref[place] = at * form.chosen + choice
                    write_parts(rows_ref.at[place], row)
                    for ref in scale_refs:
                        ref[place] = scale

                pl.when(own >= 0)(write) if form.limits else write()

        @pl.when(item >= form.tile_items)
        def _():
            begin = lax.div(token, jnp.int32(block)) * block
            inside = jnp.minimum(token, stop)

            def add(i, state):
                return state + sum(_hits(form, experts_ref, begin + i * AT_ONCE, AT_ONCE, inside, first))

            places = _before(form, sizes_s) + earlier
            places = lax.fori_loop(0, lax.div(token - begin + (AT_ONCE - 1), jnp.int32(AT_ONCE)), add, places)
            for i in range(together):
                plgpu.commit_smem()  # the token before has read its places
                places_s[...] = places
                plgpu.commit_smem()
                pl.when(token + i < form.tokens)(functools.partial(write_row, token + i))
                if i + 1 < together:
                    places += _hits(form, experts_ref, token + i, 1, stop, first)[0]


def _stop(form: Form, used):
    """Return the number of tokens that get rows."""
    return jnp.int32(form.tokens) if used is None else jnp.minimum(used, form.tokens)


def _own(form: Form, experts_ref, token, choice: int, stop, first):
    """Return the expert of a pair, or -1 for a pair without a row. The token may be past the last one."""
    own = own_expert(form, experts_ref[jnp.minimum(token, form.tokens - 1), choice], first)
    return jnp.where(token < stop, own, -1)


def _hits(form: Form, experts_ref, token, number: int, stop, first):
    """Return the pairs of each expert, for each of `number` tokens from `token` on and before `stop`."""
    expert = numbers(form.wide)
    of_tokens = [
        [_own(form, experts_ref, token + i, choice, stop, first) for choice in range(form.chosen)]
        for i in range(number)
    ]
    return [sum(jnp.where(expert == one, 1, 0) for one in chosen) for chosen in of_tokens]


def _add_blocks(form: Form, counts_ref, block):
    """Return the pairs of each expert, and those of the blocks before `block`."""
    layout = plgpu.Layout.WG_STRIDED((form.wide,), form.wide // LANES)

    def add(first, state, number: int = AT_ONCE):
        counts, earlier = state
        read = [plgpu.load(counts_ref.at[first + i], layout=layout) for i in range(number)]
        for i, one in enumerate(read):
            counts += one
            earlier += one * jnp.where(first + i < block, 1, 0)
        return counts, earlier

    whole, rest = divmod(counts_ref.shape[0], AT_ONCE)
    none = numbers(form.wide) * 0
    state = lax.fori_loop(0, whole, lambda i, state: add(i * AT_ONCE, state), (none, none))
    return add(jnp.int32(whole * AT_ONCE), state, rest) if rest else state


def _before(form: Form, sizes_s):
    """Return the rows of the experts before each expert."""
    expert = numbers(form.wide)

    def add(first, rows, number: int = AT_ONCE):
        for i, size in enumerate([sizes_s[first + i] for i in range(number)]):
            rows += jnp.where(expert > first + i, size, 0)
        return rows

    whole, rest = divmod(form.experts, AT_ONCE)
    rows = lax.fori_loop(0, whole, lambda i, rows: add(i * AT_ONCE, rows), expert * 0)
    return add(jnp.int32(whole * AT_ONCE), rows, rest) if rest else rows
