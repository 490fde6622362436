"""The check of bias and residual that all GEMM kernels share. A kernel would read past the end of smaller
arrays.
"""

import jax
import jax.numpy as jnp


def check_bias_and_residual(
    m: int, n: int, bias: jax.Array | None, residual: jax.Array | None, *, gated: bool, dtype=jnp.bfloat16
) -> None:
    """Check that bias is [N], and that residual is [M, N'] of `dtype`, with N' = N, or N / 2 for gated
    products.

    Raises: ValueError.
    """
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias {list(bias.shape)}: accepted is [{n}], one number a column")
    shape = (m, n // 2 if gated else n)
    if residual is not None and (residual.shape, residual.dtype) != (shape, dtype):
        raise ValueError(
            f"residual {residual.dtype}{list(residual.shape)}: accepted is "
            f"{jnp.dtype(dtype).name}{list(shape)}, "
            "the shape of the result"
        )
