"""Read a Hugging Face `config.json` into a `ModelConfig`.

Every key is used, ignored because it does not change the computation, or refused by name. Defaults of absent
keys are those of Hugging Face's configuration classes. Sizes have no defaults.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxflow.config import Activation, ConfigError, Layer, ModelConfig, Rope
from jaxflow.model.architectures.hf_gemma4 import gemma4_fields, gemma4_text_config
from jaxflow.model.architectures.hf_keys import Keys
from jaxflow.model.architectures.hf_latent import attention_scale, latent_attention
from jaxflow.model.architectures.hf_mixture import DEEPSEEK_DEFAULTS, GLM_DEFAULTS, sigmoid_mixture

_PART = "partial_rotary_factor"
CLAMPED_SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
MAX_LAYERS = 4096  # protects against a corrupt config with a billion layers


@dataclasses.dataclass(frozen=True)
class _Family:
    """Defaults and meanings of the config keys of one `model_type`."""

    causal_lm: str  # the accepted entry of `architectures`
    head_dim: int | None = None  # default; None: hidden_size / num_attention_heads
    kv_heads_default: bool = False  # an absent num_key_value_heads is num_attention_heads
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tied: bool = False
    qkv_bias: bool = False  # True: independent of the config
    qk_norm: bool = False
    gemma: bool = False  # norms scaled by 1 + w, norms after each block, scaled embeddings
    mixed_windows: bool = False  # `layer_types` may mix windows and full attention
    rotary_part: float = 1.0  # default of partial_rotary_factor
    attention_bias: bool | None = None  # default of this key; None: the family has no such key
    rope: Mapping[str, Any] | None = None  # default of `rope_parameters`
    own_code: bool = False  # the published files name model code, which computes what JaxFlow computes


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", kv_heads_default=True, attention_bias=False),
    "mistral": _Family("MistralForCausalLM"),
    "mixtral": _Family("MixtralForCausalLM", rms_norm_eps=1e-5, rope_theta=1e6),
    "qwen2": _Family("Qwen2ForCausalLM", qkv_bias=True, mixed_windows=True),
    "qwen3": _Family(
        "Qwen3ForCausalLM", head_dim=128, qk_norm=True, mixed_windows=True, attention_bias=False
    ),
    "qwen3_moe": _Family("Qwen3MoeForCausalLM", qk_norm=True, attention_bias=False),
    "glm4_moe": _Family("Glm4MoeForCausalLM", rms_norm_eps=1e-5, rotary_part=0.5, attention_bias=False),
    "deepseek_v3": _Family("DeepseekV3ForCausalLM", own_code=True),
    "gemma2": _Family(
        "Gemma2ForCausalLM", head_dim=256, tied=True, gemma=True, mixed_windows=True, attention_bias=False
    ),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM",
        head_dim=256,
        rope_theta=1e6,
        tied=True,
        gemma=True,
        qk_norm=True,
        mixed_windows=True,
        attention_bias=False,
    ),
    "gemma4_text": _Family("Gemma4ForCausalLM", head_dim=256, tied=True, gemma=True, attention_bias=False),
    "gpt_oss": _Family(
        "GptOssForCausalLM",
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=150_000.0,
        mixed_windows=True,
        attention_bias=True,
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    "opt": _Family("OPTForCausalLM", tied=True),
}

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Return the architecture of a parsed `config.json`, with `rope_scaling` or the newer `rope_parameters`.

    Of a Gemma 4 model that also takes images, the text model is read.

    Raises:
      ConfigError: an unknown architecture, a missing size, or a setting that is not supported or contradicts
        another setting. The error names the field.
    """
    keys = Keys(config)
    model_type = keys.take("model_type")
    if model_type == "gemma3":
        raise ConfigError("model_type", model_type, "gemma3_text, the text model; images are not supported")
    if model_type == "gemma4":
        text = gemma4_text_config(keys)
        return dataclasses.replace(model_config_from_hf(text), architecture=model_type)
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise ConfigError("model_type", model_type, f"one of {', '.join(_FAMILIES)}")
    family = _FAMILIES[model_type]
    architectures = keys.take("architectures")
    if architectures is not None and architectures != [family.causal_lm]:
        raise ConfigError(
            "architectures", architectures, f"[{family.causal_lm!r}] for model_type {model_type!r}"
        )
    auto_map = keys.mapping("auto_map") or {}
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
    if not family.own_code and any(name in auto_map for name in names):
        raise ConfigError("auto_map", auto_map, "no auto_map: JaxFlow runs no model code of a checkpoint")
    if model_type == "opt":
        model = _opt(keys, family)
    elif model_type == "deepseek_v3":
        model = _deepseek(keys, config, family)
    elif model_type == "gemma4_text":
        model = _gemma4(keys, family)
    else:
        model = _rotary(keys, model_type, family)
    keys.finish()
    _check_sizes(model)
    return model


