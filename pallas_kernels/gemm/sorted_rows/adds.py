"""The sort of up to 128 tokens in one kernel, which counts by additions in shared memory.

A CTA has a token, and counts the pairs of all experts itself. Each thread has a few pairs, and adds 1 to the
counts of their experts. The sums are integers, so their order does not matter. A thread then has an expert,
and finds its rows by one prefix sum. One more CTA lists the tiles.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.gemm.grouped.groups import Groups, HeldExperts
from pallas_kernels.gemm.sorted_rows.form import (
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
)
from pallas_kernels.gemm.sorted_rows.places import begins, list_tiles, write_token
from pallas_kernels.hopper.threads import LANES, row_layout
from pallas_kernels.pointwise.quantize import api as quantize_api

_PER_SM = 4  # CTAs for each SM
_EARLIER = 16  # bits of a count that hold all pairs; those above hold pairs of earlier tokens
_SCALAR = plgpu.Layout.WG_SPLAT(())


def sort_by_adds(
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
    ctas = min(form.tokens + 1, sms * _PER_SM)
    made = plgpu.kernel(
        functools.partial(_sort, form=form, ctas=ctas, interpret=bool(interpret)),
        out_type=results_of(form, x, quantize),
        grid=(ctas,),
        grid_names=("cta",),
        scratch_types={
            name: plgpu.SMEM((width,), jnp.int32)
            for name, width in (("counts_s", form.wide), ("places_s", form.wide), ("warps_s", 4))
        },
        compiler_params=PARAMS,
        kernel_name="sort_rows",
        interpret=interpret,
    )(*limits_of(held, used), experts.astype(jnp.int32), x)
    return groups_of(form, made[:8]), made[8:]


def _sort(*refs, form: Form, ctas: int, interpret: bool, counts_s, places_s, warps_s):
    """Process this CTA's items, every `ctas`-th item: the tokens, then the tiles."""
    used, first = read_limits(form, refs)
    experts_ref, x_ref, places_ref, pairs_ref, *tile_refs, rows_ref = refs[form.limits : form.limits + 11]
    to = [places_ref, pairs_ref, rows_ref, *refs[form.limits + 11 :]]

    def begun(token):
        """Return the counts and the result of `begins`."""
        counts_s[...] = numbers(form.wide) * 0
        places_s[...] = numbers(form.wide) * 0 + form.length
        plgpu.commit_smem()
        _add_pairs(form, experts_ref, counts_s, token, used, first, interpret)
        plgpu.commit_smem()
        counts = plgpu.load(counts_s, layout=row_layout(form.wide))
        return counts, begins(form, counts & (1 << _EARLIER) - 1, warps_s, interpret)

    def sort_token(token):
        row, scale = read_row(x_ref.at[token]), None
        mine = [own_expert(form, experts_ref[token, choice], first) for choice in range(form.chosen)]
        counts, (_, rows, _, _) = begun(token)
        if len(to) > 3:
            row, scale = quantize_api.scaled([part.astype(jnp.float32) for part in row])
        expert = numbers(form.wide)
        choice = expert * 0 + form.wide
        for number, one in enumerate(mine):
            choice = jnp.where(expert == one, number, choice)
        taken = choice < form.chosen
        here = jnp.where(taken if used is None else taken & (token < used), 1, 0)
        places = rows + (counts >> _EARLIER)
        write_token(form, token, choice, places, here, row, scale, places_s, to, interpret)

    @pl.loop(lax.axis_index("cta"), form.tokens + 1, step=ctas)
    def _(item):
        pl.when(item < form.tokens)(lambda: sort_token(item))

        @pl.when(item == form.tokens)
        def _():
            list_tiles(form, begun(jnp.int32(0))[1], tile_refs, interpret)


def _add_pairs(form: Form, experts_ref, counts_s, token, used, first, interpret: bool) -> None:
    """Add 1 to the count of each pair's expert, and 1 << _EARLIER more for a pair of a token before `token`.

    used, first: of `read_limits`.
    """
    pairs = form.tokens * form.chosen
    end = jnp.int32(pairs) if used is None else jnp.minimum(used, form.tokens) * form.chosen
    before, first = token * form.chosen, jnp.int32(0) if first is None else first
    if interpret:
        own, pair = experts_ref[...].reshape(-1) - first, jnp.arange(pairs)
        kept = (own >= 0) & (own < form.experts) & (pair < end)
        value = jnp.where(pair < before, 1 + (1 << _EARLIER), 1)
        counts_s[...] = counts_s[...].at[jnp.where(kept, own, form.wide)].add(value, mode="drop")
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR, _SCALAR))
    def add(_, experts, counts, end, before, first):
        i32 = ir.IntegerType.get_signless(32)
        end, before, first = (each.registers.item() for each in (end, before, first))
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(LANES, i32))
        source, to = mgpu.utils.memref_ptr(experts), mgpu.utils.memref_ptr(counts)
        loaded = []
        for number in range(pl.cdiv(pairs, LANES)):
            pair = arith.addi(thread, mgpu.c(number * LANES, i32))
            # -1 past the end, which is no expert
            code = """{
                .reg .pred p;
                setp.lt.s32 p, $1, $2;
                mov.b32 $0, -1;
                @p ld.global.b32 $0, [$3];
                }"""
            operands = [pair, end, _at(source, pair)]
            expert = llvm.inline_asm(i32, operands, code, "=&r,r,r,l", has_side_effects=True)
            is_earlier = arith.cmpi(arith.CmpIPredicate.slt, pair, before)
            both = arith.select(is_earlier, mgpu.c(1 + (1 << _EARLIER), i32), mgpu.c(1, i32))
            loaded.append((arith.subi(expert, first), both))
        code = """{
            .reg .pred p;
            setp.lt.u32 p, $0, $1;
            @p red.shared.add.u32 [$2], $3;
            }"""
        for own, value in loaded:
            operands = [own, mgpu.c(form.experts, i32), _at(to, own), value]
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), operands, code, "r,r,l,r,~{memory}", has_side_effects=True
            )

    add(experts_ref, counts_s, end, before, first)  # pyright: ignore[reportCallIssue]


def _at(base: ir.Value, index: ir.Value) -> ir.Value:
    """Return the address of a number of 32 bits."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.getelementptr(base.type, base, [index], [-(2**31)], i32, llvm.GEPNoWrapFlags.none)
