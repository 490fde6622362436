"""The latent attention kernel: four warpgroups of a CTA process a tile of 64
heads over a piece of the pages.

All heads read one latent vector a token, so a page is wgmma's second operand for 64 heads at once, both as
keys (latent vector and rotary key) and as values (latent vector). The output of 64 heads and 512 columns
fills the registers of two warpgroups. The warpgroups are:

    0     multiplies queries and keys, and computes the weights of a page
    1, 2  multiply the weights and the values, half of the columns each
    3     copies queries and pages

The products of a page's keys and of the previous page's values run at the same time. A page is copied once,
and its place is free when both halves of its values are multiplied.
"""

import dataclasses
import functools
import types

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.chunk.registers import rescaled
from pallas_kernels.attention.latent.work_list import HEADS, walk
from pallas_kernels.attention.paged import LEAST, LOWEST, PAGE, blank
from pallas_kernels.attention.two_halves import (
    REGISTERS,
    ROW,
    WGMMA,
    add_products,
    by_row,
    column_blocks,
    full_rows,
    hidden_zero,
    no_sums,
    soften,
)
from pallas_kernels.hopper.layouts import LOG2E, swizzled

ROTARY = 64  # columns of a rotary key
SLOTS = 2  # pages in shared memory
_NEVER = 1e30  # the maximum of rows without a head, whose weights become 0


@dataclasses.dataclass(frozen=True)
class Form:
    """The parameters that the kernel's code depends on.

    heads: heads of all tiles. rank: columns of a latent vector. tiles: tiles of heads. together: most tokens
    of a row. interpret: the kernel runs in the interpreter.
    """

    heads: int
    rank: int
    tiles: int
    together: int
    scale: float
    interpret: bool

    @property
    def rows(self) -> int:
        """Return the rows of a tile: its heads, for each token."""
        return min(self.heads, HEADS) * self.together

    @property
    def part(self) -> int:
        """Return the rows of a part."""
        return self.heads * self.together

    @property
    def half(self) -> int:
        """Return the columns of one warpgroup's values."""
        return self.rank // 2


def scratch(form: Form) -> dict:
    """Return the kernel's shared memory and barriers."""
    tiled = swizzled(jnp.bfloat16)
    return {
        "q_s": plgpu.SMEM(
            (2, HEADS, form.half), jnp.bfloat16, transforms=tiled
        ),  # becomes the output of a pair
        "q_rope_s": plgpu.SMEM((HEADS, ROTARY), jnp.bfloat16, transforms=tiled),
        "latent_s": plgpu.SMEM((SLOTS, 2, PAGE, form.half), jnp.bfloat16, transforms=tiled),
        "rope_s": plgpu.SMEM((SLOTS, PAGE, ROTARY), jnp.bfloat16, transforms=tiled),
        "weights_s": plgpu.SMEM((HEADS, PAGE), jnp.bfloat16, transforms=tiled),
        # The factors of the outputs before a page, and the sums of weights.
        "factors_s": plgpu.SMEM((2, HEADS), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=3),
        "q_empty": plgpu.Barrier(num_arrivals=2),
        "page_full": plgpu.Barrier(num_arrivals=3, num_barriers=SLOTS),
        "page_empty": plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
        "weights_full": plgpu.Barrier(),
        "weights_empty": plgpu.Barrier(num_arrivals=2),
    }


def attend(*refs, form: Form, **shared):
    """Run the kernel.

    refs: queries [T * N, R + Hr], rotary keys [P * S, Hr], latent vectors [P * S, R], page table, the work
    list's rows and pieces; then o [T * N, R], parts [workers * 2 * part, R], levels [workers, 2, tiles * 64].
    """
    names = ("q", "rope", "latent", "table", "rows", "pieces", "o", "parts", "levels")
    r = types.SimpleNamespace(**dict(zip(names, refs, strict=True)), **shared)
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    worker, tile = lax.div(cta, jnp.int32(form.tiles)), lax.rem(cta, jnp.int32(form.tiles))

    @pl.when(wg == 0)
    def _():
        plgpu.set_max_registers(REGISTERS["scores"], action="increase")
        _score_pages(r, form, worker, tile)

    @pl.when((wg == 1) | (wg == 2))
    def _():
        plgpu.set_max_registers(REGISTERS["values"], action="increase")
        _sum_values(r, form, worker, tile, wg - 1)

    @pl.when(wg == 3)
    def _():
        plgpu.set_max_registers(REGISTERS["copies"], action="decrease")
        _copy_pages(r, form, worker, tile)


