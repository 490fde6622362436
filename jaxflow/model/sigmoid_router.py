"""The choice of experts by sigmoid scores with a bias, within the best groups of
experts (DeepSeek-V3, §2.1.2).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxflow.config import ModelConfig

_SMALLEST = 1e-20  # added to the sum that weights are divided by


def choose_experts(
    logits: Float[Array, "t E"], bias: Float[Array, " E"], config: ModelConfig, *, top_k: Callable
) -> tuple[Int[Array, "t e"], Float[Array, "t e"]]:
    """Return the experts of each token and their weights, float32.

    logits: float32. bias: added to the scores for the choice; the weights are the scores without the bias.
    top_k: of `KernelSet`.
    """
    router = config.router
    assert router is not None
    scores = jax.nn.sigmoid(logits)
    ranked = scores + bias
    if router.groups > 1:
        best = _in_best_groups(ranked, router.groups, router.groups_per_token, top_k)
        ranked = jnp.where(best, ranked, -jnp.inf)
    _, experts = top_k(ranked, config.experts_per_token)
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + _SMALLEST)
    return experts, weights * router.scale


def _in_best_groups(scores: Float[Array, "t E"], groups: int, chosen: int, top_k: Callable) -> Array:
    """Return [t, E], whether an expert is in one of the token's `chosen` groups with the best two experts."""
    t, number = scores.shape
    best_two = top_k(scores.reshape(t * groups, -1), 2)[0].sum(-1)
    _, best = top_k(best_two.reshape(t, groups), chosen)
    here = jnp.any(best[:, :, None] == jnp.arange(groups), axis=1)
    return jnp.repeat(here, number // groups, axis=1)
