"""The flat GEMM kernel: one warpgroup copies weights and tokens through a ring, the others multiply and
store.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.flat.tiles import FlatTile
from pallas_kernels.hopper.layouts import LOG2E, swizzled
from pallas_kernels.hopper.pdl import launch_next, wait_for_last

_COPY_REGISTERS = 40  # registers of a copying thread, if the multiplying threads need more
GATE_BLOCK = 64  # the only gate block that the epilogue supports


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array [N, K / per] of a weight [N, K], and the transforms of its tiles in shared memory."""

    array: jax.Array
    per: int
    form: tuple = ()


def scratch(
    tile: FlatTile,
    weight: Sequence[Operand],
    m: int,
    columns: int,
    out_dtype,
    gated: bool,
    has_residual: bool,
) -> dict:
    """Return the kernel's shared memory and barriers."""
    width = tile.rows // 2 if gated else tile.rows
    form = swizzled if columns % 64 == 0 else lambda _: ()  # TMA copies only full swizzled tiles
    arrays = {
        "w_s": [
            plgpu.SMEM(
                (tile.stages, tile.columns, tile.depth // part.per), part.array.dtype, transforms=part.form
            )
            for part in weight
        ],
        "x_s": plgpu.SMEM((tile.stages, m, tile.depth), jnp.bfloat16, transforms=swizzled(jnp.bfloat16)),
        "o_s": plgpu.SMEM((tile.warpgroups, m, width), out_dtype, transforms=form(out_dtype)),
        "full": plgpu.Barrier(num_arrivals=1 + len(weight), num_barriers=tile.stages),
        "empty": plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=tile.stages),
    }
    if has_residual:
        arrays["r_s"] = plgpu.SMEM((tile.warpgroups, m, width), jnp.bfloat16, transforms=form(jnp.bfloat16))
        arrays["r_full"] = plgpu.Barrier(num_barriers=tile.warpgroups)
    small = swizzled(jnp.float32, 8)
    if tile.turns > 1:
        arrays["sums"] = plgpu.SMEM(
            (tile.warpgroups, tile.turns - 1, tile.rows, m), jnp.float32, transforms=small
        )
        arrays["sums_full"] = plgpu.Barrier(num_arrivals=tile.turns - 1, num_barriers=tile.warpgroups)
        arrays["sums_empty"] = plgpu.Barrier(num_barriers=tile.warpgroups)
    if tile.cluster > 1:
        arrays["parts"] = plgpu.SMEM(
            (tile.warpgroups, tile.cluster - 1, tile.rows, m), jnp.float32, transforms=small
        )
        # One barrier for all warpgroups, because Mosaic (0.11.2) adds the index of a barrier in its array
        # twice for an arrival at another CTA.
        arrays["parts_full"] = plgpu.Barrier(num_arrivals=(tile.cluster - 1) * tile.warpgroups)
        arrays["parts_empty"] = plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=tile.warpgroups)
    return arrays


