"""The kernel of a router: a part of the product in each CTA of a cluster, then a token's choice in each."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.router.exchange import arrive, meet, send_sums, send_to_all, wait
from pallas_kernels.gemm.router.limits import DEPTH, PARTS, TOKENS
from pallas_kernels.gemm.router.reference import SMALLEST
from pallas_kernels.gemm.sorted_rows.form import Form, numbers, read_row
from pallas_kernels.gemm.sorted_rows.places import begins, list_tiles, write_token
from pallas_kernels.hopper import threads
from pallas_kernels.hopper.pdl import launch_next, wait_for_last
from pallas_kernels.hopper.threads import LANES, row_layout, scatter
from pallas_kernels.pointwise.quantize import api as quantize_api
from pallas_kernels.pointwise.top_k.api import ordered

_AT_ONCE = 32  # scores that are read before the first of them is compared


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
        return row_layout(self.wide)


def run(
    *refs, form: RouterForm, tokens: int, has_bias: bool, sort: Form | None, pdl: bool,
    w_s, x_s, full, sums_s, keys_s, best_s,
    flags_s: Any = None, places_s: Any = None, warps_s: Any = None,
):  # fmt: skip
    """Multiply this CTA's columns for the cluster's tokens, and choose the experts of its own tokens.

    sort: the sort of all tokens, where one cluster has all of them; None: no sort.
    """
    refs = iter(refs)
    used_ref = next(refs) if sort is not None and sort.padded else None
    x_ref, w_ref = next(refs), next(refs)
    bias_ref, score_bias_ref = next(refs) if has_bias else None, next(refs) if form.sigmoid else None
    weights_ref, numbers_ref, *sorted_refs = refs
    interpret = form.parts == 1
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
    own = [group * form.tokens + part * form.own + i for i in range(form.own)]
    kept = jnp.int32(tokens) if used_ref is None else jnp.minimum(used_ref[0], tokens)
    # The rows arrive while the CTAs multiply.
    ready = [
        _row(x_ref, jnp.minimum(token, tokens - 1), len(sorted_refs) > 9) for token in own if sort is not None
    ]

    def product(acc):
        @pl.loop(0, last - first)
        def _(step):
            plgpu.barrier_wait(full.at[step])
            plgpu.wgmma(acc, w_s.at[step], x_s.at[step].transpose((1, 0)))

        plgpu.wgmma_wait(0)
        return acc[...]

    sums = pl.run_scoped(product, plgpu.ACC((form.rows, form.tokens), jnp.float32))
    send_sums(sums, sums_s, part, form.parts)
    meet(form.parts)
    found = []
    for i, token in enumerate(own):
        logits = plgpu.load(sums_s.at[0, i], layout=form.layout)
        for other in range(1, form.parts):  # a fixed order: equal runs have equal bits
            logits = logits + plgpu.load(sums_s.at[other, i], layout=form.layout)
        if bias_ref is not None:
            logits = logits + threads.read_row(bias_ref, form.wide, interpret).astype(jnp.float32)
        scores, rank = _rank(form, logits, score_bias_ref, keys_s)
        found.append((scores, rank))
        if sort is not None:
            flags = jnp.where((rank < form.chosen) & (token < kept), 1, 0)
            send_to_all(flags, flags_s, token, form.parts)
    if sort is not None:
        arrive(form.parts)
    weights = [_weights(form, scores, rank, best_s, interpret) for scores, rank in found]
    if sort is not None:
        wait(form.parts)
        places_ref, pairs_ref, *tile_refs = sorted_refs[:8]
        to = [places_ref, pairs_ref, *sorted_refs[8:]]
        for token, (_, rank), (row, scale) in zip(own, found, ready, strict=True):
            counts, earlier = _count(sort, flags_s, token)
            begun = begins(sort, counts, warps_s, interpret)
            here = jnp.where((rank < form.chosen) & (token < kept), 1, 0)
            given = begun[1] + earlier, here, row, scale, places_s, to, interpret
            pl.when(token < tokens)(functools.partial(write_token, sort, token, rank, *given))
            pl.when(token == form.tokens - 1)(
                functools.partial(list_tiles, sort, begun, tile_refs, interpret)
            )

    # Stores to memory follow the waits, which would wait for them.
    for token, (_, rank), weight in zip(own, found, weights, strict=True):

        @pl.when(token < tokens)
        def _(token=token, rank=rank, weight=weight):
            chosen = jnp.where(rank < form.chosen, 1, 0)
            scatter(weights_ref.at[token], rank, weight, chosen, interpret)
            scatter(numbers_ref.at[token], rank, numbers(form.wide), chosen, interpret)


def _row(x_ref, token, quantizes: bool):
    """Return the parts of a row of x in float32 over its scale, and the scale; or the parts and None."""
    row = read_row(x_ref.at[token])
    return quantize_api.scaled([part.astype(jnp.float32) for part in row]) if quantizes else (row, None)


def _count(form: Form, flags_s, token) -> tuple[jax.Array, jax.Array]:
    """Return the pairs of each expert, and those of tokens before `token`.

    flags_s: [tokens, experts], 1 where a token has chosen an expert and gets rows.
    """
    counts = earlier = numbers(form.wide) * 0
    for other in range(flags_s.shape[0]):
        hits = plgpu.load(flags_s.at[other], layout=row_layout(form.wide))
        counts = counts + hits
        earlier = earlier + hits * jnp.where(other < token, 1, 0)
    return counts, earlier


def _rank(form: RouterForm, logits: jax.Array, score_bias_ref, keys_s) -> tuple[jax.Array, jax.Array]:
    """Return the scores of a token's experts, and how many experts come before each expert."""
    column = numbers(form.wide)
    scores = _sigmoid(logits) if form.sigmoid else logits
    ranked = scores if score_bias_ref is None else scores + plgpu.load(score_bias_ref, layout=form.layout)
    keys = ordered(ranked)
    keys_s[...] = keys
    plgpu.commit_smem()
    below = keys - 1  # an equal key of an earlier expert is larger than this

    def compare(first, rank, number: int):
        for i, key in [(first + i, keys_s[first + i]) for i in range(number)]:
            rank = rank + jnp.where(key > jnp.where(column > i, below, keys), 1, 0)
        return rank

    whole, rest = divmod(form.experts, _AT_ONCE)
    rank = lax.fori_loop(0, whole, lambda block, rank: compare(block * _AT_ONCE, rank, _AT_ONCE), column * 0)
    rank = compare(jnp.int32(whole * _AT_ONCE), rank, rest) if rest else rank
    return scores, jnp.where(column < form.experts, rank, form.wide)


def _weights(form: RouterForm, scores, rank, best_s, interpret: bool) -> jax.Array:
    """Return the weight of each expert, if it is chosen."""
    scatter(best_s, rank, scores, jnp.where(rank < form.chosen, 1, 0), interpret)
    plgpu.commit_smem()
    best = [best_s[choice] for choice in range(form.chosen)]
    if form.sigmoid:
        own, parts, extra = scores, best, SMALLEST
    else:
        own, parts, extra = jnp.exp(scores - best[0]), [jnp.exp(score - best[0]) for score in best], 0.0
    if form.normalized:
        return own * (form.scale / (sum(parts[1:], parts[0]) + extra))
    if form.sigmoid:
        return own * form.scale
    here = numbers(form.wide) < form.experts
    return own * (form.scale / jnp.sum(jnp.where(here, own, 0.0)))


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))
