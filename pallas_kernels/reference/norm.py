"""Norms, computed in float32 whatever the inputs are."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*M D"], weight: Float[Array, " D"], *, eps: float, offset: float = 0.0) -> Float[Array, "*M D"]:
    """x / sqrt(mean(x²) + eps) · (offset + weight), over the last axis."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * (offset + weight.astype(jnp.float32))).astype(x.dtype)


def layer_norm(x: Float[Array, "*M D"], weight: Float[Array, " D"], bias: Float[Array, " D"], *, eps: float) -> Float[Array, "*M D"]:
    """(x - mean) / sqrt(var + eps) · weight + bias, over the last axis."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
