"""Matrix products with what is fused behind them."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def gemm(x: Float[Array, "M D"], w: Float[Array, "F D"], bias: Float[Array, " F"] | None = None, out_dtype=None) -> Float[Array, "M F"]:
    """x @ w.T (+ bias), accumulated in float32, returned in `out_dtype` (default: x's)."""
    y = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype or x.dtype)
    return y if bias is None else y + bias.astype(y.dtype)


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