def _rotary(keys: Keys, model_type: str, family: _Family) -> ModelConfig:
    """Return the config of a family with rotary position embeddings."""
    hidden_size = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    num_layers = _num_layers(keys)
    windows = _windows(keys, model_type, family, num_layers)
    ropes = _layer_ropes(keys, model_type, family, windows)
    moe: dict[str, Any] = {}
    if model_type == "glm4_moe":
        experts, moe = sigmoid_mixture(keys, num_layers, GLM_DEFAULTS)
    else:
        experts = _expert_layers(keys, model_type, num_layers)
    if model_type in ("mixtral", "gpt_oss"):
        moe = {
            "num_experts": keys.integer("num_local_experts"),
            "expert_intermediate_size": keys.integer("intermediate_size"),
        }
    elif model_type == "qwen3_moe":
        moe = {
            "num_experts": keys.integer("num_experts"),
            "expert_intermediate_size": keys.integer("moe_intermediate_size"),
        }
        moe["norm_topk_prob"] = keys.flag("norm_topk_prob", False)
    if moe and "router" not in moe:
        moe["experts_per_token"] = keys.integer("num_experts_per_tok")
        if moe["experts_per_token"] > moe["num_experts"]:
            raise ConfigError(
                "num_experts_per_tok",
                moe["experts_per_token"],
                f"at most {moe['num_experts']}, the number of experts",
            )
    if model_type == "gpt_oss":
        moe |= _gpt_oss(keys, moe["experts_per_token"])
    default_bias = family.attention_bias
    attention_bias = False if default_bias is None else keys.flag("attention_bias", default_bias)
    gemma: dict[str, Any] = {}
    if family.gemma:
        soft_caps = (50.0, 30.0) if model_type == "gemma2" else (None, None)
        gemma = {
            "norm_weight_offset": 1.0,
            "post_norms": True,
            "embedding_scale": math.sqrt(hidden_size),
            "attention_scale": keys.number("query_pre_attn_scalar", 256.0) ** -0.5,
            "attention_soft_cap": keys.optional_number("attn_logit_softcapping", soft_caps[0]),
            "logits_soft_cap": keys.optional_number("final_logit_softcapping", soft_caps[1]),
        }
    head_dim = family.head_dim
    if not keys.has("head_dim") and head_dim is None:
        if hidden_size % heads:
            raise ConfigError(
                "hidden_size",
                hidden_size,
                f"a multiple of num_attention_heads={heads}, or a config with head_dim",
            )
        head_dim = hidden_size // heads
    return ModelConfig(
        architecture=model_type,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden_size,
        num_heads=heads,
        num_kv_heads=keys.integer("num_key_value_heads", heads if family.kv_heads_default else None),
        head_dim=keys.integer("head_dim", head_dim),
        intermediate_size=keys.integer("intermediate_size")
        if model_type not in ("mixtral", "gpt_oss")
        else moe["expert_intermediate_size"],
        layers=tuple(Layer(*layer) for layer in zip(windows, ropes, experts, strict=True)),
        max_position=keys.integer("max_position_embeddings"),
        activation=_gated_activation(keys, model_type, family),
        norm_eps=keys.number("rms_norm_eps", family.rms_norm_eps),
        qkv_bias=family.qkv_bias or attention_bias,
        out_proj_bias=attention_bias and model_type != "glm4_moe",
        mlp_bias=keys.flag("mlp_bias", False) if model_type == "llama" else False,
        qk_norm=keys.flag("use_qk_norm", False) if model_type == "glm4_moe" else family.qk_norm,
        tie_word_embeddings=keys.flag("tie_word_embeddings", family.tied),
        **_token_ids(keys),
        **moe,
        **gemma,
    )


