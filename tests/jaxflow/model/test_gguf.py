"""GGUF files: written here by the `gguf` package; every cut and every changed byte refused or harmless."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from same_weights import same

from jaxflow.config import ConfigError, ModelConfig, Rope
from jaxflow.model.architectures.hf_config import model_config_from_hf
from jaxflow.model.checkpoints.checkpoint import CheckpointError, convert, open_checkpoint
from jaxflow.model.checkpoints.gguf_file import GgufFile, llama3_scaling
from jaxflow.model.rope import inverse_frequencies
from jaxflow.parallel.mesh import make_mesh
from jaxflow.text.tokenizer import load_tokenizer

# Their names in the GGUF specification.
MODEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def hf(name: str) -> tuple[dict[str, np.ndarray], ModelConfig]:
    folder = paths.MODELS / name
    return load_file(folder / "model.safetensors"), model_config_from_hf(
        json.loads((folder / "config.json").read_text())
    )


def gguf_name(name: str, gemma: bool) -> str:
    if name in MODEL:
        return MODEL[name]
    _, _, layer, rest = name.split(".", 3)
    role, _, part = rest.rpartition(".")
    return f"blk.{layer}.{(LAYER | (GEMMA_NORMS if gemma else NORMS))[role]}.{part}"


def interleave(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Return rows in llama.cpp's order, which keeps the two halves of a rotation next to each other."""
    per_head = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return np.stack([per_head[:, 0], per_head[:, 1]], axis=2).reshape(tensor.shape)


def write(
    path: Path,
    architecture: str,
    name: str,
    *,
    kind: Kind = Kind.F32,
    metadata: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
) -> ModelConfig:
    """A tiny Hugging Face model as a GGUF file. Returns the config of the original."""
    tensors, config = hf(name)
    settings_: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.freq_base": max(layer.rope.theta for layer in config.layers if layer.rope),
        "rope.dimension_count": config.head_dim,
    }
    if architecture == "gemma3":
        settings_ |= {
            "attention.sliding_window": 16,
            "attention.key_length": 16,
            "attention.value_length": 16,
        }
        settings_ |= {"attention.sliding_window_pattern": 2}
    values = {f"{architecture}.{key}": value for key, value in settings_.items()}
    values |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2} | (metadata or {})
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if value is None:
            continue
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        add[type(value)](key, value)
    for tensor_name, tensor in (tensors | (more or {})).items():
        their_name = (
            tensor_name if more and tensor_name in more else gguf_name(tensor_name, architecture == "gemma3")
        )
        if architecture == "llama" and their_name.endswith(("attn_q.weight", "attn_k.weight")):
            tensor = interleave(tensor, config.num_heads if "attn_q" in their_name else config.num_kv_heads)
        if architecture == "gemma3" and their_name.endswith("norm.weight"):
            tensor = tensor + 1
        if tensor.ndim == 1:
            writer.add_tensor(their_name, tensor)
        elif kind == Kind.F16:
            writer.add_tensor(their_name, tensor.astype(np.float16))
        else:
            writer.add_tensor(their_name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config


PAIRS = [
    ("llama", "tiny-llama"),
    ("llama", "stories260K"),
    ("qwen2", "tiny-qwen2"),
    ("gemma3", "tiny-gemma3_text"),
]


@pytest.mark.parametrize(("architecture", "name"), PAIRS)
def test_a_gguf_file_is_the_model_it_was_made_of(architecture: str, name: str, tmp_path: Path) -> None:
    original = open_checkpoint(str(paths.MODELS / name))
    write(tmp_path / "model.gguf", architecture, name)
    opened = open_checkpoint(str(tmp_path / "model.gguf"))
    expected_config, expected = (
        dataclasses.replace(original.model_config, eos_token_ids=(2,)),
        original.load("float32", make_mesh(2)),
    )
    if architecture == "gemma3":
        # The format has 1 + w for w, and no place for query_pre_attn_scalar: it is the width of a head but
        # for the 27B model.
        expected_config = dataclasses.replace(expected_config, norm_weight_offset=0.0, attention_scale=0.25)
        expected = jax.tree.map_with_path(
            lambda at, leaf: leaf + 1 if "norm" in str(at[-1]) else leaf, expected
        )
    assert opened.model_config == expected_config
    same(opened.load("float32", make_mesh(2)), expected)
    assert opened.tokenizer_path == tmp_path / "model.gguf" and opened.name == "model"


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16])
def test_narrow_floats_are_exact(kind: Kind, tmp_path: Path) -> None:
    """The tiny models' numbers are bfloat16's, so that format loses nothing; float16 rounds."""
    write(tmp_path / "model.gguf", "llama", "tiny-llama", kind=kind)
    weights = open_checkpoint(str(tmp_path / "model.gguf")).load("float32")
    expected = open_checkpoint(str(paths.MODELS / "tiny-llama")).load("float32")
    if kind == Kind.F16:
        expected = jax.tree.map(
            lambda leaf: leaf.astype(jnp.float16).astype(jnp.float32) if leaf.ndim > 1 else leaf, expected
        )
    same(weights, expected)


