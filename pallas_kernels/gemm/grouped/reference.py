"""The reference implementation of grouped products: rows in groups, with one weight a group (a mixture's
experts).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.gemm.block_fp8_format import row_scales
from pallas_kernels.gemm.grouped.groups import Groups
from pallas_kernels.gemm.grouped.int4_format import dequantize_experts
from pallas_kernels.gemm.grouped.mxfp4_blocks import dequantize_blocks
from pallas_kernels.gemm.grouped.mxfp4_format import dequantize_mxfp4
from pallas_kernels.gemm.reference import finish
from pallas_kernels.quantized import BLOCK, BlockFp8, ExpertInt4, Mxfp4, Mxfp4Blocks, Quantized


def grouped_gemm(
    x: Float[Array, "M K"] | Quantized,
    w: Float[Array, "E N K"] | Quantized | Mxfp4 | Mxfp4Blocks | ExpertInt4 | BlockFp8,
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
      x, w: floats, or e4m3 with scales [M] and [E, N]; the result is then bfloat16. An `Mxfp4` or
        `ExpertInt4` weight is multiplied as the numbers that it stands for, in x's dtype. With a `BlockFp8`
        weight x is e4m3 with scales [M, K / 128].
      groups: from `list_groups`. activation, gate_block: as for `gemm`. sms: number of SMs that a kernel
        may occupy.
    """
    del sms
    numbers = lax.RaggedDotDimensionNumbers(
        (((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    epilogue: dict[str, Any] = {"bias": bias, "activation": activation, "gate_block": gate_block}
    if isinstance(w, BlockFp8):
        assert isinstance(x, Quantized)  # an activation follows its weight
        y = _multiply_blocks(x, w, groups, numbers, gate_block)
        return finish_rows(y, groups, **epilogue).astype(jnp.bfloat16)
    if isinstance(x, Quantized) and isinstance(w, Quantized):
        # bfloat16 holds every number of e4m3.
        values, weights = (one.values.astype(jnp.bfloat16) for one in (x, w))
        y = lax.ragged_dot_general(
            values, weights, groups.sizes, numbers, preferred_element_type=jnp.dtype("float32")
        )
        y = y * x.scale[:, None] * by_row(w.scale, groups, y.shape[0])
        return finish_rows(y, groups, **epilogue).astype(jnp.bfloat16)
    assert not isinstance(x, Quantized) and not isinstance(w, Quantized)  # an activation follows its weight
    if isinstance(w, Mxfp4):
        w = dequantize_mxfp4(w, x.dtype)
    if isinstance(w, Mxfp4Blocks):
        w = dequantize_blocks(w, x.dtype)
    if isinstance(w, ExpertInt4):
        w = dequantize_experts(w, x.dtype)
    return finish_rows(lax.ragged_dot_general(x, w, groups.sizes, numbers), groups, **epilogue)


def _multiply_blocks(
    x: Quantized, w: BlockFp8, groups: Groups, numbers: lax.RaggedDotDimensionNumbers, gate_block: int | None
) -> Float[Array, "M N"]:
    """Return the product of operands with scales for each 128 columns, in float32.

    The sum of each 128 columns is scaled before it is added.
    """
    # bfloat16 holds every number of e4m3.
    values, weights = (one.values.astype(jnp.bfloat16) for one in (x, w))
    of_rows = row_scales(w, gate_block)

    def add(block: Array, y: Float[Array, "M N"]) -> Float[Array, "M N"]:
        part = lax.ragged_dot_general(
            lax.dynamic_slice_in_dim(values, block * BLOCK, BLOCK, 1),
            lax.dynamic_slice_in_dim(weights, block * BLOCK, BLOCK, 2),
            groups.sizes,
            numbers,
            preferred_element_type=jnp.dtype("float32"),
        )
        of_tokens, of_channels = (
            lax.dynamic_index_in_dim(one, block, one.ndim - 1, keepdims=False) for one in (x.scale, of_rows)
        )
        return y + part * of_tokens[:, None] * by_row(of_channels, groups, y.shape[0])

    zero = jnp.zeros((x.shape[0], w.shape[1]), jnp.float32)
    return lax.fori_loop(0, x.scale.shape[1], add, zero)


def finish_rows(
    y: Float[Array, "M N"],
    groups: Groups,
    *,
    bias: Float[Array, "E N"] | None,
    activation: str | None,
    gate_block: int | None,
) -> Float[Array, "M N2"]:
    """Return the epilogue of `grouped_gemm` on a product y, in y's dtype."""
    rows = None if bias is None else by_row(bias, groups, y.shape[0])
    found = finish(y, rows, dtype=y.dtype, activation=activation, gate_block=gate_block)
    assert isinstance(found, jax.Array)  # `finish` was not asked to quantize
    return found


def by_row(values: Float[Array, "E N"], groups: Groups, count: int) -> Float[Array, "M N"]:
    """Return the values of each row's expert, for `count` rows."""
    row, ends = jnp.arange(count, dtype=jnp.int32), jnp.cumsum(groups.sizes)
    expert = jnp.sum((ends[None, :] <= row[:, None]).astype(jnp.int32), axis=1)
    return jnp.take(values, expert, axis=0, mode="clip")