def _gpt_oss(keys: Keys, experts_per_token: int) -> dict[str, Any]:
    """Return what only gpt-oss has: attention sinks, and biases of the router and the experts."""
    again = keys.integer("experts_per_token", experts_per_token)  # the published files have both keys
    if again != experts_per_token:
        raise ConfigError("experts_per_token", again, f"the same as num_experts_per_tok={experts_per_token}")
    for key, published in CLAMPED_SWIGLU.items():
        value = keys.number(key, published)
        if value != published:
            raise ConfigError(key, value, f"{published}, as in the published models")
    keys.take("initial_context_length")  # the rope settings say what of this has an effect
    return {"attention_sinks": True, "router_bias": True, "expert_bias": True}


def _gated_activation(keys: Keys, model_type: str, family: _Family) -> Activation:
    """Return the activation of an MLP with gates. gpt-oss calls its clamped SwiGLU `silu`."""
    activation = _activation(keys, "hidden_activation" if family.gemma else "hidden_act")
    if model_type != "gpt_oss":
        return activation
    if activation != "silu":
        raise ConfigError("hidden_act", activation, "silu for model_type 'gpt_oss'")
    return "clamped_swiglu"


def _deepseek(keys: Keys, config: Mapping[str, Any], family: _Family) -> ModelConfig:
    """Return the config of DeepSeek-V3 and R1. config: the file, for the YaRN
    settings that scale attention.
    """
    num_layers, heads = _num_layers(keys), keys.integer("num_attention_heads")
    latent = latent_attention(keys, heads)
    (rope,) = {*_layer_ropes(keys, "deepseek_v3", family, (None,) * num_layers)}
    experts, mixture = sigmoid_mixture(keys, num_layers, DEEPSEEK_DEFAULTS)
    bias = keys.flag("attention_bias", False)
    head_dim = latent.plain_dim + latent.rope_dim
    return ModelConfig(
        architecture="deepseek_v3",
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        num_heads=heads,
        num_kv_heads=1,
        head_dim=head_dim,
        intermediate_size=keys.integer("intermediate_size"),
        layers=tuple(Layer(rope=rope, experts=mixes) for mixes in experts),
        max_position=keys.integer("max_position_embeddings"),
        activation=_activation(keys, "hidden_act"),
        norm_eps=keys.number("rms_norm_eps", family.rms_norm_eps),
        qkv_bias=bias,
        out_proj_bias=bias,
        attention_scale=attention_scale(config, rope, head_dim),
        latent=latent,
        tie_word_embeddings=keys.flag("tie_word_embeddings", family.tied),
        **_token_ids(keys),
        **mixture,
    )


def _gemma4(keys: Keys, family: _Family) -> ModelConfig:
    """Return the config of a Gemma 4 text model."""
    hidden_size, width = keys.integer("hidden_size"), keys.integer("intermediate_size")
    vocab_size = keys.integer("vocab_size")
    fields = gemma4_fields(keys, _num_layers(keys), hidden_size, width, vocab_size)
    bias = keys.flag("attention_bias", False)
    return ModelConfig(
        architecture="gemma4_text",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_heads=keys.integer("num_attention_heads"),
        num_kv_heads=keys.integer("num_key_value_heads"),
        head_dim=keys.integer("head_dim", family.head_dim),
        intermediate_size=width,
        shared_expert_intermediate_size=width if "num_experts" in fields else 0,
        max_position=keys.integer("max_position_embeddings"),
        activation=_activation(keys, "hidden_activation"),
        norm_eps=keys.number("rms_norm_eps", family.rms_norm_eps),
        qkv_bias=bias,
        out_proj_bias=bias,
        tie_word_embeddings=keys.flag("tie_word_embeddings", family.tied),
        **_token_ids(keys),
        **fields,
    )


