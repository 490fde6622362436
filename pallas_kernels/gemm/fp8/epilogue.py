"""The epilogue of an fp8 product in registers: scales, bias, activation, gate, residual and quantization."""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.layouts import LOG2E
from pallas_kernels.pointwise.quantize.reference import E4M3_MAX
from pallas_kernels.quantized import BLOCK

E4M3 = jnp.float8_e4m3fn
ROWS = 64  # rows of a warpgroup
WIDTH = 64  # columns of one store
BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """activation, gate_block and quantize of `fp8_gemm`; slots: pieces of a warpgroup's output in flight to
    memory.
    """

    activation: str | None
    gate_block: int | None
    quantize: bool
    slots: int


def activate(x, activation: str | None):
    """Return silu, gelu_tanh or relu of float32 registers, from exp2."""
    if activation is None:
        return x
    if activation == "relu":
        return jnp.maximum(x, 0.0)
    inner = x if activation == "silu" else x * (1.5957691216057308 + 0.07135481627260025 * x * x)
    return x / (1.0 + jnp.exp2(inner * -LOG2E))


def scale_of(top):
    """Return the scale with which e4m3 holds values up to `top`."""
    return jnp.maximum(top, 1e-12) * (1 / E4M3_MAX)


def load(ref, layout):
    """Load a reference in a layout."""
    return plgpu.load(ref, (), layout=layout, optimized=False)


def finished_columns(sums: Callable, start, column, ref: dict, s: dict, wg) -> Callable:
    """Return finished(at, width): columns start + at .. + width of a warpgroup's tile, scaled, with bias,
    float32 [64, width].

    sums(at, width): the product's sums. column: the tile's first column in the product. s: scratch with
    arrived scales.
    """
    tokens = load(s["token_s"].at[pl.ds(wg * ROWS, ROWS)], BY_ROW) if "token_s" in s else None

    def finished(at: int, width: int):
        y = sums(at, width)
        if "channel_s" in s:
            channels = load(s["channel_s"].at[pl.ds(start + at, width)], BY_COLUMN)
            if len(ref["tokens"].shape) == 1 and tokens is None:
                channels = channels * ref["tokens"][0]
            y = y * lax.broadcast_in_dim(channels, y.shape, [1])
        if tokens is not None:
            y = y * lax.broadcast_in_dim(tokens, y.shape, [0])
        if "bias" in ref:  # columns past the last channel are not stored, so any bias will do
            here = jnp.minimum(column + start + at, ref["bias"].shape[0] - width)
            y = y + lax.broadcast_in_dim(
                load(ref["bias"].at[pl.ds(here, width)], BY_COLUMN).astype(jnp.float32), y.shape, [1]
            )
        return y

    return finished


def store(finished: Callable, e: Epilogue, ref: dict, s: dict, wg, row, column, columns: int) -> None:
    """Store a warpgroup's `columns` columns from `column` on, for rows row .. row + 64, through its slots
    of shared memory.
    """
    column = lax.div(column, jnp.int32(2)) if e.gate_block else column
    rows, pieces = pl.ds(row, ROWS), columns // (2 * WIDTH if e.gate_block else WIDTH)

    def result(i):
        """Return piece i of the result, float32 [64, 64]."""
        b = e.gate_block
        if b is None:
            return activate(finished(i * WIDTH, WIDTH), e.activation)
        starts = range(2 * i * WIDTH, 2 * (i + 1) * WIDTH, 2 * b)
        gated = [activate(finished(at, b), e.activation) * finished(at + b, b) for at in starts]
        return jnp.concatenate(gated, axis=1) if len(gated) > 1 else gated[0]

    def slot(i):
        return s["o_s"].at[wg, i % e.slots]

    def place(i):
        return rows, pl.ds(column + i * WIDTH, WIDTH)

    def put(i, y):
        slot(i)[...] = y.astype(s["o_s"].dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot(i), ref["out"].at[place(i)])

    def put_scale(block, scale):
        def write():
            ref["scales"].at[rows, block][...] = scale

        # Plain stores, not TMA, write the scales. A store past the last block would hit the next row.
        blocks = ref["scales"].shape[1]
        pl.when(block < blocks)(write) if blocks * BLOCK % (pieces * WIDTH) else write()

    if e.quantize:
        for block in range(pieces * WIDTH // BLOCK):
            own = range(block * (BLOCK // WIDTH), (block + 1) * (BLOCK // WIDTH))
            parts = [result(i) for i in own]
            scale = scale_of(functools.reduce(jnp.maximum, [jnp.abs(y).max(axis=1) for y in parts]))
            for i, y in zip(own, parts, strict=True):
                plgpu.wait_smem_to_gmem(e.slots - 1, wait_read_only=True)
                put(i, y * lax.broadcast_in_dim(1.0 / scale, y.shape, [0]))
            put_scale(lax.div(column, jnp.int32(BLOCK)) + block, scale)
    elif "residual" not in ref:
        for i in range(pieces):
            plgpu.wait_smem_to_gmem(e.slots - 1, wait_read_only=True)
            put(i, result(i))
    else:

        def read(i):
            return s["read"].at[wg * e.slots + i % e.slots]

        def fetch(i):
            plgpu.copy_gmem_to_smem(ref["residual"].at[place(i)], slot(i), read(i))

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i in range(min(e.slots, pieces)):
            fetch(i)
        for i in range(pieces):
            y = result(i)
            plgpu.barrier_wait(read(i))
            put(i, y + plgpu.load(slot(i), (), layout=plgpu.Layout.WGMMA).astype(jnp.float32))
            if i + e.slots < pieces:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                fetch(i + e.slots)
