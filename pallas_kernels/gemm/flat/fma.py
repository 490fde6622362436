"""Product of very few rows without tensor cores: multiply and add as the weight streams by
(FlashDecoding++Next §4).

XLA's own reduction over a row reads as fast as memory gives, so the kernel is XLA's: a sum over K for each
row of x, fused with the product.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.gemm.reference import finish
from pallas_kernels.quantized import Quantized

ROWS = 4  # most rows: each is a pass of arithmetic over the same weights


def fma_gemm(x: jax.Array, w: jax.Array, bias: jax.Array | None = None, **behind) -> jax.Array | Quantized:
    """x [M, K] @ w [N, K].T, M at most 4, in float32, and what follows it (the twin: `reference.gemm`).

    Raises:
      ValueError: for more than 4 rows.
    """
    if x.shape[0] > ROWS:
        raise ValueError(f"{x.shape[0]} rows: at most {ROWS}")
    wide = w.astype(jnp.float32)
    y = jnp.stack([jnp.sum(row.astype(jnp.float32) * wide, axis=1) for row in x])
    return finish(y, bias, dtype=x.dtype, **behind)
