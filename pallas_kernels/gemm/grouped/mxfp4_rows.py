"""Grouped GEMM for few rows an expert, with a weight of MXFP4 in blocks.

The rows of a tile stay in shared memory while a worker goes over its share of the tile's columns, and the
weight streams past them. A worker has a range of neighboring items. An item is the product of a tile with 64
or more rows of the weight. Each multiplying warpgroup takes every G-th stage of K of an item, from a ring of
its own. The warpgroup whose turn it is adds the sums of the others and stores the result. The others go on to
the next item. So all warps have work, also where a worker has one item.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.cards import this_card
from pallas_kernels.gemm.grouped import gate_pairs, mxfp4_mma
from pallas_kernels.gemm.grouped.epilogue import biases, finish_halves
from pallas_kernels.gemm.grouped.groups import Groups
from pallas_kernels.gemm.grouped.kernel import GroupedForm, store
from pallas_kernels.gemm.grouped.mxfp4_blocks import COLUMNS, ROWS, dequantize_blocks
from pallas_kernels.gemm.grouped.mxfp4_operand import SHIFT
from pallas_kernels.gemm.grouped.tiles import ALIGN, GroupedTile
from pallas_kernels.hopper.layouts import LANE, swizzled
from pallas_kernels.hopper.limits import SMEM_BYTES, sms_of
from pallas_kernels.hopper.wgmma_registers import at, const
from pallas_kernels.quantized import MXFP4_WORDS, Mxfp4Blocks

FEW = 16  # the largest tile in rows that the kernel is for
_COPY_REGISTERS = 40  # of a thread of the copying warpgroup, at least


@dataclasses.dataclass(frozen=True)
class RowsTile:
    """A tile of few rows.

    rows: rows of x. blocks: rows of the weight in an item, in blocks of 64. chunks: columns of a stage, in
    chunks of 64. warpgroups: multiplying warpgroups. stages: stages of a warpgroup's ring. by_warps: each
    ring has a copying warp, up to 4 rings, and a stage is one copy.
    """

    rows: int
    blocks: int
    chunks: int
    warpgroups: int
    stages: int
    by_warps: bool = False

    @property
    def box(self) -> int:
        """Return the rows of x in one piece of the result on its way to memory."""
        return self.rows

    def turns(self, k: int) -> int:
        """Return the stages of K that each warpgroup has in an item."""
        return pl.cdiv(k, COLUMNS * self.chunks * self.warpgroups)

    def registers(self) -> int:
        """Return the registers of a thread that multiplies."""
        return min(240, (self._launched() - _COPY_REGISTERS) // self.warpgroups // 8 * 8)

    def copy_registers(self) -> int:
        """Return the registers of a thread that copies."""
        left = self._launched() - self.warpgroups * self.registers()
        return min(104, left) if self.by_warps else _COPY_REGISTERS

    def _launched(self) -> int:
        """Return the registers of a thread of each warpgroup, together."""
        return 65536 // (128 * (self.warpgroups + 1)) // 8 * 8 * (self.warpgroups + 1)


def rows_tile(
    rows: int, k: int, blocks: int = 2, chunks: int = 3, warpgroups: int = 3, by_warps: bool = False
) -> RowsTile:
    """Return a tile with the stages that shared memory holds."""
    one = RowsTile(rows, blocks, chunks, warpgroups, 1, by_warps)
    outside = rows * 2 * COLUMNS * chunks * warpgroups * one.turns(k)  # all columns of the rows
    outside += warpgroups * (64 * blocks * rows * 4 + 2 * rows * 64 * 2) + 2048  # sums and results
    stage = warpgroups * 4 * blocks * chunks * 4 * MXFP4_WORDS
    # A group of barriers has up to 32.
    return dataclasses.replace(one, stages=min(32 // warpgroups, (SMEM_BYTES - outside) // stage))


def chosen_tile(rows: int, k: int) -> RowsTile:
    """Return the tile of a card for so many rows."""
    return rows_tile(rows, k, **this_card().mxfp4_rows_tiles[str(rows)])


def supports_rows(n: int, k: int, tile: RowsTile, gate_block: int | None = None) -> bool:
    """Return whether the kernel takes a weight [n, k] with this tile.

    Each warpgroup must have columns of its own: a product of 64 columns by two warpgroups was wrong on an
    H200.
    """
    if gate_block is not None and (gate_block not in (8, 64) or n % 128 or tile.blocks != 2):
        return False
    shared = k > COLUMNS * tile.chunks * (tile.warpgroups - 1)
    if tile.by_warps and tile.warpgroups > 4:
        return False
    return min(n, k) > 0 and n % 64 == 0 and k % COLUMNS == 0 and tile.stages >= 2 and shared


def multiply_rows(
    x: jax.Array,
    w: Mxfp4Blocks,
    groups: Groups,
    *,
    bias: jax.Array | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
    sms: int | None = None,
    tile: RowsTile | None = None,
    interpret=None,
) -> jax.Array:
    """Return `pallas_kernels.gemm.grouped.api.grouped_gemm` of few rows by this kernel.

    Args:
      x: [M, K] bfloat16, rows in the order of `groups`. groups: in tiles of the tile's rows.
      gate_block: 8, 64 or None.
    Raises:
      ValueError: for a shape or sms outside the limits.
    """
    (m, k), (experts, n, depth), sms = x.shape, w.shape, sms_of(sms)
    tile = tile or chosen_tile(groups.rows, k)
    if (
        k != depth
        or groups.rows != tile.rows
        or tile.rows % ALIGN
        or not supports_rows(n, k, tile, gate_block)
    ):
        given = f"x {list(x.shape)}, w {list(w.shape)}, tiles of {groups.rows} rows, {tile}"
        accepted = "equal K and rows, N and K of whole 64, two stages or more, and blocks of 8 or 64 gates"
        raise ValueError(f"{given}: accepted are {accepted}")
    form = GroupedForm(
        GroupedTile(tile.rows, tile.warpgroups, COLUMNS, 1),
        n,
        activation,
        gate_block,
        in_blocks=True,
        bias=bias is not None,
        interpret=interpret is not None,
    )
    kernel = plgpu.kernel(
        functools.partial(_multiply, tile=tile, form=form),
        out_type=jax.ShapeDtypeStruct((m, form.columns), jnp.bfloat16),
        grid=(sms,),
        grid_names=("worker",),
        num_threads=tile.warpgroups + 1,
        thread_name="wg",
        scratch_types=_scratch(tile, k),
        compiler_params=LANE,
        kernel_name=f"grouped_gemm_mxfp4_rows_{sms}_{tile.rows}x{64 * tile.blocks}",
        interpret=interpret,
    )
    words = w.words.reshape(experts * n // ROWS, k // COLUMNS, MXFP4_WORDS)
    added = [] if bias is None else [bias.reshape(-1)]
    return kernel(groups.experts, groups.starts, groups.ends, groups.count, x, words, *added)


def _scratch(tile: RowsTile, k: int) -> dict[str, Any]:
    """Return the shared memory and the barriers of the kernel."""
    wgs, turns = tile.warpgroups, tile.turns(k)
    stage = (4 * tile.blocks, tile.chunks, MXFP4_WORDS)
    moved = swizzled(jnp.bfloat16)
    made = {
        "w_s": plgpu.SMEM((wgs * tile.stages, *stage), jnp.int32),
        "x_s": plgpu.SMEM((wgs * turns, tile.rows, COLUMNS * tile.chunks), jnp.bfloat16, transforms=moved),
        "o_s": plgpu.SMEM((wgs, 2, tile.rows, 64), jnp.bfloat16, transforms=moved),
        "full": plgpu.Barrier(
            num_arrivals=1 if tile.by_warps else tile.blocks, num_barriers=wgs * tile.stages
        ),
        "empty": plgpu.Barrier(num_arrivals=1, num_barriers=wgs * tile.stages),
        "x_full": plgpu.Barrier(num_arrivals=turns, num_barriers=wgs),
        "x_empty": plgpu.Barrier(num_arrivals=1, num_barriers=wgs),
    }
    if wgs > 1:
        made |= {
            "sums_s": plgpu.SMEM((wgs, 64 * tile.blocks, tile.rows), jnp.float32),
            "sums_full": plgpu.Barrier(num_arrivals=wgs - 1, num_barriers=wgs),
            "sums_empty": plgpu.Barrier(num_arrivals=1, num_barriers=wgs),
        }
    return made


def _multiply(
    experts_ref, starts_ref, ends_ref, count_ref, x_ref, w_ref, *refs, tile: RowsTile, form: GroupedForm,
    w_s, x_s, o_s, full, empty, x_full, x_empty, sums_s: Any = None, sums_full: Any = None,
    sums_empty: Any = None,
):  # fmt: skip
    """Run the kernel. refs: the bias of all experts if there is one, and the result."""
    *bias_refs, o_ref = refs
    n, interpret, pieces = form.n, form.interpret, range(0, 64 * tile.blocks, 64)
    wg, wgs = lax.axis_index("wg"), tile.warpgroups
    worker, workers = lax.axis_index("worker"), lax.axis_size("worker")
    turns, columns = tile.turns(x_ref.shape[1]), pl.cdiv(n, 64 * tile.blocks)
    items = count_ref[0] * columns
    first, end = (lax.div(items * (worker + i), jnp.int32(workers)) for i in (0, 1))
    mine, stages = end - first, jnp.int32(tile.stages)

    def item(i):
        """Return (tile of rows, column of items, whether the tile begins here, whether it ends here)."""
        which = first + i
        of_tile, column = lax.div(which, jnp.int32(columns)), lax.rem(which, jnp.int32(columns))
        return of_tile, column, (i == 0) | (column == 0), (i == mine - 1) | (column == columns - 1)

    def fill(rings):
        """Copy the stages of these rings in the order of their use."""

        def copy(i, carried):
            changes, expert, start = carried
            of_tile, column, begins, _ = item(i)
            expert, start = lax.cond(
                begins, lambda: (experts_ref[of_tile], starts_ref[of_tile]), lambda: (expert, start)
            )
            row = expert * (n // ROWS) + column * 4 * tile.blocks

            def copy_weight(turn, _):
                step = i * turns + turn
                for g in rings:
                    slot = g * tile.stages + lax.rem(step, stages)

                    @pl.when(step >= stages)
                    def _(slot=slot):
                        plgpu.barrier_wait(empty.at[slot])

                    chunks = pl.ds((turn * wgs + g) * tile.chunks, tile.chunks)
                    copy_stage(w_ref, w_s.at[slot], full.at[slot], row, chunks, tile)

            # These stages need no sum of this tile to become free.
            early = min(turns, tile.stages)
            lax.fori_loop(0, early, copy_weight, None)

            @pl.when(begins)
            def _():
                for g in rings:

                    @pl.when(changes > 0)
                    def _(g=g):
                        plgpu.barrier_wait(x_empty.at[g])

                    @pl.loop(0, turns)
                    def _(turn, g=g):
                        part, width = turn * wgs + g, COLUMNS * tile.chunks
                        plgpu.copy_gmem_to_smem(
                            x_ref.at[pl.ds(start, tile.rows), pl.ds(part * width, width)],
                            x_s.at[part],
                            x_full.at[g],
                        )

            lax.fori_loop(early, turns, copy_weight, None)
            return changes + begins.astype(jnp.int32), expert, start

        changes = lax.fori_loop(0, mine, copy, (jnp.int32(0),) * 3)[0]

        for g in rings:  # the interpreter reports an arrival without a wait

            @pl.loop(jnp.maximum(mine * turns - stages, 0), mine * turns)
            def _(step, g=g):
                plgpu.barrier_wait(empty.at[g * tile.stages + lax.rem(step, stages)])

            @pl.when(changes > 0)
            def _(g=g):
                plgpu.barrier_wait(x_empty.at[g])

    @pl.when(wg == wgs)
    def _():
        plgpu.set_max_registers(tile.copy_registers(), action="decrease")
        if not tile.by_warps:
            return fill(range(wgs))

        @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
        def _():
            warp = lax.axis_index("warp")
            pl.when(warp < wgs)(lambda: fill([warp]))

    @pl.when(wg < wgs)
    def _():
        plgpu.set_max_registers(tile.registers(), action="increase")
        shape = (64 * tile.blocks, tile.rows)

        def one(i, carried):
            of_tile, column, begins, ends = item(i)
            listed = starts_ref, ends_ref, experts_ref
            start, stop, expert = lax.cond(
                begins, lambda: tuple(ref[of_tile] for ref in listed), lambda: carried
            )

            @pl.when(begins)
            def _():
                plgpu.barrier_wait(x_full.at[wg])

            def add(turn, total):
                slot = wg * tile.stages + lax.rem(i * turns + turn, stages)
                plgpu.barrier_wait(full.at[slot])
                weight = w_s[slot] if interpret else mxfp4_mma.load(w_s.at[slot], form.paired)
                plgpu.barrier_arrive(empty.at[slot])
                return multiply_stage(total, weight, x_s.at[turn * wgs + wg], form)

            zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            y = lax.fori_loop(0, turns, add, zeros)

            @pl.when(ends)
            def _():
                plgpu.barrier_arrive(x_empty.at[wg])

            def own_biases():
                """Return the bias of each 64 of the item's rows, or None."""
                at_row = expert * n + column * 64 * tile.blocks
                return biases(form, bias_refs[0], at_row)[: tile.blocks] if bias_refs else None

            def finish(y, shifts):
                to = column * (64 if form.gate_block else 64 * tile.blocks)

                def finished(token, count):
                    sums = [y[row : row + 64, token : token + count] * 2.0**SHIFT for row in pieces]
                    return finish_halves(form, sums, shifts)

                store(form, finished, o_s.at[wg], o_ref, start, stop, to)

            if wgs == 1:
                finish(y, own_biases())
                return start, stop, expert
            finisher = lax.rem(i, jnp.int32(wgs))

            @pl.when(wg != finisher)
            def _():
                @pl.when((i > 1) | ((i == 1) & (wg > 0)))  # this warpgroup has stored sums before
                def _():
                    plgpu.barrier_wait(sums_empty.at[wg])

                _keep(y, sums_s.at[wg], interpret)
                plgpu.barrier_arrive(sums_full.at[finisher])

            @pl.when(wg == finisher)
            def _():
                shifts = own_biases()  # loaded during the wait
                plgpu.barrier_wait(sums_full.at[wg])
                total = y
                for other in range(1, wgs):
                    which = lax.rem(wg + other, jnp.int32(wgs))
                    total = _add_kept(total, sums_s.at[which], interpret)
                    plgpu.barrier_arrive(sums_empty.at[which])
                finish(total, shifts)

            return start, stop, expert

        lax.fori_loop(0, mine, one, (jnp.int32(0),) * 3)
        if wgs > 1:

            @pl.when((mine > 1) | ((mine == 1) & (wg > 0)))
            def _():
                plgpu.barrier_wait(sums_empty.at[wg])

        plgpu.wait_smem_to_gmem(0)