def _opt(keys: Keys, family: _Family) -> ModelConfig:
    """Return the config of OPT, with learned positions, LayerNorm and biases.

    Models with the norm after each block, as the 350M model, are refused.
    """
    hidden_size = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    if hidden_size % heads:
        raise ConfigError("hidden_size", hidden_size, f"a multiple of num_attention_heads={heads}")
    embedded = keys.integer("word_embed_proj_dim", hidden_size)
    if embedded != hidden_size:
        raise ConfigError(
            "word_embed_proj_dim",
            embedded,
            f"hidden_size={hidden_size}; projected embeddings are not supported",
        )
    if not keys.flag("do_layer_norm_before", True):
        raise ConfigError("do_layer_norm_before", False, "true; norms after each block are not supported")
    bias = keys.flag("enable_bias", True)
    return ModelConfig(
        architecture="opt",
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden_size,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden_size // heads,
        intermediate_size=keys.integer("ffn_dim"),
        layers=(Layer(),) * _num_layers(keys),
        max_position=keys.integer("max_position_embeddings"),
        activation=_activation(keys, "activation_function", "relu"),
        gated_mlp=False,
        norm="layer_norm",
        norm_eps=1e-5,
        qkv_bias=bias,
        out_proj_bias=bias,
        mlp_bias=bias,
        learned_position_offset=2,
        tie_word_embeddings=keys.flag("tie_word_embeddings", family.tied),
        **_token_ids(keys),
    )


