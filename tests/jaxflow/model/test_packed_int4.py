"""Published checkpoints in 4 bits: their numbers, on any devices, or a refusal by name."""

import functools
import json
from pathlib import Path
from typing import Any

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import packed_checkpoint
import paths
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_checkpoint import LAYOUTS, WEIGHTS, scheme
from same_weights import same

from jaxflow.config import ConfigError
from jaxflow.kv.device_cache import cache_shapes, page_groups
from jaxflow.model import transformer
from jaxflow.model.architectures.hf_quantization import stored_format
from jaxflow.model.checkpoints.checkpoint import CheckpointError, convert, open_checkpoint
from jaxflow.model.checkpoints.packed_int4 import PackedInt4Tensors
from jaxflow.model.weight_spec import AFFECTED, assemble, pack_leaf
from jaxflow.model.weights import leaves, shapes, shardings
from jaxflow.parallel.mesh import make_mesh
from pallas_kernels.gemm.grouped.int4_format import dequantize_experts
from pallas_kernels.gemm.int4.reference import dequantize_int4
from pallas_kernels.quantized import ExpertInt4, Int4

back = {Int4: jax.jit(dequantize_int4, static_argnums=1)}
back[ExpertInt4] = jax.jit(dequantize_experts, static_argnums=1)


def wide(leaf: Any, dtype: Any = jnp.float32) -> np.ndarray:
    """Return the true values of a leaf, in 4 bits or not."""
    made = back[type(leaf)](leaf, dtype) if type(leaf) in back else leaf
    return np.asarray(made, np.float32)


class Source:
    """Tensors in memory."""

    path = Path("memory")

    def __init__(self, tensors: dict[str, np.ndarray]):
        self.tensors, self.shapes = tensors, {name: array.shape for name, array in tensors.items()}

    def read(self, name: str) -> np.ndarray:
        return self.tensors[name]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    eights=st.integers(1, 4),
    groups=st.integers(1, 3),
    group=st.sampled_from([64, 128]),
    layout=st.sampled_from(LAYOUTS),
)
def test_every_code_scale_and_zero_point_is_read(seed, eights, groups, group, layout):
    rng = np.random.default_rng(seed)
    numbers = packed_checkpoint.draw(rng, 8 * eights, groups * group, group, layout)
    stored = packed_checkpoint.stored("m", numbers, layout)
    form = stored_format(scheme(layout, group), "llama")
    source = PackedInt4Tensors(Source(stored), form)  # pyright: ignore[reportArgumentType]
    assert source.shapes == {"m.weight": numbers.codes.shape}
    np.testing.assert_array_equal(source.read("m.weight"), numbers.exact)
    np.testing.assert_array_equal(source.codes("m.weight"), numbers.codes)
    twice = functools.partial(np.repeat, repeats=group // 64, axis=1)
    np.testing.assert_array_equal(source.scales("m.weight"), twice(numbers.scales))
    np.testing.assert_array_equal(source.zero_points("m.weight"), twice(numbers.zeros))
    assert source.zero_points("m.weight").dtype == np.int16


MODELS = [
    ("tiny-llama", "awq", 64, 1, False),
    ("tiny-qwen2", "gptq", 64, 2, False),
    ("tiny-qwen3", "asymmetric", 128, 1, False),
    ("tiny-qwen3", "symmetric", 128, 2, False),
    ("tiny-opt", "gptq_v2", 64, 2, False),
    ("tiny-qwen3_moe", "gptq", 128, 2, True),
    ("tiny-mixtral", "awq", 64, 2, False),
    ("tiny-glm4_moe", "symmetric", 64, 1, False),
]


@pytest.mark.parametrize(("model", "layout", "group", "devices", "whole"), MODELS)
def test_published_numbers_are_kept_on_any_devices(model, layout, group, devices, whole, tmp_path):
    folder, exact, kept = packed_checkpoint.write(tmp_path, model, layout, group=group)
    opened, mesh = open_checkpoint(str(folder)), make_mesh(devices)
    assert opened.quantization == "int4_zero_point"
    found = opened.load("bfloat16", mesh, expert_parallel=whole)
    options = {"quantization": "int4_zero_point", "expert_parallel": whole}
    form = functools.partial(jax.tree.map, lambda a: (a.shape, a.dtype))
    assert form(found) == form(shapes(opened.model_config, devices, jnp.bfloat16, **options))
    specs = shardings(opened.model_config, mesh, **options)
    assert jax.tree.map(lambda a: a.sharding.spec, found) == specs
    tree = leaves(opened.model_config, devices, expert_parallel=whole)
    for number, layer in enumerate(tree["layers"]):
        for key, leaf in layer.items():
            narrow, own = key in AFFECTED["int4"], found["layers"][number][key]
            assert isinstance(own, Int4 | ExpertInt4) == narrow
            numbers = assemble(leaf, (kept if narrow else exact).__getitem__, np.float32)
            if narrow:
                np.testing.assert_array_equal(wide(own), numbers)
            rounded = numbers.astype(leaf.dtype(jnp.bfloat16)).astype(np.float32)
            np.testing.assert_array_equal(wide(own, jnp.bfloat16), rounded)
            assert not narrow or all(
                part.addressable_shards[0].data.size * devices == part.size for part in own
            )
    head = assemble(tree["embed"], exact.__getitem__, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(found["embed"]), head)


def logits(config: Any, weights: Any, devices: int, quantization: str | None) -> np.ndarray:
    bench = drawn.Bench(config, devices, quantization)
    pages = (drawn.ROWS * drawn.PAGES_A_ROW,) * len(config.windows)
    cache = cache_shapes(page_groups(config, "float32", devices), pages, drawn.PAGE)
    zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), cache)
    step = drawn.step(config, 16, (), 3, (9,))
    return np.asarray(bench.jitted(transformer.forward)(weights, zeros, step)[0])


