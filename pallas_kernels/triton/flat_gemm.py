"""GEMM for small batches in Triton, for GPUs before Hopper: the weights stream once, with K split if N is
small.

XLA adds the parts of a split in order, fused with the epilogue in one pass over [M, N].
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false
# The extra `triton` may be missing, and pyright cannot type-check Triton's language.

import dataclasses

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.gemm.reference import finish
from pallas_kernels.quantized import Quantized
from pallas_kernels.this_device import this_device


@dataclasses.dataclass(frozen=True)
class Tile:
    """A program's tile. columns: columns of the result. step: K of a step. splits: parts of K."""

    columns: int = 64
    step: int = 128
    splits: int = 1
    warps: int = 4
    stages: int = 4


def tile_for(n: int, k: int, multiprocessors: int, itemsize: int = 2) -> Tile:
    """Return narrow tiles, with K split until every multiprocessor has two programs (FlashDecoding++ §IV:
    small N lacks parallelism).

    A step has the same number of bytes for any dtype: 61 KB of shared memory for up to 16 rows, which all
    GPUs since compute capability 7.5 have.
    """
    columns = 64 if n >= 64 * 2 * multiprocessors else 32
    programs = -(-n // columns)
    splits = max(1, min(8, 2 * multiprocessors // programs, k // 512))
    return Tile(columns=columns, step=256 // itemsize, splits=splits)


@triton.jit
def _multiply(
    x, w, out,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PER_SPLIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * PER_SPLIT
    rows, columns = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for at in range(first, tl.minimum(first + PER_SPLIT, K), STEP):
        along = at + tl.arange(0, STEP)
        weights = tl.load(
            w + columns[:, None].to(tl.int64) * K + along[None, :],
            mask=(columns[:, None] < N) & (along[None, :] < K),
            other=0.0,
        )
        values = tl.load(
            x + rows[None, :] * K + along[:, None], mask=(rows[None, :] < M) & (along[:, None] < K), other=0.0
        )
        acc += tl.dot(weights, values, input_precision="ieee")
    split = tl.program_id(1).to(tl.int64) * M
    tl.store(
        out + (split + rows[None, :]) * N + columns[:, None],
        acc,
        mask=(rows[None, :] < M) & (columns[:, None] < N),
    )


def flat_gemm(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
    quantize: bool = False,
    out_dtype=None,
    sms: int | None = None,
    tile: Tile | None = None,
    capability: int | None = None,
) -> jax.Array | Quantized:
    """Return x @ w.T with the epilogue of `gemm`.

    The reference implementation is `pallas_kernels.gemm.reference.gemm`.

    Args:
      x: [M, K], M at most 64; w: [N, K]; both bfloat16, float16 or float32. Any N and K.
      sms: multiprocessors, which decide the split of K; None: all of this device.
      capability: compute capability to compile for, for example 80; None: this device's.
    Raises:
      ValueError: for a shape or dtype outside the limits.
    """
    (m, k), n = x.shape, w.shape[0]
    if not 1 <= m <= 64 or w.shape != (n, k):
        raise ValueError(f"x {x.shape} and w {w.shape}: accepted are [M, K] and [N, K], M from 1 to 64")
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(
            f"dtypes {x.dtype} and {w.dtype}: accepted are bfloat16, float16 or float32, equal for both"
        )
    tile = tile or tile_for(n, k, sms or this_device().sms or 1, x.dtype.itemsize)
    steps = -(-k // tile.step)
    per_split = -(-steps // tile.splits) * tile.step
    splits = -(-k // per_split)
    parts = jt.triton_call(
        x, w,
        kernel=_multiply,
        name="flat_gemm",
        out_type=jax.ShapeDtypeStruct((splits, m, n), jnp.float32),
        grid=(-(-n // tile.columns), splits),
        compute_capability=capability,
        num_warps=tile.warps,
        num_stages=tile.stages,
        M=m, N=n, K=k, PER_SPLIT=per_split, ROWS=max(16, 1 << (m - 1).bit_length()), COLUMNS=tile.columns,
        STEP=tile.step,
    )  # fmt: skip
    total = parts[0]
    for part in parts[1:]:
        total += part
    epilogue = {
        "residual": residual,
        "activation": activation,
        "gate_block": gate_block,
        "quantize": quantize,
        "out_dtype": out_dtype,
    }
    return finish(total, bias, dtype=x.dtype, **epilogue)
