"""The ops of a mixture of experts: each token's experts, and their products, the (token, expert) pairs sorted by expert."""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxflow.config import gate_block
from jaxflow.model.context import Context, Weights
from pallas_kernels.reference import gate_mul


@flax.struct.dataclass
class Routing:
    """Which experts a token goes to (E' of them) and how much each weighs."""

    experts: Int[Array, "t e"]
    weights: Float[Array, "t e"]


def router(c: Context, w: Weights, h: Float[Array, "t D"]) -> Routing:
    """The likeliest experts of each token; weights are softmax over all, renormed over the chosen where the model says."""
    scores = jax.nn.softmax(c.kernels.gemm(h, w["router"], out_dtype=jnp.float32), axis=-1)
    weights, experts = lax.top_k(scores, c.config.experts_per_token)
    if c.config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdims=True)
    return Routing(experts, weights)


def _by_expert(routing: Routing, num_experts: int) -> tuple[Array, Array, Array]:
    """(order that sorts the (token, choice) pairs by expert, its inverse, pairs of each expert)."""
    flat = routing.experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    return order, jnp.argsort(order), jnp.bincount(flat, length=num_experts).astype(jnp.int32)


def _expert_gemm(x: Float[Array, "m D"], w: Float[Array, "E F D"], group_sizes: Int[Array, " E"]) -> Float[Array, "m F"]:
    """Rows grouped by expert, each group times its expert's matrix."""
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
    return lax.ragged_dot_general(x, w, group_sizes, numbers)


def expert_up_gate(c: Context, w: Weights, h: Float[Array, "t D"], routing: Routing) -> Float[Array, "t e F"]:
    """act(gate) · up of each token at each of its experts."""
    order, back, sizes = _by_expert(routing, c.config.num_experts)
    y = _expert_gemm(h[order // routing.experts.shape[1]], w["expert_up_gate"], sizes)
    a = gate_mul(y, gate_block(c.config.expert_intermediate_size), c.config.activation)
    return a[back].reshape(*routing.experts.shape, -1)


def expert_down(c: Context, w: Weights, a: Float[Array, "t e F"], routing: Routing) -> Float[Array, "t D"]:
    """The experts' outputs, weighed and summed; a partial sum under tensor parallelism."""
    order, back, sizes = _by_expert(routing, c.config.num_experts)
    y = _expert_gemm(a.reshape(-1, a.shape[-1])[order], w["expert_down"], sizes)[back]
    y = y.reshape(*routing.experts.shape, -1).astype(jnp.float32) * routing.weights[..., None]
    return y.sum(1).astype(a.dtype)
