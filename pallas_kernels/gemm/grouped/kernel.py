"""The grouped GEMM kernel: one warpgroup copies weights and rows through a ring, the others multiply and store.

The operands are swapped, as in flat GEMM: rows of the weight are wgmma's M, rows of x its N. A tile of x
starts at any multiple of 8 rows, and reads rows of the next expert where its own expert has fewer. The
columns of these rows are not stored: a result leaves in boxes of 8 rows, up to the tile's end.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.dense.epilogue import activate
from pallas_kernels.gemm.grouped.tiles import ALIGN, PART, GroupedTile
from pallas_kernels.hopper.layouts import swizzled

_STRIP = 16  # neighboring tiles of rows before the next columns
_COPY_REGISTERS, _REGISTERS = 24, 240  # 24 + 2 · 240 = 3 · 168, the registers of the launch


@dataclasses.dataclass(frozen=True)
class GroupedForm:
    """The parameters that the kernel is compiled for.

    n: rows of an expert's weight. gate_block: gates and ups alternate in blocks of so many rows, or None.
    """

    tile: GroupedTile
    n: int
    activation: str | None
    gate_block: int | None

    @property
    def block(self) -> int:
        """Return the rows of the weight in one copy."""
        return self.gate_block or 64

    @property
    def width(self) -> int:
        """Return the columns of a box of the result: the widest that divides the result."""
        return next(width for width in (64, 32, 16) if self.columns % width == 0)

    @property
    def columns(self) -> int:
        """Return the columns of the result."""
        return self.n // 2 if self.gate_block else self.n

    def copies(self) -> list[tuple[int, int]]:
        """Return (row of the weight, row in shared memory) of each copy of a tile.

        With gates a warpgroup has its 64 gates first and then their ups, in whatever blocks they alternate.
        """
        if self.gate_block is None:
            return [(row, row) for row in range(0, self.tile.columns, self.block)]
        return [
            (part + 2 * row + up * self.block, part + row + up * 64)
            for part in range(0, self.tile.columns, PART)
            for row in range(0, 64, self.block)
            for up in (0, 1)
        ]


def scratch(form: GroupedForm) -> dict:
    """Return the kernel's shared memory and barriers."""
    tile, operand = form.tile, swizzled(jnp.bfloat16)
    return {
        "w_s": plgpu.SMEM((tile.stages, tile.columns, tile.depth), jnp.bfloat16, transforms=operand),
        "x_s": plgpu.SMEM((tile.stages, tile.rows, tile.depth), jnp.bfloat16, transforms=operand),
        "o_s": plgpu.SMEM(
            (tile.warpgroups, 2, tile.box, 64), jnp.bfloat16, transforms=swizzled(jnp.bfloat16, form.width)
        ),
        "full": plgpu.Barrier(num_arrivals=1 + len(form.copies()), num_barriers=tile.stages),
        "empty": plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=tile.stages),
    }


def multiply(
    experts_ref, starts_ref, ends_ref, count_ref, x_ref, w_ref, o_ref, *, form: GroupedForm, w_s, x_s, o_s, full,
    empty,
):  # fmt: skip
    """Run the kernel."""
    tile, wg = form.tile, lax.axis_index("wg")
    worker, workers = lax.axis_index("worker"), lax.axis_size("worker")
    columns, steps = pl.cdiv(form.n, tile.columns), pl.cdiv(x_ref.shape[1], tile.depth)
    tiles = count_ref[0]
    items = tiles * columns
    mine = lax.div(items - worker + workers - 1, jnp.int32(workers))

    def item(i):
        """Return (expert, first row, row after the last, column of tiles) of this worker's item i."""
        which, strip = jnp.clip(worker + i * workers, 0, items - 1), _STRIP * columns
        first = lax.div(which, jnp.int32(strip)) * _STRIP
        height, rest = jnp.minimum(tiles - first, _STRIP), lax.rem(which, jnp.int32(strip))
        at = first + lax.rem(rest, height)
        return experts_ref[at], starts_ref[at], ends_ref[at], lax.div(rest, height)

    def for_items(visit):
        """Call visit(i, *item) for each item. The next item is read during the current one."""

        def one(i, own):
            following = item(i + 1)
            visit(i, *own)
            return following

        @pl.when(mine > 0)
        def _():
            lax.fori_loop(0, mine, one, item(jnp.int32(0)))

    @pl.when(wg == tile.warpgroups)
    def _():
        if tile.warpgroups > 1:
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
        for_items(_copier(form, steps, x_ref, w_ref, x_s, w_s, full, empty))

        @pl.loop(jnp.maximum(mine * steps - tile.stages, 0), mine * steps)
        def _(step):  # the interpreter reports an arrival without a wait
            plgpu.barrier_wait(empty.at[lax.rem(step, jnp.int32(tile.stages))])

    @pl.when(wg < tile.warpgroups)
    def _():
        if tile.warpgroups > 1:
            plgpu.set_max_registers(_REGISTERS, action="increase")
        for_items(_multiplier(form, steps, wg, x_s, w_s, o_s, o_ref, full, empty))
        plgpu.wait_smem_to_gmem(0)


