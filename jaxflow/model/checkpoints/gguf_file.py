"""A GGUF file as a checkpoint: its metadata as a `ModelConfig`, its tensors under Hugging Face's names,
dequantised as they are read.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType, dequantize

from jaxflow.config import ConfigError, ModelConfig
from jaxflow.model.architectures.hf_config import model_config_from_hf, token_ids
from jaxflow.model.architectures.hf_keys import Keys
from jaxflow.model.architectures.tensor_names import gguf_to_hf
from jaxflow.model.checkpoints.gguf_tensors import GgufTensor, read_gguf
from jaxflow.model.checkpoints.source import CheckpointError

_PLAIN = {
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.BF16: jnp.bfloat16,
}
_ROPE_FREQS = "rope_freqs.weight"
_IRRELEVANT = frozenset(
    {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "use_parallel_residual"}
)
_ONLY = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.attn_factor": (1.0,),
}
# Where a turn of a chat ends; files often name only one of their model's end tokens.
_TURN_ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>"})
_CONTROL = 3  # of tokenizer.ggml.token_type


class GgufFile:
    """Tensors by their Hugging Face names, read one at a time from the memory-mapped file.

    Raises:
      CheckpointError: no GGUF file, cut short or damaged; a tensor of a type that is not supported.
      ConfigError: an architecture or a setting that is not supported, naming the metadata key.
    """

    def __init__(self, path: Path):
        self.path = path
        self._metadata, self._by_gguf_name = read_gguf(path)
        self._data = np.memmap(path, np.uint8, mode="r")
        self.config = self._config()
        names = gguf_to_hf(self.config)
        self._tensors = {
            names.get(name, name): tensor
            for name, tensor in self._by_gguf_name.items()
            if name != _ROPE_FREQS
        }
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """Float32 where the file's tensor is quantised, otherwise its own dtype."""
        tensor = self._tensors[name]
        values = self._values(tensor)
        if self.config.architecture == "llama" and tensor.name.rpartition(".")[0].endswith(
            ("attn_q", "attn_k")
        ):
            # This architecture's files have the two halves of each head interleaved: rows 0, H/2, 1, H/2 + 1,
            # ...
            h = self.config.head_dim
            return values.reshape(-1, h // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        return values

    @property
    def generation_config(self) -> dict[str, Any]:
        """The sampling settings in the metadata, as `generation_config.json` calls them."""
        names = {
            "temp": "temperature",
            "top_k": "top_k",
            "top_p": "top_p",
            "min_p": "min_p",
            "penalty_repeat": "repetition_penalty",
        }
        metadata = self._metadata
        return {
            name: _plain(metadata[f"general.sampling.{key}"])
            for key, name in names.items()
            if f"general.sampling.{key}" in metadata
        }

    def _values(self, tensor: GgufTensor) -> np.ndarray:
        data = self._data[tensor.start : tensor.stop]
        if tensor.kind in _PLAIN:
            return data.view(_PLAIN[tensor.kind]).reshape(tensor.shape)
        return dequantize(data.reshape(*tensor.shape[:-1], -1), tensor.kind)

    def _config(self) -> ModelConfig:
        metadata = self._metadata
        architecture = metadata.get("general.architecture")
        if architecture not in _READERS:
            raise ConfigError("general.architecture", architecture, f"one of {', '.join(_READERS)}")
        if metadata.get("general.type", "model") != "model":
            raise ConfigError("general.type", metadata["general.type"], "a whole model")
        if metadata.get("split.count", 1) not in (0, 1):
            raise ConfigError(
                "split.count", metadata["split.count"], "one file; merge the parts with gguf-split first"
            )
        prefix = architecture + "."
        keys = Keys(
            {
                key.removeprefix(prefix): _plain(value)
                for key, value in metadata.items()
                if key.startswith(prefix)
            },
            prefix,
        )
        embedding = self._by_gguf_name.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(f"{self.path}: missing tensors: token_embd.weight")
        hf = _common(keys) | {
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in self._by_gguf_name,
        }
        hf |= {
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": _end_tokens(metadata),
        }
        hf |= {"rope_parameters": self._rope(keys, hf)}
        config = _READERS[architecture](keys, hf)
        keys.finish(_IRRELEVANT, _ONLY)
        return config

    def _rope(self, keys: Keys, hf: dict[str, Any]) -> dict[str, Any]:
        """Hugging Face's `rope_parameters`."""
        theta = keys.number("rope.freq_base", 10_000.0)
        kind, factor = keys.take("rope.scaling.type", "linear"), keys.take("rope.scaling.factor", 1.0)
        original = keys.integer("rope.scaling.original_context_length", 8192)
        if kind not in ("none", "linear"):
            raise ConfigError(keys.name("rope.scaling.type"), kind, "none or linear")
        linear = kind == "linear" and factor not in (0.0, 1.0)
        if _ROPE_FREQS not in self._by_gguf_name:
            return (
                {"rope_type": "linear", "factor": factor, "rope_theta": theta}
                if linear
                else {"rope_theta": theta}
            )
        if linear:
            raise ConfigError(keys.name("rope.scaling.factor"), factor, f"1 beside a tensor {_ROPE_FREQS}")
        divisors = np.asarray(self._values(self._by_gguf_name[_ROPE_FREQS]), np.float64)
        return llama3_scaling(theta, hf["head_dim"], divisors, original) | {"rope_theta": theta}


def _plain(value: Any) -> Any:
    """A float32 as its shortest decimal, as people write it in a config: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _end_tokens(metadata: dict[str, Any]) -> list[int]:
    """Every token that ends an answer: those the metadata names, and control tokens that end a turn."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    texts, kinds = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    found = [
        i
        for i, (text, kind) in enumerate(zip(texts, kinds, strict=False))
        if kind == _CONTROL and text in _TURN_ENDS
    ]
    return list(
        token_ids("tokenizer.ggml.eos_token_id", [token for token in (*named, *found) if token is not None])
    )


