"""Weights in e4m3, quantized on load or as published, and the accepted values of quantization_config."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxflow.config import ConfigError
from jaxflow.model.checkpoints.checkpoint import CheckpointError, convert, open_checkpoint
from jaxflow.model.weight_spec import QUANTIZED, QUANTIZED_EXPERTS
from jaxflow.model.weights import shapes, shardings
from jaxflow.parallel.mesh import make_mesh
from pallas_kernels.gemm.int4.reference import dequantize_int4
from pallas_kernels.pointwise.quantize.reference import dequantize, quantize_rows
from pallas_kernels.quantized import Quantized

NUMBERS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "group_size": None,
    "block_structure": None,
    "actorder": None,
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": NUMBERS | {"strategy": "channel", "dynamic": False, "observer": "minmax"},
            "input_activations": NUMBERS | {"strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
FP8_STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def is_leaf(x: Any) -> bool:
    return isinstance(x, Quantized)


def same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), err_msg=str(path))


def load(folder: Path | str, **options: Any) -> Any:
    return open_checkpoint(str(folder)).load("float32", **options)


@pytest.fixture
def published(tmp_path: Path) -> Callable[..., Path]:
    """tiny-llama (or another) as somebody would publish it in e4m3."""

    def make(
        scheme: dict,
        *,
        name: str = "tiny-llama",
        one_scale: bool = False,
        wide: tuple[str, ...] = (),
        more: dict | None = None,
    ) -> Path:
        folder = tmp_path / "published"
        shutil.copytree(paths.MODELS / name, folder)
        tensors: dict[str, np.ndarray] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
            file.unlink()
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
        for tensor in [
            name
            for name in tensors
            if name.endswith("proj.weight") and not any(part in name for part in wide)
        ]:
            found = tensors[tensor].astype(np.float32)
            scale = np.abs(found).max(axis=None if one_scale else 1, keepdims=True) / 448
            tensors[tensor] = (found / scale).astype(jnp.float8_e4m3fn)
            tensors[f"{tensor}_scale"] = scale.reshape(-1)[:1] if one_scale else scale.astype(np.float32)
            if scheme is FP8_STATIC:
                tensors[tensor.replace("weight", "input_scale")] = np.ones(1, np.float32)
        tensors = {name: tensor for name, tensor in (tensors | (more or {})).items() if tensor is not None}
        save_file(tensors, folder / "model.safetensors")
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": scheme}))
        return folder

    return make


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mixtral", "tiny-opt", "tiny-gemma2"])
def test_quantised_on_load(name: str) -> None:
    wide, found = load(paths.MODELS / name), load(paths.MODELS / name, quantization="fp8")
    config = open_checkpoint(str(paths.MODELS / name)).model_config
    told = shapes(config, 1, jnp.float32, quantization="fp8")
    assert jax.tree.map(lambda a: (a.shape, a.dtype), found) == jax.tree.map(
        lambda a: (a.shape, a.dtype), told
    )
    for layer, before in zip(found["layers"], wide["layers"], strict=True):
        assert {key for key, leaf in layer.items() if is_leaf(leaf)} == {
            key for key in (*QUANTIZED, *QUANTIZED_EXPERTS) if key in before
        }
        for key, leaf in layer.items():
            same(leaf, jax.jit(quantize_rows)(before[key]) if is_leaf(leaf) else before[key])
    same({k: v for k, v in found.items() if k != "layers"}, {k: v for k, v in wide.items() if k != "layers"})


@pytest.mark.parametrize("tp", [2, 4])
def test_shards_are_slices_of_the_full_array(tp: int) -> None:
    """A row's scale is of the whole row, however many devices share it; with more devices than heads rows
    repeat.
    """
    mesh = make_mesh(tp)
    spread = load(paths.MODELS / "tiny-llama", mesh=mesh, quantization="fp8", kv_scales=True)
    whole = load(paths.MODELS / "tiny-llama", mesh=mesh)
    config = open_checkpoint(str(paths.MODELS / "tiny-llama")).model_config
    specs = shardings(config, mesh, quantization="fp8", kv_scales=True)
    assert jax.tree.map(lambda a: a.sharding.spec, spread) == jax.tree.map(lambda s: s, specs)
    assert specs["layers"][0]["out_proj"] == Quantized(PartitionSpec(None, "tp"), PartitionSpec(None))  # pyright: ignore
    for layer, before in zip(spread["layers"], whole["layers"], strict=True):
        assert layer["k_scale"].shape == layer["v_scale"].shape == (max(2, tp),)
        for key in QUANTIZED:
            same(jax.device_get(layer[key]), jax.device_get(jax.jit(quantize_rows)(np.asarray(before[key]))))


@pytest.mark.parametrize("whole", [False, True], ids=["tp", "ep"])
def test_shards_of_experts_are_slices_of_the_full_array(whole: bool) -> None:
    """A channel's scale is of the channel's whole row, also where devices hold parts of each row."""
    mesh, options = make_mesh(2), {"quantization": "fp8", "expert_parallel": whole}
    spread = load(paths.MODELS / "tiny-mixtral", mesh=mesh, **options)["layers"][0]
    before = load(paths.MODELS / "tiny-mixtral")["layers"][0]
    axes = {"expert_up_gate": PartitionSpec(None, "tp"), "expert_down": PartitionSpec(None, None)}
    for key in QUANTIZED_EXPERTS:
        same(jax.device_get(spread[key]), jax.device_get(jax.jit(quantize_rows)(before[key])))
        assert spread[key].scale.sharding.spec == (PartitionSpec("tp") if whole else axes[key])


def test_fp8_dummy_weights_are_quantized_16_bit_dummies() -> None:
    checkpoint = open_checkpoint(str(paths.MODELS / "tiny-llama"), load_format="dummy")
    options = {}, {"quantization": "fp8", "kv_scales": True}
    wide, found = (checkpoint.load("bfloat16", make_mesh(2), seed=3, **chosen) for chosen in options)
    for layer, before in zip(found["layers"], wide["layers"], strict=True):
        assert layer["k_scale"].dtype == jnp.float32 and (layer["k_scale"] == 1).all()
        for key in QUANTIZED:
            error = np.abs(np.asarray(dequantize(layer[key])) - np.asarray(before[key], np.float32))
            assert (
                error
                <= np.abs(np.asarray(before[key], np.float32)) / 15
                + np.asarray(layer[key].scale)[:, None] / 1000
            ).all()


def test_a_converted_checkpoint_is_quantised_too(tmp_path: Path) -> None:
    convert(str(paths.MODELS / "tiny-llama"), tmp_path / "converted", "float32")
    options = {"mesh": make_mesh(2), "quantization": "fp8", "kv_scales": True}
    same(*(load(folder, **options) for folder in (tmp_path / "converted", paths.MODELS / "tiny-llama")))


@pytest.mark.parametrize("one_scale", [False, True], ids=["a scale a channel", "a scale a matrix"])
@pytest.mark.parametrize("scheme", [COMPRESSED, FP8_STATIC], ids=["compressed-tensors", "fp8"])
def test_a_published_checkpoint_is_taken_as_it_is(published, scheme: dict, one_scale: bool) -> None:
    folder = published(scheme, one_scale=one_scale)
    opened, wide = open_checkpoint(str(folder)), load(paths.MODELS / "tiny-llama")
    assert opened.quantization == "fp8"
    found = opened.load("float32", make_mesh(2))
    for i, (layer, before) in enumerate(zip(found["layers"], wide["layers"], strict=True)):
        assert {key for key, leaf in layer.items() if is_leaf(leaf)} == {*QUANTIZED}
        name = f"model.layers.{i}.mlp.down_proj.weight"
        same(np.asarray(layer["down"].values), opened.source.stored(name))
        same(np.asarray(layer["down"].scale), opened.source.row_scale(f"{name}_scale"))
        for key in QUANTIZED:
            back, wanted = np.asarray(dequantize(jax.device_get(layer[key]))), np.asarray(before[key])
            assert (
                np.abs(back - wanted) <= np.abs(wanted) / 15 + np.asarray(layer[key].scale)[:, None] / 1000
            ).all()
        if one_scale:  # three tensors of one scale each make the rows of qkv
            assert len(np.unique(np.asarray(layer["qkv"].scale))) == 3
    with pytest.raises(CheckpointError, match="stored in e4m3"):
        convert(str(folder), folder / "converted")


def test_quantization_to_int4(published) -> None:
    """Read e4m3 matrices as float32, then quantize these. The checkpoint's scales are included."""
    found, wide = (
        load(published(COMPRESSED), quantization="int4")["layers"][0],
        load(paths.MODELS / "tiny-llama")["layers"][0],
    )
    for key in (
        QUANTIZED
    ):  # e4m3 is off by a sixteenth at most; half a level, and the rounding of scale and zero, come on top
        levels = np.repeat(np.asarray(found[key].scale, np.float32), 64, axis=1)
        error = np.abs(np.asarray(dequantize_int4(found[key], jnp.float32)) - np.asarray(wide[key]))
        assert (error <= 0.6 * levels + np.abs(np.asarray(wide[key])) / 15).all()