# ---- rope scaling, windows and other settings


@given(
    st.sampled_from([2.0, 8.0, 32.0]),
    st.sampled_from([64, 128, 80]),
    st.sampled_from([1e4, 5e5]),
    st.sampled_from([64, 2048, 8192]),
    st.floats(0.5, 2).map(lambda x: round(x, 2)),
    st.floats(1, 8).map(lambda x: round(x, 2)),
)
def test_llama3_scaling_is_found_in_its_divisors(
    factor: float, h: int, theta: float, original: int, low: float, width: float
) -> None:
    rope = Rope(theta, "llama3", factor, low, low + width, original)
    divisors = (inverse_frequencies(Rope(theta), h) / inverse_frequencies(rope, h)).astype(np.float32)
    assume(((divisors > 1.001) & (divisors < factor - 0.001)).sum() >= 2)  # fewer leave the borders open
    scaling = llama3_scaling(theta, h, divisors.astype(np.float64))
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    found = Rope(theta, "llama3", *(scaling[name] for name in names))
    np.testing.assert_allclose(inverse_frequencies(found, h), inverse_frequencies(rope, h), rtol=2e-4)


def test_rope_freqs_become_the_published_scaling(tmp_path: Path) -> None:
    rope = Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    divisors = (inverse_frequencies(Rope(500000.0), 16) / inverse_frequencies(rope, 16)).astype(np.float32)
    path = tmp_path / "model.gguf"
    write(
        path,
        "llama",
        "tiny-llama",
        metadata={"llama.rope.freq_base": 500000.0},
        more={"rope_freqs.weight": divisors},
    )
    opened = open_checkpoint(str(path))
    assert {layer.rope for layer in opened.model_config.layers} == {rope}
    opened.load("float32")  # rope_freqs.weight is no tensor of the model
    write(path, "llama", "tiny-llama", more={"rope_freqs.weight": np.ones(8, np.float32)})
    assert GgufFile(path).config.layers[0].rope == Rope(10000.0)
    for wrong in (
        np.linspace(1, 8, 8, dtype=np.float32),
        np.ones(7, np.float32),
        np.full(8, np.nan, np.float32),
        -divisors,
    ):
        write(path, "llama", "tiny-llama", more={"rope_freqs.weight": wrong})
        with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
            GgufFile(path)


def test_linear_scaling(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(
        path,
        "llama",
        "tiny-llama",
        metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    )
    assert GgufFile(path).config.layers[0].rope == Rope(10000.0, "linear", 4.0)
    write(path, "llama", "tiny-llama", metadata={"llama.rope.scaling.type": "none"})
    assert GgufFile(path).config.layers[0].rope == Rope(10000.0)
    write(
        path,
        "gemma3",
        "tiny-gemma3_text",
        metadata={"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
    )
    assert [layer.rope for layer in GgufFile(path).config.layers] == [Rope(1e4), Rope(1e6, "linear", 8.0)]


def test_gemma3_windows(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for pattern, windows in ((2, [16, None]), (None, [16, 16]), ([False, True], [None, 16])):
        write(
            path, "gemma3", "tiny-gemma3_text", metadata={"gemma3.attention.sliding_window_pattern": pattern}
        )
        assert [layer.window for layer in GgufFile(path).config.layers] == windows


REFUSED = [
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.type"),
    ({"llama.attention.sliding_window": 16}, "llama.attention.sliding_window"),
    ({"llama.expert_count": 8}, "llama.expert_count"),
    ({"llama.logit_scale": 2.0}, "llama.logit_scale"),
    ({"llama.attention.key_length": 32}, "llama.rope.dimension_count"),
    ({"llama.attention.head_count": None}, "llama.attention.head_count"),
    ({"llama.attention.head_count_kv": [2, 2]}, "llama.attention.head_count_kv"),
    ({"llama.attention.causal": False}, "llama.attention.causal"),
    ({"llama.context_length": "long"}, "llama.context_length"),
    ({"general.type": "adapter"}, "general.type"),
    ({"split.count": 2}, "split.count"),
]


@pytest.mark.parametrize(("metadata", "key"), REFUSED, ids=[key for _, key in REFUSED])
def test_metadata_that_is_not_supported_is_refused_by_name(
    metadata: dict[str, Any], key: str, tmp_path: Path
) -> None:
    write(tmp_path / "model.gguf", "llama", "tiny-llama", metadata=metadata)
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(str(tmp_path / "model.gguf"))
    assert caught.value.field == key


def test_architectures_and_types_that_are_not_supported(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "mamba", "tiny-llama")
    with pytest.raises(ConfigError, match=r"general\.architecture='mamba'"):
        open_checkpoint(str(path))
    write(path, "llama", "tiny-llama", kind=Kind.Q8_0)
    raw = bytearray(path.read_bytes())
    at = raw.index(b"output.weight") + len(b"output.weight") + 4 + 16
    raw[at] = Kind.IQ4_NL
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"tensor 'output.weight' is of type IQ4_NL; accepted: F32"):
        open_checkpoint(str(path))


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(
        path,
        "llama",
        "tiny-llama",
        more={"blk.0.attn_q.bias": np.zeros(64, np.float32)},
        metadata={"llama.block_count": 3},
    )
    with pytest.raises(
        CheckpointError,
        match=(
            r"missing tensors: model\.layers\.2\..*unexpected tensors: "
            r"model\.layers\.0\.self_attn\.q_proj\.bias"
        ),
    ):
        open_checkpoint(str(path)).load("float32")


def test_end_tokens_of_a_chat_are_found_in_the_vocabulary(tmp_path: Path) -> None:
    tokens = [f"t{i}" for i in range(510)] + ["<|im_end|>", "<|eot_id|>"]
    kinds = [1] * 510 + [3, 1]  # the second has the text and is no control token
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.eot_token_id": 5,
    }
    metadata |= {"general.sampling.temp": 0.7, "general.sampling.top_k": 40}
    write(tmp_path / "model.gguf", "llama", "tiny-llama", metadata=metadata)
    opened = open_checkpoint(str(tmp_path / "model.gguf"))
    assert opened.model_config.eos_token_ids == (2, 5, 510)
    assert opened.generation_config == {"temperature": 0.7, "top_k": 40, "eos_token_ids": (2, 5, 510)}


# ---- files that are damaged


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    write(path, "llama", "tiny-llama", kind=Kind.Q8_0)
    return path


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
def test_a_truncated_file_is_refused(small_file: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = small_file.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: data.draw(st.one_of(st.integers(0, 2500), st.integers(0, len(whole) - 1)))])
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        open_checkpoint(str(cut))


