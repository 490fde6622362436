"""Routers of steps of few tokens, which run as one kernel: alone, or with the sort of the rows by expert."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxflow.config import ModelConfig
from jaxflow.model.expert_copies import has_copies
from jaxflow.model.op_registry import Context, Weights
from jaxflow.model.routing import Routing
from pallas_kernels.gemm.router import limits
from pallas_kernels.quantized import BlockFp8, Quantized


def is_one(c: Context, w: Weights, h: Float[Array, "t D"]) -> bool:
    """Return whether one kernel computes the product and the choice of experts."""
    few = c.whole and c.sms is None and h.shape[0] <= c.kernels.route_max_tokens
    plain = not c.config.router_scales and (c.config.router is None or c.config.router.groups == 1)
    return few and plain and limits.supports(h.shape[0], w["router"], c.config.experts_per_token)


def sorts(c: Context, w: Weights, h: Float[Array, "t D"]) -> bool:
    """Return whether the kernel of the router also sorts the rows. Each device then has all experts."""
    few = is_one(c, w, h) and h.shape[0] <= c.kernels.route_and_sort_max_tokens
    alone = c.expert_axis is None and not has_copies(w)
    own = "routed_norm" not in w and not isinstance(w["expert_up_gate"], BlockFp8)
    return few and alone and own and limits.supports_sort(h.shape[0], w["router"], c.config.experts_per_token)


def route(c: Context, w: Weights, h: Float[Array, "t D"]) -> tuple[Int[Array, "t e"], Float[Array, "t e"]]:
    """Return the experts of each token, and their weights."""
    weights, experts = c.kernels.route(h, *_router(w), **_rule(c.config))
    return experts, weights


def route_and_sort(
    c: Context, w: Weights, h: Float[Array, "t D"], is_token: Bool[Array, " t"] | None
) -> Routing:
    """Return the experts of each token, their weights, and the rows in the form of the experts' weight."""
    used = {} if is_token is None else {"used": jnp.sum(is_token, dtype=jnp.int32)}
    quantize = isinstance(w["expert_up_gate"], Quantized)
    made = c.kernels.route_and_sort(h, *_router(w), **_rule(c.config), quantize=quantize, **used)
    weights, experts, groups, rows = made
    return Routing(experts, weights, is_token=is_token, sorted_rows=(groups, rows))


def _router(w: Weights) -> tuple[Array, Array | None, Array | None]:
    return w["router"], w.get("router_bias"), w.get("score_bias")


def _rule(config: ModelConfig) -> dict[str, Any]:
    """Return the rule of the choice, as keyword arguments of the kernel."""
    rule = {"normalized": config.norm_topk_prob, "chosen": config.experts_per_token}
    return rule | ({"scale": config.router.scale} if config.router is not None else {})
