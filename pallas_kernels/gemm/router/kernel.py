"""The kernel of a router: a part of the product in each CTA of a cluster, then a token's choice in each."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.router.exchange import put_ranked, send_sums
from pallas_kernels.gemm.router.limits import DEPTH, PARTS, TOKENS
from pallas_kernels.gemm.router.reference import SMALLEST
from pallas_kernels.hopper.pdl import launch_next, wait_for_last
from pallas_kernels.pointwise.top_k.api import ordered

LANES = 128  # threads of a CTA
PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)
_AT_ONCE = 32  # scores that are read before the first of them is compared
_NONE = -(2**31)  # below the keys of all experts


@dataclasses.dataclass(frozen=True)
class RouterForm:
    """The sizes that a kernel is compiled for.

    sigmoid, normalized, scale: as `pallas_kernels.gemm.router.reference.route`. tokens: of a cluster. parts:
    CTAs of a cluster.
    """

    experts: int
    columns: int
    chosen: int
    sigmoid: bool = False
    normalized: bool = True
    scale: float = 1.0
    tokens: int = TOKENS
    parts: int = PARTS

    @property
    def own(self) -> int:
        """Return the tokens whose experts a CTA chooses."""
        return self.tokens // self.parts

    @property
    def steps(self) -> int:
        """Return the largest number of a CTA's copies of the weight."""
        return pl.cdiv(self.columns // DEPTH, self.parts)

    @property
    def rows(self) -> int:
        """Return the rows of the weight, rounded up to wgmma's."""
        return pl.cdiv(self.experts, 64) * 64

    @property
    def wide(self) -> int:
        """Return the experts, rounded up to equal numbers in each thread."""
        return pl.cdiv(self.experts, LANES) * LANES

    @property
    def layout(self):
        """Return the layout of a row of all experts."""
        return plgpu.Layout.WG_STRIDED((self.wide,), self.wide // LANES)


def run(
    x_ref, w_ref, *refs, form: RouterForm, tokens: int, has_bias: bool, pdl: bool,
    w_s, x_s, full, sums_s, keys_s, best_s, at_s,
):  # fmt: skip
    """Multiply this CTA's columns for the cluster's tokens, and choose the experts of its own tokens."""
    *added, weights_ref, numbers_ref = refs
    bias_ref, score_bias_ref = added[0] if has_bias else None, added[-1] if form.sigmoid else None
    launch_next(pdl)
    group = lax.axis_index("group")
    part = lax.axis_index("part") if form.parts > 1 else jnp.int32(0)
    blocks = form.columns // DEPTH
    first, last = (lax.div(blocks * (part + i), jnp.int32(form.parts)) for i in (0, 1))
    rows = pl.ds(pl.multiple_of(group * form.tokens, 8), form.tokens)

    def copy(ref, own_rows, to):
        @pl.loop(0, last - first)
        def _(step):
            at = pl.ds((first + step) * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(ref.at[own_rows, at], to.at[step], full.at[step])

    copy(w_ref, pl.ds(jnp.int32(0), form.rows), w_s)
    wait_for_last(pdl)
    copy(x_ref, rows, x_s)

    def product(acc):
        @pl.loop(0, last - first)
        def _(step):
            plgpu.barrier_wait(full.at[step])
            plgpu.wgmma(acc, w_s.at[step], x_s.at[step].transpose((1, 0)))

        plgpu.wgmma_wait(0)
        return acc[...]

    sums = pl.run_scoped(product, plgpu.ACC((form.rows, form.tokens), jnp.float32))
    send_sums(sums, sums_s, part, form.parts)
    for i in range(form.own):
        token = group * form.tokens + part * form.own + i

        @pl.when(token < tokens)
        def _(i=i, token=token):
            logits = plgpu.load(sums_s.at[0, i], layout=form.layout)
            for other in range(1, form.parts):  # a fixed order: equal runs have equal bits
                logits = logits + plgpu.load(sums_s.at[other, i], layout=form.layout)
            if bias_ref is not None:
                logits = logits + plgpu.load(bias_ref, layout=form.layout)
            _choose(form, logits, score_bias_ref, keys_s, best_s, at_s)
            weights = _weights(form, logits, best_s)
            for choice, weight in enumerate(weights):
                weights_ref[token, choice] = weight
                numbers_ref[token, choice] = at_s[choice]


def _choose(form: RouterForm, logits: jax.Array, score_bias_ref, keys_s, best_s, at_s) -> None:
    """Write the chosen experts and their scores, in the order of the choice, to shared memory."""
    column = plgpu.broadcasted_iota(jnp.int32, (form.wide,), 0, layout=form.layout)
    scores = _sigmoid(logits) if form.sigmoid else logits
    ranked = scores if score_bias_ref is None else scores + plgpu.load(score_bias_ref, layout=form.layout)
    keys = ordered(ranked)
    keys_s[...] = keys
    plgpu.commit_smem()

    def compare(first, rank, number: int):
        for i, key in [(first + i, keys_s[first + i]) for i in range(number)]:
            before = (key > keys) | ((key == keys) & (column > i))
            rank = rank + jnp.where(before, 1, 0)
        return rank

    whole, rest = divmod(form.experts, _AT_ONCE)
    rank = lax.fori_loop(0, whole, lambda block, rank: compare(block * _AT_ONCE, rank, _AT_ONCE), column * 0)
    rank = compare(jnp.int32(whole * _AT_ONCE), rank, rest) if rest else rank
    rank = jnp.where(column < form.experts, rank, LANES)
    put_ranked(scores, rank, column, form.chosen, best_s, at_s, form.layout, form.parts == 1)
    plgpu.commit_smem()


def _weights(form: RouterForm, logits: jax.Array, best_s) -> list[jax.Array]:
    """Return the weights of the chosen experts."""
    best = [best_s[choice] for choice in range(form.chosen)]
    if form.sigmoid:
        parts, total = best, sum(best[1:], best[0]) + SMALLEST
    else:
        parts = [jnp.exp(score - best[0]) for score in best]
        if form.normalized:
            total = sum(parts[1:], parts[0])
        else:
            column = plgpu.broadcasted_iota(jnp.int32, (form.wide,), 0, layout=form.layout)
            total = jnp.sum(jnp.where(column < form.experts, jnp.exp(logits - best[0]), 0.0))
    factor = form.scale / total if form.normalized or not form.sigmoid else form.scale
    return [part * factor for part in parts]


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))