# ---- one reader an architecture: the rest of the metadata, and what Hugging Face's config would be


def _common(keys: Keys) -> dict[str, Any]:
    hidden_size, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden_size // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        width = keys.integer(key, head_dim)
        if width != head_dim:
            raise ConfigError(keys.name(key), width, f"{head_dim}, the width of a head")
    return {
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
    }


def _llama(keys: Keys, hf: dict[str, Any]) -> ModelConfig:
    return model_config_from_hf(hf | {"model_type": "llama"})


def _qwen2(keys: Keys, hf: dict[str, Any]) -> ModelConfig:
    return model_config_from_hf(hf | {"model_type": "qwen2"})


def _gemma3(keys: Keys, hf: dict[str, Any]) -> ModelConfig:
    """The format has no field for what q·k is scaled by: only the model of 62 layers (27B) scales by another
    width than its heads'.
    """
    pattern = keys.take("attention.sliding_window_pattern", 6)
    layers, hidden_size, heads = hf["num_hidden_layers"], hf["hidden_size"], hf["num_attention_heads"]
    slides = (
        [bool(x) for x in pattern]
        if isinstance(pattern, np.ndarray)
        else [(i + 1) % pattern != 0 for i in range(layers)]
    )
    config = model_config_from_hf(
        hf
        | {
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": hidden_size / heads if layers == 62 else hf["head_dim"],
            "sliding_window": keys.integer("attention.sliding_window"),
            "layer_types": ["sliding_attention" if slid else "full_attention" for slid in slides],
            "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
            "final_logit_softcapping": keys.optional_number("final_logit_softcapping", None),
            "attn_logit_softcapping": keys.optional_number("attn_logit_softcapping", None),
        }
    )
    # These files hold 1 + w where the original checkpoint holds w.
    return dataclasses.replace(config, norm_weight_offset=0.0)


_READERS = {"llama": _llama, "qwen2": _qwen2, "gemma3": _gemma3}


def llama3_scaling(theta: float, head_dim: int, divisors: np.ndarray, original: int = 8192) -> dict[str, Any]:
    """The Llama 3 rope scaling (as Hugging Face's `rope_parameters`) that divides the frequencies by
    `divisors` [H/2].

    A GGUF file has only the divisors. In the band between the high and the low frequencies 1/divisor is
    linear in 1/wavelength, which gives back the band's borders; they are told relative to the context
    `original`, which may be any.

    Raises:
      ConfigError: rope_freqs.weight, where no such scaling gives these divisors, or too few are in the band
      to tell which.
    """

    def fail() -> ConfigError:
        return ConfigError(_ROPE_FREQS, divisors.tolist(), "the frequency divisors of Llama 3's rope scaling")

    if divisors.shape != (head_dim // 2,) or not np.isfinite(divisors).all() or divisors.min() < 1 - 1e-6:
        raise fail()
    factor = float(divisors.max())
    if factor < 1 + 1e-6:
        return {"rope_type": "default"}
    rotations = (
        original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    )  # within the context `original`

    def divisors_of(low: float, high: float) -> np.ndarray:
        smooth = np.clip((rotations - low) / (high - low), 0, 1)
        return 1 / ((1 - smooth) / factor + smooth)

    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    band = (smooth > 1e-5) & (smooth < 1 - 1e-5)
    candidates = [(1.0, 4.0)]  # every published model
    if band.sum() >= 2:
        slope, intercept = np.polyfit(rotations[band], smooth[band], 1)
        if slope > 0:
            candidates.append((round(float(-intercept / slope), 4), round(float((1 - intercept) / slope), 4)))
    for low, high in candidates:
        if 0 < low < high and np.allclose(divisors_of(low, high), divisors, rtol=1e-4):
            scaling = {
                "rope_type": "llama3",
                "factor": round(factor, 4),
                "low_freq_factor": low,
                "high_freq_factor": high,
            }
            return scaling | {"original_max_position_embeddings": original}
    raise fail()
