"""Persistent fp8 GEMM for Hopper: e4m3 activations and weights, float32 sums, scales and epilogue before
the store.

The skeleton is `dense_gemm`'s: a table of items, one warpgroup that copies, two that compute half of a
tile's rows each. Specific to fp8:

* A token's scale and a channel's scale multiply finished sums. An activation with a scale for every 128
  columns cannot wait that long: the sums of 128 columns leave the tensor core, and their scaled values are
  added in float32 registers (two-level accumulation, DeepSeek-V3 §3.3.2). So does a weight with a scale for
  every 64 rows and 128 columns, as published checkpoints have it.
* The epilogue can quantize the result: gates and ups of 128 columns of a row lie in the registers of four
  threads, which find the largest value and write values and one scale.
* fp8 consumes operands twice as fast as bfloat16, so the bandwidth of the L2 limits the time. Clusters of
  two vertically adjacent CTAs load a weight once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.epilogue_limits import check_bias_and_residual
from pallas_kernels.gemm.fp8.epilogue import E4M3, Epilogue
from pallas_kernels.gemm.fp8.kernel import HALF, multiply, scratch
from pallas_kernels.gemm.fp8.tile_schedule import Fp8Tile, Work, fp8_plan
from pallas_kernels.hopper.layouts import LANE, pad_rows
from pallas_kernels.hopper.limits import sms_of
from pallas_kernels.quantized import BLOCK, BLOCK_ROWS, BlockFp8, Quantized


def fp8_gemm(
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
    plan: tuple[Fp8Tile, Work] | None = None,
    interpret=None,
) -> jax.Array | Quantized:
    """Return act(x @ w.T + bias) (+ residual) of e4m3 operands, accumulated in float32.

    The reference implementation is `pallas_kernels.gemm.reference.gemm`.

    Args:
      x: [M, K] e4m3; scale [] (static), [M] (one a token) or [M, K / 128] (one for 128 columns). K is a
        multiple of 128.
      w: [N, K] e4m3; scale [N] (one a channel). Or `BlockFp8`, scale [N / 64, K / 128], which x with scales
        [M, K / 128] follows, and with gates a gate_block of 64. N is a multiple of 128.
      bias: [N] bfloat16.
      residual: [M, N'] bfloat16, added last.
      activation: None, "silu", "gelu_tanh" or "relu".
      gate_block: 16, 32 or 64: columns are alternating blocks of gates and ups; the result is act(gate) ·
        up.
      quantize: return e4m3 with a scale for every 128 columns of a row (N' a multiple of 128).
      sms: number of SMs that the kernel may occupy, 1 to 132; None: all.
      plan: tile and work; None: `fp8_plan`'s.
    Returns:
      [M, N'] bfloat16, N' = N, or N / 2 with gate_block; or Quantized([M, N'] e4m3, [M, N' / 128] float32).
    Raises:
      ValueError: for a shape, dtype, epilogue or sms outside the limits.
    """
    (m, k), (n, _) = x.values.shape, w.values.shape
    check_operands(x, w, bias, residual, activation, gate_block, quantize, out_dtype)
    x = Quantized(pad_rows(x.values), x.scale)
    residual = residual if residual is None else pad_rows(residual)
    blocked, sms = x.scale.ndim == 2, sms_of(sms)
    tile, work = plan or fp8_plan(m, n, k, sms, blocked=blocked, gate_block=gate_block, quantize=quantize)
    tall = 128 * tile.cluster
    width = n // 2 if gate_block else n
    out_type = [jax.ShapeDtypeStruct((x.values.shape[0], width), E4M3 if quantize else jnp.bfloat16)]
    if quantize:
        out_type.append(jax.ShapeDtypeStruct((m + -m % tall, width // BLOCK), jnp.float32))
    if work.cut:
        out_type.append(
            jax.ShapeDtypeStruct((work.cut, work.parts, tile.cluster, 2, HALF, tile.columns), jnp.float32)
        )
    operands = {
        "work": jnp.asarray(work.table),
        "x": x.values,
        "tokens": _full_rows(x.scale, tall),
        "w": w.values,
        **scales_of_weight(w),
    }
    operands |= {name: v for name, v in (("bias", bias), ("residual", residual)) if v is not None}
    names = (*operands, "out", *(["scales"] if quantize else []), *(["parts"] if work.cut else []))
    epilogue = Epilogue(activation, gate_block, quantize, tile.slots)
    out = plgpu.kernel(
        functools.partial(
            multiply,
            names=names,
            tile=tile,
            epilogue=epilogue,
            parts=work.parts if work.cut else 1,
            interpreted=interpret is not None,
        ),
        out_type=out_type,
        grid=(work.table.shape[0],),
        grid_names=("cta",),
        cluster=(tile.cluster,) if tile.cluster > 1 else (),
        cluster_names=("pair",) if tile.cluster > 1 else (),
        num_threads=3,
        thread_name="wg",
        scratch_types=scratch(tile, operands, out_type[0].dtype),
        compiler_params=LANE,
        kernel_name=f"fp8_gemm_{sms}_{tile.columns}",
        interpret=interpret,
    )(*operands.values())
    return Quantized(out[0][:m], out[1][:m]) if quantize else out[0][:m]


def supports(n: int, k: int, gate_block: int | None = None) -> bool:
    """Return whether `fp8_gemm` supports weights [n, k] with alternating blocks of gates and ups."""
    return n > 0 and k > 0 and n % 128 == 0 and k % 128 == 0 and (gate_block in (None, 16, 32, 64))


def scales_of_weight(w: Quantized | BlockFp8) -> dict[str, jax.Array]:
    """Return the scales of the channels or of the blocks of a weight, by the kernels' name."""
    return {"blocks" if isinstance(w, BlockFp8) else "channels": w.scale}


def check_operands(
    x: Quantized, w: Quantized | BlockFp8, bias, residual, activation, gate_block, quantize, out_dtype
) -> None:
    """Check the limits that both fp8 kernels share. Raises: ValueError."""
    (m, k), (n, depth) = x.values.shape, w.values.shape
    if x.values.dtype != E4M3 or w.values.dtype != E4M3 or out_dtype not in (None, jnp.bfloat16):
        raise ValueError(
            f"dtypes {x.values.dtype}, {w.values.dtype} -> {out_dtype}: accepted are float8_e4m3fn twice -> "
            "bfloat16"
        )
    if m < 1 or k != depth or not supports(n, k, gate_block):
        raise ValueError(
            f"[{m}, {k}] @ [{n}, {depth}].T, gate_block={gate_block}: accepted are N and K multiples of 128, "
            "and gate_block None, 16, 32 or 64"
        )
    if isinstance(w, BlockFp8):
        wanted = (m, k // BLOCK), (n // BLOCK_ROWS, k // BLOCK)
        if (x.scale.shape, w.scale.shape) != wanted or gate_block not in (None, BLOCK_ROWS):
            given = f"scales {x.scale.shape}, {w.scale.shape}, gate_block={gate_block}"
            raise ValueError(f"{given}: accepted are {wanted}, and gate_block None or {BLOCK_ROWS}")
    elif x.scale.shape not in ((), (m,), (m, k // BLOCK)) or w.scale.shape != (n,):
        raise ValueError(
            f"scales {x.scale.shape}, {w.scale.shape}: accepted are [], [{m}] or [{m}, {k // BLOCK}], and "
            f"[{n}]"
        )
    if quantize and (residual is not None or (gate_block and n % (2 * BLOCK))):
        raise ValueError(
            f"quantize=True with N={n}, gate_block={gate_block}: accepted are no residual, and full blocks "
            f"of {BLOCK} columns"
        )
    if activation not in (None, "silu", "gelu_tanh", "relu"):
        raise ValueError(f"activation={activation!r}: accepted are None, silu, gelu_tanh or relu")
    check_bias_and_residual(m, n, bias, residual, gated=gate_block is not None)


def _full_rows(scale, rows: int):
    """Return an activation's scales padded to full tiles of rows."""
    if scale.ndim == 0:
        return scale.reshape(1)
    short = -scale.shape[0] % rows
    return (
        lax.pad(scale, jnp.zeros((), scale.dtype), [(0, short, 0)] + [(0, 0, 0)] * (scale.ndim - 1))
        if short
        else scale
    )
