"""The keys of a config's mixture of experts with a sigmoid router, shared experts and dense first layers."""

from typing import Any

from jaxflow.config import ConfigError, SigmoidRouter
from jaxflow.model.architectures.hf_keys import Keys


def sigmoid_mixture(
    keys: Keys, num_layers: int, *, experts_per_token: int, dense_layers: int
) -> tuple[tuple[bool, ...], dict[str, Any]]:
    """Return whether each layer is a mixture, and the fields of `ModelConfig` that describe the mixtures.

    experts_per_token, dense_layers: the defaults of `num_experts_per_tok` and `first_k_dense_replace`.

    Raises:
      ConfigError: sizes that contradict each other. The error names the field.
    """
    experts, chosen = keys.integer("n_routed_experts"), keys.integer("num_experts_per_tok", experts_per_token)
    groups, best = keys.integer("n_group", 1), keys.integer("topk_group", 1)
    width, shared = keys.integer("moe_intermediate_size"), keys.integer("n_shared_experts", 0, least=0)
    dense = keys.integer("first_k_dense_replace", dense_layers, least=0)
    if experts % groups:
        raise ConfigError("n_group", groups, f"a divisor of n_routed_experts={experts}")
    if groups > 1 and experts // groups < 2:
        raise ConfigError("n_group", groups, f"groups of two or more of n_routed_experts={experts}, or 1")
    if best > groups:
        raise ConfigError("topk_group", best, f"at most n_group={groups}")
    if chosen > experts // groups * best:
        raise ConfigError(
            "num_experts_per_tok",
            chosen,
            f"at most {experts // groups * best}, the experts in topk_group={best} groups",
        )
    fields = {
        "num_experts": experts,
        "experts_per_token": chosen,
        "expert_intermediate_size": width,
        "shared_expert_intermediate_size": shared * width,
        "norm_topk_prob": keys.flag("norm_topk_prob", True),
        "router": SigmoidRouter(groups, best, keys.number("routed_scaling_factor", 1.0)),
        "prediction_layers": keys.integer("num_nextn_predict_layers", 0, least=0),
    }
    return tuple(layer >= dense for layer in range(num_layers)), fields
