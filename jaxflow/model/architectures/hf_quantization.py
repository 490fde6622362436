"""Checks of a checkpoint's `quantization_config`.

gpt-oss may have experts in `mxfp4`. All families may have two kinds of 8 bits: `float-quantized` of
compressed-tensors, and `fp8`. Their weights are e4m3 with a scale
a matrix or an output channel. JaxFlow quantizes activations at run time, with a scale a token or 128 columns.
These scales are at least as fine as those of any checkpoint, so `input_scale` is not needed. The dtypes of
the tensors decide which matrices stay in 16 bits. A checkpoint of `fp8` may have a scale for each block of
128 x 128 (DeepSeek-V3). Its experts keep their blocks, and its other matrices become 16-bit weights when they
are read. All families but gpt-oss may also have matrices in 4 bits (`hf_packed_int4`).
"""

from collections.abc import Mapping
from typing import Any, Literal

from jaxflow.config import ConfigError
from jaxflow.model.architectures import hf_packed_int4
from jaxflow.model.architectures.hf_keys import Keys
from jaxflow.model.architectures.hf_packed_int4 import PackedInt4

_WHERE = "quantization_config."
BLOCKS = [128, 128]  # the only accepted `weight_block_size`
Stored = Literal["fp8", "fp8 blocks", "mxfp4"] | PackedInt4


def stored_format(config: Mapping[str, Any], architecture: str) -> Stored:
    """Return what a `quantization_config` describes: `fp8`, `fp8 blocks`, `mxfp4` experts, or 4 bits.

    `fp8`: e4m3 with a scale a matrix or an output channel. `fp8 blocks`: a scale for
        each block of 128 x 128 weights.

    architecture: Hugging Face's model_type.

    Raises:
      ConfigError: any other scheme. The error names the field.
    """
    keys = Keys(config, _WHERE)
    if architecture != "gpt_oss":
        return _format_of_all(config)
    method = keys.take("quant_method")
    if method != "mxfp4":
        raise ConfigError(
            f"{_WHERE}quant_method",
            method,
            "mxfp4 for gpt_oss, or no quantization_config with experts in 16 bits",
        )
    kept = keys.take("modules_to_not_convert")
    if isinstance(kept, list) and any("experts" in str(name) for name in kept):
        raise ConfigError(f"{_WHERE}modules_to_not_convert", kept, "modules other than the experts")
    keys.one_of("dequantize", None, False)
    keys.finish((), {})
    return "mxfp4"


def _format_of_all(config: Mapping[str, Any]) -> Stored:
    """Return the form of weights that all families may have.

    Raises:
      ConfigError: any other scheme. The error names the field.
    """
    keys = Keys(config, _WHERE)
    method = keys.take("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(keys)
    if method == "awq":
        return hf_packed_int4.awq(keys)
    if method == "gptq":
        return hf_packed_int4.gptq(keys)
    if method != "fp8":
        raise ConfigError(
            f"{_WHERE}quant_method",
            method,
            "compressed-tensors, fp8, awq or gptq (or no quantization_config, or a GGUF file)",
        )
    blocks = config.get("weight_block_size") == BLOCKS
    _fp8(keys)
    return "fp8 blocks" if blocks else "fp8"


def _fp8(keys: Keys) -> None:
    keys.one_of("activation_scheme", "dynamic", "static")
    keys.one_of(
        "weight_block_size",
        None,
        BLOCKS,
        accepts=f"null: a scale a matrix or an output channel; or {BLOCKS}: a scale a block",
    )
    keys.one_of("fmt", None, "e4m3")
    keys.take("kv_cache_scheme")  # the tensors k_scale and v_scale hold its values
    keys.finish(("ignored_layers", "modules_to_not_convert", "is_checkpoint_fp8_serialized"), {})


def _compressed_tensors(keys: Keys) -> Stored:
    form = keys.one_of("format", "float-quantized", "naive-quantized", "pack-quantized")
    keys.one_of("quantization_status", None, "compressed", "frozen")
    groups = keys.mapping("config_groups")
    if not groups:
        raise ConfigError(keys.name("config_groups"), groups, "at least one group")
    of_groups = []
    for name, group in groups.items():
        where = f"{keys.name('config_groups')}.{name}."
        if not isinstance(group, dict):
            raise ConfigError(where[:-1], group, "an object")
        of_groups.append(Keys(group, where))
    kv = keys.mapping("kv_cache_scheme")
    if kv and form == "pack-quantized":
        raise ConfigError(keys.name("kv_cache_scheme"), kv, "null with weights in 4 bits")
    if kv:
        _numbers(Keys(kv, keys.name("kv_cache_scheme.")), ("tensor", "attn_head"))
    sparsity = keys.mapping("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ConfigError(keys.name("sparsity_config.format"), sparsity["format"], "dense")
    if keys.mapping("transform_config"):
        raise ConfigError(
            keys.name("transform_config"), "...", "empty; transformed weights are not supported"
        )
    keys.finish(("ignore", "global_compression_ratio", "version"), {})
    if form == "pack-quantized":
        return hf_packed_int4.pack_quantized(of_groups)
    for group in of_groups:
        _group(group)
    return "fp8"


def _group(keys: Keys) -> None:
    for operand, strategies in (
        ("weights", ("channel", "tensor")),
        ("input_activations", ("token", "tensor")),
    ):
        numbers = keys.mapping(operand)
        if numbers is None:
            raise ConfigError(
                keys.name(operand), None, "float with 8 bits, because both operands of a GEMM are e4m3"
            )
        _numbers(Keys(numbers, keys.name(f"{operand}.")), strategies)
    keys.one_of("output_activations", None)
    keys.one_of("format", None, "float-quantized", "naive-quantized")
    keys.finish(("targets",), {})


def _numbers(keys: Keys, strategies: tuple[str, ...]) -> None:
    keys.one_of("num_bits", 8)
    keys.one_of("type", "float")
    keys.one_of("symmetric", True, None)
    keys.one_of("strategy", *strategies)
    keys.one_of("group_size", None)
    keys.one_of("block_structure", None)
    keys.one_of("actorder", None, False)
    keys.finish(("dynamic", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"), {})
