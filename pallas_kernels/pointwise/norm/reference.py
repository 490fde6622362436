"""Reference implementations of the norms, computed in float32."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.pointwise.norm.weighted_rows import WeightedRows
from pallas_kernels.pointwise.quantize.reference import quantize_rows
from pallas_kernels.quantized import Quantized


def add_norm(
    x: Float[Array, "T D"],
    y: Float[Array, "T D"] | WeightedRows | None,
    weight: Float[Array, " D"],
    bias: Float[Array, " D"] | None = None,
    *,
    other: Float[Array, "T D"] | None = None,
    eps: float,
    offset: float = 0.0,
    quantize: bool = False,
    sms: int | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"] | Quantized]:
    """Return (x + y, its norm): the residual sum, rounded to x's dtype, and the input of the next block.

    Args:
      y: None: nothing to add.
      other: added to y first, with rounding: the second part of a sum over two devices.
      bias: with a bias the norm is LayerNorm, without RMSNorm, which scales by offset + weight.
      quantize: return the norm in e4m3 with a scale for each token, from the float32 values.
      sms: number of SMs that a kernel may occupy; the result does not depend on it.
    """
    del sms
    y = y.total() if isinstance(y, WeightedRows) else y
    y = y if other is None or y is None else y + other
    x = x if y is None else x + y
    x32 = x.astype(jnp.float32)
    h = _rms(x32, weight, eps, offset) if bias is None else _layer(x32, weight, bias, eps)
    return x, quantize_rows(h) if quantize else h.astype(x.dtype)


def rms_norm(
    x: Float[Array, "*M D"], weight: Float[Array, " D"], *, eps: float, offset: float = 0.0
) -> Float[Array, "*M D"]:
    """Return x / sqrt(mean(x²) + eps) · (offset + weight), over the last axis."""
    return _rms(x.astype(jnp.float32), weight, eps, offset).astype(x.dtype)


def _rms(x: Array, weight: Array, eps: float, offset: float) -> Array:
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * (offset + weight.astype(jnp.float32))


def _layer(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Return (x - mean) / sqrt(var + eps) · weight + bias, over the last axis."""
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * weight.astype(jnp.float32) + bias.astype(jnp.float32)
