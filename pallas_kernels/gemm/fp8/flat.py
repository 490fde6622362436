"""Flat fp8 GEMM for Hopper: products of few e4m3 rows (decode) with an e4m3 weight.

The skeleton is `flat_gemm`'s: rows of the weight are wgmma's M and tokens its N, one warpgroup copies ahead
through a ring that fills shared memory, and a cluster of CTAs splits a tile along K if tiles are few.
Specific to fp8 are the scales (of a token, of a channel, of a token's 128 columns, of a weight's block) and
the quantized result: one warpgroup holds all 128 columns of a token's scale.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.fp8.api import check_operands, scales_of_weight
from pallas_kernels.gemm.fp8.epilogue import BY_COLUMN, BY_ROW, E4M3, Epilogue, activate, load, scale_of
from pallas_kernels.gemm.fp8.kernel import DEPTH
from pallas_kernels.hopper.layouts import LANE, pad_rows, pad_rows_above_8, store_transposed, swizzled
from pallas_kernels.hopper.limits import SMEM_BYTES, sms_of
from pallas_kernels.hopper.pdl import launch_next, wait_for_last
from pallas_kernels.quantized import BLOCK, BLOCK_ROWS, BlockFp8, Quantized

ROWS = 64  # maximum number of tokens
_ONE_BY_ONE = plgpu.Layout._WGMMA_ACC_32BIT  # the accumulator's layout with single values instead of pairs


@dataclasses.dataclass(frozen=True)
class Fp8FlatTile:
    """A tile of flat fp8 GEMM.

    rows: weight rows. depth: K of a step. stages: steps in flight, a multiple of turns. cluster: CTAs that
    split a tile along K. turns: warpgroups that take the steps in turns, and add up at the end of a tile.
    """

    rows: int
    depth: int
    stages: int
    cluster: int
    turns: int = 1


def fp8_flat_tile(
    m: int, n: int, k: int, sms: int, e: Epilogue, depth: int = DEPTH, *, blocked: bool = False, **chosen
) -> Fp8FlatTile:
    """Return the tile of x [m, k], w [n, k]: a ring that fills shared memory, and clusters if there are
    more SMs than tiles.

    blocked: x has a scale for every 128 columns, so a step's sums are scaled before the next step's are
    added. Two warpgroups take turns: one multiplies while the other scales.
    """
    rows = chosen.get("rows") or (
        256 if e.quantize and e.gate_block else 128 if e.quantize or e.gate_block else 64
    )
    # Larger parts would leave no room for the ring.
    pairs = 2 * pl.cdiv(n, rows) <= sms and k >= 2 * depth and rows * m <= 64 * 64
    cluster = chosen.get("cluster") or (2 if pairs else 1)
    # Three warpgroups have 168 registers a thread, too few for the sums of 256 rows and their epilogue.
    turns = chosen.get("turns") or (2 if blocked and rows <= 128 else 1)
    extra = 4 * 1024 + m * rows * 4 + (cluster - 1 + turns - 1) * rows * m * 4
    return Fp8FlatTile(
        rows, depth, min((SMEM_BYTES - extra) // ((rows + m) * depth), 16) // turns * turns, cluster, turns
    )


def fp8_flat_gemm(
    x: Quantized,
    w: Quantized | BlockFp8,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
    quantize: bool = False,
    out_dtype=None,
    sms: int | None = None,
    tile: Fp8FlatTile | None = None,
    pdl: bool = False,
    interpret=None,
) -> jax.Array | Quantized:
    """Return the product of `fp8_gemm` for 1 to 64 rows (FlashDecoding++Next §4), with the same arguments
    and errors.

    gate_block: 64 or None. pdl: start before the previous kernel has ended (`pallas_kernels.hopper.pdl`); w
    must be an argument of the program.
    """
    (m, k), n = x.values.shape, w.values.shape[0]
    check_operands(x, w, bias, residual, activation, gate_block, quantize, out_dtype)
    if m > ROWS or gate_block not in (None, 64):
        raise ValueError(f"{m} rows, gate_block={gate_block}: accepted are up to {ROWS} rows, and None or 64")
    x = Quantized(pad_rows_above_8(x.values), pad_rows(x.scale) if x.scale.ndim else x.scale.reshape(1))
    rows, sms = max(8, x.values.shape[0]), sms_of(sms)
    epilogue = Epilogue(activation, gate_block, quantize, slots=1)
    tile = tile or fp8_flat_tile(rows, n, k, sms, epilogue, blocked=x.scale.ndim == 2)
    out_dtype = jnp.dtype(E4M3 if quantize else jnp.bfloat16)
    columns = n // 2 if gate_block else n
    out_type = [jax.ShapeDtypeStruct((x.values.shape[0], columns), out_dtype)]
    if quantize:
        out_type.append(jax.ShapeDtypeStruct((rows, columns // BLOCK), jnp.float32))
    operands = {"x": x.values, "tokens": x.scale, "w": w.values, **scales_of_weight(w)}
    operands |= {"bias": bias} if bias is not None else {}
    operands |= {"residual": pad_rows_above_8(residual)} if residual is not None else {}
    names = (*operands, "out", *(["scales"] if quantize else []))
    tiles = pl.cdiv(n, tile.rows)
    most = min(tiles, sms // tile.cluster)
    out = plgpu.kernel(
        functools.partial(
            _multiply, names=names, tile=tile, e=epilogue, pdl=pdl, interpret=interpret is not None
        ),
        out_type=out_type,
        grid=(pl.cdiv(tiles, pl.cdiv(tiles, most)),),  # CTAs with equally many tiles
        grid_names=("group",),
        cluster=(tile.cluster,) if tile.cluster > 1 else (),
        cluster_names=("part",) if tile.cluster > 1 else (),
        num_threads=tile.turns + 1,
        thread_name="wg",
        scratch_types=_scratch(tile, rows, out_dtype, gate_block is not None, residual is not None),
        compiler_params=LANE,
        kernel_name=f"fp8_flat_gemm_{rows}x{n}x{k}",
        interpret=interpret,
    )(*operands.values())
    return Quantized(out[0][:m], out[1][:m]) if quantize else out[0][:m]


def _scratch(tile: Fp8FlatTile, rows: int, out_dtype, gated: bool, has_residual: bool) -> dict:
    width = tile.rows // 2 if gated else tile.rows
    scratch = {
        "w_s": plgpu.SMEM((tile.stages, tile.rows, tile.depth), E4M3, transforms=swizzled(E4M3, DEPTH)),
        "x_s": plgpu.SMEM((tile.stages, rows, tile.depth), E4M3, transforms=swizzled(E4M3, DEPTH)),
        "o_s": plgpu.SMEM(
            (rows, width), out_dtype, transforms=swizzled(out_dtype, min(width, 128 // out_dtype.itemsize))
        ),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        "empty": plgpu.Barrier(num_barriers=tile.stages),
    }
    if has_residual:
        scratch["r_s"] = plgpu.SMEM((rows, width), jnp.bfloat16, transforms=swizzled(jnp.bfloat16))
        scratch["r_full"] = plgpu.Barrier()
    if tile.turns > 1:
        scratch["sums"] = plgpu.SMEM(
            (tile.turns - 1, tile.rows, rows), jnp.float32, transforms=swizzled(jnp.float32, 8)
        )
        scratch["sums_full"] = plgpu.Barrier(num_arrivals=tile.turns - 1)
        scratch["sums_empty"] = plgpu.Barrier()
    if tile.cluster > 1:
        scratch["parts"] = plgpu.SMEM(
            (tile.cluster - 1, tile.rows, rows), jnp.float32, transforms=swizzled(jnp.float32, 8)
        )
        scratch["parts_full"] = plgpu.Barrier(num_arrivals=tile.cluster - 1)
        scratch["parts_empty"] = plgpu.ClusterBarrier(collective_axes=("part",))
    return scratch


def _multiply(*refs, names, tile, e, pdl, interpret, **s):
    launch_next(pdl)
    ref = dict(zip(names, refs, strict=True))
    w_s, x_s, o_s, full, empty = (s[name] for name in ("w_s", "x_s", "o_s", "full", "empty"))
    group, groups = lax.axis_index("group"), lax.axis_size("group")
    part = lax.axis_index("part") if tile.cluster > 1 else jnp.int32(0)
    m, stages, blocked = x_s.shape[1], jnp.int32(tile.stages), len(ref["tokens"].shape) == 2
    (n, k), (_, width) = ref["w"].shape, o_s.shape
    tokens = pl.ds(jnp.int32(0), m)  # dynamic, as in `flat.kernel.multiply`
    tiles, blocks = pl.cdiv(n, tile.rows), pl.cdiv(k, tile.depth)
    mine = lax.div(tiles - group + groups - 1, jnp.int32(groups))
    first, last = (lax.div(blocks * (part + i), jnp.int32(tile.cluster)) for i in (0, 1))
    steps, turn = last - first, lax.axis_index("wg")

    @pl.when(turn == tile.turns)
    def _copy():
        total = mine * steps
        ahead = jnp.minimum(total, stages)

        def copy_weight(step):
            item, block, slot = lax.div(step, steps), first + lax.rem(step, steps), lax.rem(step, stages)
            at, deep = (
                pl.ds((group + item * groups) * tile.rows, tile.rows),
                pl.ds(block * tile.depth, tile.depth),
            )
            plgpu.copy_gmem_to_smem(ref["w"].at[at, deep], w_s.at[slot], full.at[slot])

        def copy_tokens(step):
            block, slot = first + lax.rem(step, steps), lax.rem(step, stages)
            plgpu.copy_gmem_to_smem(
                ref["x"].at[tokens, pl.ds(block * tile.depth, tile.depth)], x_s.at[slot], full.at[slot]
            )

        pl.loop(0, ahead)(copy_weight)
        wait_for_last(pdl)
        pl.loop(0, ahead)(copy_tokens)

        @pl.loop(ahead, total)
        def _(step):
            plgpu.barrier_wait(empty.at[lax.rem(step, stages)])
            copy_weight(step)
            copy_tokens(step)

        @pl.loop(jnp.maximum(total - stages, 0), total)
        def _(step):  # the interpreter reports an arrival without a wait
            plgpu.barrier_wait(empty.at[lax.rem(step, stages)])

    def along_rows(scale, rows):
        return plgpu.layout_cast(lax.broadcast_in_dim(scale, (rows, m), [1]), _ONE_BY_ONE)

    def sums_of(item):
        """Return the tile's sums [rows, tokens], as they leave the tensor core."""

        def product(acc):
            def step(i, _):
                g = item * steps + i
                slot = lax.rem(g, stages)
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, w_s.at[slot], x_s.at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(1)

                @pl.when(i > 0)
                def _():  # the step before this one is done
                    plgpu.barrier_arrive(empty.at[lax.rem(g + stages - 1, stages)])

            lax.fori_loop(0, steps, step, None)
            value = acc[...]
            plgpu.barrier_arrive(empty.at[lax.rem(item * steps + steps - 1, stages)])
            return value

        return pl.run_scoped(product, plgpu.ACC((tile.rows, m), jnp.float32))

    def scaled_sums_of(item):
        """Return the tile's sums [rows, tokens], with those of each 128 of K times the tokens' scales."""
        per = tile.depth // DEPTH

        def scales(block):
            scale = load(
                ref["tokens"].at[:, jnp.minimum(block, ref["tokens"].shape[1] - 1)], _ONE_BY_ONE.reduce(0)
            )
            return plgpu.layout_cast(along_rows(scale, tile.rows), plgpu.Layout.WGMMA)

        # Steps go to turns cyclically through all tiles, because the barriers of a slot count the phases of
        # one turn.
        begin = lax.rem(
            turn + tile.turns - lax.rem(item * steps, jnp.int32(tile.turns)), jnp.int32(tile.turns)
        )

        def step(n, state):
            total, *own = state
            i = begin + n * tile.turns
            slot = lax.rem(item * steps + i, stages)
            following = [scales((first + i + tile.turns) * per + j) for j in range(per)]
            plgpu.barrier_wait(full.at[slot])
            for j, scale in enumerate(own):

                def product(acc, j=j):
                    deep = pl.ds(j * DEPTH, DEPTH)
                    plgpu.wgmma(acc, w_s.at[slot, :, deep], x_s.at[slot, :, deep].transpose((1, 0)))
                    return acc[...]

                total = total + pl.run_scoped(product, plgpu.ACC((tile.rows, m), jnp.float32)) * scale
            plgpu.barrier_arrive(empty.at[slot])
            return total, *following

        zero = plgpu.layout_cast(jnp.zeros((tile.rows, m), jnp.float32), plgpu.Layout.WGMMA)
        count = lax.div(steps - begin + tile.turns - 1, jnp.int32(tile.turns))
        return lax.fori_loop(
            0, count, step, (zero, *(scales((first + begin) * per + j) for j in range(per)))
        )[0]

    def sums_of_blocks(item, at):
        """Return the tile's sums [rows, tokens], with those of each 64 rows and 128 of K times both scales.

        Each 64 rows have a product of their own, because two products of all rows do not fit the registers.
        at: the first row of the weight.
        """
        assert tile.depth == DEPTH
        ahead = tile.rows * m <= 256 * 32  # the sums of more rows leave no registers for the next scales
        blocks, parts = ref["blocks"], range(tile.rows // BLOCK_ROWS)
        first_block = lax.div(at, jnp.int32(BLOCK_ROWS))

        def scales(i):
            """Return the tokens' scales of a step, and those of the tile's blocks. Past the last are any."""
            block = jnp.minimum(i, ref["tokens"].shape[1] - 1)
            of_tokens = load(ref["tokens"].at[:, block], _ONE_BY_ONE.reduce(0))
            rows = [jnp.minimum(first_block + j, blocks.shape[0] - 1) for j in parts]
            return of_tokens, *(blocks[row, block] for row in rows)

        begin = lax.rem(
            turn + tile.turns - lax.rem(item * steps, jnp.int32(tile.turns)), jnp.int32(tile.turns)
        )

        def step(n, state):
            sums = list(state[-len(parts) :])
            of_tokens, *of_blocks = state[: -len(parts)] or (None,)
            i = begin + n * tile.turns
            slot = lax.rem(item * steps + i, stages)
            following = scales(first + i + tile.turns) if ahead else ()
            if not ahead:
                of_tokens, *of_blocks = scales(first + i)
            plgpu.barrier_wait(full.at[slot])
            for j in parts:

                def product(acc, j=j):
                    own = pl.ds(j * BLOCK_ROWS, BLOCK_ROWS)
                    plgpu.wgmma(acc, w_s.at[slot, own], x_s.at[slot].transpose((1, 0)))
                    return acc[...]

                part = pl.run_scoped(product, plgpu.ACC((BLOCK_ROWS, m), jnp.float32))
                scale = along_rows(of_tokens * of_blocks[j], BLOCK_ROWS)
                sums[j] += part * plgpu.layout_cast(scale, plgpu.Layout.WGMMA)
            plgpu.barrier_arrive(empty.at[slot])
            return *following, *sums

        zero = plgpu.layout_cast(jnp.zeros((BLOCK_ROWS, m), jnp.float32), plgpu.Layout.WGMMA)
        count = lax.div(steps - begin + tile.turns - 1, jnp.int32(tile.turns))
        start = (*(scales(first + begin) if ahead else ()), *[zero] * len(parts))
        sums = lax.fori_loop(0, count, step, start)[-len(parts) :]
        return jnp.concatenate(sums) if len(sums) > 1 else sums[0]

    def finish(y, at, to):
        """Scale and store the sums of the weight's rows from `at` on, which are the result's columns from
        `to` on.
        """
        if ref["tokens"].shape == (m,) and m > 1:
            y = y * lax.broadcast_in_dim(load(ref["tokens"], BY_COLUMN), y.shape, [1])
        elif not blocked:
            y = y * ref["tokens"][0]
        if "channels" in ref:
            y = y * lax.broadcast_in_dim(load(ref["channels"].at[pl.ds(at, tile.rows)], BY_ROW), y.shape, [0])
        if "bias" in ref:
            bias = load(ref["bias"].at[pl.ds(at, tile.rows)], BY_ROW).astype(jnp.float32)
            y = y + lax.broadcast_in_dim(bias, y.shape, [0])
        if e.gate_block is None:
            y = activate(y, e.activation)
        else:
            b = e.gate_block
            gated = [
                activate(y[i : i + b], e.activation) * y[i + b : i + 2 * b]
                for i in range(0, tile.rows, 2 * b)
            ]
            y = jnp.concatenate(gated) if len(gated) > 1 else gated[0]
        if "residual" in ref:
            plgpu.barrier_wait(s["r_full"])
            y = y + load(s["r_s"].transpose((1, 0)), plgpu.Layout.WGMMA).astype(jnp.float32)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if e.quantize:
            y = plgpu.layout_cast(y, _ONE_BY_ONE)
            scale = scale_of(jnp.abs(y).max(axis=0))
            y = plgpu.layout_cast(y * along_rows(1.0 / scale, width), plgpu.Layout.WGMMA)
            store_transposed(y.astype(E4M3), o_s, interpret)
            ref["scales"].at[:, lax.div(to, jnp.int32(BLOCK))][...] = scale
        else:
            o_s.transpose((1, 0))[...] = y.astype(o_s.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_s, ref["out"].at[tokens, pl.ds(to, width)])

    def visit(item, _):
        at = (group + item * groups) * tile.rows
        to = pl.multiple_of(lax.div(at, jnp.int32(2)) if e.gate_block else at, 64)
        if "residual" in ref:

            @pl.when((part == 0) & (turn == 0))
            def _():
                plgpu.copy_gmem_to_smem(ref["residual"].at[tokens, pl.ds(to, width)], s["r_s"], s["r_full"])

        if "blocks" in ref:
            y = sums_of_blocks(item, at)
        else:
            y = scaled_sums_of(item) if blocked else sums_of(item)
        if tile.turns == 1:
            finish_tile(item, y, at, to)
            return

        @pl.when(turn > 0)
        def _():
            @pl.when(item > 0)
            def _():
                plgpu.barrier_wait(s["sums_empty"])

            s["sums"].at[turn - 1][...] = y
            plgpu.barrier_arrive(s["sums_full"])

        @pl.when(turn == 0)
        def _():
            plgpu.barrier_wait(s["sums_full"])
            others = [load(s["sums"].at[i], plgpu.Layout.WGMMA) for i in range(tile.turns - 1)]

            @pl.when(item + 1 < mine)
            def _():
                plgpu.barrier_arrive(s["sums_empty"])

            finish_tile(item, functools.reduce(jnp.add, others, y), at, to)

    def finish_tile(item, y, at, to):
        if tile.cluster == 1:
            finish(y, at, to)
            return

        @pl.when(item > 0)
        def _():
            plgpu.barrier_wait(s["parts_empty"])

        @pl.when(part > 0)
        def _():
            to_first = {"cluster_idx": jnp.int32(0), "cluster_dim": "part", "optimized": False}
            plgpu.async_store_smem(y, s["parts"].at[part - 1], s["parts_full"], **to_first)

        @pl.when(part == 0)
        def _():
            plgpu.barrier_wait(s["parts_full"])
            parts = [load(s["parts"].at[i], plgpu.Layout.WGMMA) for i in range(tile.cluster - 1)]
            finish(functools.reduce(jnp.add, parts, y), at, to)

        @pl.when(item + 1 < mine)
        def _():
            plgpu.barrier_arrive(s["parts_empty"])

    @pl.when(turn < tile.turns)
    def _compute():
        wait_for_last(pdl)
        lax.fori_loop(0, mine, visit, None)
        plgpu.wait_smem_to_gmem(0)