def _copy_pages(r, form: Form, worker, tile):
    """Copy the worker's queries and pages, in the order of their use."""

    def visit(index, page, here, pages, length, tokens):
        table_row, first_token, _ = tokens

        def copy(i, index):
            slot, first = lax.rem(index, jnp.int32(SLOTS)), r.table[table_row, page + i] * PAGE

            @pl.when(index >= SLOTS)
            def _():
                plgpu.barrier_wait(r.page_empty.at[slot])

            full, keys = r.page_full.at[slot], pl.ds(first, PAGE)
            plgpu.copy_gmem_to_smem(r.rope.at[keys], r.rope_s.at[slot], full)
            for half in range(2):
                columns = pl.ds(half * form.half, form.half)
                plgpu.copy_gmem_to_smem(r.latent.at[keys, columns], r.latent_s.at[slot, half], full)
            return index + 1

        index = copy(0, index)  # The place of the queries becomes free later than the place of a page.
        plgpu.barrier_wait(r.q_empty)
        heads, own = pl.ds(first_token * form.heads + tile * HEADS, form.rows), pl.ds(0, form.rows)
        for half in range(2):
            columns = pl.ds(half * form.half, form.half)
            plgpu.copy_gmem_to_smem(r.q.at[heads, columns], r.q_s.at[half, own], r.q_full)
        plgpu.copy_gmem_to_smem(r.q.at[heads, pl.ds(form.rank, ROTARY)], r.q_rope_s.at[own], r.q_full)
        return lax.fori_loop(1, here, copy, index)

    copied = walk(r.rows, r.pieces, worker, visit, jnp.int32(0))
    # Wait for every arrival, because the interpreter reports a barrier that no thread waited for.
    plgpu.barrier_wait(r.q_empty)

    @pl.loop(jnp.maximum(copied - SLOTS, 0), copied)
    def _(index):
        plgpu.barrier_wait(r.page_empty.at[lax.rem(index, jnp.int32(SLOTS))])


def _start_of_rows(form: Form):
    """Return (maximum [64], sums of weights by column modulo 8 [64, 8]) before the first page."""
    head = plgpu.broadcasted_iota(jnp.int32, (HEADS,), 0, layout=ROW)
    top = full_rows(LOWEST)
    return top if form.rows == HEADS else jnp.where(head < form.rows, top, full_rows(_NEVER)), no_sums()


def _weights(scores, keys, count, top, total, form: Form):
    """Return `soften` of a page's products.

    keys: the keys of the page that the last of `count` tokens sees.
    """
    key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=WGMMA)
    if form.together > 1:  # each token sees one key less than the next one
        token = plgpu.broadcasted_iota(jnp.int32, (HEADS,), 0, layout=ROW) // form.heads
        keys = by_row(jnp.minimum(token - count + 1, 0) + keys, scores.shape)
    return soften(jnp.where(key < keys, scores * (form.scale * LOG2E), -jnp.inf), top, total)


