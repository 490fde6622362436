"""The keys of a config's latent attention."""

import math
from collections.abc import Mapping
from typing import Any

from jaxflow.config import ConfigError, Latent, Rope
from jaxflow.model.architectures.hf_keys import Keys


def latent_attention(keys: Keys, heads: int) -> Latent:
    """Return the widths of latent attention.

    Raises:
      ConfigError: queries without a down-projection, key/value heads, or widths that contradict each
        other. The error names the field.
    """
    if keys.has("q_lora_rank"):
        query_rank = keys.integer("q_lora_rank")
    else:
        raise ConfigError(
            "q_lora_rank", None, "a number; queries without a down-projection are not supported"
        )
    latent = Latent(
        query_rank,
        keys.integer("kv_lora_rank"),
        keys.integer("qk_nope_head_dim"),
        keys.integer("qk_rope_head_dim"),
        keys.integer("v_head_dim"),
        keys.flag("rope_interleave", True),
    )
    if latent.rope_dim % 2:
        raise ConfigError("qk_rope_head_dim", latent.rope_dim, "an even number, because planes rotate")
    equal = {
        "num_key_value_heads": (heads, "num_attention_heads"),
        "head_dim": (latent.rope_dim, "qk_rope_head_dim"),
        "qk_head_dim": (latent.plain_dim + latent.rope_dim, "qk_nope_head_dim + qk_rope_head_dim"),
    }
    for field, (value, others) in equal.items():
        if (given := keys.integer(field, value)) != value:
            raise ConfigError(field, given, f"the same as {others}={value}")
    return latent


def attention_scale(config: Mapping[str, Any], rope: Rope, head_dim: int) -> float:
    """Return the factor of q·k. YaRN's `mscale_all_dim` raises it (DeepSeek-V2's modelling code).

    config: a config whose rope settings were read without an error.
    """
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    of_all = settings.get("mscale_all_dim") if rope.scaling == "yarn" else None
    grown = 0.1 * of_all * math.log(rope.factor) + 1.0 if of_all and rope.factor > 1.0 else 1.0
    return head_dim**-0.5 * grown * grown
