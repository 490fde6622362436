"""What the products' kernels take behind a product: a bias and a residual of its shape. Past smaller ones
they would read on.
"""

import jax
import jax.numpy as jnp


def check_behind(
    m: int, n: int, bias: jax.Array | None, residual: jax.Array | None, *, gated: bool, dtype=jnp.bfloat16
) -> None:
    """Raises ValueError unless bias is [N], and residual [M, N'] of `dtype`: N' = N, or N / 2 where half of
    the columns are gates.
    """
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias {list(bias.shape)}: [{n}], one a column of the product")
    shape = (m, n // 2 if gated else n)
    if residual is not None and (residual.shape, residual.dtype) != (shape, dtype):
        raise ValueError(
            f"residual {residual.dtype}{list(residual.shape)}: {jnp.dtype(dtype).name}{list(shape)}, "
            f"of the result's shape"
        )
