"""The keys of a config's mixture of experts with a sigmoid router, shared experts and dense first layers."""

from collections.abc import Mapping
from typing import Any

from jaxflow.config import ConfigError, SigmoidRouter
from jaxflow.model.architectures.hf_keys import Keys

GLM_DEFAULTS = {
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1,
}
DEEPSEEK_DEFAULTS = GLM_DEFAULTS | {
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
}


def sigmoid_mixture(
    keys: Keys, num_layers: int, defaults: Mapping[str, Any]
) -> tuple[tuple[bool, ...], dict[str, Any]]:
    """Return whether each layer is a mixture, and the fields of `ModelConfig` that describe the mixtures.

    defaults: of absent keys.

    Raises:
      ConfigError: sizes that contradict each other. The error names the field.
    """

    def number(key: str, least: int = 1) -> int:
        return keys.integer(key, defaults.get(key), least=least)

    experts, chosen = number("n_routed_experts"), number("num_experts_per_tok")
    groups, best = number("n_group"), number("topk_group")
    width, shared = number("moe_intermediate_size"), number("n_shared_experts", least=0)
    dense = number("first_k_dense_replace", least=0)
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
        "router": SigmoidRouter(
            groups, best, keys.number("routed_scaling_factor", defaults["routed_scaling_factor"])
        ),
        "prediction_layers": number("num_nextn_predict_layers", least=0),
    }
    return tuple(layer >= dense for layer in range(num_layers)), fields
