"""The grouped GEMM kernel: one warpgroup copies weights and rows through a ring,
the others multiply and store.

The operands are swapped, as in flat GEMM: rows of the weight are wgmma's M, rows of x its N. A tile of x
starts at any multiple of 8 rows, and reads rows of the next expert where its own expert has fewer. The
columns of these rows are not stored: a result leaves in boxes of 8 rows, up to the tile's end.

Operands in e4m3 have a scale for each row of x and each row of the weight. The scales multiply the finished
sums in registers.

A weight in e4m3 blocks is multiplied 128 columns at a time, and the scales of the rows and of the weight
multiply each of these products (`block_products`).

A weight in MXFP4 goes from shared memory through registers (`mxfp4_operand`). The scales of a tile's rows are
one piece of memory, since a row's scales may be too few for a copy of their own. So each tile has one copy of
the scales of all its columns, into one of two buffers.

A weight in int4 goes through registers, too (`int4_operand`). Its factors are copied with each stage. So does
a weight of MXFP4 in blocks, which have their scales (`mxfp4_mma`).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.grouped import block_products, gate_pairs, int4_operand, mxfp4_mma, mxfp4_operand
from pallas_kernels.gemm.grouped.block_products import BlockScales
from pallas_kernels.gemm.grouped.epilogue import biases, channel_values, epilogue, token_scales
from pallas_kernels.gemm.grouped.int4_format import dequantize_experts
from pallas_kernels.gemm.grouped.mxfp4_blocks import ROWS as BLOCK_ROWS
from pallas_kernels.gemm.grouped.mxfp4_blocks import dequantize_blocks
from pallas_kernels.gemm.grouped.mxfp4_format import dequantize_mxfp4
from pallas_kernels.gemm.grouped.mxfp4_operand import COLUMNS, SHIFT, WIDTH
from pallas_kernels.gemm.grouped.tiles import ALIGN, GATE_PAIRS, PART, GroupedTile
from pallas_kernels.hopper.layouts import swizzled
from pallas_kernels.quantized import MXFP4_WORDS, ExpertInt4, Mxfp4, Mxfp4Blocks

_STRIP = 16  # neighboring tiles of rows before the next columns


@dataclasses.dataclass(frozen=True)
class GroupedForm:
    """The parameters that the kernel is compiled for.

    n: rows of an expert's weight. gate_block: gates and ups alternate in blocks of so many rows, or None.
    k: columns of a weight in MXFP4, or None. group: columns of a weight in int4 with one scale, or None.
    in_blocks: a weight of MXFP4 is in blocks. zero_points: the factors of a weight in int4 are in int16.
    blocks: the operands are e4m3 with a scale for each block of 128 columns.
    bias: the sums get the bias of their expert. interpret: the kernel runs in the interpreter.
    """

    tile: GroupedTile
    n: int
    activation: str | None
    gate_block: int | None
    k: int | None = None
    group: int | None = None
    in_blocks: bool = False
    zero_points: bool = False
    blocks: bool = False
    bias: bool = False
    interpret: bool = False

    @property
    def packed(self) -> bool:
        """Return whether a byte of the weight has two columns."""
        return self.k is not None or self.group is not None or self.in_blocks

    @property
    def groups(self) -> int:
        """Return the groups of a weight in int4 in a stage."""
        return self.tile.depth // self.group if self.group else 0

    @property
    def registers(self) -> tuple[int, int]:
        """Return the registers of a thread that copies, and of one that multiplies.

        With two multiplying warpgroups, 40 + 2 · 232 = 24 + 2 · 240 = 3 · 168, the registers of the
        launch. The copies with scales have more addresses.
        """
        copies, warpgroups = 40 if self.group or self.blocks else 24, self.tile.warpgroups
        launched = 65536 // (128 * (warpgroups + 1)) // 8 * 8 * (warpgroups + 1)
        return copies, min(240, (launched - copies) // warpgroups // 8 * 8)

    @property
    def block(self) -> int:
        """Return the rows of the weight in one copy."""
        if self.paired:
            return 64 if self.reads_pairs else gate_pairs.ROWS
        return self.gate_block or 64

    @property
    def paired(self) -> bool:
        """Return whether gates and ups are neighbors in registers (`gate_pairs`)."""
        return self.gate_block == GATE_PAIRS

    @property
    def reads_pairs(self) -> bool:
        """Return whether the operands, and not the copies, bring the rows into the order of `gate_pairs`."""
        return self.paired and (self.k is not None or self.in_blocks)

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

        With gates a warpgroup has its 64 gates first and then their ups, in whatever blocks they alternate,
        or has the order of `gate_pairs`.
        """
        if self.paired and not self.reads_pairs:
            return [
                (part + gate_pairs.ROWS * block, part + gate_pairs.place_of(block))
                for part in range(0, self.tile.columns, PART)
                for block in range(PART // gate_pairs.ROWS)
            ]
        if self.gate_block is None or self.paired:
            return [(row, row) for row in range(0, self.tile.columns, self.block)]
        return [
            (part + 2 * row + up * self.block, part + row + up * 64)
            for part in range(0, self.tile.columns, PART)
            for row in range(0, 64, self.block)
            for up in (0, 1)
        ]


def strip_item(which, tiles, columns: int):
    """Return (tile of rows, column of tiles) of an item, in strips of neighboring tiles of rows."""
    strip = _STRIP * columns
    first = lax.div(which, jnp.int32(strip)) * _STRIP
    height, rest = jnp.minimum(tiles - first, _STRIP), lax.rem(which, jnp.int32(strip))
    return first + lax.rem(rest, height), lax.div(rest, height)


def scratch(form: GroupedForm, dtype) -> dict:
    """Return the kernel's shared memory and barriers, for rows of x of a dtype."""
    tile, moved = form.tile, swizzled(dtype)
    weight = plgpu.SMEM((tile.stages, tile.columns, tile.depth), dtype, transforms=moved)
    copies = len(form.copies()) * (2 if form.group else 1) + 1 + form.blocks
    own = {"w_s": weight} | (block_products.scratch(tile) if form.blocks else {})
    return (_packed_scratch(form) if form.packed else own) | {
        "x_s": plgpu.SMEM((tile.stages, tile.rows, tile.depth), dtype, transforms=moved),
        "o_s": plgpu.SMEM(
            (tile.warpgroups, 2, tile.box, 64), jnp.bfloat16, transforms=swizzled(jnp.bfloat16, form.width)
        ),
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=tile.stages),
        "empty": plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=tile.stages),
    }


