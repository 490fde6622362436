"""The grouped GEMM kernel: one warpgroup copies weights and rows through a ring, the others multiply and store.

The operands are swapped, as in flat GEMM: rows of the weight are wgmma's M, rows of x its N. A tile of x
starts at any multiple of 8 rows, and reads rows of the next expert where its own expert has fewer. The
columns of these rows are not stored: a result leaves in boxes of 8 rows, up to the tile's end.

Operands in e4m3 have a scale for each row of x and each row of the weight. The scales multiply the finished
sums in registers.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.dense.epilogue import activate
from pallas_kernels.gemm.fp8.epilogue import BY_COLUMN, BY_ROW, load
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


def scratch(form: GroupedForm, dtype) -> dict:
    """Return the kernel's shared memory and barriers, for operands of a dtype."""
    tile, operand = form.tile, swizzled(dtype)
    return {
        "w_s": plgpu.SMEM((tile.stages, tile.columns, tile.depth), dtype, transforms=operand),
        "x_s": plgpu.SMEM((tile.stages, tile.rows, tile.depth), dtype, transforms=operand),
        "o_s": plgpu.SMEM(
            (tile.warpgroups, 2, tile.box, 64), jnp.bfloat16, transforms=swizzled(jnp.bfloat16, form.width)
        ),
        "full": plgpu.Barrier(num_arrivals=1 + len(form.copies()), num_barriers=tile.stages),
        "empty": plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=tile.stages),
    }


def multiply(
    experts_ref, starts_ref, ends_ref, count_ref, x_ref, w_ref, *refs, form: GroupedForm, w_s, x_s, o_s, full,
    empty,
):  # fmt: skip
    """Run the kernel. refs: the scales of x and w, if these are e4m3, and the result."""
    *scales, o_ref = refs
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
        for_items(_multiplier(form, steps, wg, x_s, w_s, o_s, o_ref, scales, full, empty))
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


def _multiplier(form, steps, wg, x_s, w_s, o_s, o_ref, scales, full, empty):
    """Return the product of an item: this warpgroup's columns, summed and stored."""
    tile, stages = form.tile, jnp.int32(form.tile.stages)

    def visit(i, expert, start, end, column):
        row = (column * tile.warpgroups + wg) * PART

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
            finished = _epilogue(form, y, scales, start, expert * form.n + row)
            to = lax.div(row, jnp.int32(2)) if form.gate_block else row
            _store(form, finished, o_s.at[wg], o_ref, start, end, to)

        pl.run_scoped(product, plgpu.ACC((PART, tile.rows), jnp.float32))

    return visit


def _epilogue(form, y, scales, start, row):
    """Return finished(token, count): the pieces [64, count] of the result of some tokens of y [PART, rows].

    start: the first row of x. row: the first row of the weight among the rows of all experts. Registers hold
    the scales of few tokens at a time, and those of the channels where these are costly to find.
    """
    gated = form.gate_block is not None
    of_gates = _channel_scales(form, scales[1], row) if scales and gated else None

    def finished(token: int, count: int):
        halves = [y[at : at + 64, token : token + count] for at in (0, 64)]
        if scales:
            channels = of_gates or _channel_scales(form, scales[1], row)
            by_token = load(scales[0].at[pl.ds(start + token, count)], BY_COLUMN)
            halves = [
                half
                * lax.broadcast_in_dim(by_row, half.shape, [0])
                * lax.broadcast_in_dim(by_token, half.shape, [1])
                for half, by_row in zip(halves, channels, strict=True)
            ]
        if gated:
            return [activate(halves[0], form.activation) * halves[1]]
        return [activate(half, form.activation) for half in halves]

    return finished


def _channel_scales(form, channels, row):
    """Return the scales of both halves of `PART` rows of the weight, of which `row` is the first."""

    def rows_from(at):
        """Return the scales of 64 rows. Rows past the last expert do not exist, and are not stored."""
        return load(channels.at[pl.ds(jnp.minimum(row + at, channels.shape[0] - 64), 64)], BY_ROW)

    if form.gate_block is None:
        return rows_from(0), rows_from(64)
    # Row r of the gates lies in block r // b, behind as many blocks of ups.
    b, count = form.block, 64 // form.block
    parts = [rows_from(j * b) for j in range(count + 1)]
    block = lax.div(plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=BY_ROW), jnp.int32(b))

    def chosen(ups: int):
        found = parts[ups]
        for j in range(1, count):
            found = jnp.where(block == j, parts[ups + j], found)
        return found

    return chosen(0), chosen(1)


def _store(form, finished, o_s, o_ref, start, end, column):
    """Store the tokens up to `end`. column: the first column of the pieces in the result."""
    box, turn = form.tile.box, 0
    for token in range(0, form.tile.rows, box):
        for number, value in enumerate(finished(token, box)):
            to = o_s.at[turn % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            to.transpose((1, 0))[...] = value.astype(o_s.dtype)
            plgpu.commit_smem()
            for some in range(0, box, ALIGN):
                for inside in range(0, 64, form.width):
                    first, left = start + token + some, column + number * 64 + inside

                    @pl.when((first < end) & (left < form.columns))
                    def _(first=first, left=left, some=some, inside=inside, to=to):
                        plgpu.copy_smem_to_gmem(
                            to.at[pl.ds(some, ALIGN), pl.ds(inside, form.width)],
                            o_ref.at[pl.ds(first, ALIGN), pl.ds(left, form.width)],
                            commit_group=False,
                        )

            plgpu.commit_smem_to_gmem_group()
            turn += 1
