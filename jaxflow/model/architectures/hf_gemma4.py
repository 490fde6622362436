"""The keys of a Gemma 4 text model's config: two shapes of heads, two ropes, and experts beside the MLP.

The small models E2B and E4B also have embeddings of each layer, and layers that share keys and values.
"""

import dataclasses
import math
from typing import Any

from jaxflow.config import ConfigError, Layer, Rope
from jaxflow.model.architectures.hf_keys import Keys

_TYPES = ("sliding_attention", "full_attention")


_OF_OTHER_INPUTS = (
    "vision_config",
    "audio_config",
    "boi_token_id",
    "eoi_token_id",
    "image_token_id",
    "video_token_id",
    "boa_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "audio_token_id",
    "vision_soft_tokens_per_image",
)


def gemma4_text_config(keys: Keys) -> dict[str, Any]:
    """Return the `text_config` of a model that also takes images and audio, whose other parts are ignored.

    Raises:
      ConfigError: a setting that is not known, or no text model.
    """
    architectures = keys.take("architectures")
    if architectures not in (None, ["Gemma4ForConditionalGeneration"]):
        accepted = "['Gemma4ForConditionalGeneration'] for model_type 'gemma4'"
        raise ConfigError("architectures", architectures, accepted)
    text = keys.mapping("text_config")
    if text is None or text.get("model_type") != "gemma4_text":
        raise ConfigError("text_config", text, "an object of model_type gemma4_text")
    for name in _OF_OTHER_INPUTS:
        keys.take(name)
    outer = {name: keys.take(name) for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id")}
    text |= {name: value for name, value in outer.items() if value is not None}
    keys.finish()
    return text | {"architectures": None}


def gemma4_fields(
    keys: Keys, num_layers: int, hidden_size: int, mlp_width: int, vocab_size: int
) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that other families lack or read from other keys.

    Raises:
      ConfigError: images, or settings that contradict each other. The error names the field.
    """
    _refuse(keys)
    width = keys.take("hidden_size_per_layer_input", 256)
    width = Keys({"hidden_size_per_layer_input": width}).integer("hidden_size_per_layer_input", least=0)
    rows = keys.integer("vocab_size_per_layer_input", 262_144)
    if width and rows != vocab_size:
        raise ConfigError("vocab_size_per_layer_input", rows, f"the same as vocab_size={vocab_size}")
    experts = keys.flag("enable_moe_block", False)
    layers = _with_shared_kv(keys, _layers(keys, num_layers, experts), mlp_width)
    fields: dict[str, Any] = {
        "layers": layers,
        "post_norms": True,
        "embedding_scale": math.sqrt(hidden_size),
        "attention_scale": 1.0,
        "logits_soft_cap": keys.optional_number("final_logit_softcapping", None),
        "qk_norm": True,
        "value_norm": True,
        "layer_scalars": True,
        "layer_input_size": width,
    }
    sizes = {name: keys.take(name) for name in ("num_experts", "top_k_experts", "moe_intermediate_size")}
    return fields | _mixture(Keys(sizes)) if experts else fields


def _mixture(keys: Keys) -> dict[str, Any]:
    """Return the fields of the experts."""
    experts, chosen = keys.integer("num_experts"), keys.integer("top_k_experts")
    if chosen > experts:
        raise ConfigError("top_k_experts", chosen, f"at most {experts}, the number of experts")
    return {
        "num_experts": experts,
        "experts_per_token": chosen,
        "expert_intermediate_size": keys.integer("moe_intermediate_size"),
        "router_scales": True,
        "branch_norms": True,
    }


def _refuse(keys: Keys) -> None:
    """Refuse what is not supported by its key. Raises: ConfigError."""
    both = keys.take("use_bidirectional_attention")
    if both not in (None, "vision"):  # `vision` concerns the tokens of images only
        raise ConfigError("use_bidirectional_attention", both, "vision or null: text attends to the past")
    for name in ("vision_config", "audio_config"):
        if keys.take(name) is not None:
            raise ConfigError(name, "an object", "null: images and audio are not supported")


def _layers(keys: Keys, num_layers: int, experts: bool) -> tuple[Layer, ...]:
    """Return the layers. Full attention has heads and a rope of its own."""
    types = keys.take("layer_types")
    if types is None:
        types = [_TYPES[(layer + 1) % 6 == 0] for layer in range(num_layers - 1)] + [_TYPES[1]]
    if not isinstance(types, list) or len(types) != num_layers or not {*types} <= {*_TYPES}:
        raise ConfigError("layer_types", types, f"{num_layers} times full_attention or sliding_attention")
    if types[-1] != _TYPES[1]:
        raise ConfigError("layer_types", types, "full_attention in the last layer")
    window, same = keys.integer("sliding_window", 512), keys.flag("attention_k_eq_v", False)
    heads, width = keys.take("num_global_key_value_heads"), keys.integer("global_head_dim", 512)
    if heads is not None:
        heads = Keys({"num_global_key_value_heads": heads}).integer("num_global_key_value_heads")
    sliding_rope, full_rope = _ropes(keys)
    full = Layer(
        rope=full_rope,
        experts=experts,
        num_kv_heads=heads if same else None,  # the key has no effect without equal keys and values
        head_dim=width,
        keys_are_values=same,
    )
    kinds = {_TYPES[0]: Layer(window=window, rope=sliding_rope, experts=experts), _TYPES[1]: full}
    return tuple(kinds[kind] for kind in types)


def _with_shared_kv(keys: Keys, layers: tuple[Layer, ...], mlp_width: int) -> tuple[Layer, ...]:
    """Return the layers, of which the last `num_kv_shared_layers` share keys and values of earlier layers.

    With `use_double_wide_mlp`, the MLPs of these layers are twice as wide.
    """
    shared, wide = keys.integer("num_kv_shared_layers", 0, least=0), keys.flag("use_double_wide_mlp", False)
    first = max(0, len(layers) - shared)
    own, others = layers[:first], layers[first:]
    if not {layer.window for layer in others} <= {layer.window for layer in own}:
        accepted = "a number that leaves a layer of each type with keys and values of its own"
        raise ConfigError("num_kv_shared_layers", shared, accepted)
    width = 2 * mlp_width if wide else None
    changed = (dataclasses.replace(layer, shares_kv=True, intermediate_size=width) for layer in others)
    return (*own, *changed)


def _ropes(keys: Keys) -> tuple[Rope, Rope]:
    """Return the rotary embeddings of sliding and of full attention."""
    settings = keys.mapping("rope_parameters")
    if settings is None:
        return Rope(10_000.0), Rope(1_000_000.0, "proportional", part=0.25)
    if {*settings} != {*_TYPES} or not all(isinstance(value, dict) for value in settings.values()):
        raise ConfigError(
            "rope_parameters", settings, "an object for full_attention and one for sliding_attention"
        )
    sliding, full = (_rope(Keys(settings[name], f"rope_parameters.{name}.")) for name in _TYPES)
    return sliding, full


def _rope(keys: Keys) -> Rope:
    kind, theta = keys.take("rope_type", "default"), keys.number("rope_theta")
    if kind not in ("default", "proportional"):
        raise ConfigError(keys.name("rope_type"), kind, "default or proportional")
    rope = Rope(theta)
    if kind == "proportional":
        part, factor = keys.number("partial_rotary_factor", 1.0), keys.number("factor", 1.0)
        if part > 1:
            raise ConfigError(keys.name("partial_rotary_factor"), part, "a part of the head's width, up to 1")
        rope = Rope(theta, "proportional", factor, part=part)
    keys.finish()
    return rope