def _copier(form, steps, x_ref, w_ref, x_s, w_s, full, empty):
    """Return the copies of an item: the operands of every k step, ahead by the number of stages."""
    tile, stages = form.tile, jnp.int32(form.tile.stages)

    def visit(i, expert, start, _, column):
        base = expert * form.n + column * tile.columns

        def copy(step, _):
            slot, at = lax.rem(i * steps + step, stages), pl.ds(step * tile.depth, tile.depth)

            @pl.when(i * steps + step >= stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            for row, to in form.copies():
                # Rows past the last expert do not exist; their columns are not stored.
                rows = pl.ds(jnp.minimum(base + row, w_ref.shape[0] - form.block), form.block)
                plgpu.copy_gmem_to_smem(
                    w_ref.at[rows, at], w_s.at[slot, pl.ds(to, form.block)], full.at[slot]
                )
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(start, tile.rows), at], x_s.at[slot], full.at[slot])

        lax.fori_loop(0, steps, copy, None)

    return visit


def _multiplier(form, steps, wg, x_s, w_s, o_s, o_ref, full, empty):
    """Return the product of an item: this warpgroup's columns, summed and stored."""
    tile, stages = form.tile, jnp.int32(form.tile.stages)

    def visit(i, _, start, end, column):
        def product(acc):
            def one(step, _):
                at = i * steps + step
                slot = lax.rem(at, stages)
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, w_s.at[slot, pl.ds(wg * PART, PART)], x_s.at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(1)

                @pl.when(step > 0)
                def _():  # the step before this one is done
                    plgpu.barrier_arrive(empty.at[lax.rem(at + stages - 1, stages)])

            lax.fori_loop(0, steps, one, None)
            y = acc[...]
            plgpu.barrier_arrive(empty.at[lax.rem(i * steps + steps - 1, stages)])
            _store(form, y, o_s.at[wg], o_ref, start, end, (column * tile.warpgroups + wg) * PART)

        pl.run_scoped(product, plgpu.ACC((PART, tile.rows), jnp.float32))

    return visit


def _store(form, y, o_s, o_ref, start, end, row):
    """Apply the epilogue to y [PART, rows], and store its tokens up to `end`.

    row: the first row of the weight within the expert.
    """
    if form.gate_block is None:
        pieces = [(activate(y[at : at + 64], form.activation), row + at) for at in range(0, PART, 64)]
    else:
        pieces = [(activate(y[:64], form.activation) * y[64:], lax.div(row, jnp.int32(2)))]
    box, turn = form.tile.box, 0
    for value, column in pieces:
        for token in range(0, form.tile.rows, box):
            to = o_s.at[turn % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            to.transpose((1, 0))[...] = value[:, token : token + box].astype(o_s.dtype)
            plgpu.commit_smem()
            for some in range(0, box, ALIGN):
                for inside in range(0, 64, form.width):
                    first, left = start + token + some, column + inside

                    @pl.when((first < end) & (left < form.columns))
                    def _(first=first, left=left, some=some, inside=inside, to=to):
                        plgpu.copy_smem_to_gmem(
                            to.at[pl.ds(some, ALIGN), pl.ds(inside, form.width)],
                            o_ref.at[pl.ds(first, ALIGN), pl.ds(left, form.width)],
                            commit_group=False,
                        )

            plgpu.commit_smem_to_gmem_group()
            turn += 1
