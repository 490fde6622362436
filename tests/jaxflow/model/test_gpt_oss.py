"""gpt-oss: every part that its goldens have changes the logits, and what
contradicts its config is refused.
"""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paths
import probes as probing
import pytest
from probes import Weights, blanked
from safetensors.numpy import load_file, save_file
from same_weights import same

from jaxflow.config import ConfigError, EngineConfig, ModelConfig, gate_block
from jaxflow.engine.settings import resolve
from jaxflow.model.architectures.hf_config import model_config_from_hf
from jaxflow.model.checkpoints import mxfp4
from jaxflow.model.checkpoints.checkpoint import CheckpointError, convert, open_checkpoint
from jaxflow.model.weight_spec import assemble
from jaxflow.model.weights import expert_width, leaves, shapes, tensors

NAME = "tiny-gpt_oss"
FOLDER = paths.MODELS / NAME
model = functools.partial(probing.model, NAME)
probes = functools.partial(probing.probes, NAME)


def other_layers(config: ModelConfig, **changes: Any) -> ModelConfig:
    return dataclasses.replace(
        config, layers=tuple(dataclasses.replace(layer, **changes) for layer in config.layers)
    )


def other_rope(config: ModelConfig, **changes: Any) -> ModelConfig:
    rope = config.layers[0].rope
    assert rope is not None
    return other_layers(config, rope=dataclasses.replace(rope, **changes))


PARTS: dict[str, Callable[[ModelConfig, Weights], tuple[ModelConfig, Weights]]] = {
    "sinks": lambda c, w: (c, blanked(w, "sink_logits", -1e30)),
    "window": lambda c, w: (other_layers(c, window=None), w),
    "clamp": lambda c, w: (dataclasses.replace(c, activation="silu"), w),
    "softmax over the chosen experts": lambda c, w: (dataclasses.replace(c, norm_topk_prob=False), w),
    "router's bias": lambda c, w: (c, blanked(w, "router_bias")),
    "experts' biases": lambda c, w: (c, blanked(w, "expert_up_gate_bias")),
    "experts' output biases": lambda c, w: (c, blanked(w, "expert_down_bias")),
    "attention's biases": lambda c, w: (c, blanked(w, "qkv_bias")),
    "output bias": lambda c, w: (c, blanked(w, "out_proj_bias")),
    "yarn's frequencies": lambda c, w: (other_rope(c, factor=1.0), w),
    "yarn's attention factor": lambda c, w: (other_rope(c, attention_factor=1.0), w),
    "yarn's borders": lambda c, w: (other_rope(c, truncate=True), w),
}


