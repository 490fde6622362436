"""Products of few rows for Hopper: decode's GEMMs, which are reads of the weight.

The operands are swapped: rows of the weight are wgmma's M (64) and tokens its N, so that M tokens are padded to a multiple of 8 and not
to 64 (FlashDecoding++Next §4). One warpgroup copies weights and tokens ahead through a ring that fills the SM's shared memory (the
paper's double buffering, as deep as it goes); the others multiply. What bounds the time is bytes in flight, so a CTA takes whole tiles
where there are enough of them, each CTA as many as any other, and fewer CTAs than SMs where that makes them equal. Where there are too
few tiles, a cluster of CTAs shares a tile along K and adds its parts up in distributed shared memory, always in the same order.

`multiply_flat` does this for a weight in any form of one or more arrays by row: `flat_gemm` for bfloat16, `int4_gemm` for 4 bits.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flat_tiles import FlatTile, flat_tile
from pallas_kernels.paged import LANE, LOG2E, rows_of_eight
from pallas_kernels.tiles import SMS

ROWS = 64  # most tokens
GATE_BLOCK = 64  # the one block of gates and ups that the epilogue knows


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array [N, K / per] of a weight [N, K], and the form of its tiles in shared memory."""

    array: jax.Array
    per: int
    form: tuple = ()


def flat_gemm(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
    out_dtype=None,
    sms: int | None = None,
    tile: FlatTile | None = None,
    interpret=None,
) -> jax.Array:
    """act(x @ w.T + bias) (+ residual), accumulated in float32 (the twin: `reference.gemm`; FlashDecoding++Next §4).

    Args:
      x: [M, K] bfloat16, 1 to 64 rows. w: [N, K] bfloat16; K a multiple of 64, N of 8. bias: [N].
      residual: [M, N'] bfloat16, added last. activation: None, "silu", "gelu_tanh" or "relu".
      gate_block: 64: columns are blocks of 64 gates, then 64 ups, alternating (N a multiple of 128); the result is act(gate) · up.
      out_dtype: bfloat16 (default) or float32.
      sms: SMs the kernel may occupy; None: all 132.
    Returns:
      [M, N'], N' = N, or N / 2 with gate_block.
    Raises:
      ValueError: for a shape, dtype or epilogue that the kernel does not take.
    """
    if w.dtype != jnp.bfloat16 or x.shape[1] != w.shape[1] or w.shape[1] % 64:
        raise ValueError(f"x {x.shape}, w {w.shape} of {w.dtype}: bfloat16 and the same K, a multiple of 64")
    tile = tile or flat_tile(x.shape[0], w.shape[0], w.shape[1], sms or SMS, gated=gate_block is not None)
    return multiply_flat(
        x, [Operand(w, 1, swizzled(w.dtype))], _product, bias, residual=residual, activation=activation, gate_block=gate_block,
        out_dtype=out_dtype, sms=sms or SMS, tile=tile, name="flat_gemm", interpret=interpret,
    )  # fmt: skip


def _product(acc, weight, x_s, own):
    """acc += the warpgroup's rows of the weight's tile times the tokens."""
    plgpu.wgmma(acc, weight[0].at[own], x_s.transpose((1, 0)))


def multiply_flat(
    x: jax.Array, weight: Sequence[Operand], product: Callable, bias: jax.Array | None, *, residual: jax.Array | None,
    activation: str | None, gate_block: int | None, out_dtype, sms: int, tile: FlatTile, name: str, interpret,
) -> jax.Array:  # fmt: skip
    """The pipeline: copies tiles of the weight's arrays and of x, calls product(acc, tiles, x's tile, rows of the warpgroup) on each."""
    (m, k), n = x.shape, weight[0].array.shape[0]
    out_dtype, gated = jnp.dtype(out_dtype or x.dtype), gate_block is not None
    _check(x, n, activation, gate_block, out_dtype)
    x = rows_of_eight(x)
    operands = [x, *(part.array for part in weight)]
    tiles, columns = pl.cdiv(n, tile.columns), n // 2 if gated else n
    if bias is not None:  # padded: it is not TMA that reads it
        operands.append(lax.pad(bias, jnp.zeros((), bias.dtype), [(0, tiles * tile.columns - n, 0)]) if n % tile.columns else bias)
    if residual is not None:
        operands.append(rows_of_eight(residual))
    most = min(tiles, sms // tile.cluster)
    if not most or tile.cluster > pl.cdiv(k, tile.depth) or tile.stages % tile.turns:
        raise ValueError(f"sms={sms}, K={k}: for {tile} at least {tile.cluster} SMs and steps along K, and stages a multiple of its turns")
    body = functools.partial(
        _multiply, weight=weight, product=product, tile=tile, has_bias=bias is not None, has_residual=residual is not None,
        activation=activation, gated=gated,
    )  # fmt: skip
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((x.shape[0], columns), out_dtype),
        grid=(pl.cdiv(tiles, pl.cdiv(tiles, most)),),
        grid_names=("group",),
        cluster=(tile.cluster,) if tile.cluster > 1 else (),
        cluster_names=("part",) if tile.cluster > 1 else (),
        num_threads=tile.warpgroups * tile.turns + 1,
        thread_name="wg",
        scratch_types=_scratch(tile, weight, x.shape[0], columns, out_dtype, gated, residual is not None),
        compiler_params=LANE,
        kernel_name=f"{name}_{x.shape[0]}x{n}x{k}",
        interpret=interpret,
    )(*operands)
    return out if x.shape[0] == m else out[:m]