@pytest.mark.parametrize(
    ("layout", "devices", "coarse"), [("awq", 1, True), ("gptq", 2, True), ("asymmetric", 1, False)]
)
def test_the_logits_are_those_of_the_numbers_in_32_bits(layout, devices, coarse, tmp_path):
    """Scales that bfloat16 does not hold are rounded, each by at most 2 ** -9 of it."""
    written = packed_checkpoint.write(tmp_path / "4", "tiny-qwen3", layout, coarse=coarse)
    opened, mesh = open_checkpoint(str(written[0])), make_mesh(devices)
    twin = packed_checkpoint.write_wide(tmp_path / "32", written[0], written[1])
    plain = open_checkpoint(str(twin)).load("float32", mesh)
    found = logits(opened.model_config, opened.load("float32", mesh), devices, "int4_zero_point")
    wanted = logits(opened.model_config, plain, devices, None)
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert error < (1e-5 if coarse else 1e-2) and np.abs(wanted).max() > 0.1


def test_matrices_of_16_bits_stay_and_partly_packed_ones_become_16_bits(tmp_path):
    left = ("down_proj.weight", "1.self_attn.v_proj.weight")
    folder, exact, _ = packed_checkpoint.write(
        tmp_path, "tiny-llama", "awq", wide=lambda name: name.endswith(left)
    )
    opened = open_checkpoint(str(folder))
    found, tree = opened.load("float32"), leaves(opened.model_config)
    for number, narrow in enumerate([{"qkv", "out_proj", "up_gate"}, {"out_proj", "up_gate"}]):
        layer = found["layers"][number]
        assert {key for key, leaf in layer.items() if isinstance(leaf, Int4)} == narrow
        for key in {"qkv", "down"} - narrow:
            numbers = assemble(tree["layers"][number][key], exact.__getitem__, np.float32)
            np.testing.assert_array_equal(np.asarray(layer[key]), numbers)


def test_settings_keep_the_numbers_or_make_another_format_of_them(tmp_path):
    folder, exact, _ = packed_checkpoint.write(tmp_path / "4", "tiny-llama", "gptq")
    opened = open_checkpoint(str(folder))
    same(opened.load("float32", quantization="int4"), opened.load("float32"))
    twin = open_checkpoint(str(packed_checkpoint.write_wide(tmp_path / "32", folder, exact)))
    same(opened.load("float32", quantization="fp8"), twin.load("float32", quantization="fp8"))
    assert twin.quantization_of("int4") == "int4"
    with pytest.raises(CheckpointError, match="is stored in 4 bits and cannot be converted"):
        convert(str(folder), tmp_path / "converted")
    with pytest.raises(ConfigError) as caught:
        list(opened.stream("float32"))
    assert (caught.value.field, caught.value.value) == ("quantization", "int4_zero_point")


