"""The softmax of decode attention on scores [64 keys, heads], in powers of two.

A round of pages computes its weights relative to a constant maximum. One vote, at a barrier that the round
needs anyway, checks that all scores allow this. Otherwise the round moves the maximum and rescales the
earlier sums. With a unified max value phi (FlashDecoding++Next §3) rows start at phi, so rows within its
bound never compute their maximum. Without phi, rows start at the maximum of their first round.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.attention.paged import LOWEST, PAGE, capped, sink_term
from pallas_kernels.hopper.layouts import LOG2E

_WGMMA = plgpu.Layout.WGMMA
_HEADS = _WGMMA.reduce(0)
_NEVER = 3e38


class Range(NamedTuple):
    """The scores that leave the maximum unchanged. Weights are 2**(score - top).

    top: [cols], the start value. cap: [cols]; a score above top + cap moves the maximum, in columns of
    heads only. floor: [cols]; a head with all first keys below floor computes its own maximum, so that no
    sum underflows. lift: after a move to maximum m, top = m - lift.
    """

    top: jax.Array
    cap: jax.Array
    floor: jax.Array
    lift: float


def score_range(unified_max, heads: int, cols: int, e4m3: bool) -> Range:
    """Return the range for unified_max = (phi, bound), in units of a score, or for a running maximum
    (None).

    heads: columns that belong to heads. bfloat16 weights have float32's exponents: a running maximum moves
    by at least 2**10, and bounds up to 2**96 are exact. e4m3 weights end at 448 and lose bits below 2**-6,
    so phi serves only rows with a maximum within 2**±3 of phi.
    """
    lift, most = (5.0, 8.75) if e4m3 else (0.0, 10.0 if unified_max is None else 96.0)
    column = plgpu.broadcasted_iota(jnp.int32, (cols,), 0, layout=_HEADS)
    full = lambda x: plgpu.layout_cast(jnp.full((cols,), x, jnp.float32), _HEADS)
    if unified_max is None:
        top, cap, floor = full(LOWEST), full(most), full(-jnp.inf)
    else:
        phi, bound = (x * LOG2E for x in unified_max)
        top, cap = full(phi - lift), full(jnp.minimum(bound + lift, most))
        floor = full(phi - jnp.minimum(bound, 3.0 if e4m3 else most))
    used = column < heads
    return Range(top, jnp.where(used, cap, full(_NEVER)), jnp.where(used, floor, full(-jnp.inf)), lift)


def start(h, cols):
    """Return the sums of weights by key and the output before the first page."""
    return tuple(plgpu.layout_cast(jnp.zeros((rows, cols), jnp.float32), _WGMMA) for rows in (PAGE, h))


def with_sinks(total, top, logits_ref, first, raw):
    """Return the sums of weights [cols] with the terms of the heads' attention sinks.

    logits_ref: [cols] in powers of two, or raw. first: whether this is the pair's first
      part, which alone has the term.
    """
    logits = plgpu.load(logits_ref, layout=_HEADS, optimized=False)
    term = sink_term(logits.astype(jnp.float32) * LOG2E if raw else logits, top)
    return total + jnp.where(first, term, jnp.zeros_like(term))


def across_keys(x, op, *, scratch, interpret):
    """Return the sum or maximum of x [keys, heads] over keys.

    Warps exchange values in `scratch`. Pallas' own reduction has one scratch for the CTA, which warpgroups
    would overwrite.
    """
    if interpret:
        return x.sum(axis=0) if op == "add" else x.max(axis=0)
    reduce = plgpu.inline_mgpu(
        arg_types=(_WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((x.shape[1],), x.dtype, layout=_HEADS),
    )
    return reduce(lambda _, x, scratch: x.reduce(op, 0, scratch))(x, scratch)


def soften(scores, seen, bounds: Range, begun, put, across, top, total, out, *, scale, soft_cap, interpret):
    """Return (top, total, out) after one round over a list of pages [keys, cols], and store the weights.
    Commit.

    begun: True if the pair had an earlier round. put(page, weights) stores the weights of one page.
    """
    scores = [x * factor for x, factor in (capped(x, scale, soft_cap) for x in scores)]
    scores = [jnp.where(mask, x, -jnp.inf) for x, mask in zip(scores, seen, strict=True)]
    highest = scores[0] if len(scores) == 1 else jnp.maximum(*scores)

    def weigh(top):
        weights = [jnp.exp2(x - lax.broadcast_in_dim(top, x.shape, [1])) for x in scores]
        for page, weight in enumerate(weights):
            put(page, weight)
        return weights[0] if len(weights) == 1 else weights[0] + weights[1]

    def stay():
        return top, total + added, out

    def move():
        base = jnp.where(begun, top, jnp.full_like(top, LOWEST))
        new_top = jnp.maximum(base, across(highest, "max") - bounds.lift)
        keep = jnp.exp2(base - new_top)
        more = weigh(new_top)
        plgpu.commit_smem()
        by_head = lambda x: x * lax.broadcast_in_dim(keep, x.shape, [1])
        return new_top, by_head(total) + more, by_head(out)

    added = weigh(top)
    floor = jnp.where(begun, jnp.full_like(bounds.floor, -jnp.inf), bounds.floor)
    return lax.cond(_leaves(highest, top + bounds.cap, floor, interpret), move, stay)


def _leaves(highest, cap, floor, interpret: bool):
    """Return whether a score in highest [keys, cols] is above its column's cap, or all keys of a warp are
    below a floor.

    The function commits shared memory. The answer arrives with the barrier that the weights need anyway. A
    warp sees 16 keys of each page; if only these are below the floor, the pair computes its own maximum
    needlessly.
    """
    if interpret:
        plgpu.commit_smem()
        below = (highest < floor).reshape(4, 16, -1).all(1).any()
        return (highest > cap).any() | below

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA, _HEADS, _HEADS),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def vote(_, highest, cap, floor):
        i32 = ir.IntegerType.get_signless(32)
        number = lambda x: mgpu.c(x, i32)
        bit = lambda x: arith.extui(i32, x)
        above, reached, columns = number(0), number(0), highest.shape[1]
        for tile in range(columns // 8):  # a thread holds two columns of each 8
            for i in range(2):
                pick = lambda register, i=i: vector.extract(register, [], [i])
                top = functools.reduce(arith.maximumf, (pick(x) for x in highest.registers[:, tile].flat))
                over = arith.cmpf(arith.CmpFPredicate.UGT, top, pick(cap.registers.flat[tile]))
                there = arith.cmpf(arith.CmpFPredicate.OGE, top, pick(floor.registers.flat[tile]))
                above = arith.ori(above, bit(over))
                reached = arith.ori(reached, arith.shli(bit(there), number(2 * tile + i)))
        lane = arith.remui(mgpu.utils.thread_idx(), number(4))
        reached = arith.shli(reached, arith.muli(lane, number(columns // 4)))
        # A redux.or combines the lanes of a warp. One barrier then gives the vote to all threads.
        return mgpu.FragmentedArray.splat(
            llvm.inline_asm(
                i32,
                [reached, above, mgpu.utils.warpgroup_barrier_idx(sync=False)],
                f"""{{
                .reg .pred p, q;
                .reg .b32 all;
                redux.sync.or.b32 all, $1, 0xffffffff;
                setp.ne.b32 p, all, {(1 << columns) - 1};
                setp.ne.or.b32 p, $2, 0, p;
                fence.proxy.async.shared::cta;
                barrier.cta.red.or.pred q, $3, 128, p;
                selp.b32 $0, 1, 0, q;
                }}""",
                "=r,r,r,r,~{memory}",
                has_side_effects=True,
            ),
            (),
            is_signed=True,
        )

    return vote(highest, cap, floor) != 0  # pyright: ignore[reportCallIssue]
