"""A router for Hopper in one kernel: the product, the choice of experts and their weights.

Product and choice as two kernels take 7 to 8 us for few tokens, and most of it is waiting: four CTAs read the
weight, and one maximum follows another. Here a cluster of 8 CTAs has 8 tokens. Each CTA multiplies an eighth
of the columns, and sends each token's sums to the token's CTA through distributed shared memory. This CTA has
a thread for each expert. The thread compares its score with all others, and their number is its rank.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.router.kernel import LANES, PARAMS, RouterForm, run
from pallas_kernels.gemm.router.limits import DEPTH, MOST_EXPERTS, MOST_TOKENS, supports
from pallas_kernels.hopper.layouts import pad_rows_above_8, swizzled


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
    (tokens, columns), experts = x.shape, w.shape[0]
    if x.dtype != jnp.bfloat16 or w.shape[1] != columns or not supports(tokens, w, chosen):
        raise ValueError(
            f"x {x.dtype}{list(x.shape)}, w {w.dtype}{list(w.shape)}, {chosen=}: accepted are bfloat16, "
            f"up to {MOST_TOKENS} tokens and {MOST_EXPERTS} experts, and columns that fit shared memory"
        )
    form = RouterForm(
        experts, columns, chosen, sigmoid=score_bias is not None, normalized=normalized, scale=scale
    )
    if interpret:  # the interpreter has no memory that CTAs share
        form = dataclasses.replace(form, parts=1)
    added = [
        jnp.pad(each.astype(jnp.float32), (0, form.wide - experts))
        for each in (bias, score_bias)
        if each is not None
    ]
    x = pad_rows_above_8(x)
    weights, numbers = plgpu.kernel(
        functools.partial(run, form=form, tokens=tokens, has_bias=bias is not None, pdl=pdl),
        out_type=(
            jax.ShapeDtypeStruct((tokens, chosen), jnp.float32),
            jax.ShapeDtypeStruct((tokens, chosen), jnp.int32),
        ),
        grid=(pl.cdiv(tokens, form.tokens),),
        grid_names=("group",),
        cluster=(form.parts,) if form.parts > 1 else (),
        cluster_names=("part",) if form.parts > 1 else (),
        scratch_types={
            "w_s": plgpu.SMEM((form.steps, form.rows, DEPTH), w.dtype, transforms=swizzled(w.dtype)),
            "x_s": plgpu.SMEM((form.steps, form.tokens, DEPTH), x.dtype, transforms=swizzled(x.dtype)),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=form.steps),
            "sums_s": plgpu.SMEM((form.parts, form.own, form.wide), jnp.float32),
            "keys_s": plgpu.SMEM((form.wide,), jnp.int32),
            "best_s": plgpu.SMEM((LANES,), jnp.float32),
            "at_s": plgpu.SMEM((LANES,), jnp.int32),
        },
        compiler_params=PARAMS,
        kernel_name=f"route_{tokens}x{experts}x{columns}",
        interpret=interpret,
    )(x, w, *added)
    return weights, numbers
