"""The sort of up to 128 tokens in one kernel.

A CTA has a token. The CTA counts the pairs of all experts itself, so that no CTA waits for another. Then it
quantizes the token's row, and writes the row to the token's places. Other CTAs have 128 tiles each.
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

_PER_SM = 4  # CTAs for each SM


def sort_few(
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
    ctas = min(form.tile_items + form.tokens, sms * _PER_SM)
    made = plgpu.kernel(
        functools.partial(_sort, form=form, ctas=ctas),
        out_type=results_of(form, x, quantize),
        grid=(ctas,),
        grid_names=("cta",),
        scratch_types={"sizes_s": plgpu.SMEM((form.wide,), jnp.int32)},
        compiler_params=PARAMS,
        kernel_name="sort_rows",
        interpret=interpret,
    )(*limits_of(held, used), experts.astype(jnp.int32), x)
    return groups_of(form, made[:8]), made[8:]


def _sort(*refs, form: Form, ctas: int, sizes_s):
    """Process this CTA's items, every `ctas`-th item. The tokens' items follow those of the tiles."""
    used, first = read_limits(form, refs)
    experts_ref, x_ref, places_ref, pairs_ref, *listed_refs, rows_ref = refs[form.limits : form.limits + 11]
    of_tiles_ref, starts_ref, ends_ref, count_ref, sizes_ref, arrived_ref = listed_refs
    scale_refs = refs[form.limits + 11 :]

    @pl.loop(lax.axis_index("cta"), form.tile_items + form.tokens, step=ctas)
    def _(item):
        @pl.when(item < form.tile_items)
        def _():
            sizes = sizes_of(_count(form, experts_ref, jnp.int32(0), used, first)[0])
            plgpu.commit_smem()  # the last item of this CTA has read its sizes
            sizes_s[...] = sizes
            plgpu.commit_smem()
            *found, count = tiles_from(form, item * LANES, sizes_s)
            for ref, values in zip((of_tiles_ref, starts_ref, ends_ref), found, strict=True):
                ref[pl.ds(item * LANES, LANES)] = values
            arrived_ref[pl.ds(item * LANES, LANES)] = numbers(LANES) * 0

            @pl.when(item == 0)
            def _():
                sizes_ref[...] = sizes
                count_ref[0] = count

        def sort_token(token):
            row = read_row(x_ref.at[token])
            scale = None
            counts, earlier = _count(form, experts_ref, token, used, first)
            expert, sizes = numbers(form.wide), sizes_of(counts)
            if scale_refs:
                row, scale = quantize_api.scaled([part.astype(jnp.float32) for part in row])

            def write(own, choice):
                before = jnp.where(expert < own, sizes, jnp.where(expert == own, earlier, 0))
                place = jnp.sum(before)
                places_ref[token, choice] = place
                pairs_ref[place] = token * form.chosen + choice
                write_parts(rows_ref.at[place], row)
                for ref in scale_refs:
                    ref[place] = scale

            def skip(choice):
                places_ref[token, choice] = jnp.int32(form.length)

            for choice in range(form.chosen):
                own = own_expert(form, experts_ref[token, choice], first)
                if first is None:
                    write(own, choice)
                    continue
                pl.when(own >= 0)(functools.partial(write, own, choice))
                pl.when(own < 0)(functools.partial(skip, choice))

        def skip_token(token):
            for choice in range(form.chosen):
                places_ref[token, choice] = jnp.int32(form.length)

        @pl.when(item >= form.tile_items)
        def _():
            token = item - form.tile_items
            if used is None:
                return sort_token(token)
            pl.when(token < used)(lambda: sort_token(token))
            pl.when(token >= used)(lambda: skip_token(token))


def _count(form: Form, experts_ref, token, used, first_expert):
    """Return the pairs of each expert, and those of tokens before `token`.

    used: the number of tokens that are counted; None: all. first_expert: as for `own_expert`.
    """
    expert = numbers(form.wide)

    def expert_of(at, choice):
        """Return the expert of a pair, or a number that no thread has."""
        own = own_expert(form, experts_ref[at, choice], first_expert)
        return own if used is None else jnp.where(at < used, own, -1)

    def add(first, state, number: int = AT_ONCE):
        counts, earlier = state
        of_tokens = [[expert_of(first + i, choice) for choice in range(form.chosen)] for i in range(number)]
        for i, chosen in enumerate(of_tokens):
            hits = sum(jnp.where(expert == one, 1, 0) for one in chosen)
            counts += hits
            earlier += hits * jnp.where(first + i < token, 1, 0)
        return counts, earlier

    whole, none = form.tokens // AT_ONCE, expert * 0
    state = lax.fori_loop(0, whole, lambda block, state: add(block * AT_ONCE, state), (none, none))
    rest = form.tokens % AT_ONCE
    return add(jnp.int32(whole * AT_ONCE), state, rest) if rest else state
