"""Flat GEMM for Hopper: products of small batches (decode), whose time is the time to read the weight.

The operands are swapped: rows of the weight are wgmma's M (64) and tokens are its N, so that M tokens are
padded to a multiple of 8 instead of 64 (FlashDecoding++Next §4). One warpgroup copies weights and tokens
ahead through a ring that fills the SM's shared memory (the paper's double buffering, with more buffers).
The other warpgroups multiply. Bytes in flight limit the time, so each CTA processes equally many full
tiles, on fewer CTAs than SMs if necessary. With too few tiles a cluster of CTAs splits a tile along K and
adds the parts in distributed shared memory, in a fixed order.

`multiply_flat` does this for a weight of one or more arrays by row: `flat_gemm` for bfloat16, `int4_gemm`
for 4 bits.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.epilogue_limits import check_bias_and_residual
from pallas_kernels.gemm.flat.kernel import GATE_BLOCK, Operand, multiply, scratch
from pallas_kernels.gemm.flat.tiles import FlatTile, flat_tile
from pallas_kernels.hopper.layouts import LANE, pad_rows_above_8, swizzled
from pallas_kernels.hopper.limits import sms_of

ROWS = 64  # maximum number of tokens


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
    """Return act(x @ w.T + bias) (+ residual), accumulated in float32 (FlashDecoding++Next §4).

    The reference implementation is `pallas_kernels.gemm.reference.gemm`.

    Args:
      x: [M, K] bfloat16, 1 to 64 rows. w: [N, K] bfloat16; K a multiple of 64, N of 8. bias: [N].
      residual: [M, N'] bfloat16, added last. activation: None, "silu", "gelu_tanh" or "relu".
      gate_block: 64: columns are alternating blocks of 64 gates and 64 ups (N a multiple of 128); the
        result is act(gate) · up.
      out_dtype: bfloat16 (default) or float32.
      sms: number of SMs that the kernel may occupy, 1 to 132; None: all.
      pdl: start before the previous kernel has ended (`pallas_kernels.hopper.pdl`); w must be an argument
        of the program.
    Returns:
      [M, N'], N' = N, or N / 2 with gate_block.
    Raises:
      ValueError: for a shape, dtype, epilogue or sms outside the limits.
    """
    if w.dtype != jnp.bfloat16 or x.shape[1] != w.shape[1] or w.shape[1] % 64:
        raise ValueError(
            f"x {x.shape}, w {w.shape} of {w.dtype}: accepted are bfloat16 and the same K, a multiple of 64"
        )
    sms = sms_of(sms)
    tile = tile or flat_tile(x.shape[0], w.shape[0], w.shape[1], sms, gated=gate_block is not None)
    return multiply_flat(
        x, [Operand(w, 1, swizzled(w.dtype))], _product, bias, residual=residual, activation=activation,
        gate_block=gate_block, out_dtype=out_dtype, sms=sms, tile=tile, name="flat_gemm", pdl=pdl,
        interpret=interpret,
    )  # fmt: skip


def _product(acc, weight, x_s, own):
    """Add the warpgroup's rows of the weight's tile times the tokens to acc."""
    plgpu.wgmma(acc, weight[0].at[own], x_s.transpose((1, 0)))


def multiply_flat(
    x: jax.Array, weight: Sequence[Operand], product: Callable, bias: jax.Array | None, *,
    residual: jax.Array | None, activation: str | None, gate_block: int | None, out_dtype, sms: int,
    tile: FlatTile, name: str, pdl: bool = False, in_registers: bool = False, interpret,
) -> jax.Array:  # fmt: skip
    """Run the pipeline: copy tiles of the weight's arrays and of x, and call product(acc, tiles, x's tile,
    rows of the warpgroup).

    in_registers: acc is a value, and product returns the next value; otherwise acc is a reference that
    wgmma adds to.
    """
    (m, k), n = x.shape, weight[0].array.shape[0]
    out_dtype, gated = jnp.dtype(out_dtype or x.dtype), gate_block is not None
    _check(x, n, activation, gate_block, out_dtype)
    check_bias_and_residual(m, n, bias, residual, gated=gated)
    x = pad_rows_above_8(x)
    rows = max(8, x.shape[0])
    operands = [x, *(part.array for part in weight)]
    tiles, columns = pl.cdiv(n, tile.columns), n // 2 if gated else n
    if bias is not None:  # padded, because plain loads, not TMA, read the bias
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
            f"sms={sms}, K={k}: accepted for {tile} are at least {tile.cluster} SMs and steps along K, and "
            "stages that are a multiple of turns"
        )
    body = functools.partial(
        multiply, weight=weight, product=product, tile=tile, has_bias=bias is not None,
        has_residual=residual is not None, activation=activation, gated=gated, pdl=pdl,
        in_registers=in_registers,
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
        raise ValueError(f"dtypes {x.dtype} -> {out_dtype}: accepted are bfloat16 -> bfloat16 or float32")
    if not 1 <= x.shape[0] <= ROWS or n % 8:
        raise ValueError(f"{x.shape[0]} rows, N={n}: accepted are 1 to {ROWS} rows, N a multiple of 8")
    if gate_block is not None and (gate_block != GATE_BLOCK or n % (2 * GATE_BLOCK)):
        raise ValueError(
            f"gate_block={gate_block}, N={n}: accepted are {GATE_BLOCK}, and N a multiple of {2 * GATE_BLOCK}"
        )
    if activation not in (None, "silu", "gelu_tanh", "relu"):
        raise ValueError(f"activation={activation!r}: accepted are None, silu, gelu_tanh or relu")
