"""Hugging Face configs: each key is used, harmless or refused by name; both styles of rope settings say the
same.
"""

import copy
import json
import math
from typing import Any

import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.config import ConfigError, Latent, Rope, SigmoidRouter
from jaxflow.model.architectures.hf_config import model_config_from_hf
from jaxflow.model.checkpoints.checkpoint import open_checkpoint, shipped_configs
from jaxflow.model.checkpoints.model_names import CONFIGS
from jaxflow.model.weights import tensors


def config_of(name: str) -> dict[str, Any]:
    config = json.loads((paths.MODELS / name / "config.json").read_text())
    config.pop("quantization_config", None)  # the checkpoint reads this key
    return config


def changed(name: str, **changes: Any) -> dict[str, Any]:
    return config_of(name) | changes


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


# Billions of parameters as the makers publish them (tied embeddings count once).
PUBLISHED = {
    "llama-13b": 13.0,
    "llama-33b": 32.5,
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.0,
    "llama-2-70b": 69.0,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.2-1b": 1.24,
    "deepseek-67b": 67.4,
    "yi-34b": 34.4,
    "smollm2-135m": 0.1345,
    "mistral-7b": 7.24,
    "mixtral-8x7b": 46.7,
    "qwen2-72b": 72.7,
    "qwen2.5-7b": 7.62,
    "qwen3-8b": 8.19,
    "qwen3-30b-a3b": 30.5,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "qwen3-235b-a22b": 235.1,
    "glm-4.5-air": 106.85,
    "deepseek-v3": 671.03,
    "gemma-2-9b": 9.24,
    "gemma-3-1b": 1.0,
    "gemma-4-26b-a4b": 25.2,
    "gemma-4-31b": 30.7,
    "gemma-4-e2b": 4.63,  # of the text model; 5.1 with images and audio
    "gemma-4-e4b": 7.46,  # of the text model; 8 with images and audio
    "opt-125m": 0.125,
    "opt-1.3b": 1.316,
    "opt-6.7b": 6.66,
    "opt-13b": 12.85,
    "opt-30b": 30.0,
    "opt-66b": 65.7,
    "opt-175b": 174.6,
}


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configs_have_the_published_size(name: str) -> None:
    config = open_checkpoint(name, load_format="dummy").model_config
    parameters = sum(math.prod(shape) for shape in tensors(config).values())
    assert parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.005)


def test_sizes_are_read() -> None:
    config = model_config_from_hf(config_of("tiny-qwen3"))
    assert (
        config.vocab_size,
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
    ) == (512, 64, 4, 2, 32)
    assert (config.num_layers, config.intermediate_size, config.max_position) == (2, 128, 512)
    assert config.qk_norm and config.tie_word_embeddings and not config.qkv_bias
    assert (
        model_config_from_hf(config_of("tiny-llama")).head_dim == 16
    )  # hidden_size / num_attention_heads, not in the file


# The newer style of each older config: rope_theta and rope_scaling in one object, dtype for torch_dtype.
@pytest.mark.parametrize(
    "name",
    [name for name in paths.TINY_MODELS if not name.startswith(("tiny-opt", "tiny-gemma3", "tiny-gemma4"))],
)
def test_both_styles_of_rope_are_the_same(name: str) -> None:
    config = config_of(name)
    plain = without(config, "rope_theta", "rope_scaling", "rope_parameters", "torch_dtype", "dtype")
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    newer = plain | {"rope_parameters": scaling | {"rope_theta": theta}, "dtype": "bfloat16"}
    older = plain | {
        "rope_theta": theta,
        "rope_scaling": config.get("rope_scaling"),
        "torch_dtype": "bfloat16",
    }
    assert model_config_from_hf(newer) == model_config_from_hf(older) == model_config_from_hf(config)


def test_gemma3_has_its_ropes_by_layer_type_in_both_styles() -> None:
    older = changed("tiny-gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    newer = without(older, "rope_scaling", "rope_theta", "rope_local_base_freq") | {
        "rope_parameters": parameters
    }
    assert model_config_from_hf(older) == model_config_from_hf(newer)
    sliding, full = model_config_from_hf(newer).layers
    assert (sliding.window, sliding.rope) == (16, Rope(1e4))
    assert (full.window, full.rope) == (None, Rope(1e6, "linear", 8.0))


def test_llama3_scaling_is_read() -> None:
    rope = model_config_from_hf(config_of("tiny-llama3rope")).layers[0].rope
    assert rope == Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 64)