def _check(x, n, activation, gate_block, out_dtype) -> None:
    if x.dtype != jnp.bfloat16 or out_dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"dtypes {x.dtype} -> {out_dtype}: bfloat16 -> bfloat16 or float32")
    if not 1 <= x.shape[0] <= ROWS or n % 8:
        raise ValueError(f"{x.shape[0]} rows, N={n}: 1 to {ROWS} rows, N a multiple of 8")
    if gate_block is not None and (gate_block != GATE_BLOCK or n % (2 * GATE_BLOCK)):
        raise ValueError(f"gate_block={gate_block}, N={n}: {GATE_BLOCK}, and N a multiple of {2 * GATE_BLOCK}")
    if activation not in (None, "silu", "gelu_tanh", "relu"):
        raise ValueError(f"activation={activation!r}: None, silu, gelu_tanh or relu")


def swizzled(dtype) -> tuple:
    """128-byte swizzled tiles of 8 rows, which TMA writes and wgmma reads."""
    return (plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]


def _scratch(tile: FlatTile, weight: Sequence[Operand], m: int, columns: int, out_dtype, gated: bool, has_residual: bool) -> dict:
    width = tile.rows // 2 if gated else tile.rows
    form = swizzled if columns % 64 == 0 else lambda _: ()  # TMA copies whole swizzled tiles only
    scratch = {
        "w_s": [plgpu.SMEM((tile.stages, tile.columns, tile.depth // part.per), part.array.dtype, transforms=part.form) for part in weight],
        "x_s": plgpu.SMEM((tile.stages, m, tile.depth), jnp.bfloat16, transforms=swizzled(jnp.bfloat16)),
        "o_s": plgpu.SMEM((tile.warpgroups, m, width), out_dtype, transforms=form(out_dtype)),
        "full": plgpu.Barrier(num_arrivals=1 + len(weight), num_barriers=tile.stages),
        "empty": plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=tile.stages),
    }
    if has_residual:
        scratch["r_s"] = plgpu.SMEM((tile.warpgroups, m, width), jnp.bfloat16, transforms=form(jnp.bfloat16))
        scratch["r_full"] = plgpu.Barrier(num_barriers=tile.warpgroups)
    small = (plgpu.TilingTransform((8, 8)), plgpu.SwizzleTransform(32))  # pyright: ignore[reportAbstractUsage]
    if tile.turns > 1:
        scratch["sums"] = plgpu.SMEM((tile.warpgroups, tile.turns - 1, tile.rows, m), jnp.float32, transforms=small)
        scratch["sums_full"] = plgpu.Barrier(num_arrivals=tile.turns - 1, num_barriers=tile.warpgroups)
        scratch["sums_empty"] = plgpu.Barrier(num_barriers=tile.warpgroups)
    if tile.cluster > 1:
        scratch["parts"] = plgpu.SMEM((tile.warpgroups, tile.cluster - 1, tile.rows, m), jnp.float32, transforms=small)
        # One barrier for all warpgroups: Mosaic (0.11.2) adds a barrier's place in its array twice when it arrives at another CTA's.
        scratch["parts_full"] = plgpu.Barrier(num_arrivals=(tile.cluster - 1) * tile.warpgroups)
        scratch["parts_empty"] = plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=tile.warpgroups)
    return scratch


def _multiply(
    x_ref, *refs, weight, product, tile, has_bias, has_residual, activation, gated,
    w_s, x_s, o_s, full, empty,
    sums: Any = None, sums_full: Any = None, sums_empty: Any = None, r_s: Any = None, r_full: Any = None,
    parts: Any = None, parts_full: Any = None, parts_empty: Any = None,
):  # fmt: skip
    w_refs, (*extras, o_ref) = refs[: len(weight)], refs[len(weight) :]
    bias_ref: Any = extras[0] if has_bias else None
    residual_ref: Any = extras[-1] if has_residual else None
    group, thread = lax.axis_index("group"), lax.axis_index("wg")
    wg, turn = lax.rem(thread, jnp.int32(tile.warpgroups)), lax.div(thread, jnp.int32(tile.warpgroups))
    part = lax.axis_index("part") if tile.cluster > 1 else jnp.int32(0)
    groups = lax.axis_size("group")
    m, width = o_s.shape[1:]
    tiles, blocks = pl.cdiv(w_refs[0].shape[0], tile.columns), pl.cdiv(x_ref.shape[1], tile.depth)
    mine = lax.div(tiles - group + groups - 1, jnp.int32(groups))
    first, last = (lax.div(blocks * (part + i), jnp.int32(tile.cluster)) for i in (0, 1))
    steps = last - first  # of this CTA in each of its tiles

    def slot_of(step):
        return lax.rem(step, jnp.int32(tile.stages))

    @pl.when(turn == tile.turns)
    def _copy():
        def copy_weight(step):
            item, block, slot = lax.div(step, steps), first + lax.rem(step, steps), slot_of(step)
            rows = pl.ds((group + item * groups) * tile.columns, tile.columns)
            for ref, to, form in zip(w_refs, w_s, weight, strict=True):
                deep = tile.depth // form.per
                plgpu.copy_gmem_to_smem(ref.at[rows, pl.ds(block * deep, deep)], to.at[slot], full.at[slot])

        def copy_tokens(step):
            block, slot = first + lax.rem(step, steps), slot_of(step)
            plgpu.copy_gmem_to_smem(x_ref.at[:, pl.ds(block * tile.depth, tile.depth)], x_s.at[slot], full.at[slot])

        total = mine * steps
        ahead = jnp.minimum(total, tile.stages)
        pl.loop(0, ahead)(copy_weight)
        pl.loop(0, ahead)(copy_tokens)

        @pl.loop(ahead, total)
        def _(step):
            plgpu.barrier_wait(empty.at[slot_of(step)])
            copy_weight(step)
            copy_tokens(step)

        @pl.loop(total - ahead, total)
        def _(step):  # every arrival is waited for: one that nobody watched is an error in the interpreter
            plgpu.barrier_wait(empty.at[slot_of(step)])

    @pl.when(turn < tile.turns)
    def _compute():
        own = pl.ds(wg * tile.rows, tile.rows)

        def finish(y, row, column):
            """The epilogue of y [rows, M], float32, at rows `row` of the weight, columns `column` of the result."""
            if bias_ref is not None:
                bias = plgpu.load(bias_ref.at[pl.ds(row, tile.rows)], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
                y = y + lax.broadcast_in_dim(bias.astype(jnp.float32), y.shape, [0])
            y = _gate(y, activation) if gated else _act(y, activation)
            if r_s is not None:
                plgpu.barrier_wait(r_full.at[wg])
                y = y + plgpu.load(r_s.at[wg].transpose((1, 0)), layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if o_s.dtype == jnp.float32:  # stmatrix transposes 16-bit values only; this layout holds them one by one
                y = plgpu.layout_cast(y, plgpu.Layout._WGMMA_ACC_32BIT)
            o_s.at[wg].transpose((1, 0))[...] = y.astype(o_s.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_s.at[wg], o_ref.at[:, pl.ds(column, width)])

        def one_tile(item, _):
            row = (group + item * groups) * tile.columns + wg * tile.rows
            column = pl.multiple_of(lax.div(row, jnp.int32(2)) if gated else row, 64)
            if r_s is not None:

                @pl.when((part == 0) & (turn == 0))
                def _():
                    plgpu.copy_gmem_to_smem(residual_ref.at[:, pl.ds(column, width)], r_s.at[wg], r_full.at[wg])

            # Every so many steps are this turn's, through all tiles: a place in the ring, whose barriers count phases, is of one turn.
            begin = lax.rem(turn + tile.turns - lax.rem(item * steps, jnp.int32(tile.turns)), jnp.int32(tile.turns))
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
                        pl.when(i > 0)(lambda: plgpu.barrier_arrive(empty.at[slot_of(step + tile.stages - 1)]))

                value = acc[...]
                if tile.turns == 1:
                    plgpu.barrier_arrive(empty.at[slot_of(item * steps + steps - 1)])
                return value

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
                plgpu.async_store_smem(y, to, parts_full, cluster_idx=jnp.int32(0), cluster_dim="part", optimized=False)

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
    """act(gates) · ups of columns that lie in blocks of 64 gates, 64 ups."""
    return _act(y[:GATE_BLOCK], activation) * y[GATE_BLOCK:]


def _act(y, activation):
    if activation == "silu":
        return y / (1.0 + jnp.exp2(y * -LOG2E))
    if activation == "gelu_tanh":  # y · sigmoid(2z) is y · (1 + tanh z) / 2; the hardware's tanh is good to 11 bits only
        z = 0.7978845608028654 * (y + 0.044715 * y * y * y)
        return y / (1.0 + jnp.exp2(z * (-2.0 * LOG2E)))
    return y if activation is None else jnp.maximum(y, 0.0)
