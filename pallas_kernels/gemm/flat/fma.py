"""GEMM for very small batches without tensor cores: multiply and add while the weight streams by
(FlashDecoding++Next §4).

XLA's reduction over a row reads at memory speed, so this is XLA code: a sum over K for each row of x, fused
with the product.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.gemm.reference import finish
from pallas_kernels.quantized import Quantized

ROWS = 4  # maximum number of rows; each row is a pass of arithmetic over the weights


def fma_gemm(x: jax.Array, w: jax.Array, bias: jax.Array | None = None, **epilogue) -> jax.Array | Quantized:
    """Return x [M, K] @ w [N, K].T, M at most 4, in float32, with the epilogue of `gemm`.

    The reference implementation is `pallas_kernels.gemm.reference.gemm`.

    Raises: ValueError for more than 4 rows.
    """
    if x.shape[0] > ROWS:
        raise ValueError(f"{x.shape[0]} rows: accepted are up to {ROWS}")
    w32 = w.astype(jnp.float32)
    y = jnp.stack([jnp.sum(row.astype(jnp.float32) * w32, axis=1) for row in x])
    return finish(y, bias, dtype=x.dtype, **epilogue)