def test_yarn_grows_the_scale_of_attention_as_its_keys_say() -> None:
    scale = lambda **more: model_config_from_hf(changed("tiny-llama", rope_scaling=YARN | more)).scale
    grown = 0.1 * math.log(4.0) + 1.0  # of cos and sin, so of queries and of keys
    assert scale() == pytest.approx(16**-0.5 * grown**2)
    assert scale(attention_factor=1.5) == pytest.approx(16**-0.5 * 1.5**2)
    assert scale(mscale=1.0, mscale_all_dim=1.0) == scale(factor=0.5) == 16**-0.5
    half = 0.05 * math.log(4.0) + 1.0
    assert scale(mscale=1.0, mscale_all_dim=0.5) == pytest.approx(16**-0.5 * (grown / half) ** 2)


def windows(config: dict[str, Any]) -> list[int | None]:
    return [layer.window for layer in model_config_from_hf(config).layers]


def test_windows_of_each_family() -> None:
    four = {"num_hidden_layers": 4}
    assert windows(changed("tiny-mistral", sliding_window=None)) == [None, None]
    assert windows(without(config_of("tiny-mistral"), "sliding_window")) == [
        4096,
        4096,
    ]  # the family's default
    qwen = changed("tiny-qwen2", **four, max_window_layers=3, sliding_window=8)
    assert windows(qwen) == [None] * 4
    assert windows(qwen | {"use_sliding_window": True}) == [None, None, None, 8]
    types = ["sliding_attention", "full_attention"] * 2
    assert windows(qwen | {"use_sliding_window": True, "layer_types": types}) == [8, None, 8, None]
    assert windows(changed("tiny-qwen3_moe", **four, use_sliding_window=True, sliding_window=8)) == [8] * 4
    assert windows(changed("tiny-gemma2", **four)) == [16, None, 16, None]
    gemma3 = without(changed("tiny-gemma3_text", num_hidden_layers=7), "layer_types")
    assert windows(gemma3) == [16] * 5 + [None, 16]
    assert windows(gemma3 | {"sliding_window_pattern": 2}) == [16, None] * 3 + [16]


def test_expert_layers() -> None:
    base = changed("tiny-qwen3_moe", num_hidden_layers=6)
    experts = lambda **changes: [layer.experts for layer in model_config_from_hf(base | changes).layers]
    assert experts() == [True] * 6
    assert experts(decoder_sparse_step=2) == [False, True] * 3
    assert experts(mlp_only_layers=[0, 5]) == [False, True, True, True, True, False]
    config = model_config_from_hf(without(base, "norm_topk_prob"))
    assert (
        not config.norm_topk_prob
        and config.expert_intermediate_size == 32
        and config.intermediate_size == 128
    )


def test_a_mixture_with_a_sigmoid_router() -> None:
    config = model_config_from_hf(changed("tiny-glm4_moe", num_hidden_layers=4, first_k_dense_replace=3))
    assert [layer.experts for layer in config.layers] == [False, False, False, True]
    assert config.router == SigmoidRouter(groups=4, groups_per_token=2, scale=1.5)
    assert (config.num_experts, config.experts_per_token, config.shared_expert_intermediate_size) == (
        8,
        3,
        64,
    )
    assert {layer.rope.part for layer in config.layers if layer.rope} == {0.5}
    newer = without(config_of("tiny-glm4_moe"), "rope_theta", "rope_scaling", "partial_rotary_factor")
    newer["rope_parameters"] = {"rope_theta": 1e6, "partial_rotary_factor": 0.5}
    assert model_config_from_hf(newer) == model_config_from_hf(config_of("tiny-glm4_moe"))


def test_latent_attention() -> None:
    config = model_config_from_hf(json.loads((CONFIGS / "deepseek-v3.json").read_text()))
    assert config.latent == Latent(1536, 512, 128, 64, 128, interleaved=True)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (128, 1, 192)
    assert config.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    tiny = model_config_from_hf(config_of("tiny-deepseek_v3"))  # mscale is twice mscale_all_dim
    grown = [0.1 * mscale * math.log(8) + 1 for mscale in (1.5, 0.75)]
    assert tiny.layers[0].rope is not None
    assert tiny.layers[0].rope.attention_factor == pytest.approx(grown[0] / grown[1])
    assert tiny.scale == pytest.approx(40**-0.5 * grown[1] ** 2)
    assert not model_config_from_hf(changed("tiny-deepseek_v3", rope_interleave=False)).latent.interleaved  # type: ignore[union-attr]
    plain = model_config_from_hf(without(config_of("tiny-deepseek_v3"), "rope_scaling"))
    assert plain.scale == 40**-0.5


