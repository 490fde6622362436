"""The reference implementation of grouped products: rows in groups, with one weight a group (a mixture's
experts).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.gemm.grouped.groups import Groups
from pallas_kernels.gemm.reference import finish


def grouped_gemm(
    x: Float[Array, "M K"],
    w: Float[Array, "E N K"],
    groups: Groups,
    *,
    bias: Float[Array, "E N"] | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
    sms: int | None = None,
) -> Float[Array, "M N2"]:
    """Return act(x @ w[expert of the row].T + bias[expert of the row]), summed in float32.

    Rows after the last group are undefined.

    Args:
      groups: from `list_groups`. activation, gate_block: as for `gemm`. sms: number of SMs that a kernel
        may occupy.
    """
    del sms
    numbers = lax.RaggedDotDimensionNumbers(
        (((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    y = lax.ragged_dot_general(x, w, groups.sizes, numbers)
    return finish_rows(y, groups, bias=bias, activation=activation, gate_block=gate_block)


def finish_rows(
    y: Float[Array, "M N"],
    groups: Groups,
    *,
    bias: Float[Array, "E N"] | None,
    activation: str | None,
    gate_block: int | None,
) -> Float[Array, "M N2"]:
    """Return the epilogue of `grouped_gemm` on a product y, in y's dtype."""
    rows = None
    if bias is not None:
        row, ends = jnp.arange(y.shape[0], dtype=jnp.int32), jnp.cumsum(groups.sizes)
        expert = jnp.sum((ends[None, :] <= row[:, None]).astype(jnp.int32), axis=1)
        rows = jnp.take(bias, expert, axis=0, mode="clip")
    found = finish(y, rows, dtype=y.dtype, activation=activation, gate_block=gate_block)
    assert isinstance(found, jax.Array)  # `finish` was not asked to quantize
    return found
