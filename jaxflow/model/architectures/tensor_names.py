"""Names of a model's tensors in Hugging Face and GGUF checkpoints, by their roles in JaxFlow."""

from collections.abc import Mapping
from types import MappingProxyType

from jaxflow.config import ModelConfig


def model_names(config: ModelConfig) -> Mapping[str, str]:
    """Return the names of the tensors outside the layers. `layer` is the prefix of layer number {}."""
    if config.architecture == "opt":
        return _OPT_MODEL
    names = {**_MODEL, **_LAYER_INPUTS} if config.layer_input_size else _MODEL
    if config.architecture == "gemma4":
        return {role: name.replace("model.", "model.language_model.") for role, name in names.items()}
    return names


def unread_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Return the prefixes of tensors that a checkpoint may have and that no text needs.

    These are the tensors of other inputs, and the keys and values of layers that share those of another.
    """
    layer = model_names(config)["layer"]
    shared = (i for i, each in enumerate(config.layers) if each.shares_kv)
    unused = tuple(f"{layer.format(i)}self_attn.{role}_" for i in shared for role in ("k", "v"))
    return unused + (_OTHER_INPUTS if config.architecture == "gemma4" else ())


def layer_names(config: ModelConfig) -> Mapping[str, str]:
    """Return the names within a layer, without `.weight` or `.bias`. {} is the number of an expert.

    The names of arrays that hold all experts, `all_…` and `stacked_…`, of scales and of sinks are complete.
    """
    if config.architecture == "opt":
        return _OPT_LAYER
    names = dict(_LAYER)
    if config.post_norms:
        names |= {
            "post_attn_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "post_mlp_norm": "post_feedforward_layernorm",
        }
    if config.architecture == "mixtral":
        names |= {
            "router": "block_sparse_moe.gate",
            "expert_gate": "block_sparse_moe.experts.{}.w1",
            "expert_up": "block_sparse_moe.experts.{}.w3",
            "expert_down": "block_sparse_moe.experts.{}.w2",
        }
    if config.architecture == "gpt_oss":
        names |= {
            "sinks": "self_attn.sinks",
            "router": "mlp.router",
            "all_up_gate": "mlp.experts.gate_up_proj",
            "all_down": "mlp.experts.down_proj",
        }
    if config.architecture in ("gemma4", "gemma4_text"):
        names |= {
            "shared_norm": names["mlp_norm"],
            "routed_norm": "pre_feedforward_layernorm_2",
            "post_shared_norm": "post_feedforward_layernorm_1",
            "post_routed_norm": "post_feedforward_layernorm_2",
            "layer_scalar": "layer_scalar",
            "router": "router.proj",
            "router_columns": "router.scale",
            "expert_factors": "router.per_expert_scale",
            "stacked_up_gate": "experts.gate_up_proj",
            "stacked_down": "experts.down_proj",
            "shared_gate": names["gate"],
            "shared_up": names["up"],
            "shared_down": names["down"],
            "layer_gate": "per_layer_input_gate",
            "layer_proj": "per_layer_projection",
            "post_layer_norm": "post_per_layer_input_norm",
        }
    return names


_MODEL = MappingProxyType(
    {
        "embed": "model.embed_tokens.weight",
        "final_norm": "model.norm",
        "lm_head": "lm_head.weight",
        "layer": "model.layers.{}.",
    }
)

_LAYER_INPUTS = MappingProxyType(
    {
        "layer_embed": "model.embed_tokens_per_layer.weight",
        "layer_embed_proj": "model.per_layer_model_projection.weight",
        "layer_embed_norm": "model.per_layer_projection_norm",
    }
)

_OTHER_INPUTS = (
    "model.vision_tower.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
)

_LAYER = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "out": "self_attn.o_proj",
        "query_down": "self_attn.q_a_proj",
        "query_norm": "self_attn.q_a_layernorm",
        "query_up": "self_attn.q_b_proj",
        "latent_down": "self_attn.kv_a_proj_with_mqa",
        "latent_norm": "self_attn.kv_a_layernorm",
        "latent_up": "self_attn.kv_b_proj",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "router": "mlp.gate",
        "score_bias": "mlp.gate.e_score_correction_bias",
        "expert_gate": "mlp.experts.{}.gate_proj",
        "expert_up": "mlp.experts.{}.up_proj",
        "expert_down": "mlp.experts.{}.down_proj",
        "shared_gate": "mlp.shared_experts.gate_proj",
        "shared_up": "mlp.shared_experts.up_proj",
        "shared_down": "mlp.shared_experts.down_proj",
    }
)

_OPT_MODEL = MappingProxyType(
    {
        "embed": "model.decoder.embed_tokens.weight",
        "positions": "model.decoder.embed_positions.weight",
        "final_norm": "model.decoder.final_layer_norm",
        "lm_head": "lm_head.weight",
        "layer": "model.decoder.layers.{}.",
    }
)

_OPT_LAYER = MappingProxyType(
    {
        "attn_norm": "self_attn_layer_norm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "out": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "up": "fc1",
        "down": "fc2",
    }
)

_GGUF_LAYER = MappingProxyType(
    {
        "attn_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "out": "attn_output",
        "post_attn_norm": "post_attention_norm",
        "mlp_norm": "ffn_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
        "post_mlp_norm": "post_ffw_norm",
    }
)


def gguf_to_hf(config: ModelConfig) -> dict[str, str]:
    """Return the Hugging Face name of each tensor of a GGUF file, by its GGUF name."""
    model, layer = model_names(config), layer_names(config)
    names = {
        "token_embd.weight": model["embed"],
        "output_norm.weight": f"{model['final_norm']}.weight",
        "output.weight": model["lm_head"],
    }
    for i in range(config.num_layers):
        for role, name in _GGUF_LAYER.items():
            if role in layer:
                for part in ("weight", "bias"):
                    names[f"blk.{i}.{name}.{part}"] = f"{model['layer'].format(i)}{layer[role]}.{part}"
    return names
