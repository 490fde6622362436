"""Matrix products with what is fused behind them."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.quantized import BLOCK, Int4, Quantized
from pallas_kernels.reference.int4 import dequantize_int4

E4M3_MAX = 448.0


def gemm(
    x: Float[Array, "M K"] | Quantized,
    w: Float[Array, "N K"] | Quantized | Int4,
    bias: Float[Array, " N"] | None = None,
    *,
    residual: Float[Array, "M N2"] | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
    quantize: bool = False,
    out_dtype=None,
    sms: int | None = None,
) -> Float[Array, "M N2"] | Quantized:
    """x @ w.T and what follows it, in this order: bias, activation or gates, residual, quantisation.

    Args:
      x: plain, or e4m3 with one scale a row or one for each 128 columns. w: plain, e4m3 with one scale a row (an output channel), or Int4.
      activation: silu, gelu_tanh or relu. gate_block: columns are blocks of this many gates, then ups, alternating, and the result is
        act(gate) · up of N / 2 columns. residual: added to the result.
      quantize: the result is `Quantized`, e4m3 with a scale for each 128 columns.
      out_dtype: default x's, bfloat16 for a quantised x. sms: SMs it may occupy; nothing here.
    """
    del sms
    dtype = jnp.dtype(out_dtype or (jnp.bfloat16 if isinstance(x, Quantized) else x.dtype))
    y = _product(x, dequantize_int4(w, dtype) if isinstance(w, Int4) else w, dtype)
    return finish(y, bias, residual=residual, activation=activation, gate_block=gate_block, quantize=quantize, dtype=dtype)


def _product(x, w, dtype) -> Float[Array, "M N"]:
    dims = (((1,), (1,)), ((), ()))
    if not isinstance(x, Quantized) and not isinstance(w, Quantized):
        return lax.dot_general(x, w, dims, preferred_element_type=dtype)
    values, scale = (w.values, w.scale) if isinstance(w, Quantized) else (w, None)
    if not isinstance(x, Quantized):
        y = lax.dot_general(x, values.astype(x.dtype), dims, preferred_element_type=jnp.float32)
    elif x.scale.ndim == 2:
        y = lax.dot_general(dequantize(x), values.astype(jnp.float32), dims)
    else:  # e4m3 is exact in bfloat16, and its products are exact in float32
        y = lax.dot_general(x.values.astype(jnp.bfloat16), values.astype(jnp.bfloat16), dims, preferred_element_type=jnp.float32)
        y = y * jnp.reshape(x.scale, (-1, 1))
    return y if scale is None else y * scale


def finish(
    y: Float[Array, "M N"],
    bias: Float[Array, " N"] | None = None,
    *,
    residual: Float[Array, "M N2"] | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
    quantize: bool = False,
    dtype=None,
) -> Float[Array, "M N2"] | Quantized:
    """What follows the product in `gemm`; the result is of `dtype`, default y's."""
    if bias is not None:
        y = y + bias.astype(y.dtype)
    if gate_block is not None:
        y = gate_mul(y, gate_block, activation or "")
    elif activation is not None:
        y = activate(y, activation)
    if residual is not None:
        y = (y.astype(jnp.float32) + residual.astype(jnp.float32)).astype(y.dtype)
    return quantize_blocks(y) if quantize else y.astype(dtype or y.dtype)


def quantize_rows(x: Float[Array, "M N"]) -> Quantized:
    """e4m3 with a scale for each row, such that its largest value becomes 448."""
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(x).max(-1), 1e-12) / E4M3_MAX
    return Quantized((x / scale[:, None]).astype(jnp.float8_e4m3fn), scale)


def quantize_blocks(x: Float[Array, "M N"]) -> Quantized:
    """e4m3 with a scale for each 128 columns of a row."""
    blocks = quantize_rows(x.reshape(-1, BLOCK))
    return Quantized(blocks.values.reshape(x.shape), blocks.scale.reshape(x.shape[0], -1))


def dequantize(x: Quantized, dtype=jnp.float32) -> Float[Array, "M N"]:
    """values · scale, in float32, rounded to `dtype` once."""
    wide = x.values.astype(jnp.float32)
    if x.scale.ndim == 2:
        return (wide.reshape(*x.scale.shape, -1) * x.scale[..., None]).reshape(wide.shape).astype(dtype)
    return (wide * (x.scale[:, None] if x.scale.ndim else x.scale)).astype(dtype)


def gate_mul(y: Float[Array, "M F2"], block: int, activation: str) -> Float[Array, "M F"]:
    """act(gate) · up, of columns laid out as blocks of `block` gates then `block` ups, alternating."""
    pair = y.reshape(y.shape[0], -1, 2, block)
    return (activate(pair[:, :, 0], activation) * pair[:, :, 1]).reshape(y.shape[0], -1)


def activate(x: Float[Array, "*M"], activation: str) -> Float[Array, "*M"]:
    """silu, gelu_tanh or relu, in float32, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    if activation == "silu":
        y = x32 * lax.logistic(x32)
    elif activation == "gelu_tanh":
        y = 0.5 * x32 * (1.0 + jnp.tanh(0.7978845608028654 * (x32 + 0.044715 * x32**3)))
    elif activation == "relu":
        y = jnp.maximum(x32, 0.0)
    else:
        raise ValueError(f"activation={activation!r}: silu, gelu_tanh or relu")
    return y.astype(x.dtype)
