"""A router for Hopper in one kernel: the product, the choice of experts and their weights.

Product and choice as two kernels take 7 to 8 us for few tokens, and most of it is waiting: four CTAs read the
weight, and one maximum follows another. Here a cluster of 8 CTAs has 8 tokens. Each CTA multiplies an eighth
of the columns, and sends each token's sums to the token's CTA through distributed shared memory. This CTA has
a thread for each expert. The thread compares its score with all others, and their number is its rank.

One cluster has all tokens of a small step. Its CTAs then also exchange the choices, and sort the rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.grouped.groups import Groups
from pallas_kernels.gemm.router.kernel import RouterForm, run
from pallas_kernels.gemm.router.limits import (
    DEPTH,
    MOST_EXPERTS,
    MOST_TOKENS,
    TOKENS,
    supports,
    supports_sort,
)
from pallas_kernels.gemm.sorted_rows.form import PARAMS, form_of, groups_of, limits_of, results_of
from pallas_kernels.hopper.layouts import pad_rows_above_8, swizzled
from pallas_kernels.quantized import Quantized


def route(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    score_bias: jax.Array | None = None,
    *,
    chosen: int,
    normalized: bool = True,
    scale: float = 1.0,
    pdl: bool = False,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """Return the weights and the numbers of each token's experts, as
    `pallas_kernels.gemm.router.reference.route`.

    NaN counts as less than all numbers. Of equal scores the first expert comes first.

    Args:
      x: [T, D] bfloat16. w: [E, D] bfloat16. bias, score_bias: [E].
        `pallas_kernels.gemm.router.limits` has the limits.
      pdl: start before the previous kernel has ended (`pallas_kernels.hopper.pdl`); w must be an argument of
        the program.
    Returns:
      Weights [T, chosen] float32 and experts [T, chosen] int32.
    Raises:
      ValueError: for a shape or dtype outside the limits.
    """
    rule = {"normalized": normalized, "scale": scale}
    made = _run(x, w, bias, score_bias, chosen, rule, None, None, pdl, interpret)
    return made[0], made[1]


def route_and_sort(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    score_bias: jax.Array | None = None,
    *,
    chosen: int,
    normalized: bool = True,
    scale: float = 1.0,
    quantize: bool = False,
    used: jax.Array | None = None,
    pdl: bool = False,
    interpret=None,
) -> tuple[jax.Array, jax.Array, Groups, jax.Array | Quantized]:
    """Return the results of `route`, and of the sort of x by the chosen experts, for up to 8 tokens.

    The reference implementation is `pallas_kernels.gemm.router.reference.route_and_sort`.

    Args:
      x: [T, D] bfloat16, D a multiple of 64. w: [E, D] bfloat16. The other arguments are those of `route`.
      quantize, used: as for `pallas_kernels.gemm.sorted_rows.api.sort_rows`.
    Returns:
      Weights [T, chosen] float32, experts [T, chosen] int32, the groups, and the row of x for each row of the
      groups.
    Raises:
      ValueError: for a shape or dtype outside the limits.
    """
    if not supports_sort(x.shape[0], w, chosen):
        raise ValueError(
            f"x {list(x.shape)}, w {list(w.shape)}: accepted are up to {TOKENS} tokens, "
            "and a multiple of 64 columns"
        )
    form = form_of(x.shape[0], chosen, w.shape[0], None, used)
    results = results_of(form, x, quantize)
    rule = {"normalized": normalized, "scale": scale}
    weights, experts, *made = _run(
        x, w, bias, score_bias, chosen, rule, (form, results), used, pdl, interpret
    )
    groups, rows = groups_of(form, made[:8]), made[8:]
    return weights, experts, groups, Quantized(*rows) if quantize else rows[0]


def _run(x, w, bias, score_bias, chosen, rule, sorts, used, pdl, interpret) -> list[jax.Array]:
    """Run the kernel. sorts: the form of the sort and its results; None: no sort."""
    (tokens, columns), experts = x.shape, w.shape[0]
    if x.dtype != jnp.bfloat16 or w.shape[1] != columns or not supports(tokens, w, chosen):
        raise ValueError(
            f"x {x.dtype}{list(x.shape)}, w {w.dtype}{list(w.shape)}, {chosen=}: accepted are bfloat16, "
            f"up to {MOST_TOKENS} tokens and {MOST_EXPERTS} experts, and columns that fit shared memory"
        )
    form = RouterForm(experts, columns, chosen, sigmoid=score_bias is not None, **rule)
    if interpret:  # the interpreter has no memory that CTAs share
        form = dataclasses.replace(form, parts=1)
    sort, results = sorts or (None, [])
    given = [
        *limits_of(None, used),
        pad_rows_above_8(x),
        w,
        *([] if bias is None else [bias]),
    ]
    if score_bias is not None:
        given.append(jnp.pad(score_bias.astype(jnp.float32), (0, form.wide - experts)))
    chosen_shape = (tokens, chosen)
    scratch = {
        "w_s": plgpu.SMEM((form.steps, form.rows, DEPTH), w.dtype, transforms=swizzled(w.dtype)),
        "x_s": plgpu.SMEM((form.steps, form.tokens, DEPTH), x.dtype, transforms=swizzled(x.dtype)),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=form.steps),
        "sums_s": plgpu.SMEM((form.parts, form.own, form.wide), jnp.float32),
        "keys_s": plgpu.SMEM((form.wide,), jnp.int32),
        "best_s": plgpu.SMEM((form.wide,), jnp.float32),
    }
    if sort is not None:
        scratch |= {
            "flags_s": plgpu.SMEM((form.tokens, form.wide), jnp.int32),
            "places_s": plgpu.SMEM((form.wide,), jnp.int32),
            "warps_s": plgpu.SMEM((4,), jnp.int32),
        }
    return plgpu.kernel(
        functools.partial(run, form=form, tokens=tokens, has_bias=bias is not None, sort=sort, pdl=pdl),
        out_type=[
            jax.ShapeDtypeStruct(chosen_shape, jnp.float32),
            jax.ShapeDtypeStruct(chosen_shape, jnp.int32),
            *results,
        ],
        grid=(pl.cdiv(tokens, form.tokens),),
        grid_names=("group",),
        cluster=(form.parts,) if form.parts > 1 else (),
        cluster_names=("part",) if form.parts > 1 else (),
        scratch_types=scratch,
        compiler_params=PARAMS,
        kernel_name=f"route{'' if sort is None else '_and_sort'}_{tokens}x{experts}x{columns}",
        interpret=interpret,
    )(*given)