def _num_layers(keys: Keys) -> int:
    layers = keys.integer("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise ConfigError("num_hidden_layers", layers, f"at most {MAX_LAYERS}")
    return layers


def _activation(keys: Keys, key: str, default: str | None = None) -> Activation:
    # Configs of Gemma often have both spellings. Values that disagree are refused.
    names = {name: value for name in {key, "hidden_act"} if (value := keys.take(name)) is not None}
    if not names:
        names = {key: default if default else "gelu_pytorch_tanh" if key == "hidden_activation" else "silu"}
    for name, value in names.items():
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise ConfigError(name, value, f"one of {', '.join(_ACTIVATIONS)}")
    if len({_ACTIVATIONS[value] for value in names.values()}) > 1:
        raise ConfigError(key, names.get(key), f"the same function as hidden_act={names['hidden_act']!r}")
    return _ACTIVATIONS[next(iter(names.values()))]


def _token_ids(keys: Keys) -> dict[str, Any]:
    bos, eos = keys.take("bos_token_id"), keys.take("eos_token_id")
    return {
        "bos_token_id": next(iter(token_ids("bos_token_id", bos)), None),
        "eos_token_ids": token_ids("eos_token_id", eos),
    }


def token_ids(field: str, value: Any) -> tuple[int, ...]:
    """Return one id, a list of ids or null as a tuple without duplicates. Raises: ConfigError."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31 for token in ids):
        raise ConfigError(field, value, "a token id, a list of token ids, or null")
    return tuple(dict.fromkeys(ids))


def _windows(keys: Keys, model_type: str, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    """Return the attention window of each layer, None for full attention."""
    window, sliding = None, [False] * num_layers
    if model_type in ("mistral", "mixtral"):
        default = 4096 if model_type == "mistral" else None
        window = keys.take("sliding_window", default)
        sliding = [window is not None] * num_layers
    elif model_type.startswith("qwen"):
        used, window = keys.flag("use_sliding_window", False), keys.take("sliding_window", 4096)
        window = window if used else None
        first = keys.integer("max_window_layers", 28, least=0)
        from_layer = 0 if model_type == "qwen3_moe" else first  # qwen3_moe ignores max_window_layers
        sliding = [window is not None and layer >= from_layer for layer in range(num_layers)]
    elif model_type == "gpt_oss":
        window = keys.take("sliding_window", 128)
        sliding = [layer % 2 == 0 for layer in range(num_layers)]
    elif family.gemma:
        window = keys.integer("sliding_window", 4096)
        again = keys.integer("sliding_window_size", window)  # some Gemma 2 files have both keys
        if again != window:
            raise ConfigError("sliding_window_size", again, f"the same as sliding_window={window}")
        pattern = (
            2
            if model_type == "gemma2"
            else keys.integer("sliding_window_pattern", keys.integer("_sliding_window_pattern", 6))
        )
        sliding = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    if window is not None and (
        isinstance(window, bool) or not isinstance(window, int) or not 1 <= window < 2**31
    ):
        raise ConfigError("sliding_window", window, "a whole number of at least 1, or null")
    types = keys.take("layer_types")
    if types is not None:
        if (
            not isinstance(types, list)
            or len(types) != num_layers
            or not {*types} <= {"full_attention", "sliding_attention"}
        ):
            raise ConfigError("layer_types", types, f"{num_layers} times full_attention or sliding_attention")
        stated = [kind == "sliding_attention" for kind in types]
        if stated != sliding and not family.mixed_windows:
            raise ConfigError(
                "layer_types",
                types,
                f"the layers that model_type {model_type!r} derives from sliding_window={window}",
            )
        if any(stated) and window is None:
            raise ConfigError(
                "layer_types", types, "sliding_attention only with a sliding_window that is in use"
            )
        sliding = stated
    return tuple(window if slides else None for slides in sliding)


def _layer_ropes(
    keys: Keys, model_type: str, family: _Family, windows: tuple[int | None, ...]
) -> tuple[Rope, ...]:
    """Return the rotary embedding of each layer. In Gemma 3, layers with a window have a separate one.

    Raises:
      ConfigError: a scaling that is not supported, or settings that contradict each
        other. The error names the field.
    """
    theta, default_theta = keys.optional_number("rope_theta", None), family.rope_theta
    newer, older = keys.mapping("rope_parameters"), keys.mapping("rope_scaling")
    if newer is not None and older is not None and newer != older:
        raise ConfigError("rope_scaling", older, "absent where rope_parameters is given")
    field = "rope_scaling" if newer is None else "rope_parameters"
    settings = newer if newer is not None else older if older is not None else family.rope or {}
    if model_type != "gemma3_text":
        part = 1.0
        if family.rotary_part != 1.0:
            settings = dict(settings)
            part = _rotary_part(keys.take(_PART), settings.pop(_PART, None), family.rotary_part)
        rope = _rope(field, settings, theta, default_theta)
        return (dataclasses.replace(rope, part=part),) * len(windows)
    local_theta = keys.number("rope_local_base_freq", 10_000.0)
    if {*settings} & {"full_attention", "sliding_attention"}:
        extra = {*settings} - {"full_attention", "sliding_attention"}
        if extra or not all(isinstance(value, dict) for value in settings.values()):
            raise ConfigError(field, settings, "an object for full_attention and one for sliding_attention")
        full = _rope(f"{field}.full_attention", settings.get("full_attention", {}), theta, default_theta)
        local = _rope(f"{field}.sliding_attention", settings.get("sliding_attention", {}), None, local_theta)
    else:
        full, local = _rope(field, settings, theta, default_theta), Rope(local_theta)
    if full.attention_factor != local.attention_factor:
        raise ConfigError(field, settings, "one attention factor for all layers")
    return tuple(full if window is None else local for window in windows)


def _rope(field: str, settings: Mapping[str, Any], theta: float | None, default_theta: float) -> Rope:
    keys = Keys(settings, field + ".")
    its_theta = keys.optional_number("rope_theta", None)
    if theta is not None and its_theta is not None and theta != its_theta:
        raise ConfigError(keys.name("rope_theta"), its_theta, f"the same as rope_theta={theta}")
    base = theta if its_theta is None else its_theta
    base = default_theta if base is None else base
    older, newer = keys.take("type"), keys.take("rope_type")
    if older is not None and newer is not None and older != newer:
        raise ConfigError(keys.name("type"), older, f"the same as rope_type={newer!r}")
    kind = newer or older or "default"
    if kind == "default":
        rope = Rope(base)
    elif kind == "linear":
        rope = Rope(base, "linear", keys.number("factor"))
        keys.take("original_max_position_embeddings")  # linear scaling does not depend on it
    elif kind == "llama3":
        low, high = keys.number("low_freq_factor"), keys.number("high_freq_factor")
        if not low < high:
            raise ConfigError(keys.name("low_freq_factor"), low, f"less than high_freq_factor={high}")
        rope = Rope(
            base, "llama3", keys.number("factor"), low, high, keys.integer("original_max_position_embeddings")
        )
    elif kind == "yarn":
        rope = _yarn(keys, base)
    else:
        raise ConfigError(
            keys.name("rope_type" if newer else "type"), kind, "default, linear, llama3 or yarn"
        )
    keys.finish()
    return rope


def _yarn(keys: Keys, theta: float) -> Rope:
    """Return YaRN's rotary embedding. Cos and sin grow by 0.1 · ln(factor) + 1 without an attention_factor.

    DeepSeek's `mscale` and `mscale_all_dim` give the quotient of two such numbers.
    """
    factor, original = keys.number("factor"), keys.integer("original_max_position_embeddings")
    fast, slow = keys.number("beta_fast", 32.0), keys.number("beta_slow", 1.0)
    if theta <= 1.0:
        raise ConfigError("rope_theta", theta, "more than 1 with rope_type yarn")
    if not slow < fast:
        raise ConfigError(keys.name("beta_slow"), slow, f"less than beta_fast={fast}")

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    mscale, of_all = keys.optional_number("mscale", None), keys.optional_number("mscale_all_dim", None)
    default = grown(mscale) / grown(of_all) if mscale and of_all else grown(1.0)
    attention_factor = keys.number("attention_factor", default)
    truncate = keys.flag("truncate", True)
    return Rope(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
        attention_factor=attention_factor,
    )


def _rotary_part(older: Any, newer: Any, default: float) -> float:
    """Return the part of a head's columns that rotates, from a key of the config or of `rope_parameters`."""
    if older is not None and newer is not None and older != newer:
        raise ConfigError(_PART, older, f"the same as in rope_parameters, {newer}")
    part = Keys({_PART: older if newer is None else newer}).number(_PART, default)
    if part > 1:
        raise ConfigError(_PART, part, "a part of the head's width, over 0 up to 1")
    return part


def _expert_layers(keys: Keys, model_type: str, num_layers: int) -> tuple[bool, ...]:
    if model_type != "qwen3_moe":
        return (model_type in ("mixtral", "gpt_oss"),) * num_layers
    step, dense = keys.integer("decoder_sparse_step", 1), keys.take("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(
        isinstance(layer, int) and 0 <= layer < num_layers for layer in dense
    ):
        raise ConfigError("mlp_only_layers", dense, f"a list of layers, 0 to {num_layers - 1}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def _check_sizes(model: ModelConfig) -> None:
    for kv_heads, head_dim in sorted({(model.num_kv_heads, model.head_dim)} | model.head_shapes):
        if model.num_heads % kv_heads:
            raise ConfigError(
                "num_key_value_heads" if kv_heads == model.num_kv_heads else "num_global_key_value_heads",
                kv_heads,
                f"a divisor of num_attention_heads={model.num_heads}",
            )
        if head_dim % 2 and model.learned_position_offset is None:
            raise ConfigError(
                "head_dim" if head_dim == model.head_dim else "global_head_dim",
                head_dim,
                "an even number, because rotary embeddings rotate pairs",
            )
    for layer in {layer for layer in model.layers if layer.rope is not None}:
        rope, head_dim = layer.rope, model.for_layer(layer).head_dim
        assert rope is not None
        if (width := rope.width(head_dim)) % 2 or width == 0:
            raise ConfigError(_PART, rope.part, f"an even number of the {head_dim} columns of a head")
        if rope.part != 1.0 and rope.attention_factor != 1.0:  # `ModelConfig.scale` applies it to all columns
            raise ConfigError(_PART, rope.part, "1 with an attention_factor other than 1")
    for field, ids in (("bos_token_id", (model.bos_token_id or 0,)), ("eos_token_id", model.eos_token_ids)):
        if max(ids, default=0) >= model.vocab_size:
            raise ConfigError(field, max(ids), f"below vocab_size={model.vocab_size}")