def test_the_whole_model_has_the_logits_of_the_golden() -> None:
    wanted = probing.wanted_probes(NAME)
    np.testing.assert_allclose(probes(*model()), wanted, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_that_stay_in_mxfp4_give_equal_logits(dtype: str) -> None:
    wide, kept = (open_checkpoint(str(FOLDER)).load(dtype, quantization=how) for how in (None, "mxfp4"))
    np.testing.assert_array_equal(probes(model()[0], kept), probes(model()[0], wide))


@pytest.mark.parametrize("part", PARTS)
def test_no_part_can_be_left_out_of_the_golden(part: str) -> None:
    wanted = probing.wanted_probes(NAME)
    assert np.abs(probes(*PARTS[part](*model())) - wanted).max() > 0.05


@pytest.mark.parametrize("width", [64, 720])  # 720 columns are padded for 2 and for 4 devices
def test_the_shards_of_each_expert_add_up(width: int) -> None:
    """The sum over shards of down · act(up_gate · x + bias) is the expert of the checkpoint's own tensors."""
    config, rng = dataclasses.replace(model()[0], expert_intermediate_size=width), np.random.default_rng(2)
    source = {name: rng.standard_normal(shape) for name, shape in tensors(config).items()}
    x, stem, block = rng.standard_normal(64), "model.layers.1.mlp.experts.", gate_block(width)
    act = lambda gate, up: np.tanh(gate) * (up + 1)
    for expert in (0, 7):
        y = x @ source[f"{stem}gate_up_proj"][expert] + source[f"{stem}gate_up_proj_bias"][expert]
        wanted = act(y[::2], y[1::2]) @ source[f"{stem}down_proj"][expert]
        for tp in (1, 2, 4):
            tree = leaves(config, tp)["layers"][1]
            layer = {key: assemble(leaf, source.__getitem__, np.float64) for key, leaf in tree.items()}
            assert layer["expert_down"].shape[2] == expert_width(width, tp)
            total = 0.0
            for up_gate, bias, down in zip(
                np.split(layer["expert_up_gate"][expert], tp),
                np.split(layer["expert_up_gate_bias"][expert], tp),
                np.split(layer["expert_down"][expert], tp, axis=1),
                strict=True,
            ):
                pair = (up_gate @ x + bias).reshape(-1, 2, block)
                total = total + down @ act(pair[:, 0], pair[:, 1]).reshape(-1)
            np.testing.assert_allclose(total, wanted, rtol=1e-9)


def test_experts_of_gpt_oss_fill_the_kernels_on_several_devices() -> None:
    assert [expert_width(2880, tp) for tp in (1, 2, 4, 8)] == [2880, 2944, 3072, 3072]
    config = open_checkpoint("gpt-oss-20b", load_format="dummy").model_config
    one, two = (shapes(config, tp)["layers"][0] for tp in (1, 2))
    assert one["expert_down"].shape == (32, 2880, 2880) and two["expert_down"].shape == (32, 2880, 2944)
    assert two["expert_up_gate"].shape == (32, 5888, 2880) and two["expert_up_gate_bias"].shape == (32, 5888)


def test_mxfp4_is_what_its_definition_says() -> None:
    """Each number is (-1)^s · 2^(e - 1) · (1 + m / 2), or m / 2 for e = 0.

    The factor of a block is 2^(scale - 127). The low bits are first.
    """
    rng = np.random.default_rng(3)
    blocks, scales = rng.integers(0, 256, (5, 2, 16), np.uint8), rng.integers(100, 150, (5, 2), np.uint8)
    found = mxfp4.dequantize(blocks, scales).astype(np.float64)
    assert found.shape == (5, 64)
    for row, column in np.ndindex(5, 64):
        group, place = divmod(column, 32)
        code = int(blocks[row, group, place // 2]) >> (4 if place % 2 else 0) & 15
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        size = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
        assert found[row, column] == (-1) ** sign * size * 2.0 ** (int(scales[row, group]) - 127)


def plain(folder: Path) -> None:
    """Replace the experts of a folder by those in 16 bits, in the layout of `transformers`."""
    tensors, wide = load_file(folder / "model.safetensors"), {}
    for name, value in tensors.items():
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            rows = [mxfp4.dequantize(*one) for one in zip(value, tensors[f"{stem}_scales"], strict=True)]
            wide[stem] = np.ascontiguousarray(np.stack(rows).swapaxes(1, 2))
        elif not name.endswith("_scales"):
            wide[name] = value
    save_file(wide, folder / "model.safetensors")
    change(folder, quantization_config=None)


def change(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit(folder: Path, edited: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edited(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(FOLDER, tmp_path / "model")


def test_experts_in_16_bits_are_the_same(folder: Path, tmp_path: Path) -> None:
    plain(folder)
    same(open_checkpoint(str(folder)).load("float32"), model()[1])
    convert(str(FOLDER), tmp_path / "converted", "float32")
    same(open_checkpoint(str(tmp_path / "converted")).load("float32"), model()[1])


BLOCKS = "model.layers.0.mlp.experts.down_proj_blocks"
SCALES = "model.layers.0.mlp.experts.down_proj_scales"
DAMAGE: dict[str, tuple[Callable[[dict[str, np.ndarray]], object], str]] = {
    "no scales": (lambda t: t.pop(SCALES), "down_proj_scales is None"),
    "no blocks": (lambda t: t.pop(BLOCKS), "down_proj_scales.* no part of MXFP4"),
    "another group": (lambda t: t.update({BLOCKS: t[BLOCKS].reshape(8, 64, 4, 8)}), "MXFP4 has"),
    "a scale too few": (lambda t: t.update({SCALES: t[SCALES][:, :, :1].copy()}), "MXFP4 has"),
    "bytes elsewhere": (
        lambda t: t.update({"model.norm.weight": np.zeros(64, np.uint8)}),
        "model.norm.weight",
    ),
    "twice": (
        lambda t: t.update({BLOCKS.removesuffix("_blocks"): np.zeros((8, 64, 64), np.float32)}),
        "16 bits",
    ),
    "fewer experts": (
        lambda t: t.update({name: value[:4].copy() for name, value in t.items() if "experts." in name}),
        r"gate_up_proj is \[4, 64, 128\] and should be \[8, 64, 128\]",
    ),
    "another router": (
        lambda t: t.update({"model.layers.1.mlp.router.weight": np.zeros((16, 64), np.float32)}),
        r"router.weight is \[16, 64\] and should be \[8, 64\]",
    ),
    "no sinks": (lambda t: t.pop("model.layers.1.self_attn.sinks"), "missing tensors: .*sinks"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_experts_and_routers_are_named_before_any_weight_is_read(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited, said = DAMAGE[what]
    edit(folder, edited)
    monkeypatch.setattr(mxfp4, "dequantize", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(str(folder)).load("float32")


def test_a_scale_that_is_no_number_is_refused(folder: Path) -> None:
    edit(folder, lambda t: t[SCALES].__setitem__((0, 0, 0), 255))
    with pytest.raises(CheckpointError, match="down_proj_scales has scales that are not numbers"):
        open_checkpoint(str(folder)).load("float32")


@pytest.mark.parametrize(
    ("scheme", "field"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "quant_method"),
        (
            {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.experts"]},
            "modules_to_not_convert",
        ),
        ({"quant_method": "mxfp4", "group_size": 64}, "group_size"),
    ],
)
def test_other_formats_of_experts_are_refused_by_name(scheme: dict, field: str, folder: Path) -> None:
    change(folder, quantization_config=scheme)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(str(folder))
    assert caught.value.field == f"quantization_config.{field}"


def test_mxfp4_of_another_family_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(paths.MODELS / "tiny-mixtral", tmp_path / "model")
    change(folder, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ConfigError, match="quant_method='mxfp4'"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"experts_per_token": 4}, "experts_per_token"),
        ({"num_experts_per_tok": 9, "experts_per_token": 9}, "num_experts_per_tok"),
        ({"swiglu_limit": 8.0}, "swiglu_limit"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"sliding_window": None}, "layer_types"),
    ],
)
def test_settings_of_other_models_are_refused_by_name(changes: dict, field: str) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    config.pop("quantization_config")
    with pytest.raises(ConfigError) as caught:
        model_config_from_hf(config | changes)
    assert caught.value.field == field


def test_what_the_published_config_leaves_out_has_its_meaning() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    config.pop("quantization_config")
    absent = ("layer_types", "attention_bias", "swiglu_limit", "experts_per_token", "initial_context_length")
    short = {key: value for key, value in config.items() if key not in absent}
    assert model_config_from_hf(short) == model_config_from_hf(config)


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_a_cache_of_8_bits_is_refused(kv: str) -> None:
    with pytest.raises(ConfigError, match="attention sinks") as caught:
        resolve(EngineConfig(str(FOLDER), kv_cache_dtype=kv), model()[0])
    assert caught.value.field == "kv_cache_dtype"
