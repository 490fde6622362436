"""Both products of a mixture's experts in one kernel for Hopper: gates, activation, quantization and down.

A decode step reads the weights of many experts for few rows each. Two products with a quantization between
them start and drain three times. Here a worker computes its tiles of the first product and goes on with
those of the second one, whose weights it copies before their rows are there.

The first product leaves e4m3 with a scale for each row and 64 columns, because one warpgroup holds 64
columns of a row. Tiles of shared memory have 128 columns. So each row of the result is two rows, with the
even and with the odd blocks of 64 columns, and zeros between them. The second product then has a sum for
each of both.

A tile of the second product waits for all columns of its rows: each worker counts a finished tile of the
first product. All workers must be resident, so the grid has at most as many CTAs as the device has SMs.
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

from pallas_kernels.gemm.expert_mlp.limits import GATE_BLOCKS, TALLEST, supports
from pallas_kernels.gemm.fp8.epilogue import BY_COLUMN, E4M3, load, scale_of
from pallas_kernels.gemm.grouped.groups import Groups
from pallas_kernels.gemm.grouped.kernel import GroupedForm, channel_scales, epilogue, strip_item, token_scales
from pallas_kernels.gemm.grouped.tiles import ALIGN, PART, GroupedTile, check_operands
from pallas_kernels.hopper.layouts import LANE, store_transposed, swizzled
from pallas_kernels.hopper.limits import SMEM_BYTES, SMS, sms_of
from pallas_kernels.quantized import BLOCK, BLOCK_ROWS, Quantized
from pallas_kernels.this_device import this_device

DEPTH = 256  # columns of a stage
_ONE_BY_ONE = plgpu.Layout._WGMMA_ACC_32BIT  # the accumulator's layout with single values instead of pairs


def expert_mlp(
    x: Quantized,
    w_up: Quantized,
    w_down: Quantized,
    groups: Groups,
    *,
    activation: str | None = None,
    gate_block: int | None = None,
    sms: int | None = None,
    split: bool = False,
    depth: int = DEPTH,
    interpret=None,
) -> jax.Array:
    """Return down(act(gate(x)) · up(x)) of each row's expert, summed in float32.

    The reference implementation is `pallas_kernels.gemm.expert_mlp.reference.expert_mlp`.

    Args:
      x: [M, K] e4m3 with scales [M], rows in the order of `groups`.
      w_up: [E, 2 F, K] e4m3 with scales [E, 2 F], in alternating blocks of `gate_block` gates and ups.
      w_down: [E, D, F] e4m3 with scales [E, D].
      groups: from `sort_rows`, in tiles of at most 32 rows. The kernel changes `arrived`.
      activation: silu, gelu_tanh, relu or None.
      sms: CTAs of the persistent grid, which must all be resident, 1 to 132; None: all.
      depth: columns of a stage in shared memory, a multiple of 128.
      split: run one kernel for each product, which wait for nothing. The interpreter always does.
    Returns:
      [M, D] bfloat16; rows after the last tile are not written.
    Raises:
      ValueError: for a shape, dtype, activation or sms outside the limits.
    """
    (m, k), (experts, n, _), columns, sms = x.shape, w_up.shape, w_down.shape[1], _resident(sms)
    check_operands(x, w_up, activation)
    if (
        not supports(groups.rows, w_up, w_down, gate_block)
        or w_up.shape[2] != k
        or w_down.shape[0] != experts
    ):
        given = f"x {list(x.shape)}, weights {list(w_up.shape)} and {list(w_down.shape)}, {gate_block=}"
        raise ValueError(
            f"{given}, tiles of {groups.rows} rows: accepted are [M, K], [E, 2 F, K] and [E, D, F] in e4m3, "
            f"K and F multiples of {BLOCK}, D of 64, gate blocks {GATE_BLOCKS}, tiles of up to {TALLEST} rows"
        )
    tile = _tile(groups.rows, depth)
    form = MlpForm(
        GroupedForm(tile, n, activation, gate_block),
        GroupedForm(tile, columns, None, None),
        interpret=interpret is not None,
    )
    inner = [
        jax.ShapeDtypeStruct((2 * m, n // 2), E4M3),
        jax.ShapeDtypeStruct((n // 2 // BLOCK_ROWS, m), jnp.float32),
    ]
    result = jax.ShapeDtypeStruct((m, columns), jnp.bfloat16)
    listed = groups.experts, groups.starts, groups.ends, groups.count
    first = x.values, x.scale, w_up.values.reshape(experts * n, k), w_up.scale.reshape(-1)
    second = w_down.values.reshape(experts * columns, -1), w_down.scale.reshape(-1)

    def kernel(part: MlpForm, out_type: list, name: str):
        return plgpu.kernel(
            functools.partial(_multiply, form=part),
            out_type=out_type,
            grid=(sms,),
            grid_names=("worker",),
            num_threads=2,
            thread_name="wg",
            scratch_types=_scratch(part),
            compiler_params=LANE,
            kernel_name=f"expert_{name}_{sms}_{tile.rows}",
            interpret=interpret,
        )

    if not split and interpret is None:
        assert groups.arrived is not None  # `sort_rows` of the kernels made the groups
        return kernel(form, [result, *inner], "mlp")(*listed, groups.arrived, *first, *second)[0]
    a = kernel(dataclasses.replace(form, down=None), inner, "up_gate")(*listed, *first)
    (y,) = kernel(dataclasses.replace(form, up=None), [result], "down")(*listed, *a, *second)
    return y


def _resident(sms: int | None) -> int:
    """Return the number of CTAs: as many as may be resident, and no more than the device has SMs."""
    return min(sms_of(sms), this_device().sms or SMS)


@dataclasses.dataclass(frozen=True)
class MlpForm:
    """The parameters that the kernel is compiled for: the forms of both products, or of one of them."""

    up: GroupedForm | None
    down: GroupedForm | None
    interpret: bool

    @property
    def tile(self) -> GroupedTile:
        """Return the tile of both products."""
        one = self.up or self.down
        assert one is not None
        return one.tile

    @property
    def waits(self) -> bool:
        """Return whether tiles of the second product wait for tiles of the first one."""
        return self.up is not None and self.down is not None


def _tile(rows: int, depth: int) -> GroupedTile:
    """Return the tile of so many rows, with the stages that shared memory holds."""
    outside = 8 * 1024  # pieces of both results, and barriers
    return GroupedTile(rows, 1, depth, min(12, (SMEM_BYTES - outside) // ((PART + 2 * rows) * depth)))


def _scratch(form: MlpForm) -> dict:
    tile, moved = form.tile, swizzled(E4M3)
    half = swizzled(E4M3, BLOCK_ROWS)
    arrays: dict[str, Any] = {
        "w_s": plgpu.SMEM((tile.stages, PART, tile.depth), E4M3, transforms=moved),
        "x_s": plgpu.SMEM((tile.stages, 2 * tile.rows, tile.depth), E4M3, transforms=moved),
        "full": plgpu.Barrier(num_arrivals=_copies(form) + 1, num_barriers=tile.stages),
        "empty": plgpu.Barrier(num_barriers=tile.stages),
    }
    if form.up is not None:
        arrays["q_s"] = plgpu.SMEM((2, ALIGN, BLOCK_ROWS), E4M3, transforms=half)
        arrays["zero_s"] = plgpu.SMEM((ALIGN, BLOCK_ROWS), E4M3, transforms=half)
    if form.down is not None:
        arrays["o_s"] = plgpu.SMEM((2, ALIGN, 64), jnp.bfloat16, transforms=swizzled(jnp.bfloat16))
    return arrays


def _copies(form: MlpForm) -> int:
    """Return the copies of a stage of the weight, which are as many for both products."""
    return PART // (form.up.block if form.up is not None else 64)


def _multiply(
    *refs, form: MlpForm, w_s, x_s, full, empty, q_s: Any = None, zero_s: Any = None, o_s: Any = None
):
    """Run the kernel. refs: the groups, the operands of the products, and their results."""
    of = _named(refs, form)
    up: Any = form.up  # None in a kernel of the other product
    down: Any = form.down
    wg, worker, workers = lax.axis_index("wg"), lax.axis_index("worker"), lax.axis_size("worker")
    tile, tiles = form.tile, of["count"][0]
    stages = jnp.int32(tile.stages)
    number = {name: pl.cdiv(one.n, PART) if one else 0 for name, one in (("up", up), ("down", down))}
    steps = {
        "up": pl.cdiv(of["x"].shape[1], tile.depth) if up else 0,
        "down": pl.cdiv(of["a"].shape[1], tile.depth) if down else 0,
    }
    ups, all_items = tiles * number["up"], tiles * (number["up"] + number["down"])

    def until(items):
        """Return the number of this worker's items among the first `items`."""
        return lax.div(items - worker + workers - 1, jnp.int32(workers))

    mine = {"up": until(ups), "down": until(all_items) - until(ups)}

    def for_items(name: str, visit):
        """Call visit(steps before the item, *item) for each item of a product. The next item is read during
        the current one."""
        first = jnp.int32(0) if name == "up" else mine["up"]
        before = jnp.int32(0) if name == "up" else mine["up"] * steps["up"]

        def item(i):
            which = worker + (first + i) * workers - (0 if name == "up" else ups)
            at, column = strip_item(jnp.clip(which, 0, tiles * number[name] - 1), tiles, number[name])
            return at, of["experts"][at], of["starts"][at], of["ends"][at], column

        def one(i, own):
            following = item(i + 1)
            visit(before + i * steps[name], *own)
            return following

        @pl.when(mine[name] > 0)
        def _():
            lax.fori_loop(0, mine[name], one, item(jnp.int32(0)))

    @pl.when(wg == 1)
    def _copy():
        def slot_of(step):
            """Return the stage of a step, after it is free."""
            slot = lax.rem(step, stages)
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
            return slot

        def copy_weight(own: GroupedForm, ref, base, slot, step):
            last, at = ref.shape[0] - PART // _copies(form), pl.ds(step * tile.depth, tile.depth)
            size = PART // _copies(form)
            pieces = own.copies() if own.gate_block else [(row, row) for row in range(0, PART, size)]
            for row, to in pieces:
                rows = pl.ds(jnp.minimum(base + row, last), size)  # rows past the last expert are not stored
                plgpu.copy_gmem_to_smem(ref.at[rows, at], w_s.at[slot, pl.ds(to, size)], full.at[slot])

        def copy_up(before, at, expert, start, end, column):
            @pl.loop(0, steps["up"])
            def _(step):
                slot = slot_of(before + step)
                copy_weight(up, of["w_up"], expert * up.n + column * PART, slot, step)
                plgpu.copy_gmem_to_smem(
                    of["x"].at[pl.ds(start, tile.rows), pl.ds(step * tile.depth, tile.depth)],
                    x_s.at[slot, pl.ds(0, tile.rows)],
                    full.at[slot],
                )

        def copy_down(before, at, expert, start, end, column):
            base, ahead = expert * down.n + column * PART, min(steps["down"], tile.stages)

            def copy_rows(step):
                plgpu.copy_gmem_to_smem(
                    of["a"].at[pl.ds(2 * start, 2 * tile.rows), pl.ds(step * tile.depth, tile.depth)],
                    x_s.at[lax.rem(before + step, stages)],
                    full.at[lax.rem(before + step, stages)],
                )

            @pl.loop(0, ahead)
            def _(step):
                copy_weight(down, of["w_down"], base, slot_of(before + step), step)

            if form.waits:
                wait_for(of["arrived"], at, number["up"])
            pl.loop(0, ahead)(copy_rows)

            @pl.loop(ahead, steps["down"])
            def _(step):
                copy_weight(down, of["w_down"], base, slot_of(before + step), step)
                copy_rows(step)

        if up is not None:
            for_items("up", copy_up)
        if down is not None:
            for_items("down", copy_down)
        total = sum(mine[name] * steps[name] for name in ("up", "down"))

        @pl.loop(jnp.maximum(total - stages, 0), total)
        def _(step):  # the interpreter reports an arrival without a wait
            plgpu.barrier_wait(empty.at[lax.rem(step, stages)])

    def multiply_up(before, at, expert, start, end, column):
        row, scales = expert * up.n + column * PART, (of["x_scale"], of["up_scale"])
        early = channel_scales(up, of["up_scale"], row), token_scales(up, scales, start)

        def product(acc):
            def one(step, _):
                slot = lax.rem(before + step, stages)
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, w_s.at[slot], x_s.at[slot, pl.ds(0, tile.rows)].transpose((1, 0)))
                plgpu.wgmma_wait(1)

                @pl.when(step > 0)
                def _():  # the step before this one is done
                    plgpu.barrier_arrive(empty.at[lax.rem(before + step + stages - 1, stages)])

            lax.fori_loop(0, steps["up"], one, None)
            y = acc[...]
            plgpu.barrier_arrive(empty.at[lax.rem(before + steps["up"] - 1, stages)])
            return y

        y = pl.run_scoped(product, plgpu.ACC((PART, tile.rows), jnp.float32))
        sums_of = lambda half, token, count: y[64 * half : 64 * half + 64, token : token + count]
        (finished,) = epilogue(up, sums_of, scales, start, row, early)(0, tile.rows)
        odd, columns = lax.rem(column, jnp.int32(2)), pl.ds(column * BLOCK_ROWS, BLOCK_ROWS)
        for number_of, token in enumerate(range(0, tile.rows, ALIGN)):
            value = plgpu.layout_cast(finished[:, token : token + ALIGN], _ONE_BY_ONE)
            scale = scale_of(jnp.abs(value).max(axis=0))
            inverse = lax.broadcast_in_dim(1.0 / scale, value.shape, [1])
            value = plgpu.layout_cast(value * plgpu.layout_cast(inverse, _ONE_BY_ONE), plgpu.Layout.WGMMA)
            to = q_s.at[number_of % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            store_transposed(value.astype(E4M3), to, form.interpret)
            plgpu.commit_smem()

            @pl.when(start + token < end)
            def _(token=token, to=to, scale=scale):
                for source, part in ((to, odd), (zero_s, 1 - odd)):
                    rows = pl.ds(2 * (start + token) + part * ALIGN, ALIGN)
                    plgpu.copy_smem_to_gmem(source, of["a"].at[rows, columns], commit_group=False)
                of["a_scale"].at[column, pl.ds(start + token, ALIGN)][...] = scale

            plgpu.commit_smem_to_gmem_group()
        if form.waits:
            plgpu.wait_smem_to_gmem(0)
            arrive(of["arrived"], at)

    def multiply_down(before, at, expert, start, end, column):
        channels = channel_scales(down, of["down_scale"], expert * down.n + column * PART)
        blocks, tokens = of["a_scale"].shape[0], range(0, tile.rows, ALIGN)

        def one(step, sums):
            found, slot = list(sums), lax.rem(before + step, stages)
            plgpu.barrier_wait(full.at[slot])
            for line in range(tile.depth // BLOCK):
                block = 2 * (step * (tile.depth // BLOCK) + line)
                # Columns past the last block are zeros, so their scales need only be finite.
                scales = [
                    load(
                        of["a_scale"].at[jnp.minimum(block + odd, blocks - 1), pl.ds(start + token, ALIGN)],
                        BY_COLUMN,
                    )
                    for token in tokens
                    for odd in (0, 1)
                ]
                columns = pl.ds(line * BLOCK, BLOCK)

                def product(acc, columns=columns):
                    plgpu.wgmma(acc, w_s.at[slot, :, columns], x_s.at[slot, :, columns].transpose((1, 0)))
                    return acc[...]

                part = pl.run_scoped(product, plgpu.ACC((PART, 2 * tile.rows), jnp.float32))
                if line == tile.depth // BLOCK - 1:
                    plgpu.barrier_arrive(empty.at[slot])
                for i, token in enumerate(tokens):
                    for odd in (0, 1):
                        sums_of = part[:, 2 * token + odd * ALIGN : 2 * token + (odd + 1) * ALIGN]
                        found[i] += sums_of * lax.broadcast_in_dim(scales[2 * i + odd], sums_of.shape, [1])
            return tuple(found)

        zero = plgpu.layout_cast(jnp.zeros((PART, ALIGN), jnp.float32), plgpu.Layout.WGMMA)
        sums = lax.fori_loop(0, steps["down"], one, tuple(zero for _ in tokens))
        turn = 0
        for token, y in zip(tokens, sums, strict=True):
            for half, by_row in enumerate(channels):
                value = y[64 * half : 64 * half + 64]
                value = value * lax.broadcast_in_dim(by_row, value.shape, [0])
                left, to = column * PART + 64 * half, o_s.at[turn % 2]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                to.transpose((1, 0))[...] = value.astype(jnp.bfloat16)
                plgpu.commit_smem()

                @pl.when((start + token < end) & (left < down.n))
                def _(token=token, left=left, to=to):
                    rows = pl.ds(start + token, ALIGN)
                    plgpu.copy_smem_to_gmem(to, of["y"].at[rows, pl.ds(left, 64)], commit_group=False)

                plgpu.commit_smem_to_gmem_group()
                turn += 1

    @pl.when(wg == 0)
    def _compute():
        if up is not None:
            zeros = plgpu.layout_cast(jnp.zeros((BLOCK_ROWS, ALIGN), jnp.float32), plgpu.Layout.WGMMA)
            store_transposed(zeros.astype(E4M3), zero_s, form.interpret)
            plgpu.commit_smem()
            for_items("up", multiply_up)
        if down is not None:
            for_items("down", multiply_down)
        plgpu.wait_smem_to_gmem(0)


def _named(refs, form: MlpForm) -> dict[str, Any]:
    """Return the references by name."""
    names = ["experts", "starts", "ends", "count"]
    if form.waits:
        names += ["arrived", "x", "x_scale", "w_up", "up_scale", "w_down", "down_scale", "y", "a", "a_scale"]
    elif form.up is not None:
        names += ["x", "x_scale", "w_up", "up_scale", "a", "a_scale"]
    else:
        names += ["a", "a_scale", "w_down", "down_scale", "y"]
    return dict(zip(names, refs, strict=True))


def arrive(arrived, place):
    """Add 1 to arrived[place] after the writes of this warpgroup, and after its copies that are complete."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(_, counter):
        i32 = ir.IntegerType.get_signless(32)
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, i32))
        code = """{
            .reg .pred p;
            fence.proxy.async;
            fence.acq_rel.gpu;
            barrier.cta.sync $2, 128;
            setp.eq.u32 p, $1, 0;
            @p red.release.gpu.global.add.u32 [$0], 1;
            }"""
        operands = [
            mgpu.utils.memref_ptr(counter),
            thread,
            mgpu.utils.warpgroup_barrier_idx(sync=False),
        ]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, code, "l,r,r,~{memory}", has_side_effects=True)

    add(arrived.at[pl.ds(place, 1)])  # pyright: ignore[reportCallIssue]


def wait_for(arrived, place, number: int):
    """Wait until arrived[place] is `number`. Later copies see what was written before."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(_, counter):
        i32 = ir.IntegerType.get_signless(32)
        code = """{
            .reg .pred p;
            .reg .b32 seen;
            again:
            ld.acquire.gpu.global.u32 seen, [$0];
            setp.lt.u32 p, seen, $1;
            @p bra again;
            fence.proxy.async;
            }"""
        operands = [mgpu.utils.memref_ptr(counter), mgpu.c(number, i32)]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, code, "l,r,~{memory}", has_side_effects=True)

    wait(arrived.at[pl.ds(place, 1)])  # pyright: ignore[reportCallIssue]
