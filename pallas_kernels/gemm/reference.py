"""The reference implementation of matrix products with their epilogue."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from pallas_kernels.gemm.block_fp8_format import dequantize_block_fp8
from pallas_kernels.gemm.int4.reference import dequantize_int4
from pallas_kernels.pointwise.quantize.reference import dequantize, quantize_blocks
from pallas_kernels.quantized import BlockFp8, Int4, Quantized

CLAMPED_SWIGLU = "clamped_swiglu"  # needs gates and ups
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702


def multiply(x: Shaped[Array, "M K"], w: Shaped[Array, "N K"], operands, dtype) -> Float[Array, "M N"]:
    """Return x @ w.T in `dtype`, of operands that are converted to the dtype `operands` first."""
    x, w = x.astype(operands), w.astype(operands)
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def gemm(
    x: Float[Array, "M K"] | Quantized,
    w: Float[Array, "N K"] | Quantized | Int4 | BlockFp8,
    bias: Float[Array, " N"] | None = None,
    *,
    residual: Float[Array, "M N2"] | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
    quantize: bool = False,
    out_dtype=None,
    sms: int | None = None,
    multiply: Callable[..., Array] = multiply,
) -> Float[Array, "M N2"] | Quantized:
    """Return act(x @ w.T + bias) + residual, summed in float32.

    Args:
      activation: silu, gelu_tanh, relu or None; with gates also clamped_swiglu.
      gate_block: columns are alternating blocks of `gate_block` gates and as many ups; the result is
        act(gate) · up with N / 2 columns.
      quantize: return e4m3 with a scale for every 128 columns of a row.
      out_dtype: dtype of the result; None: x's dtype, or bfloat16 for quantized x.
      sms: number of SMs that a kernel may occupy; the result does not depend on it.
      multiply: computes the product without scales.
    """
    del sms
    out = jnp.dtype(out_dtype or (jnp.bfloat16 if isinstance(x, Quantized) else x.dtype))
    epilogue = {
        "residual": residual,
        "activation": activation,
        "gate_block": gate_block,
        "quantize": quantize,
    }
    plain = not (isinstance(x, Quantized) or isinstance(w, Quantized))
    operands = out if isinstance(x, Quantized) else x.dtype
    if isinstance(x, Quantized) and isinstance(w, Quantized) and max(x.scale.ndim, w.scale.ndim) < 2:
        operands = x.values.dtype  # XLA multiplies two e4m3 arrays directly, and the sums are scaled
    w = dequantize_int4(w, operands) if isinstance(w, Int4) else w
    w = dequantize_block_fp8(w, gate_block, operands) if isinstance(w, BlockFp8) else w
    (x, of_rows), (w, of_columns) = _factors(x), _factors(w)
    # Without scales the product is rounded before the epilogue, which halves the bytes that XLA writes.
    y = multiply(x, w, operands, out if plain else jnp.float32)
    if of_rows is not None:
        y = y * (of_rows[:, None] if of_rows.ndim else of_rows)
    if of_columns is not None:
        y = y * of_columns
    return finish(y, bias, dtype=out, **epilogue)


def _factors(x: Array | Quantized) -> tuple[Array, Array | None]:
    """Return (numbers, scales of rows) of an operand. A scale that varies along a row is applied before the
    sum.
    """
    if not isinstance(x, Quantized):
        return x, None
    if x.scale.ndim == x.values.ndim:
        return dequantize(x), None
    return x.values, x.scale


def finish(
    y: Float[Array, "M N"],
    bias: Float[Array, " N"] | None = None,
    *,
    dtype,
    residual: Float[Array, "M N2"] | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
    quantize: bool = False,
    out_dtype=None,
) -> Float[Array, "M N2"] | Quantized:
    """Return the epilogue of `gemm` on a product y, computed in float32, with `out_dtype` (None: `dtype`)."""
    if bias is not None or residual is not None or activation is not None or quantize:
        y = y.astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    if gate_block is not None:
        y = gate_mul(y, gate_block, activation)
    elif activation is not None:
        y = activate(y, activation)
    if residual is not None:
        y = y + residual.astype(jnp.float32)
    return quantize_blocks(y) if quantize else y.astype(out_dtype or dtype)


def gate_mul(y: Float[Array, "M F2"], block: int, activation: str | None) -> Float[Array, "M F"]:
    """Return act(gate) · up for columns in alternating blocks of `block` gates and `block` ups.

    `clamped_swiglu`, of gpt-oss, is g · sigmoid(1.702 · g) · (u + 1) of the gate g, at most
    7, and of the up u from -7 to 7.
    """
    pair = y.reshape(y.shape[0], -1, 2, block)
    gate, up = pair[:, :, 0], pair[:, :, 1]
    if activation == CLAMPED_SWIGLU:
        gate, up = jnp.minimum(gate, SWIGLU_LIMIT), jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (gate * lax.logistic(SWIGLU_ALPHA * gate) * (up + 1.0)).reshape(y.shape[0], -1)
    return (activate(gate, activation) * up).reshape(y.shape[0], -1)


def activate(x: Float[Array, "*M"], activation: str | None) -> Float[Array, "*M"]:
    """Return silu, gelu_tanh or relu of x (None: x), computed in float32, in x's dtype."""
    x32 = x.astype(jnp.float32)
    if activation == "silu":
        y = x32 * lax.logistic(x32)
    elif activation == "gelu_tanh":
        y = 0.5 * x32 * (1.0 + jnp.tanh(0.7978845608028654 * (x32 + 0.044715 * x32**3)))
    elif activation == "relu":
        y = jnp.maximum(x32, 0.0)
    elif activation is None:
        y = x32
    else:
        raise ValueError(f"activation={activation!r}: accepted are silu, gelu_tanh, relu or None")
    return y.astype(x.dtype)