def _score_pages(r, form: Form, worker, tile):
    """Compute the weights of the worker's pages, and the level of each part of a row."""

    def scores_of(slot):
        nothing = hidden_zero(form.interpret)

        def product(acc):
            for half in range(2):
                plgpu.wgmma(acc, r.q_s.at[half + nothing], r.latent_s.at[slot, half].transpose((1, 0)))
            plgpu.wgmma(acc, r.q_rope_s, r.rope_s.at[slot].transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(product, plgpu.ACC((HEADS, PAGE), jnp.float32))

    def visit(index, page, here, pages, length, tokens):
        plgpu.barrier_wait(r.q_full)

        def step(i, state):
            top, total, index = state
            slot = lax.rem(index, jnp.int32(SLOTS))
            plgpu.barrier_wait(r.page_full.at[slot])
            keys = length - (page + i) * PAGE
            top, total, keep, weights = _weights(scores_of(slot), keys, tokens[2], top, total, form)
            weights = weights.astype(jnp.bfloat16)

            @pl.when(index > 0)
            def _():
                plgpu.barrier_wait(r.weights_empty)

            r.weights_s[...] = weights
            r.factors_s.at[0][...] = keep

            @pl.when(i + 1 == here)
            def _():
                r.factors_s.at[1][...] = total.sum(axis=1)

            plgpu.commit_smem()
            plgpu.barrier_arrive(r.weights_full)
            return top, total, index + 1

        top, total, index = lax.fori_loop(0, here, step, (*_start_of_rows(form), index))

        @pl.when(here < pages)
        def _():
            level = top + jnp.log2(jnp.maximum(total.sum(axis=1), LEAST))
            r.levels.at[worker, _begun(page), pl.ds(tile * HEADS, HEADS)][...] = level

        return index

    index = walk(r.rows, r.pieces, worker, visit, jnp.int32(0))

    @pl.when(index > 0)
    def _():
        plgpu.barrier_wait(r.weights_empty)


def _begun(page):
    """Return the place of a part: 1 for the first part of a row, 0 for a part that continues a row."""
    return jnp.where(page == 0, jnp.int32(1), jnp.int32(0))


def _sum_values(r, form: Form, worker, tile, half):
    """Sum the weighted values of half of the columns, and write them: to `o`
    for a whole row, else to `parts`.
    """
    place, shape = r.q_s.at[half], (HEADS, form.half)
    if form.rows < HEADS:  # the rows without a head stay 0: outputs of 0 follow from weights of 0
        place[...] = plgpu.layout_cast(jnp.zeros(shape, jnp.bfloat16), WGMMA)

        @pl.when(half == 0)
        def _():
            r.q_rope_s[...] = plgpu.layout_cast(jnp.zeros((HEADS, ROTARY), jnp.bfloat16), WGMMA)

        plgpu.commit_smem()
    plgpu.barrier_arrive(r.q_empty)

    def step(i, state, last):
        out, _, index = state
        slot = lax.rem(index, jnp.int32(SLOTS))
        values, keys = r.latent_s.at[slot, half], last - i * PAGE
        plgpu.barrier_wait(r.page_full.at[slot])
        plgpu.barrier_wait(r.weights_full)
        keep, total = (plgpu.load(r.factors_s.at[n], layout=ROW, optimized=False) for n in range(2))
        out = [rescaled(x, keep, form.interpret) for x in out]

        @pl.when(keys < PAGE)
        def _():
            blank(values, keys)
            plgpu.commit_smem()

        out = add_products(out, r.weights_s, values, form.interpret)
        plgpu.barrier_arrive(r.page_empty.at[slot])
        plgpu.barrier_arrive(r.weights_empty)
        return out, total, index + 1

    def visit(index, page, here, pages, length, tokens):
        zeros = [
            plgpu.layout_cast(jnp.zeros((HEADS, width), jnp.float32), WGMMA)
            for _, width in column_blocks(form.half)
        ]
        total = full_rows(0.0)
        one = functools.partial(step, last=length - page * PAGE)
        out, total, index = lax.fori_loop(0, here, one, (zeros, total, index))
        total = jnp.maximum(total, LEAST)
        for (column, width), x in zip(column_blocks(form.half), out, strict=True):
            place.at[:, pl.ds(column, width)][...] = (x / by_row(total, x.shape)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        columns = pl.ds(half * form.half, form.half)

        _, first_token, count = tokens

        def store(to, row, first=0, rows=form.rows):
            plgpu.copy_smem_to_gmem(
                place.at[pl.ds(first, rows)], to.at[pl.ds(row + tile * HEADS, rows), columns]
            )

        @pl.when(here == pages)
        def _():
            if form.together == 1:
                store(r.o, first_token * form.heads)
            for token in range(form.together if form.together > 1 else 0):

                @pl.when(token < count)
                def _(token=token):
                    store(r.o, (first_token + token) * form.heads, token * form.heads, form.heads)

        pl.when(here < pages)(lambda: store(r.parts, (worker * 2 + _begun(page)) * form.part))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(r.q_empty)
        return index

    walk(r.rows, r.pieces, worker, visit, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)