def _packed_scratch(form: GroupedForm) -> dict:
    """Return the shared memory and the barriers of a weight in MXFP4 or int4."""
    tile = form.tile
    wide = (tile.warpgroups, PART, COLUMNS)  # the interpreter has no operands in registers
    own = {"wide_s": plgpu.SMEM(wide, jnp.bfloat16, transforms=swizzled(jnp.bfloat16))}
    if form.in_blocks:
        stage = (tile.columns // BLOCK_ROWS, tile.depth // COLUMNS, MXFP4_WORDS)
        words = {"w_s": plgpu.SMEM((tile.stages, *stage), jnp.int32)}
        return words | (own if form.interpret else {})
    made: dict[str, Any] = {
        "w_s": plgpu.SMEM(
            (tile.stages, tile.columns, tile.depth // 2), jnp.uint8, transforms=swizzled(jnp.uint8, WIDTH)
        ),
    }
    if form.k is not None:
        made |= {
            "f_s": plgpu.SMEM((2, tile.columns // 8, form.k // COLUMNS, 16), jnp.uint8),
            "f_full": plgpu.Barrier(num_arrivals=len(form.copies()), num_barriers=2),
            "f_empty": plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=2),
        }
    else:
        factors = (tile.stages, tile.columns // form.block, form.groups, 2 * form.block)
        made["f_s"] = plgpu.SMEM(factors, jnp.int16 if form.zero_points else jnp.bfloat16)
    return made | (own if form.interpret else {})


def multiply(
    experts_ref, starts_ref, ends_ref, count_ref, x_ref, w_ref, *refs, form: GroupedForm, w_s, x_s, o_s, full,
    empty, f_s: Any = None, f_full: Any = None, f_empty: Any = None, wide_s: Any = None, t_s: Any = None,
):  # fmt: skip
    """Run the kernel. refs: the scales of x and w if these are e4m3, or of w in 4 bits, the bias, and the
    result.
    """
    *scales, o_ref = refs
    bias = scales.pop() if form.bias else None
    of_blocks = BlockScales(scales[0], scales[1], t_s) if form.blocks else None
    of_tiles = _TileScales(scales.pop(), f_s, f_full, f_empty) if form.k else None
    of_stages = _StageFactors(scales.pop(), f_s) if form.group else None
    tile, wg = form.tile, lax.axis_index("wg")
    worker, workers = lax.axis_index("worker"), lax.axis_size("worker")
    columns, steps = pl.cdiv(form.n, tile.columns), pl.cdiv(x_ref.shape[1], tile.depth)
    tiles = count_ref[0]
    items = tiles * columns
    mine = lax.div(items - worker + workers - 1, jnp.int32(workers))

    def item(i):
        """Return (expert, first row, row after the last, column of tiles) of this worker's item i."""
        at, column = strip_item(jnp.clip(worker + i * workers, 0, items - 1), tiles, columns)
        return experts_ref[at], starts_ref[at], ends_ref[at], column

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
            plgpu.set_max_registers(form.registers[0], action="decrease")
        for_items(_copier(form, steps, x_ref, w_ref, x_s, w_s, full, empty, of_tiles, of_stages, of_blocks))

        @pl.loop(jnp.maximum(mine * steps - tile.stages, 0), mine * steps)
        def _(step):  # the interpreter reports an arrival without a wait
            plgpu.barrier_wait(empty.at[lax.rem(step, jnp.int32(tile.stages))])

        if of_tiles is not None:

            @pl.loop(jnp.maximum(mine - 2, 0), mine)
            def _(i):
                plgpu.barrier_wait(f_empty.at[lax.rem(i, jnp.int32(2))])

    @pl.when(wg < tile.warpgroups)
    def _():
        if tile.warpgroups > 1:
            plgpu.set_max_registers(form.registers[1], action="increase")
        factors = of_tiles or of_stages or of_blocks
        added = (scales, bias)
        for_items(_multiplier(form, steps, wg, x_s, w_s, o_s, o_ref, added, full, empty, factors, wide_s))
        plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class _TileScales:
    """The scales of a weight in MXFP4: in memory, in two buffers of shared memory, and their barriers."""

    memory: Any
    buffers: Any
    full: Any
    empty: Any


@dataclasses.dataclass(frozen=True)
class _StageFactors:
    """The factors of a weight in int4: in memory, and in the stages of shared memory."""

    memory: Any
    buffers: Any


def _copier(form, steps, x_ref, w_ref, x_s, w_s, full, empty, of_tiles, of_stages, of_blocks):
    """Return the copies of an item: the operands of every k step, ahead by the number of stages."""
    tile, stages = form.tile, jnp.int32(form.tile.stages)
    deep = tile.depth // 2 if form.packed else tile.depth  # elements of the weight's row in a stage

    def visit(i, expert, start, _, column):
        base = expert * form.n + column * tile.columns

        def existing(row):
            """Return a row, or for rows past the last expert others. Their columns are not stored."""
            rows = w_ref.shape[0] * (BLOCK_ROWS if form.in_blocks else 1)
            return jnp.minimum(base + row, rows - form.block)

        if of_tiles is not None:
            turn = lax.rem(i, jnp.int32(2))

            @pl.when(i >= 2)
            def _():
                plgpu.barrier_wait(of_tiles.empty.at[turn])

            for row, to in form.copies():
                eights = form.block // 8
                plgpu.copy_gmem_to_smem(
                    of_tiles.memory.at[pl.ds(lax.div(existing(row), jnp.int32(8)), eights)],
                    of_tiles.buffers.at[turn, pl.ds(to // 8, eights)],
                    of_tiles.full.at[turn],
                )

        def copy(step, _):
            slot, at = lax.rem(i * steps + step, stages), pl.ds(step * tile.depth, tile.depth)

            @pl.when(i * steps + step >= stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            for row, to in form.copies():
                if form.in_blocks:
                    _copy_blocks(form, w_ref, existing(row), step, w_s.at[slot], to, full.at[slot])
                    continue
                rows, columns = pl.ds(existing(row), form.block), pl.ds(step * deep, deep)
                plgpu.copy_gmem_to_smem(
                    w_ref.at[rows, columns], w_s.at[slot, pl.ds(to, form.block)], full.at[slot]
                )
                if of_stages is not None:
                    # For rows past the expert others. Their columns are not stored.
                    first = jnp.minimum(column * tile.columns + row, form.n - form.block)
                    groups = (
                        of_stages.memory.shape[0] * form.n // w_ref.shape[0]
                    )  # groups of columns of an expert
                    plgpu.copy_gmem_to_smem(
                        of_stages.memory.at[
                            pl.ds(expert * groups + step * form.groups, form.groups),
                            pl.ds(2 * first, 2 * form.block),
                        ],
                        of_stages.buffers.at[slot, to // form.block],
                        full.at[slot],
                    )
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(start, tile.rows), at], x_s.at[slot], full.at[slot])
            if of_blocks is not None:
                of_blocks.copy_tokens(start, step, slot, full)

        lax.fori_loop(0, steps, copy, None)

    return visit


def _copy_blocks(form, w_ref, row, step, w_s, to, full):
    """Copy a stage's columns of some rows of a weight of MXFP4 in blocks. to: the first row in the stage."""
    count, chunks = form.block // BLOCK_ROWS, form.tile.depth // COLUMNS
    plgpu.copy_gmem_to_smem(
        w_ref.at[pl.ds(lax.div(row, jnp.int32(BLOCK_ROWS)), count), pl.ds(step * chunks, chunks)],
        w_s.at[pl.ds(to // BLOCK_ROWS, count)],
        full,
    )


def _multiplier(form, steps, wg, x_s, w_s, o_s, o_ref, added, full, empty, factors, wide_s):
    """Return the product of an item: this warpgroup's columns, summed and stored.

    added: the scales of x and w in e4m3, and the bias of all experts or None.
    factors: of a weight in 4 bits, or the scales of blocks. wide_s: shared memory for a 4-bit weight
    in bfloat16, in the interpreter.
    """
    tile, stages = form.tile, jnp.int32(form.tile.stages)
    of_tiles, (scales, bias) = factors if form.k else None, added

    def visit(i, expert, start, end, column):
        row, turn = (column * tile.warpgroups + wg) * PART, lax.rem(i, jnp.int32(2))
        to = lax.div(row, jnp.int32(2)) if form.gate_block else row
        if form.blocks:
            sums_of = block_products.sums(
                tile,
                steps,
                i * steps,
                expert * form.n + row,
                w_s.at[:, pl.ds(wg * PART, PART)],
                x_s,
                factors,
                full,
                empty,
                interpret=form.interpret,
            )
            store(form, epilogue(form, sums_of, [], start, None), o_s.at[wg], o_ref, start, end, to)
            return
        if of_tiles is not None:
            plgpu.barrier_wait(of_tiles.full.at[turn])
        early, shifts = None, None
        if bias is not None and tile.box == tile.rows:
            shifts = biases(form, bias, expert * form.n + row)
        if scales and tile.box == tile.rows:  # loaded while the operands arrive, because registers are free
            early = (
                channel_values(form, scales[1], expert * form.n + row),
                token_scales(form, scales, start),
            )

        def product(acc):
            def one(step, _):
                at = i * steps + step
                slot = lax.rem(at, stages)
                plgpu.barrier_wait(full.at[slot])
                if factors is None and not form.in_blocks:
                    plgpu.wgmma(acc, w_s.at[slot, pl.ds(wg * PART, PART)], x_s.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(1)
                else:
                    own = factors and factors.buffers.at[turn if form.k else slot]
                    _add_packed(form, acc, w_s.at[slot], x_s.at[slot], own, wide_s, wg, step)

                @pl.when(step > 0)
                def _():  # the step before this one is done
                    plgpu.barrier_arrive(empty.at[lax.rem(at + stages - 1, stages)])

            lax.fori_loop(0, steps, one, None)
            y = acc[...]
            plgpu.barrier_arrive(empty.at[lax.rem(i * steps + steps - 1, stages)])
            if of_tiles is not None:
                plgpu.barrier_arrive(of_tiles.empty.at[turn])

            def sums_of(half, token, count):
                return y[64 * half : 64 * half + 64, token : token + count]

            at_row = expert * form.n + row
            own = shifts or (None if bias is None else biases(form, bias, at_row))
            finished = epilogue(form, sums_of, scales, start, at_row, early, own)
            store(form, finished, o_s.at[wg], o_ref, start, end, to)

        pl.run_scoped(product, plgpu.ACC((PART, tile.rows), jnp.float32))

    return visit


def _add_packed(form, acc, w_s, x_s, factors, wide_s, wg, step):
    """Add a stage's product of this warpgroup's rows of a weight in 4 bits. The last
    but one wgmma is done after it.

    factors: the scales of the tile's rows in MXFP4, or the stage's factors in int4.
    """
    for number in range(form.tile.depth // COLUMNS):
        tokens = x_s.at[:, pl.ds(number * COLUMNS, COLUMNS)].transpose((1, 0))
        # Columns past K are zeros in the stage of x, so their weights need only be finite.
        pair = step * (form.tile.depth // COLUMNS) + number
        if form.k:
            pair = jnp.minimum(pair, form.k // COLUMNS - 1)
        if form.interpret:
            weight = wide_s.at[wg]
            weight[...] = _in_bfloat16(form, w_s, factors, wg, number, pair)
            plgpu.commit_smem()
            plgpu.wgmma(acc, weight, tokens)
            plgpu.wgmma_wait(0)
            continue
        for half in (0, 64):
            # The operand's 64 rows, or 128 rows of which it has every other 16.
            begin, count, of_pairs = (0, PART, half // 64) if form.reads_pairs else (half, 64, None)
            if form.in_blocks:
                blocks = w_s.at[pl.ds((wg * PART + begin) // BLOCK_ROWS, count // BLOCK_ROWS)]
                part = mxfp4_mma.operand(blocks, number, of_pairs)
                plgpu.wgmma(acc.at[pl.ds(half, 64)], part, tokens)
                plgpu.wgmma_wait(1)
                continue
            packed, first = w_s.at[pl.ds(wg * PART + begin, count)], number * COLUMNS
            if form.k:
                own = factors.at[pl.ds(wg * (PART // 8) + begin // 8, count // 8)]
                part = mxfp4_operand.operand(packed, own, first, pair, of_pairs)
            else:
                blocks = pl.ds(wg * (PART // form.block) + half // form.block, 64 // form.block)
                own, group = factors.at[blocks], first // form.group
                part = int4_operand.operand(packed, own, first, group, form.zero_points)
            plgpu.wgmma(acc.at[pl.ds(half, 64)], part, tokens)
            plgpu.wgmma_wait(1)


def _in_bfloat16(form, w_s, factors, wg, number, pair):
    """Return `COLUMNS` columns of this warpgroup's rows as the operands' registers
    hold them, in the interpreter.
    """
    ordered = gate_pairs.in_halves if form.reads_pairs else lambda rows: rows
    if form.in_blocks:
        own = w_s[pl.ds(wg * (PART // BLOCK_ROWS), PART // BLOCK_ROWS), number]
        numbers = dequantize_blocks(Mxfp4Blocks(own[:, None]), jnp.float32)
        return ordered(numbers * 2.0**-SHIFT).astype(jnp.bfloat16)
    packed = w_s[pl.ds(wg * PART, PART), pl.ds(number * COLUMNS // 2, COLUMNS // 2)]
    if form.k:
        of_rows = factors[pl.ds(wg * (PART // 8), PART // 8)].reshape(PART, form.k // 32)
        own = Mxfp4(packed, lax.dynamic_slice(of_rows, (0, 2 * pair), (PART, 2)))
        return ordered(dequantize_mxfp4(own, jnp.float32) * 2.0**-SHIFT).astype(jnp.bfloat16)
    blocks = factors[pl.ds(wg * (PART // form.block), PART // form.block), number * COLUMNS // form.group]
    return dequantize_experts(ExpertInt4(packed[None], blocks.reshape(1, 1, PART, 2)))[0]


def store(form, finished, o_s, o_ref, start, end, column):
    """Store the tokens up to `end`. column: the first column of the pieces in the result."""
    box, turn = form.tile.box, 0
    for token in range(0, form.tile.rows, box):
        for number, value in enumerate(finished(token, box)):
            to = o_s.at[turn % 2]
            # The piece before the first one is in the same slot if the tile has an odd number of pieces.
            plgpu.wait_smem_to_gmem(min(turn, 1), wait_read_only=True)
            to.transpose((1, 0))[...] = value.astype(o_s.dtype)
            plgpu.commit_smem()

            @pl.loop(0, lax.div(jnp.clip(end - start - token, 0, box), jnp.int32(ALIGN)))
            def _(i, token=token, number=number, to=to):
                for inside in range(0, 64, form.width):
                    left = column + number * 64 + inside

                    @pl.when(left < form.columns)
                    def _(left=left, inside=inside):
                        plgpu.copy_smem_to_gmem(
                            to.at[pl.ds(i * ALIGN, ALIGN), pl.ds(inside, form.width)],
                            o_ref.at[pl.ds(start + token + i * ALIGN, ALIGN), pl.ds(left, form.width)],
                            commit_group=False,
                        )

            plgpu.commit_smem_to_gmem_group()
            turn += 1