def test_dummies_of_a_published_config_have_its_format(tmp_path):
    folder, *_ = packed_checkpoint.write(tmp_path, "tiny-qwen3_moe", "symmetric")
    (folder / "model.safetensors").unlink()
    opened = open_checkpoint(str(folder), load_format="dummy")
    weights = opened.load("bfloat16")
    form = functools.partial(jax.tree.map, lambda a: (a.shape, a.dtype))
    told = shapes(opened.model_config, 1, jnp.bfloat16, quantization="int4_zero_point")
    assert form(weights) == form(told)
    plain = dict(open_checkpoint(str(folder), load_format="dummy").load("bfloat16", quantization="fp8"))
    assert plain.keys() == weights.keys()
    assert np.asarray(weights["layers"][0]["qkv"].zero).max() > 4


def test_biases_of_zeros_are_ignored(tmp_path):
    name = "model.layers.0.mlp.up_proj.bias"
    zeros = {name: np.zeros(256, np.float16)}
    folder, *_ = packed_checkpoint.write(tmp_path / "0", "tiny-llama", "gptq", more=zeros)
    open_checkpoint(str(folder)).load("float32")
    folder, *_ = packed_checkpoint.write(
        tmp_path / "1", "tiny-llama", "gptq", more={name: np.ones(256, np.float16)}
    )
    with pytest.raises(CheckpointError, match=f"unexpected tensors: {name}"):
        open_checkpoint(str(folder)).load("float32")


def refused(change: dict[str, Any], *path: str) -> dict[str, Any]:
    """Return a scheme of compressed-tensors with a change to the weights, or at a path."""
    made = scheme("symmetric", 64)
    inner = made["config_groups"]["group_0"]
    (inner["weights"] if not path else inner if path == ("group",) else made).update(change)
    return made