def multiply(
    x_ref, *refs, weight, product, tile, has_bias, has_residual, activation, gated, pdl, in_registers,
    w_s, x_s, o_s, full, empty,
    sums: Any = None, sums_full: Any = None, sums_empty: Any = None, r_s: Any = None, r_full: Any = None,
    parts: Any = None, parts_full: Any = None, parts_empty: Any = None,
):  # fmt: skip
    """Run the kernel: copy stages, multiply them and finish each tile.

    product: adds one stage's product. gated: columns are blocks of 64 gates and 64 ups. in_registers: the
    sums are values.
    """
    w_refs, (*extras, o_ref) = refs[: len(weight)], refs[len(weight) :]
    bias_ref: Any = extras[0] if has_bias else None
    residual_ref: Any = extras[-1] if has_residual else None
    launch_next(pdl)
    group, thread = lax.axis_index("group"), lax.axis_index("wg")
    wg, turn = lax.rem(thread, jnp.int32(tile.warpgroups)), lax.div(thread, jnp.int32(tile.warpgroups))
    part = lax.axis_index("part") if tile.cluster > 1 else jnp.int32(0)
    groups = lax.axis_size("group")
    m, width = o_s.shape[1:]
    # TMA handles an incomplete tile of 8 rows. Pallas would refuse a slice past the end with a static start.
    tokens = pl.ds(jnp.int32(0), m)
    tiles, blocks = pl.cdiv(w_refs[0].shape[0], tile.columns), pl.cdiv(x_ref.shape[1], tile.depth)
    mine = lax.div(tiles - group + groups - 1, jnp.int32(groups))
    first, last = (lax.div(blocks * (part + i), jnp.int32(tile.cluster)) for i in (0, 1))
    steps = last - first  # of this CTA in each of its tiles

    def slot_of(step):
        return lax.rem(step, jnp.int32(tile.stages))

    @pl.when(turn == tile.turns)
    def _copy():
        if in_registers:
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")

        def copy_weight(step):
            item, block, slot = lax.div(step, steps), first + lax.rem(step, steps), slot_of(step)
            rows = pl.ds((group + item * groups) * tile.columns, tile.columns)
            for ref, to, form in zip(w_refs, w_s, weight, strict=True):
                deep = tile.depth // form.per
                plgpu.copy_gmem_to_smem(ref.at[rows, pl.ds(block * deep, deep)], to.at[slot], full.at[slot])

        def copy_tokens(step):
            block, slot = first + lax.rem(step, steps), slot_of(step)
            plgpu.copy_gmem_to_smem(
                x_ref.at[tokens, pl.ds(block * tile.depth, tile.depth)], x_s.at[slot], full.at[slot]
            )

        total = mine * steps
        ahead = jnp.minimum(total, tile.stages)
        pl.loop(0, ahead)(copy_weight)
        wait_for_last(pdl)
        pl.loop(0, ahead)(copy_tokens)

        @pl.loop(ahead, total)
        def _(step):
            plgpu.barrier_wait(empty.at[slot_of(step)])
            copy_weight(step)
            copy_tokens(step)

        @pl.loop(total - ahead, total)
        def _(step):  # the interpreter reports an arrival without a wait
            plgpu.barrier_wait(empty.at[slot_of(step)])

    @pl.when(turn < tile.turns)
    def _compute():
        if in_registers:
            threads = tile.warpgroups * tile.turns
            launched = 65536 // (128 * (threads + 1)) // 8 * 8
            plgpu.set_max_registers(
                min(240, (launched * (threads + 1) - _COPY_REGISTERS) // threads // 8 * 8), action="increase"
            )
        wait_for_last(pdl)
        own = pl.ds(wg * tile.rows, tile.rows)

        def finish(y, row, column):
            """Store the epilogue of y [rows, M], float32, for weight rows from `row` and result columns
            from `column` on.
            """
            if bias_ref is not None:
                bias = plgpu.load(
                    bias_ref.at[pl.ds(row, tile.rows)], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
                )
                y = y + lax.broadcast_in_dim(bias.astype(jnp.float32), y.shape, [0])
            y = _gate(y, activation) if gated else _act(y, activation)
            if r_s is not None:
                plgpu.barrier_wait(r_full.at[wg])
                y = y + plgpu.load(
                    r_s.at[wg].transpose((1, 0)), layout=plgpu.Layout.WGMMA, optimized=False
                ).astype(jnp.float32)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if (
                o_s.dtype == jnp.float32
            ):  # stmatrix transposes only 16-bit values, this layout has single values
                y = plgpu.layout_cast(y, plgpu.Layout._WGMMA_ACC_32BIT)
            o_s.at[wg].transpose((1, 0))[...] = y.astype(o_s.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_s.at[wg], o_ref.at[tokens, pl.ds(column, width)])

        def one_tile(item, _):
            row = (group + item * groups) * tile.columns + wg * tile.rows
            column = pl.multiple_of(lax.div(row, jnp.int32(2)) if gated else row, 64)
            if r_s is not None:

                @pl.when((part == 0) & (turn == 0))
                def _():
                    plgpu.copy_gmem_to_smem(
                        residual_ref.at[tokens, pl.ds(column, width)], r_s.at[wg], r_full.at[wg]
                    )

            # Steps go to turns cyclically through all tiles, because the barriers of a slot count the phases
            # of one turn.
            begin = lax.rem(
                turn + tile.turns - lax.rem(item * steps, jnp.int32(tile.turns)), jnp.int32(tile.turns)
            )
            count = lax.div(steps - begin + tile.turns - 1, jnp.int32(tile.turns))

            def accumulate(acc):
                @pl.loop(0, count)
                def _(i):
                    step = item * steps + begin + i * tile.turns
                    plgpu.barrier_wait(full.at[slot_of(step)])
                    product(acc, [w.at[slot_of(step)] for w in w_s], x_s.at[slot_of(step)], own)
                    if tile.turns > 1:  # the other turns multiply while this one waits
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(empty.at[slot_of(step)])
                    else:
                        plgpu.wgmma_wait(1)
                        pl.when(i > 0)(
                            lambda: plgpu.barrier_arrive(empty.at[slot_of(step + tile.stages - 1)])
                        )

                value = acc[...]
                if tile.turns == 1:
                    plgpu.barrier_arrive(empty.at[slot_of(item * steps + steps - 1)])
                return value

            def add(i, total):
                slot = slot_of(item * steps + begin + i * tile.turns)
                plgpu.barrier_wait(full.at[slot])
                total = product(total, [w.at[slot] for w in w_s], x_s.at[slot], own)
                plgpu.barrier_arrive(empty.at[slot])
                return total

            if in_registers:
                y = lax.fori_loop(
                    0,
                    count,
                    add,
                    plgpu.layout_cast(jnp.zeros((tile.rows, m), jnp.float32), plgpu.Layout.WGMMA),
                )
            else:
                y = pl.run_scoped(accumulate, plgpu.ACC((tile.rows, m), jnp.float32))
            if tile.turns == 1:
                finish_tile(item, y, row, column)
                return

            @pl.when(turn > 0)
            def _():
                @pl.when(item > 0)
                def _():
                    plgpu.barrier_wait(sums_empty.at[wg])

                sums.at[wg, turn - 1][...] = y
                plgpu.barrier_arrive(sums_full.at[wg])

            @pl.when(turn == 0)
            def _():
                plgpu.barrier_wait(sums_full.at[wg])
                total = y
                for i in range(tile.turns - 1):
                    total = total + plgpu.load(sums.at[wg, i], layout=plgpu.Layout.WGMMA, optimized=False)

                @pl.when(item + 1 < mine)
                def _():
                    plgpu.barrier_arrive(sums_empty.at[wg])

                finish_tile(item, total, row, column)

        def finish_tile(item, y, row, column):
            if tile.cluster == 1:
                finish(y, row, column)
                return

            @pl.when(item > 0)
            def _():
                plgpu.barrier_wait(parts_empty)

            @pl.when(part > 0)
            def _():
                to = parts.at[wg, part - 1]
                plgpu.async_store_smem(
                    y, to, parts_full, cluster_idx=jnp.int32(0), cluster_dim="part", optimized=False
                )

            @pl.when(part == 0)
            def _():
                plgpu.barrier_wait(parts_full)
                total = y
                for i in range(tile.cluster - 1):
                    total = total + plgpu.load(parts.at[wg, i], layout=plgpu.Layout.WGMMA, optimized=False)
                finish(total, row, column)

            @pl.when(item + 1 < mine)
            def _():
                plgpu.barrier_arrive(parts_empty)

        lax.fori_loop(0, mine, one_tile, None)
        plgpu.wait_smem_to_gmem(0)


def _gate(y, activation):
    """Return act(gates) · ups of columns in blocks of 64 gates and 64 ups."""
    return _act(y[:GATE_BLOCK], activation) * y[GATE_BLOCK:]


def _act(y, activation):
    if activation == "silu":
        return y / (1.0 + jnp.exp2(y * -LOG2E))
    # y · sigmoid(2z) equals y · (1 + tanh z) / 2. The hardware's tanh has only 11 bits.
    if activation == "gelu_tanh":
        z = 0.7978845608028654 * (y + 0.044715 * y * y * y)
        return y / (1.0 + jnp.exp2(z * (-2.0 * LOG2E)))
    return y if activation is None else jnp.maximum(y, 0.0)
