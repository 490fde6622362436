"""The reference implementation of both products of a mixture's experts."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.gemm.expert_mlp.limits import MOST_TOKENS
from pallas_kernels.gemm.grouped.groups import Groups, list_groups
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


def few_expert_mlp(
    x: Float[Array, "T K"],
    experts: Int[Array, "T e"],
    w_up: Float[Array, "E N K"],
    w_down: Float[Array, "E D F"],
    *,
    used: Int[Array, ""] | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
) -> tuple[Float[Array, "M D"], Int[Array, "T e"]]:
    """Return the row of each token at each of its experts, and the place of each pair's row.

    The experts that tokens choose have 8 rows each, in the order of the experts, and row t is token t's. Rows
    without a pair are undefined. Pairs of padding have the place M.

    Args:
      used: the number of tokens before padding; None: all. The others: as for `expert_mlp`.
    """
    tokens, chosen = experts.shape
    groups = list_groups(experts, w_up.shape[0], MOST_TOKENS, 1, used=used)
    rows = expert_mlp(
        x[groups.pairs // chosen], w_up, w_down, groups, activation=activation, gate_block=gate_block
    )
    expert = jnp.arange(w_up.shape[0], dtype=jnp.int32)
    before = jnp.sum(
        (expert[None, :] < experts.reshape(-1, 1)) & (groups.sizes > 0)[None, :], axis=1, dtype=jnp.int32
    )
    most = MOST_TOKENS * min(experts.size, w_up.shape[0])
    places = before.reshape(experts.shape) * MOST_TOKENS + jnp.arange(tokens, dtype=jnp.int32)[:, None]
    if used is not None:
        places = jnp.where(jnp.arange(tokens)[:, None] < used, places, most)
    found = jnp.zeros((most, rows.shape[1]), rows.dtype)
    return found.at[places].set(rows.at[groups.places].get(mode="clip"), mode="drop"), places