@pytest.mark.parametrize(
    ("given_scheme", "field", "value"),
    [
        *((scheme("awq", 64) | {"bits": bits}, "bits", bits) for bits in (3, 8)),
        *((scheme("awq", group), "group_size", group) for group in (32, -1)),
        (scheme("awq", 64) | {"zero_point": False}, "zero_point", False),
        (scheme("awq", 64) | {"version": "gemv"}, "version", "gemv"),
        (scheme("awq", 64) | {"unknown": 1}, "unknown", 1),
        *((scheme("gptq", 64) | {"bits": bits}, "bits", bits) for bits in (3, 8)),
        *((scheme("gptq", group), "group_size", group) for group in (32, -1)),
        (scheme("gptq", 64) | {"desc_act": True}, "desc_act", True),
        (scheme("gptq", 64) | {"checkpoint_format": "marlin"}, "checkpoint_format", "marlin"),
        (scheme("gptq", 64) | {"dynamic": {r"-:.*\.1\..*": {}, ".*": {"bits": 8}}}, "dynamic", ".*"),
        *((refused({"num_bits": bits}), "num_bits", bits) for bits in (3, 8)),
        *((refused({"group_size": group}), "group_size", group) for group in (32, -1, None)),
        (refused({"strategy": "channel"}), "strategy", "channel"),
        (refused({"actorder": "group"}), "actorder", "group"),
        (refused({"type": "float"}), "type", "float"),
        (refused({"input_activations": {"num_bits": 8}}, "group"), "input_activations", {"num_bits": 8}),
        (refused({"kv_cache_scheme": {"num_bits": 8}}, "all"), "kv_cache_scheme", {"num_bits": 8}),
        (refused({"format": "marlin-24"}, "all"), "format", "marlin-24"),
        ({"quant_method": "bitsandbytes"}, "quant_method", "bitsandbytes"),
    ],
)
def test_other_schemes_are_refused_by_name(given_scheme, field, value, tmp_path):
    keys = json.loads((paths.MODELS / "tiny-llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(keys | {"quantization_config": given_scheme}))
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(str(tmp_path))  # the folder has no weights
    assert caught.value.field.startswith("quantization_config.")
    assert (caught.value.field.rpartition(".")[2], caught.value.value) == (field, value)


def test_groups_of_modules_with_different_weights_are_refused():
    given_scheme = scheme("symmetric", 64)
    given_scheme["config_groups"]["group_1"] = scheme("asymmetric", 64)["config_groups"]["group_0"]
    with pytest.raises(ConfigError, match="the weights of all groups alike") as caught:
        stored_format(given_scheme, "llama")
    assert caught.value.field == "quantization_config.config_groups.group_1.weights"
    assert WEIGHTS["num_bits"] == 4


def test_gpt_oss_has_no_experts_in_these_formats():
    with pytest.raises(ConfigError) as caught:
        stored_format(scheme("awq", 64), "gpt_oss")
    assert caught.value.field == "quantization_config.quant_method"


M = "model.layers.0.mlp.up_proj."


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        ("awq", {"qzeros": None}, r"up_proj.qzeros' is missing; accepted is int32 \[2, 32\]"),
        (
            "awq",
            {"scales": np.ones((2, 128), np.float16)},
            r"scales' is float16 \[2, 128\]; accepted is .*256",
        ),
        (
            "awq",
            {"qweight": np.ones((128, 32), np.float16)},
            r"qweight' is float16 \[128, 32\]; accepted is int",
        ),
        ("awq", {"weight": np.ones((256, 128), np.float16)}, "in 4 bits and in 16 bits"),
        (
            "awq",
            {"qweight": np.ones((96, 32), np.int32)},
            r"is \[256, 96\]; accepted are columns in whole groups",
        ),
        ("gptq", {"scales": None}, r"up_proj.scales' is missing; accepted is float16 \[2, 256\]"),
        (
            "gptq",
            {"qzeros": np.ones((2, 31), np.int32)},
            r"qzeros' is int32 \[2, 31\]; accepted is int32 \[2, 32\]",
        ),
        (
            "gptq",
            {"g_idx": np.arange(128, dtype=np.int32)[::-1] // 64 * 1},
            "g_idx spreads the columns of a group",
        ),
        (
            "gptq",
            {"g_idx": np.arange(64, dtype=np.int32)},
            r"g_idx' is int32 \[64\]; accepted is int32 \[128\]",
        ),
        ("asymmetric", {"weight_zero_point": None}, r"zero_point' is missing; accepted is int32 \[32, 2\]"),
        ("symmetric", {"weight_scale": None}, r"weight_scale' is missing; accepted is float16 \[256, 2\]"),
        (
            "symmetric",
            {"weight_shape": np.array([256, 64])},
            r"weight_shape is \[256, 64\]; accepted is \[256, 128\]",
        ),
        (
            "symmetric",
            {"weight_g_idx": np.zeros(128, np.int32)},
            "weight_g_idx spreads the columns of a group",
        ),
    ],
)
def test_damaged_parts_are_refused_before_a_weight_is_read(layout, change, said, tmp_path):
    more = {
        M + name: None if array is None else np.ascontiguousarray(array) for name, array in change.items()
    }
    folder, *_ = packed_checkpoint.write(tmp_path, "tiny-llama", layout, more=more)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        ("awq", {"qweight": None}, r"missing tensors: .*up_proj\.weight"),
        (
            "symmetric",
            {"weight_zero_point": np.zeros((32, 2), np.int32)},
            r"unexpected tensors: .*weight_zero_point",
        ),
        ("awq", {"scales": np.full((2, 256), np.inf, np.float16)}, "scales is not finite"),
    ],
)
def test_other_damage_is_refused(layout, change, said, tmp_path):
    more = {M + name: array for name, array in change.items()}
    folder, *_ = packed_checkpoint.write(tmp_path, "tiny-llama", layout, more=more)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(str(folder)).load("float32")


def test_a_group_that_two_devices_would_share_is_refused(tmp_path):
    folder, *_ = packed_checkpoint.write(tmp_path, "tiny-llama", "awq")
    with pytest.raises(ConfigError, match="a divisor of the 2 groups of 64 columns of out_proj") as caught:
        open_checkpoint(str(folder)).load("float32", make_mesh(4), tp=4)
    assert caught.value.field in ("tensor_parallel_size",)


def test_parts_of_a_matrix_are_packed_as_the_format_says():
    rng = np.random.default_rng(3)
    numbers = packed_checkpoint.draw(rng, 16, 128, 64, "gptq")
    leaf = leaves(drawn.config_of("tiny-llama"), quantization="int4_zero_point")["layers"][0]["up_gate"]
    parts = numbers.codes, numbers.scales.astype(jnp.bfloat16), numbers.zeros.astype(np.int16)
    made = pack_leaf(leaf, *map(jnp.asarray, parts), mesh=None)
    np.testing.assert_array_equal(wide(made), numbers.kept)
