"""Persistent product of e4m3 activations and e4m3 weights for Hopper: float32 sums, scaled, and what follows done before they are stored.

The skeleton is `dense_gemm`'s: a table of items, one warpgroup that copies, two that compute half of a tile's rows each. What is fp8's own:

* A token's scale and a channel's multiply finished sums. An activation with a scale for every 128 columns cannot wait that long: sums of
  128 columns leave the tensor core and are added, scaled, to float32 registers (two-level accumulation, DeepSeek-V3 §3.3.2).
* The result can be quantised in the epilogue: gate and up of 128 columns of a row lie in the registers of four threads, which agree on
  the largest of them and write values and one scale.
* fp8 eats operands twice as fast as bfloat16, so what the L2 delivers binds: clusters of two CTAs, one above the other, load a weight once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp8_epilogue import BY_ROW, E4M3, WIDTH, Epilogue, finished_columns, load, store
from pallas_kernels.fp8_plan import FIELDS, Fp8Tile, Work, fp8_plan
from pallas_kernels.paged import LANE, rows_of_eight
from pallas_kernels.quantized import BLOCK, Quantized
from pallas_kernels.tiles import SMS

DEPTH = 128  # of K a step: one swizzled row of e4m3, and one block of an activation's scales
_HALF = 64  # rows of one compute warpgroup


def fp8_gemm(
    x: Quantized,
    w: Quantized,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
    quantize: bool = False,
    out_dtype=None,
    sms: int | None = None,
    plan: tuple[Fp8Tile, Work] | None = None,
    interpret=None,
) -> jax.Array | Quantized:
    """act(x @ w.T + bias) (+ residual) of e4m3 operands, accumulated in float32 (the twin: `reference.gemm`).

    Args:
      x: [M, K] e4m3; scale [] (static), [M] (a token) or [M, K / 128] (a token and 128 columns). K is a multiple of 128.
      w: [N, K] e4m3; scale [N] (a channel). N is a multiple of 128.
      bias: [N] bfloat16. residual: [M, N'] bfloat16, added last. activation: None, "silu", "gelu_tanh" or "relu".
      gate_block: 16, 32 or 64: columns are blocks of that many gates, then as many ups, alternating; the result is act(gate) · up.
      quantize: the result in e4m3 with a scale for every 128 columns of a row (N' a multiple of 128).
      sms: SMs the kernel may occupy; None: all 132.
      plan: tile and work in place of `fp8_plan`'s.
    Returns:
      [M, N'] bfloat16, N' = N, or N / 2 with gate_block; or Quantized([M, N'] e4m3, [M, N' / 128] float32).
    Raises:
      ValueError: for a shape, dtype or epilogue that the kernel does not take.
    """
    (m, k), (n, _) = x.values.shape, w.values.shape
    check_operands(x, w, activation, gate_block, quantize, residual, out_dtype)
    x = Quantized(rows_of_eight(x.values), x.scale)
    residual = residual if residual is None else rows_of_eight(residual)
    blocked, sms = x.scale.ndim == 2, sms or SMS
    tile, work = plan or fp8_plan(m, n, k, sms, blocked=blocked, gate_block=gate_block, quantize=quantize)
    tall = 128 * tile.cluster
    width = n // 2 if gate_block else n
    out_type = [jax.ShapeDtypeStruct((x.values.shape[0], width), E4M3 if quantize else jnp.bfloat16)]
    if quantize:
        out_type.append(jax.ShapeDtypeStruct((m + -m % tall, width // BLOCK), jnp.float32))
    if work.cut:
        out_type.append(jax.ShapeDtypeStruct((work.cut, work.parts, tile.cluster, 2, _HALF, tile.columns), jnp.float32))
    operands = {"work": jnp.asarray(work.table), "x": x.values, "tokens": _whole_rows(x.scale, tall), "w": w.values, "channels": w.scale}
    operands |= {name: v for name, v in (("bias", bias), ("residual", residual)) if v is not None}
    names = (*operands, "out", *(["scales"] if quantize else []), *(["parts"] if work.cut else []))
    epilogue = Epilogue(activation, gate_block, quantize, tile.slots)
    out = plgpu.kernel(
        functools.partial(_multiply, names=names, tile=tile, epilogue=epilogue, parts=work.parts if work.cut else 1),
        out_type=out_type,
        grid=(work.table.shape[0],),
        grid_names=("cta",),
        cluster=(tile.cluster,) if tile.cluster > 1 else (),
        cluster_names=("pair",) if tile.cluster > 1 else (),
        num_threads=3,
        thread_name="wg",
        scratch_types=_scratch(tile, operands, out_type[0].dtype),
        compiler_params=LANE,
        kernel_name=f"fp8_gemm_{sms}_{tile.columns}",
        interpret=interpret,
    )(*operands.values())
    return Quantized(out[0][:m], out[1][:m]) if quantize else out[0][:m]


def supports(n: int, k: int, gate_block: int | None = None) -> bool:
    """Whether `fp8_gemm` takes weights [n, k], gates and ups alternating in blocks."""
    return n > 0 and k > 0 and n % 128 == 0 and k % 128 == 0 and (gate_block in (None, 16, 32, 64))


def check_operands(x: Quantized, w: Quantized, activation, gate_block, quantize, residual, out_dtype) -> None:
    """Raises ValueError for what neither fp8 kernel takes."""
    (m, k), (n, depth) = x.values.shape, w.values.shape
    if x.values.dtype != E4M3 or w.values.dtype != E4M3 or out_dtype not in (None, jnp.bfloat16):
        raise ValueError(f"dtypes {x.values.dtype}, {w.values.dtype} -> {out_dtype}: float8_e4m3fn twice -> bfloat16")
    if m < 1 or k != depth or not supports(n, k, gate_block):
        raise ValueError(f"[{m}, {k}] @ [{n}, {depth}].T, gate_block={gate_block}: N and K multiples of 128, gate_block None, 16, 32 or 64")
    if x.scale.shape not in ((), (m,), (m, k // BLOCK)) or w.scale.shape != (n,):
        raise ValueError(f"scales {x.scale.shape}, {w.scale.shape}: [], [{m}] or [{m}, {k // BLOCK}] of x, [{n}] of w")
    if quantize and (residual is not None or (gate_block and n % (2 * BLOCK))):
        raise ValueError(f"quantize=True with N={n}, gate_block={gate_block}: no residual, and whole blocks of {BLOCK} columns")
    if activation not in (None, "silu", "gelu_tanh", "relu"):
        raise ValueError(f"activation={activation!r}: None, silu, gelu_tanh or relu")


def _whole_rows(scale, rows: int):
    """The scales of an activation as the kernel reads them: whole tiles of rows."""
    if scale.ndim == 0:
        return scale.reshape(1)
    short = -scale.shape[0] % rows
    return lax.pad(scale, jnp.zeros((), scale.dtype), [(0, short, 0)] + [(0, 0, 0)] * (scale.ndim - 1)) if short else scale


def form(columns: int, dtype) -> tuple:
    """The shared-memory form of a matrix whose rows of `columns` are copied by swizzled tiles of 8 rows."""
    bytes_a_row = columns * jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(bytes_a_row))  # pyright: ignore[reportAbstractUsage]


def _scratch(tile: Fp8Tile, operands: dict, out_dtype) -> dict:
    stages, per_token = tile.stages, operands["tokens"].ndim == 1 and operands["tokens"].shape[0] > 1
    empty = functools.partial(plgpu.ClusterBarrier, collective_axes=("pair",)) if tile.cluster > 1 else plgpu.Barrier
    scratch = {
        "x_s": plgpu.SMEM((stages, 128, DEPTH), E4M3, transforms=form(DEPTH, E4M3)),
        "w_s": plgpu.SMEM((stages, tile.columns, DEPTH), E4M3, transforms=form(DEPTH, E4M3)),
        "o_s": plgpu.SMEM((2, tile.slots, _HALF, WIDTH), out_dtype, transforms=form(WIDTH, out_dtype)),
        "channel_s": plgpu.SMEM((tile.columns,), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "empty": empty(num_arrivals=2, num_barriers=stages),
        "scales_full": plgpu.Barrier(num_arrivals=1 + per_token),
        "scales_empty": plgpu.Barrier(num_arrivals=2),
    }
    if per_token:
        scratch["token_s"] = plgpu.SMEM((128,), jnp.float32)
    if "residual" in operands:
        scratch["read"] = plgpu.Barrier(num_barriers=2 * tile.slots)
    return scratch


def _multiply(*refs, names, tile, epilogue, parts, **s):
    ref = dict(zip(names, refs, strict=True))
    x_s, w_s, full, empty = s["x_s"], s["w_s"], s["full"], s["empty"]
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    pair = lax.axis_index("pair") if tile.cluster > 1 else jnp.int32(0)
    stages, items = jnp.int32(tile.stages), ref["work"].shape[1]
    blocked = len(ref["tokens"].shape) == 2
    given = pl.get_global(plgpu.SemaphoreType.REGULAR((ref["parts"].shape[0] * tile.cluster * 2,))) if parts > 1 else None

    def item(i):
        i = jnp.minimum(i, items - 1)
        return tuple(ref["work"][cta, i, field] for field in range(FIELDS))

    def for_items(visit, state):
        def one(i, carry):
            own, state = carry
            following = item(i + 1)  # read under the products of this one
            return following, lax.cond(own[3] > 0, lambda state: visit(state, *own), lambda state: state, state)

        return lax.fori_loop(0, items, one, (item(0), state))[1]

    @pl.when(wg == 2)
    def _copy():
        plgpu.set_max_registers(24, action="decrease")

        def visit(state, row, column, first, count, *_):
            step, done = state
            row = pl.multiple_of((row * tile.cluster + pair) * 128, 128)
            rows, columns = pl.ds(row, 128), pl.ds(column * tile.columns, tile.columns)

            def copy(i, step):
                slot = lax.rem(step, stages)

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                at = pl.ds((first + i) * DEPTH, DEPTH)
                plgpu.copy_gmem_to_smem(ref["x"].at[rows, at], x_s.at[slot], full.at[slot])
                together = "pair" if tile.cluster > 1 else None
                plgpu.copy_gmem_to_smem(ref["w"].at[columns, at], w_s.at[slot], full.at[slot], collective_axes=together)
                return step + 1

            step = lax.fori_loop(0, count, copy, step)

            @pl.when(done > 0)
            def _():
                plgpu.barrier_wait(s["scales_empty"])

            for source, to, at in (("channels", "channel_s", columns), ("tokens", "token_s", rows)):
                if to in s:
                    plgpu.copy_gmem_to_smem(ref[source].at[at], s[to], s["scales_full"])
            return step, done + 1

        steps, done = for_items(visit, (jnp.int32(0), jnp.int32(0)))

        # Every arrival is waited for, also the last ones (a barrier that nobody watched is an error in the interpreter).
        @pl.loop(jnp.maximum(steps - stages, 0), steps)
        def _(step):
            plgpu.barrier_wait(empty.at[lax.rem(step, stages)])

        @pl.when(done > 0)
        def _():
            plgpu.barrier_wait(s["scales_empty"])

    @pl.when(wg < 2)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        own = pl.ds(wg * _HALF, _HALF)

        def sums_of(step, count):
            """The tile's sums [64, columns], as they leave the tensor core."""

            def product(acc):
                def multiply(i, step):
                    slot = lax.rem(step, stages)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, x_s.at[slot, own], w_s.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(1)

                    @pl.when(i > 0)
                    def _():  # the step before this one is done
                        plgpu.barrier_arrive(empty.at[lax.rem(step + stages - 1, stages)])

                    return step + 1

                end = lax.fori_loop(0, count, multiply, step)
                y = acc[...]
                plgpu.barrier_arrive(empty.at[lax.rem(end - 1, stages)])
                return y

            return [pl.run_scoped(product, plgpu.ACC((_HALF, tile.columns), jnp.float32))]

        def moved_sums_of(step, first, count, row):
            """The tile's sums in pieces [64, moved], each step's added to float32 registers, times the rows' scales for its 128 of K."""

            def scales(i):
                i = jnp.minimum(i, ref["tokens"].shape[1] - 1)
                return load(ref["tokens"].at[pl.ds(row, _HALF), i], BY_ROW)

            def multiply(i, state):
                step, scale, *sums = state
                slot = lax.rem(step, stages)
                following = scales(first + i + 1) if blocked else scale
                plgpu.barrier_wait(full.at[slot])
                for piece in range(len(sums)):

                    def product(acc, piece=piece):
                        columns = pl.ds(piece * tile.moved, tile.moved)
                        plgpu.wgmma(acc, x_s.at[slot, own], w_s.at[slot, columns].transpose((1, 0)))
                        return acc[...]

                    part = pl.run_scoped(product, plgpu.ACC((_HALF, tile.moved), jnp.float32))
                    if piece == len(sums) - 1:
                        plgpu.barrier_arrive(empty.at[slot])
                    sums[piece] += part * lax.broadcast_in_dim(scale, part.shape, [0]) if blocked else part
                return step + 1, following, *sums

            zero = plgpu.layout_cast(jnp.zeros((_HALF, tile.moved), jnp.float32), plgpu.Layout.WGMMA)
            start = (step, scales(first) if blocked else jnp.int32(0), *[zero] * (tile.columns // tile.moved))
            return list(lax.fori_loop(0, count, multiply, start)[2:])

        def visit(step, row, column, first, count, part, cut):
            row, column = (row * tile.cluster + pair) * 128 + wg * _HALF, column * tile.columns
            sums = moved_sums_of(step, first, count, row) if tile.moved else sums_of(step, count)
            piece = sums[0].shape[1]

            def whole(at, width):
                return sums[at // piece][:, at % piece : at % piece + width]

            def finish(sums_at, start, columns):
                finished = finished_columns(sums_at, start, column, ref, s, wg)
                store(finished, epilogue, ref, s, wg, row, column + start, columns)

            plgpu.barrier_wait(s["scales_full"])
            if parts == 1:
                finish(whole, 0, tile.columns)
            else:

                @pl.when(cut < 0)
                def _():
                    finish(whole, 0, tile.columns)

                @pl.when(cut >= 0)
                def _():
                    share = tile.columns // parts

                    def added(at, width):
                        """This part's share of the columns, of all parts in the order of K."""
                        of = [ref["parts"].at[cut, i, pair, wg, :, pl.ds(part * share + at, width)] for i in range(parts)]
                        return functools.reduce(jnp.add, [load(x, plgpu.Layout.WGMMA) for x in of])

                    for i, y in enumerate(sums):
                        ref["parts"].at[cut, part, pair, wg, :, pl.ds(i * piece, piece)][...] = y
                    there = given.at[(cut * tile.cluster + pair) * 2 + wg]  # pyright: ignore[reportOptionalMemberAccess]
                    plgpu.semaphore_signal(there, memory_scope="gpu")
                    plgpu.semaphore_wait(there, parts, decrement=False, memory_scope="gpu")
                    finish(added, part * share, share)

            plgpu.barrier_arrive(s["scales_empty"])
            return step + count

        for_items(visit, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