def test_16_bit_matrices_of_an_fp8_checkpoint_stay(published) -> None:
    """A fused matrix is e4m3 only if all its parts are."""
    found = load(published(COMPRESSED, wide=("layers.0.self_attn.k_proj", "layers.1.mlp.down_proj")))
    assert [is_leaf(found["layers"][0][key]) for key in QUANTIZED] == [False, True, True, True]
    assert [is_leaf(found["layers"][1][key]) for key in QUANTIZED] == [True, True, True, False]
    same(found["layers"][1]["down"], load(paths.MODELS / "tiny-llama")["layers"][1]["down"])


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_scales_of_the_cache(published, names: tuple[str, str]) -> None:
    given = {
        f"model.layers.0.self_attn.{name}": np.array(value, np.float32)
        for name, value in zip(names, (0.5, [0.25, 2]), strict=True)
    }
    found = load(published(COMPRESSED, more=given), kv_scales=True, mesh=make_mesh(4))
    assert found["layers"][0]["k_scale"].tolist() == [0.5] * 4
    assert found["layers"][0]["v_scale"].tolist() == [0.25, 0.25, 2, 2]
    assert found["layers"][1]["k_scale"].tolist() == [1] * 4


def test_one_scale_of_the_cache_is_that_of_keys_and_values(published) -> None:
    given = {
        "model.layers.0.self_attn.kv_scale": np.array(3.0, np.float32),
        "model.layers.0.self_attn.k_scale": np.array(0.5, np.float32),
    }
    found = load(published(COMPRESSED, more=given), kv_scales=True)["layers"][0]
    assert (set(found["k_scale"].tolist()), set(found["v_scale"].tolist())) == ({0.5}, {3.0})


