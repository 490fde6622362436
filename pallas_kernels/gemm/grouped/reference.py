"""The reference implementation of grouped products: rows in groups, with one weight a group (a mixture's
experts).
"""

import jax
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.gemm.grouped.groups import Groups
from pallas_kernels.gemm.reference import finish


def grouped_gemm(
    x: Float[Array, "M K"],
    w: Float[Array, "E N K"],
    groups: Groups,
    *,
    activation: str | None = None,
    gate_block: int | None = None,
    sms: int | None = None,
) -> Float[Array, "M N2"]:
    """Return act(x @ w[expert of the row].T), summed in float32. Rows after the last group are undefined.

    Args:
      groups: from `list_groups`. activation, gate_block: as for `gemm`. sms: number of SMs that a kernel
        may occupy.
    """
    del sms
    numbers = lax.RaggedDotDimensionNumbers(
        (((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    y = finish(
        lax.ragged_dot_general(x, w, groups.sizes, numbers),
        dtype=x.dtype,
        activation=activation,
        gate_block=gate_block,
    )
    assert isinstance(y, jax.Array)  # `finish` was not asked to quantize
    return y
