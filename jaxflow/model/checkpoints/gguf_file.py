"""A GGUF file as a checkpoint: its config, and its tensors under Hugging
Face names, dequantized when read.
"""

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from jaxflow.config import ConfigError, ModelConfig
from jaxflow.model.architectures.hf_config import model_config_from_hf, token_ids
from jaxflow.model.architectures.hf_keys import Keys
from jaxflow.model.architectures.tensor_names import gguf_to_hf
from jaxflow.model.checkpoints.source import CheckpointError
from jaxflow.text.gguf_metadata import GgufError, read_metadata_section

TYPES = {
    GGMLQuantizationType[name]: name
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
}
_PLAIN = {
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.BF16: jnp.bfloat16,
}
CACHED_VALUES = 2**16  # values that are dequantized at a time
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
# End tokens of a chat message. Files often name only one end token of their model.
_TURN_ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>"})
_CONTROL = 3  # a value of tokenizer.ggml.token_type


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """The location of one tensor in a GGUF file."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first, as in numpy
    kind: GGMLQuantizationType
    start: int  # bytes from the start of the file
    stop: int


class GgufFile:
    """A GGUF file. Its tensors have Hugging Face names and are read one at a
    time from the memory-mapped file.

    Raises:
      CheckpointError: not a GGUF file, truncated or damaged, or a tensor type that is not supported.
      ConfigError: an architecture or a setting that is not supported. The error names the metadata key.
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
        """Return a tensor, as float32 if it is quantized, otherwise in its dtype."""
        tensor = self._tensors[name]
        values = self._values(tensor)
        if self.config.architecture == "llama" and tensor.name.rpartition(".")[0].endswith(
            ("attn_q", "attn_k")
        ):
            # Files of this architecture interleave the two halves of each head: rows 0, H/2, 1, H/2 + 1, ...
            h = self.config.head_dim
            return values.reshape(-1, h // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        return values

    @property
    def generation_config(self) -> dict[str, Any]:
        """Return the sampling settings of the metadata, with the names of `generation_config.json`."""
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
        return dequantized(data.reshape(math.prod(tensor.shape[:-1]), -1), tensor.kind).reshape(tensor.shape)

    def _config(self) -> ModelConfig:
        metadata = self._metadata
        architecture = metadata.get("general.architecture")
        if architecture not in _READERS:
            raise ConfigError("general.architecture", architecture, f"one of {', '.join(_READERS)}")
        if metadata.get("general.type", "model") != "model":
            raise ConfigError("general.type", metadata["general.type"], "model")
        if metadata.get("split.count", 1) not in (0, 1):
            raise ConfigError(
                "split.count", metadata["split.count"], "one file; merge the files with gguf-split"
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
        """Return the rotary settings as Hugging Face's `rope_parameters`."""
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
            raise ConfigError(
                keys.name("rope.scaling.factor"), factor, f"1 in a file with the tensor {_ROPE_FREQS}"
            )
        divisors = np.asarray(self._values(self._by_gguf_name[_ROPE_FREQS]), np.float64)
        return llama3_scaling(theta, hf["head_dim"], divisors, original) | {"rope_theta": theta}


def dequantized(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Return the values of quantized rows as float32.

    rows: [rows, bytes] uint8. A part of the rows is dequantized at a time, because the intermediate arrays of
    a large tensor do not fit in a core's cache.
    """
    block, block_bytes = GGML_QUANT_SIZES[kind]
    out = np.empty((len(rows), rows.shape[1] // block_bytes * block), np.float32)
    step = max(1, CACHED_VALUES // max(1, out.shape[1]))
    for start in range(0, len(rows), step):
        out[start : start + step] = dequantize(rows[start : start + step], kind)
    return out


def _plain(value: Any) -> Any:
    """Return a float32 as its shortest decimal: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _end_tokens(metadata: dict[str, Any]) -> list[int]:
    """Return all end-of-sequence tokens: those that the metadata names, and
    control tokens that end a message.
    """
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


# ---- one reader an architecture, which returns the ModelConfig of the equivalent Hugging Face config


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
    """Return the config of Gemma 3.

    The format has no field for the attention scale. All models scale by the head width except the 27B model
    with 62 layers.
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
    # These files store 1 + w for the norm weight w of the original checkpoint.
    return dataclasses.replace(config, norm_weight_offset=0.0)


_READERS = {"llama": _llama, "qwen2": _qwen2, "gemma3": _gemma3}


def llama3_scaling(theta: float, head_dim: int, divisors: np.ndarray, original: int = 8192) -> dict[str, Any]:
    """Return the Llama 3 rope scaling that divides the frequencies by `divisors` [H/2].

    A GGUF file holds only the divisors. Between the high and the low frequencies, 1/divisor is linear in
    1/wavelength. A line fit gives the borders of this band, relative to the context length `original`.

    Returns:
      Hugging Face's `rope_parameters`.

    Raises:
      ConfigError: no Llama 3 scaling has these divisors, or the band holds too few of them.
    """

    def fail() -> ConfigError:
        return ConfigError(_ROPE_FREQS, divisors.tolist(), "the frequency divisors of Llama 3's rope scaling")

    if divisors.shape != (head_dim // 2,) or not np.isfinite(divisors).all() or divisors.min() < 1 - 1e-6:
        raise fail()
    factor = float(divisors.max())
    if factor < 1 + 1e-6:
        return {"rope_type": "default"}
    # Rotations within the context `original`.
    rotations = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)

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


# ---- the tensor section of the file


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Return the metadata by key, with numpy arrays of numbers, and the tensors by name.

    Raises:
      CheckpointError: not a GGUF file, truncated or damaged, or a tensor type that is not supported. The
        error names the file and the tensor.
    """
    metadata, at = _metadata(path)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment={alignment!r} is not a power of two")
    found: list[tuple[str, tuple[int, ...], int, int]] = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        size = len(data)
        (count,) = struct.unpack_from("<Q", data, 8)
        try:
            for _ in range(count):
                description, at = _description(data, at)
                found.append(description)
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path}: cut short or damaged: {len(found)} of {count} tensors are described ({size} bytes)"
            ) from error
    data_start = -(-at // alignment) * alignment
    tensors = {
        name: _tensor(path, size, name, shape, kind, data_start + offset)
        for name, shape, kind, offset in found
    }
    if len(tensors) != count:
        raise CheckpointError(f"{path}: two tensors have the same name")
    return metadata, tensors


def write_metadata_only(source: Path, target: Path) -> None:
    """Write a GGUF file with the metadata of another file and without tensors."""
    end = _metadata(source)[1]
    with source.open("rb") as file:
        section = file.read(end)
    # The section is: magic and version, the number of tensors in 8 bytes, the number of values, the values.
    target.write_bytes(section[:8] + struct.pack("<Q", 0) + section[16:])


def _metadata(path: Path) -> tuple[dict[str, Any], int]:
    try:
        return read_metadata_section(path)
    except GgufError as error:
        raise CheckpointError(f"{error}: cut short or damaged, or no GGUF file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def _description(data: mmap.mmap, at: int) -> tuple[tuple[str, tuple[int, ...], int, int], int]:
    """Return (name, shape, type, offset) of the tensor described at byte `at`, and the next byte offset."""
    (length,) = struct.unpack_from("<Q", data, at)
    name = data[at + 8 : at + 8 + length].decode()
    at += 8 + length
    (rank,) = struct.unpack_from("<I", data, at)
    *dims, kind, offset = struct.unpack_from(f"<{min(rank, 64)}QIQ", data, at + 4)
    return (name, tuple(dims[::-1]), kind, offset), at + 4 + 8 * rank + 12


def _tensor(path: Path, size: int, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
    if kind not in TYPES:
        known = {known.value: known.name for known in GGMLQuantizationType}
        raise CheckpointError(
            f"{path}: tensor {name!r} is of type {known.get(kind, kind)}; accepted: "
            f"{', '.join(TYPES.values())}"
        )
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if not shape or shape[-1] % block:
        raise CheckpointError(
            f"{path}: tensor {name!r} is {list(shape)}, and {TYPES[GGMLQuantizationType(kind)]} has "
            f"blocks of {block}"
        )
    stop = start + math.prod(shape) // block * block_bytes
    if stop > size:
        raise CheckpointError(
            f"{path}: cut short: tensor {name!r} ends at byte {stop}, the file at byte {size}"
        )
    return GgufTensor(name, shape, GGMLQuantizationType(kind), start, stop)
