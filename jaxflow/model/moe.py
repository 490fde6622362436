"""The ops of a mixture of experts: each token's experts, and their products, the (token, expert) pairs sorted
by expert.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxflow.config import gate_block
from jaxflow.model.context import Context, Weights

_FEW = 32  # experts that are ranked by comparing each with each


@flax.struct.dataclass
class Routing:
    """Which experts a token goes to (E' of them) and how much each weighs."""

    experts: Int[Array, "t e"]
    weights: Float[Array, "t e"]


def router(c: Context, w: Weights, h: Float[Array, "t D"]) -> Routing:
    """The likeliest experts of each token; weights are softmax over all, renormed over the chosen where the
    model says.
    """
    scores = jax.nn.softmax(c.kernels.gemm(h, w["router"], out_dtype=jnp.float32), axis=-1)
    weights, experts = likeliest(scores, c.config.experts_per_token)
    if c.config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdims=True)
    return Routing(experts, weights)


def likeliest(scores: Float[Array, "t E"], chosen: int) -> tuple[Float[Array, "t e"], Int[Array, "t e"]]:
    """`lax.top_k`. Few scores are ranked by comparing each with each: XLA sorts, which takes a kernel for
    each part of it.
    """
    number = scores.shape[1]
    if number > _FEW:
        return lax.top_k(scores, chosen)
    at = jnp.arange(number, dtype=jnp.int32)
    ranked = jnp.where(
        jnp.isnan(scores), -jnp.inf, scores
    )  # NaN, which is before and behind nothing, would give all the first rank
    one, other = ranked[:, :, None], ranked[:, None, :]
    rank = jnp.sum(((other > one) | ((other == one) & (at[None, :] < at[:, None]))).astype(jnp.int32), axis=2)
    here = (
        rank[:, None, :] == at[:chosen, None]
    )  # [t, e, E]: whether an expert is a token's first, second, ...
    return jnp.sum(jnp.where(here, scores[:, None, :], 0.0), axis=2), jnp.sum(jnp.where(here, at, 0), axis=2)


def expert_up_gate(c: Context, w: Weights, h: Float[Array, "t D"], routing: Routing) -> Float[Array, "t e F"]:
    """act(gate) · up of each token at each of its experts."""
    groups = c.kernels.list_groups(routing.experts, c.config.num_experts)
    gates = {"activation": c.config.activation, "gate_block": gate_block(c.config.expert_intermediate_size)}
    tokens = groups.pairs // routing.experts.shape[1]
    return c.kernels.grouped_gemm(h[tokens], w["expert_up_gate"], groups, **gates, **_share(c))[groups.places]


def expert_down(c: Context, w: Weights, a: Float[Array, "t e F"], routing: Routing) -> Float[Array, "t D"]:
    """The experts' outputs, weighed and summed; a partial sum under tensor parallelism."""
    groups = c.kernels.list_groups(routing.experts, c.config.num_experts)
    y = c.kernels.grouped_gemm(
        a.reshape(-1, a.shape[-1])[groups.pairs], w["expert_down"], groups, **_share(c)
    )[groups.places]
    return (y.astype(jnp.float32) * routing.weights[..., None]).sum(1).astype(a.dtype)


def _share(c: Context) -> dict[str, int]:
    """How many SMs the plan leaves to a product."""
    return {} if c.sms is None else {"sms": c.sms}