@given(st.integers(0, 2400), st.integers(0, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_a_changed_byte_before_the_weights_breaks_nothing_else(
    small_file: Path, tmp_path: Path, at: int, byte: int
) -> None:
    """Whatever the header comes to say, the file loads as a whole model or is refused; nothing else is
    raised.
    """
    damaged = bytearray(small_file.read_bytes())
    damaged[at] = byte
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        with np.errstate(invalid="ignore"):  # where other bytes are read as scales
            open_checkpoint(str(path)).load("float32")
    except (CheckpointError, ConfigError) as error:
        assert str(error)


def test_other_files_are_no_gguf(tmp_path: Path) -> None:
    for content in (
        b"",
        b"<html>404: Not Found</html>" * 3,
        b"GGUF" + bytes(40),
        b"GGUF" + b"\x00\x00\x00\x03" + bytes(64),
    ):
        path = tmp_path / "page.gguf"
        path.write_bytes(content)
        with pytest.raises((CheckpointError, ConfigError), match=r"page\.gguf|architecture"):
            open_checkpoint(str(path))


# ---- the default chat model


def test_smollm2_config(smollm2_gguf: Path) -> None:
    opened = open_checkpoint(str(smollm2_gguf))
    config = opened.model_config
    assert (
        config.num_layers,
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
    ) == (30, 576, 9, 3, 64)
    assert (config.vocab_size, config.intermediate_size, config.max_position, config.norm_eps) == (
        49152,
        1536,
        8192,
        1e-5,
    )
    assert {layer.rope for layer in config.layers} == {Rope(100000.0)} and config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    assert sum(math.prod(shape) for shape in GgufFile(smollm2_gguf).shapes.values()) == 134_515_008


def test_a_converted_gguf_keeps_its_tokenizer(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut the model to its first layer for speed. The test reads only the tokenizer's part of the file."""
    first = dataclasses.replace(
        GgufFile(smollm2_gguf).config, layers=(GgufFile(smollm2_gguf).config.layers[0],)
    )
    monkeypatch.setattr("jaxflow.model.checkpoints.checkpoint.check_tensors", lambda *_: None)
    monkeypatch.setattr(GgufFile, "_config", lambda self: first)
    convert(str(smollm2_gguf), tmp_path / "converted")
    opened = open_checkpoint(str(tmp_path / "converted"))
    assert opened.tokenizer_path == tmp_path / "converted" / "tokenizer.gguf"
    assert opened.tokenizer_path.stat().st_size < 4_000_000
    text = "def f(x): return x**2  # Grüße, 世界 123"
    ours, theirs = load_tokenizer(opened.tokenizer_path), load_tokenizer(smollm2_gguf)
    assert ours.encode(text) == theirs.encode(text)
    assert (ours.eos_token_id, ours.chat_template) == (theirs.eos_token_id, theirs.chat_template)
