"""The items of a CTA in a persistent kernel of chunk attention: a round has one item a CTA."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.chunk.rows import MARKS


def item_at(i, *, cta, sms: int):
    """Return the item of round i, back and forth over the sorted list. The last round may have no item."""
    return i * sms + jnp.where(lax.rem(i, jnp.int32(2)) == 0, cta, sms - 1 - cta)


def visit_items(rounds, items, item_of, tile_of, visit, carry):
    """Return the carry after visit(carry, round, head, *tile) for a CTA's items.

    items: the number of items of all CTAs. item_of, tile_of: functions of the round; tile_of returns (item,
    head, *tile), of any tile if the round has no item.
    """

    def round_(i, state):
        (which, *facts), carry = state
        following = tile_of(i + 1)  # read ahead, to hide the latency
        return following, lax.cond(
            which < items, lambda carry: visit(carry, i, *facts), lambda carry: carry, carry
        )

    return lax.fori_loop(0, rounds, round_, (tile_of(jnp.int32(0)), carry))[1]


def visit_marked(rounds, items, item_of, tile_of, again, visit, carry):
    """Return the carry after the visits of `visit_items` for marked rounds only.

    again: the marks. Rounds can share a mark, so some run again needlessly. The last round can have a mark
    but no item.
    """

    def round_(i, carry):
        at = lax.rem(i, jnp.int32(MARKS))
        marked = (again[0, at] + again[1, at] > 0) & (item_of(i) < items)
        return lax.cond(marked, lambda carry: visit(carry, i, *tile_of(i)[1:]), lambda carry: carry, carry)

    return lax.fori_loop(0, rounds, round_, carry)


def wait_for_all(count, places, *empty):
    """Wait for every arrival, because the interpreter reports a barrier that no thread waited for."""

    @pl.loop(jnp.maximum(count - places, 0), count)
    def _(i):
        for barrier in empty:
            plgpu.barrier_wait(barrier.at[lax.rem(i, jnp.int32(places))])


def clear_marks(again, wg, rounds):
    """Clear the marks of a warpgroup's rounds."""

    @pl.loop(0, rounds)
    def _(i):
        again[wg, i] = jnp.int32(0)