def test_gemma_settings() -> None:
    config = model_config_from_hf(config_of("tiny-gemma2"))
    assert (
        config.embedding_scale == 8.0
        and config.norm_weight_offset == 1.0
        and config.post_norms
        and config.tie_word_embeddings
    )
    assert config.scale == 24**-0.5 and (config.attention_soft_cap, config.logits_soft_cap) == (8.0, 20.0)
    absent = model_config_from_hf(
        without(config_of("tiny-gemma2"), "attn_logit_softcapping", "final_logit_softcapping")
    )
    assert (absent.attention_soft_cap, absent.logits_soft_cap) == (50.0, 30.0)  # the family's defaults
    null = model_config_from_hf(
        changed("tiny-gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    )
    assert (null.attention_soft_cap, null.logits_soft_cap) == (None, None)


def test_gemma4_has_heads_and_ropes_by_layer_type() -> None:
    config = model_config_from_hf(config_of("tiny-gemma4_text"))
    sliding, full = config.layers
    assert (sliding.window, sliding.rope, sliding.keys_are_values) == (16, Rope(1e4), False)
    assert (full.window, full.rope) == (None, Rope(1e6, "proportional", part=0.25))
    assert full.keys_are_values and config.head_shapes == {(2, 16), (1, 32)}
    assert (config.scale, config.norm_weight_offset, config.logits_soft_cap) == (1.0, 0.0, 30.0)
    two = model_config_from_hf(changed("tiny-gemma4_text", attention_k_eq_v=False))
    assert two.head_shapes == {(2, 16), (2, 32)} and not two.layers[1].keys_are_values
    dense = model_config_from_hf(changed("tiny-gemma4_text", enable_moe_block=False))
    assert not any(layer.experts for layer in dense.layers) and dense.shared_expert_intermediate_size == 0


def test_gemma4_layers_that_share_keys_and_values_come_last_and_may_be_wider() -> None:
    config = model_config_from_hf(config_of("tiny-gemma4_e2b"))
    assert [layer.shares_kv for layer in config.layers] == [False] * 3 + [True] * 2
    assert [config.for_layer(layer).intermediate_size for layer in config.layers] == [128] * 3 + [256] * 2
    assert (config.layer_input_size, config.widest_mlp, config.cached_layers) == (16, 256, (0, 1, 2))
    plain = model_config_from_hf(changed("tiny-gemma4_e2b", use_double_wide_mlp=False))
    assert plain.widest_mlp == 128
    none = model_config_from_hf(changed("tiny-gemma4_e2b", hidden_size_per_layer_input=0))
    assert none.layer_input_size == 0


def test_gemma4_defaults() -> None:
    """The defaults of absent keys are those of the published models' ropes and of one full layer in six."""
    keys = ("layer_types", "rope_parameters", "global_head_dim", "sliding_window")
    config = model_config_from_hf(without(changed("tiny-gemma4_text", num_hidden_layers=8), *keys))
    assert [layer.window for layer in config.layers] == [512] * 5 + [None, 512, None]
    assert {layer.head_dim for layer in config.layers} == {None, 512}
    read = model_config_from_hf(config_of("tiny-gemma4_text")).layers
    assert {layer.rope for layer in config.layers} == {layer.rope for layer in read}


def test_biases() -> None:
    config = model_config_from_hf(changed("tiny-llama", attention_bias=True, mlp_bias=True))
    assert (config.qkv_bias, config.out_proj_bias, config.mlp_bias) == (True, True, True)
    config = model_config_from_hf(config_of("tiny-qwen2"))
    assert (config.qkv_bias, config.out_proj_bias, config.mlp_bias) == (True, False, False)
    config = model_config_from_hf(changed("tiny-opt", enable_bias=False))
    assert (config.qkv_bias, config.out_proj_bias, config.mlp_bias, config.norm) == (
        False,
        False,
        False,
        "layer_norm",
    )


def test_end_tokens() -> None:
    assert model_config_from_hf(changed("tiny-llama", eos_token_id=[3, 2, 3])).eos_token_ids == (3, 2)
    assert model_config_from_hf(changed("tiny-llama", eos_token_id=None)).eos_token_ids == ()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
REFUSED = [
    ("tiny-llama", {"model_type": "mamba"}, "model_type"),
    ("tiny-llama", {"model_type": None}, "model_type"),
    ("tiny-llama", {"model_type": ["llama"]}, "model_type"),
    ("tiny-gemma3_text", {"model_type": "gemma3"}, "model_type"),
    ("tiny-llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    ("tiny-llama", {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
    ("tiny-llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("tiny-llama", {"hidden_size": "64"}, "hidden_size"),
    ("tiny-llama", {"hidden_size": 65}, "hidden_size"),
    ("tiny-llama", {"hidden_size": True}, "hidden_size"),
    ("tiny-llama", {"hidden_size": None}, "hidden_size"),
    ("tiny-llama", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ("tiny-llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("tiny-llama", {"head_dim": 15}, "head_dim"),
    ("tiny-llama", {"rms_norm_eps": 0}, "rms_norm_eps"),
    ("tiny-llama", {"rms_norm_eps": math.nan}, "rms_norm_eps"),
    ("tiny-llama", {"sliding_window": 128}, "sliding_window"),
    ("tiny-llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("tiny-llama", {"rope_interleaved": True}, "rope_interleaved"),
    ("tiny-llama", {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_scaling.type"),
    (
        "tiny-llama",
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        "rope_scaling.original_max_position_embeddings",
    ),
    ("tiny-llama", {"rope_scaling": YARN | {"beta_slow": 32}}, "rope_scaling.beta_slow"),
    ("tiny-llama", {"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta"),
    ("tiny-gemma3_text", {"rope_scaling": YARN}, "rope_scaling"),
    ("tiny-llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_scaling.rope_type"),
    ("tiny-llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
    (
        "tiny-llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 3.0}},
        "rope_scaling.attention_factor",
    ),
    ("tiny-llama", {"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "rope_scaling.type"),
    ("tiny-llama", {"rope_scaling": [2]}, "rope_scaling"),
    ("tiny-llama", {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters.rope_theta"),
    ("tiny-llama3rope", {"rope_parameters": {"rope_type": "default"}}, "rope_scaling"),
    ("tiny-llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ("tiny-mixtral", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ("tiny-qwen3_moe", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ("tiny-llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ("tiny-llama", {"eos_token_id": "</s>"}, "eos_token_id"),
    ("tiny-llama", {"eos_token_id": [1, 512]}, "eos_token_id"),
    ("tiny-llama", {"bos_token_id": 512}, "bos_token_id"),
    ("tiny-mistral", {"sliding_window": 0}, "sliding_window"),
    ("tiny-mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
    ("tiny-mistral", {"attention_bias": True}, "attention_bias"),
    ("tiny-qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ("tiny-qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    ("tiny-qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    ("tiny-qwen3_moe", {"mlp_only_layers": [2]}, "mlp_only_layers"),
    ("tiny-qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ("tiny-qwen3_moe", {"shared_expert_intermediate_size": 32}, "shared_expert_intermediate_size"),
    ("tiny-mixtral", {"num_local_experts": 0}, "num_local_experts"),
    ("tiny-deepseek_v3", {"q_lora_rank": None}, "q_lora_rank"),
    ("tiny-deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("tiny-deepseek_v3", {"qk_rope_head_dim": 15}, "qk_rope_head_dim"),
    ("tiny-deepseek_v3", {"head_dim": 24}, "head_dim"),
    ("tiny-deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("tiny-deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
    ("tiny-deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("tiny-glm4_moe", {"n_group": 3}, "n_group"),
    ("tiny-glm4_moe", {"n_group": 8}, "n_group"),
    ("tiny-glm4_moe", {"topk_group": 5}, "topk_group"),
    ("tiny-glm4_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
    ("tiny-glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor"),
    ("tiny-glm4_moe", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ("tiny-glm4_moe", {"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
    ("tiny-glm4_moe", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    (
        "tiny-glm4_moe",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        "partial_rotary_factor",
    ),
    ("tiny-gemma2", {"hidden_act": "silu"}, "hidden_activation"),
    ("tiny-gemma2", {"sliding_window_size": 32}, "sliding_window_size"),
    ("tiny-gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("tiny-gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("tiny-gemma3_text", {"rope_scaling": {"full_attention": {}, "other": {}}}, "rope_scaling"),
    ("tiny-gemma4_text", {"model_type": "gemma4"}, "architectures"),
    ("tiny-gemma4_text", {"model_type": "gemma4", "architectures": None}, "text_config"),
    ("tiny-gemma4_text", {"vision_config": {}}, "vision_config"),
    ("tiny-gemma4_text", {"audio_config": {}}, "audio_config"),
    ("tiny-gemma4_text", {"hidden_size_per_layer_input": 256}, "vocab_size_per_layer_input"),
    ("tiny-gemma4_e2b", {"vocab_size_per_layer_input": 511}, "vocab_size_per_layer_input"),
    ("tiny-gemma4_e2b", {"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
    ("tiny-gemma4_e2b", {"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
    ("tiny-gemma4_e2b", {"use_double_wide_mlp": 2}, "use_double_wide_mlp"),
    ("tiny-gemma4_text", {"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input"),
    ("tiny-gemma4_text", {"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
    ("tiny-gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ("tiny-gemma4_text", {"layer_types": ["full_attention"]}, "layer_types"),
    ("tiny-gemma4_text", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("tiny-gemma4_text", {"num_global_key_value_heads": 3}, "num_global_key_value_heads"),
    ("tiny-gemma4_text", {"global_head_dim": 31}, "global_head_dim"),
    ("tiny-gemma4_text", {"top_k_experts": 9}, "top_k_experts"),
    ("tiny-gemma4_text", {"num_experts": None}, "num_experts"),
    ("tiny-gemma4_text", {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters"),
    ("tiny-gemma4_text", {"rope_theta": 1e6}, "rope_theta"),
    ("tiny-opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
    ("tiny-opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
    ("tiny-opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
    ("tiny-opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
]


@pytest.mark.parametrize(
    ("name", "changes", "field"), REFUSED, ids=[f"{n}-{json.dumps(c)[:60]}" for n, c, _ in REFUSED]
)
def test_what_is_not_supported_is_refused_by_name(name: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_config_from_hf(changed(name, **changes))
    assert caught.value.field == field
    assert field in str(caught.value)


# Keys that checkpoints of these families carry and that change nothing.
HARMLESS = [
    (
        "tiny-llama",
        {
            "_name_or_path": "x",
            "pretraining_tp": 1,
            "is_llama_config": True,
            "rope_interleaved": False,
            "transformers.js_config": {},
        },
    ),
    (
        "tiny-llama",
        {
            "architectures": None,
            "head_dim": None,
            "auto_map": {"AutoTokenizer": "x.Y"},
            "partial_rotary_factor": 1.0,
        },
    ),
    (
        "tiny-opt",
        {
            "activation_dropout": 0.0,
            "dropout": 0.1,
            "layerdrop": 0.0,
            "init_std": 0.02,
            "_remove_final_layer_norm": False,
        },
    ),
    (
        "tiny-gemma2",
        {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "sliding_window_size": 16},
    ),
    ("tiny-gemma3_text", {"_sliding_window_pattern": 6, "use_bidirectional_attention": False}),
    ("tiny-qwen2", {"use_mrope": False, "attention_dropout": 0.1}),
    (
        "tiny-deepseek_v3",
        {
            "auto_map": {"AutoConfig": "x.Y", "AutoModel": "x.Z", "AutoModelForCausalLM": "x.W"},
            "ep_size": 1,
            "seq_aux": True,
            "aux_loss_alpha": 0.001,
            "rope_interleave": True,
            "head_dim": 16,
        },
    ),
]


@pytest.mark.parametrize(
    ("name", "more"), HARMLESS, ids=[f"{name}-{next(iter(more))}" for name, more in HARMLESS]
)
def test_harmless_keys_change_nothing(name: str, more: dict[str, Any]) -> None:
    assert model_config_from_hf(changed(name, **more)) == model_config_from_hf(config_of(name))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(paths.TINY_MODELS)


@given(
    NAMES,
    st.text(min_size=1, max_size=20).map(lambda key: f"new_{key}"),
    JSON.filter(lambda value: value is not None),
)
def test_a_key_nobody_knows_is_refused_by_name(name: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        model_config_from_hf(changed(name, **{key: value}))
    assert caught.value.field == key


@given(NAMES, st.data())
def test_any_value_of_any_key_is_read_or_refused(name: str, data: st.DataObject) -> None:
    config = config_of(name)
    key = data.draw(st.sampled_from(sorted(config)))
    config[key] = data.draw(JSON)
    before = copy.deepcopy(config)
    try:
        model_config_from_hf(config)
    except ConfigError as error:
        assert error.field
    assert repr(config) == repr(before)  # the reader does not change its input


@given(NAMES, st.data())
def test_an_absent_key_is_a_default_or_refused(name: str, data: st.DataObject) -> None:
    config = config_of(name)
    key = data.draw(st.sampled_from(sorted(config)))
    try:
        model_config_from_hf(without(config, key))
    except ConfigError as error:
        assert error.field == key or error.value is None or key in str(error)
