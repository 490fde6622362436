"""The reference implementation of both products of a mixture's experts."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.gemm.grouped.groups import Groups
from pallas_kernels.gemm.grouped.reference import by_row, finish_rows, grouped_gemm
from pallas_kernels.pointwise.quantize.reference import dequantize, quantize_rows
from pallas_kernels.quantized import BLOCK_ROWS, Quantized


def expert_mlp(
    x: Float[Array, "M K"] | Quantized,
    w_up: Float[Array, "E N K"] | Quantized,
    w_down: Float[Array, "E D F"] | Quantized,
    groups: Groups,
    *,
    activation: str | None = None,
    gate_block: int | None = None,
) -> Float[Array, "M D"]:
    """Return down(act(gate(x)) · up(x)) of each row's expert, summed in float32.

    Between the products the rows are in x's dtype, in e4m3 with a scale for each 64 columns. The result is in
    bfloat16 for e4m3, and in x's dtype otherwise.

    Args:
      x, w_up, w_down: floats, or e4m3 with scales [M], [E, 2 F] and [E, D]. The others: as for
        `grouped_gemm`.
    """
    gates: dict[str, Any] = {"activation": activation, "gate_block": gate_block}
    if not isinstance(x, Quantized):
        return grouped_gemm(grouped_gemm(x, w_up, groups, **gates), w_down, groups)
    assert isinstance(w_up, Quantized) and isinstance(w_down, Quantized)  # an activation follows its weight
    numbers = lax.RaggedDotDimensionNumbers(
        (((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    values, weights = (one.values.astype(jnp.float32) for one in (x, w_up))
    y = lax.ragged_dot_general(values, weights, groups.sizes, numbers, precision="highest")
    y = y * x.scale[:, None] * by_row(w_up.scale, groups, y.shape[0])
    a = finish_rows(y, groups, bias=None, **gates)
    # Without the barrier XLA leaves both conversions out on a GPU, and nothing is rounded.
    blocks = lax.optimization_barrier(quantize_rows(a.reshape(a.shape[0], -1, BLOCK_ROWS)))
    a = dequantize(blocks).reshape(a.shape)
    y = lax.ragged_dot_general(
        a, w_down.values.astype(jnp.float32), groups.sizes, numbers, precision="highest"
    )
    return (y * by_row(w_down.scale, groups, y.shape[0])).astype(jnp.bfloat16)