def changed(scheme: dict, where: str, value: Any) -> dict:
    copy = json.loads(json.dumps(scheme))
    *path, last = where.split(".")
    inner = copy
    for key in path:
        inner = inner[key]
    inner[last] = value
    return copy


@pytest.mark.parametrize(
    ("scheme", "where", "value"),
    [
        (FP8_STATIC, "quant_method", "exl2"),
        (FP8_STATIC, "quant_method", None),
        (FP8_STATIC, "weight_block_size", [64, 128]),
        (FP8_STATIC, "activation_scheme", "none"),
        (FP8_STATIC, "fmt", "e5m2"),
        (FP8_STATIC, "unknown_key", 1),
        (COMPRESSED, "format", "int-quantized"),
        (COMPRESSED, "config_groups", {}),
        (COMPRESSED, "config_groups.group_0.weights.num_bits", 4),
        (COMPRESSED, "config_groups.group_0.weights.type", "int"),
        (COMPRESSED, "config_groups.group_0.weights.strategy", "group"),
        (COMPRESSED, "config_groups.group_0.weights.symmetric", False),
        (COMPRESSED, "config_groups.group_0.input_activations", None),
        (COMPRESSED, "config_groups.group_0.input_activations.type", "int"),
        (COMPRESSED, "config_groups.group_0.output_activations", {"num_bits": 8}),
        (COMPRESSED, "kv_cache_scheme", NUMBERS | {"num_bits": 4, "strategy": "tensor"}),
        (COMPRESSED, "sparsity_config", {"format": "sparse-24-bitmask"}),
        (COMPRESSED, "transform_config", {"config_groups": {"u": {}}}),
        (COMPRESSED, "unknown_key", 1),
    ],
)
def test_other_schemes_are_refused_by_name(tmp_path: Path, scheme: dict, where: str, value: Any) -> None:
    path = tmp_path / "config.json"
    config = json.loads((paths.MODELS / "tiny-llama" / "config.json").read_text())
    path.write_text(json.dumps(config | {"quantization_config": changed(scheme, where, value)}))
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(str(path), load_format="dummy")
    assert caught.value.field.startswith("quantization_config") and caught.value.field.rpartition(".")[2] in (
        where + ".num_bits.format"
    )


def test_dummies_of_a_published_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = json.loads((paths.MODELS / "tiny-llama" / "config.json").read_text())
    path.write_text(json.dumps(config | {"quantization_config": COMPRESSED}))
    assert is_leaf(open_checkpoint(str(path), load_format="dummy").load("bfloat16")["layers"][0]["qkv"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.0.mlp.up_proj.weight_scale": None}, "up_proj.weight' is e4m3, but"),
        (
            {"model.layers.0.mlp.up_proj.weight_scale": np.ones(5, np.float32)},
            "has 5 numbers and should have 1 or 128",
        ),
        (
            {"model.layers.0.mlp.up_proj.weight_scale": np.array([np.nan], np.float32)},
            "not positive and finite",
        ),
        ({"model.layers.0.mlp.up_proj.weight_scale": np.zeros(1, np.float32)}, "not positive and finite"),
        (
            {"model.layers.0.mlp.up_proj.weight_zero_point": np.ones(1, np.float32)},
            "unexpected tensors: model.layers.0.mlp.up_proj.weight_zero",
        ),
    ],
)
def test_damaged_scales(published, change: dict, message: str) -> None:
    folder = published(COMPRESSED, more=change)
    with pytest.raises(CheckpointError, match=message.replace("'", ".")):
        load(folder)


def test_e4m3_without_a_scheme_is_refused(published) -> None:
    folder = published(COMPRESSED)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="dtype F8_E4M3"):
        open_checkpoint(str(folder))
