"""Products of few rows for Hopper: decode's GEMMs, which are reads of the weight.

The operands are swapped: rows of the weight are wgmma's M (64) and tokens its N, so that M tokens are padded
to a multiple of 8 and not to 64 (FlashDecoding++Next §4). One warpgroup copies weights and tokens ahead
through a ring that fills the SM's shared memory (the paper's double buffering, as deep as it goes); the
others multiply. What bounds the time is bytes in flight, so a CTA takes whole tiles where there are enough of
them, each CTA as many as any other, and fewer CTAs than SMs where that makes them equal. Where there are too
few tiles, a cluster of CTAs shares a tile along K and adds its parts up in distributed shared memory, always
in the same order.

`multiply_flat` does this for a weight in any form of one or more arrays by row: `flat_gemm` for bfloat16,
`int4_gemm` for 4 bits.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.epilogue_limits import check_behind
from pallas_kernels.gemm.flat.kernel import GATE_BLOCK, Operand, multiply, scratch
from pallas_kernels.gemm.flat.tiles import FlatTile, flat_tile
from pallas_kernels.hopper.layouts import LANE, pad_rows_above_8, swizzled
from pallas_kernels.hopper.limits import sms_of

ROWS = 64  # most tokens


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
    pdl: bool = False,
    interpret=None,
) -> jax.Array:
    """act(x @ w.T + bias) (+ residual), accumulated in float32 (the twin: `reference.gemm`;
    FlashDecoding++Next §4).

    Args:
      x: [M, K] bfloat16, 1 to 64 rows. w: [N, K] bfloat16; K a multiple of 64, N of 8. bias: [N].
      residual: [M, N'] bfloat16, added last. activation: None, "silu", "gelu_tanh" or "relu".
      gate_block: 64: columns are blocks of 64 gates, then 64 ups, alternating (N a multiple of 128); the
      result is act(gate) · up. out_dtype: bfloat16 (default) or float32. sms: SMs the kernel may occupy, 1 to
      132; None: all. pdl: it begins before the kernel before it has ended (`pallas_kernels.hopper.pdl`); w
      is then an argument of the program.
    Returns:
      [M, N'], N' = N, or N / 2 with gate_block.
    Raises:
      ValueError: for a shape, dtype, epilogue or sms that the kernel does not take.
    """
    if w.dtype != jnp.bfloat16 or x.shape[1] != w.shape[1] or w.shape[1] % 64:
        raise ValueError(f"x {x.shape}, w {w.shape} of {w.dtype}: bfloat16 and the same K, a multiple of 64")
    sms = sms_of(sms)
    tile = tile or flat_tile(x.shape[0], w.shape[0], w.shape[1], sms, gated=gate_block is not None)
    return multiply_flat(
        x, [Operand(w, 1, swizzled(w.dtype))], _product, bias, residual=residual, activation=activation, gate_block=gate_block,
        out_dtype=out_dtype, sms=sms, tile=tile, name="flat_gemm", pdl=pdl, interpret=interpret,
    )  # fmt: skip


def _product(acc, weight, x_s, own):
    """acc += the warpgroup's rows of the weight's tile times the tokens."""
    plgpu.wgmma(acc, weight[0].at[own], x_s.transpose((1, 0)))


def multiply_flat(
    x: jax.Array, weight: Sequence[Operand], product: Callable, bias: jax.Array | None, *, residual: jax.Array | None,
    activation: str | None, gate_block: int | None, out_dtype, sms: int, tile: FlatTile, name: str, pdl: bool = False,
    in_registers: bool = False, interpret,
) -> jax.Array:  # fmt: skip
    """The pipeline: copies tiles of the weight's arrays and of x, calls product(acc, tiles, x's tile, rows of
    the warpgroup) on each.

    in_registers: acc is a value, and product returns the next one, done with the tiles; else a reference that
    wgmma adds to.
    """
    (m, k), n = x.shape, weight[0].array.shape[0]
    out_dtype, gated = jnp.dtype(out_dtype or x.dtype), gate_block is not None
    _check(x, n, activation, gate_block, out_dtype)
    check_behind(m, n, bias, residual, gated=gated)
    x = pad_rows_above_8(x)
    rows = max(8, x.shape[0])
    operands = [x, *(part.array for part in weight)]
    tiles, columns = pl.cdiv(n, tile.columns), n // 2 if gated else n
    if bias is not None:  # padded: it is not TMA that reads it
        operands.append(
            lax.pad(bias, jnp.zeros((), bias.dtype), [(0, tiles * tile.columns - n, 0)])
            if n % tile.columns
            else bias
        )
    if residual is not None:
        operands.append(pad_rows_above_8(residual))
    most = min(tiles, sms // tile.cluster)
    if not most or tile.cluster > pl.cdiv(k, tile.depth) or tile.stages % tile.turns:
        raise ValueError(
            f"sms={sms}, K={k}: for {tile} at least {tile.cluster} SMs and steps along K, and stages "
            f"a multiple of its turns"
        )
    body = functools.partial(
        multiply, weight=weight, product=product, tile=tile, has_bias=bias is not None, has_residual=residual is not None,
        activation=activation, gated=gated, pdl=pdl, in_registers=in_registers,
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
        scratch_types=scratch(tile, weight, rows, columns, out_dtype, gated, residual is not None),
        compiler_params=LANE,
        kernel_name=f"{name}_{rows}x{n}x{k}",
        interpret=interpret,
    )(*operands)
    return out if x.shape[0] == m else out[:m]


def _check(x, n, activation, gate_block, out_dtype) -> None:
    if x.dtype != jnp.bfloat16 or out_dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"dtypes {x.dtype} -> {out_dtype}: bfloat16 -> bfloat16 or float32")
    if not 1 <= x.shape[0] <= ROWS or n % 8:
        raise ValueError(f"{x.shape[0]} rows, N={n}: 1 to {ROWS} rows, N a multiple of 8")
    if gate_block is not None and (gate_block != GATE_BLOCK or n % (2 * GATE_BLOCK)):
        raise ValueError(
            f"gate_block={gate_block}, N={n}: {GATE_BLOCK}, and N a multiple of {2 * GATE_BLOCK}"
        )
    if activation not in (None, "silu", "gelu_tanh", "relu"):
        raise ValueError(f"activation={activation!r}: None, silu, gelu_tanh or relu")