def copy_stage(w_ref, stage, full, row, chunks, tile: RowsTile) -> None:
    """Copy a stage of the weight. row: its first block of 16 rows."""
    if tile.by_warps:  # TMA makes zeros of rows past the last expert
        plgpu.copy_gmem_to_smem(w_ref.at[pl.ds(row, 4 * tile.blocks), chunks], stage, full)
        return
    for block in range(0, 4 * tile.blocks, 4):
        # For rows past the last expert others. Their columns are not stored.
        existing = jnp.minimum(row + block, w_ref.shape[0] - 4)
        plgpu.copy_gmem_to_smem(w_ref.at[pl.ds(existing, 4), chunks], stage.at[pl.ds(block, 4)], full)


def multiply_stage(total, weight, tokens, form: GroupedForm):
    """Return total plus a stage's product. weight: as `mxfp4_mma.load` returns it."""
    if not form.interpret:
        return mxfp4_mma.multiply_add(total, weight, tokens)
    return _add_numbers(form.paired, total, weight, tokens)


def _add_numbers(pairs: bool, total, blocks, tokens):
    """Return the sum of `mxfp4_mma.multiply_add`, in the interpreter."""
    numbers = dequantize_blocks(Mxfp4Blocks(blocks), jnp.float32) * 2.0**-SHIFT
    numbers = gate_pairs.in_halves(numbers) if pairs else numbers
    return total + jnp.einsum("nk,mk->nm", numbers, tokens[...].astype(jnp.float32))


def _keep(y, ref, interpret: bool) -> None:
    """Store the thread's sums in shared memory, each register of all threads together."""
    if interpret:
        ref[...] = y
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def run(_, y, ref):
        for number, offset in _offsets(y):
            llvm.store(y.registers.flat[number], at(ref, offset, 1024 * number), alignment=8)

    run(y, ref)  # pyright: ignore[reportCallIssue]


def _add_kept(y, ref, interpret: bool):
    """Return y plus what `_keep` stored."""
    if interpret:
        return y + ref[...]
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(y.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )

    def add(_, y, ref):
        registers = y.registers.copy()
        for number, offset in _offsets(y):
            own = registers.flat[number]
            kept = llvm.load(own.type, at(ref, offset, 1024 * number), alignment=8)
            registers.flat[number] = arith.addf(own, kept)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run(add)(y, ref)


def _offsets(y: mgpu.FragmentedArray) -> list[tuple[int, ir.Value]]:
    """Return the number of each register of two sums, and the thread's offset in the 1024 bytes of it."""
    thread = arith.remui(mgpu.utils.thread_idx(), const(128))
    return [(number, arith.muli(thread, const(8))) for number in range(y.registers.size)]
