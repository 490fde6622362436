"""Matrices of e4m3 checkpoints that stay in their blocks: the published
numbers on any devices, or a refusal.
"""

import dataclasses
import functools
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from block_checkpoint import write
from jax.sharding import PartitionSpec
from safetensors.numpy import save_file
from same_weights import same

from jaxflow.config import ConfigError, gate_block
from jaxflow.engine.step_time_prediction import roofline_step_time
from jaxflow.model import ops
from jaxflow.model.checkpoints.checkpoint import CheckpointError, convert, open_checkpoint
from jaxflow.model.checkpoints.safetensors_file import SafetensorsFolder
from jaxflow.model.cost import find_device
from jaxflow.model.graph import BFLOAT16, FP8_BLOCKS
from jaxflow.model.op_registry import Context, Site
from jaxflow.model.routing import Routing
from jaxflow.model.weight_spec import QUANTIZED_EXPERTS, assemble_shard
from jaxflow.model.weights import dummy_weights, leaves, shapes
from jaxflow.parallel.mesh import TP, make_mesh, over_shards
from pallas_kernels.gemm.block_fp8_format import dequantize_block_fp8, quantize_block_fp8
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.gemm.reference import gate_mul
from pallas_kernels.kernel_set import REFERENCE
from pallas_kernels.quantized import BlockFp8, Quantized

MODELS = ("tiny-qwen3_moe", "tiny-deepseek_v3", "tiny-glm4_moe")  # shared experts, dense first layers
back = jax.jit(dequantize_block_fp8, static_argnums=(1, 2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of a model in blocks, and of the same numbers in float32."""
    root = tmp_path_factory.mktemp("blocks")

    @functools.cache
    def of(model):
        return [str(write(root / f"{model}-{blocks}", model, blocks=blocks)) for blocks in (True, False)]

    return of


def read(folder):
    """Return the tensors of a folder as stored."""
    source = SafetensorsFolder(Path(folder), e4m3=True)
    return {name: np.array(source.read(name)) for name in source.shapes}


def gates_of(config):
    return {"expert_up_gate": gate_block(config.expert_intermediate_size), "expert_down": None}


def gate_of(config, key):
    """Return the rows of a block of gates of a matrix, or None. Dense gates in blocks have 64 rows."""
    return gates_of(config).get(key, 64 if key.endswith("up_gate") else None)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("devices", "whole"), [(1, False), (2, False), (4, True)])
def test_published_experts_are_kept_on_any_devices(model, devices, whole, folders):
    kept_in, wide_in = folders(model)
    opened, mesh = open_checkpoint(kept_in), make_mesh(devices)
    assert opened.quantization == "fp8_per_block"
    kept = opened.load("float32", mesh, expert_parallel=whole)
    wide = open_checkpoint(wide_in).load("float32", mesh, expert_parallel=whole)
    mixtures = 0
    for before, after in zip(wide["layers"], kept["layers"], strict=True):
        mixtures += "expert_down" in after
        in_blocks = [key for key, leaf in after.items() if isinstance(leaf, BlockFp8)]
        assert {*QUANTIZED_EXPERTS} & after.keys() <= {*in_blocks}
        for key in in_blocks:
            gates, leaf = gate_of(opened.model_config, key), after[key]
            assert leaf.scale.dtype == jnp.float32
            assert all(part.addressable_shards[0].data.size * devices == part.size for part in leaf)
            same(back(leaf, gates), before[key])
            numbers = np.asarray(before[key])  # The loop compares the numbers of each device.
            shards = (part.addressable_shards for part in leaf)
            for values, scale in zip(*shards, strict=True):
                own = jax.device_get(BlockFp8(values.data, scale.data))
                same(back(own, gates), numbers[values.index])
        rest = [key for key in before if key not in in_blocks]
        same({key: after[key] for key in rest}, {key: before[key] for key in rest})
    assert mixtures
    options = {"quantization": "fp8_per_block", "expert_parallel": whole}
    form = functools.partial(jax.tree.map, lambda a: (a.shape, a.dtype))
    assert form(kept) == form(shapes(opened.model_config, devices, "float32", **options))


WHOLE = {"head_dim": 128, "intermediate_size": 512}  # dense matrices of whole blocks on two devices
DENSE = [
    ("tiny-qwen3_moe", {"qkv", "out_proj"}),
    ("tiny-glm4_moe", {"qkv", "out_proj", "up_gate", "down", "shared_up_gate", "shared_down"}),
    ("tiny-qwen3", {"qkv", "out_proj", "up_gate", "down"}),
]


@pytest.mark.parametrize(("model", "wanted"), DENSE)
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_published_dense_matrices_are_kept_where_they_are_whole_blocks(model, wanted, devices, tmp_path):
    """Four devices repeat each key/value head."""
    kept_in, wide_in = (
        write(tmp_path / str(blocks), model, blocks=blocks, **WHOLE) for blocks in (True, False)
    )
    opened, mesh, whole = open_checkpoint(str(kept_in)), make_mesh(devices), devices == 4
    options = {"expert_parallel": whole and bool(opened.model_config.num_experts)}
    kept = opened.load("float32", mesh, **options)["layers"]
    wide = open_checkpoint(str(wide_in)).load("float32", mesh, **options)["layers"]
    found = set()
    for before, after in zip(wide, kept, strict=True):
        for key, leaf in after.items():
            if isinstance(leaf, BlockFp8) and key not in QUANTIZED_EXPERTS:
                found.add(key)
                same(back(leaf, gate_of(opened.model_config, key)), before[key])
    assert found == wanted


def test_products_of_dense_matrices_in_blocks_are_near_those_of_32_bits(tmp_path):
    kept_in, wide_in = (
        write(tmp_path / str(blocks), "tiny-glm4_moe", blocks=blocks, **WHOLE) for blocks in (True, False)
    )
    opened = open_checkpoint(str(kept_in))
    config, rng = opened.model_config, np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(5, config.hidden_size)), jnp.float32)
    heads = jnp.asarray(rng.normal(size=(5, config.num_heads, config.head_dim)), jnp.float32)

    def run(w):
        site = Site(Context(config, REFERENCE), w)
        normed, h = ops.attn_norm(site, x, x)
        mlp = ops.down(site, ops.up_gate(site, ops.mlp_norm(site, x, x)[1])) if "up_gate" in w else None
        shared = ops.shared_down(site, ops.shared_up_gate(site, x), x) if "shared_down" in w else None
        return [
            y for y in (normed, ops.qkv(site, h), ops.out_proj(site, heads), mlp, shared) if y is not None
        ]

    every = (open_checkpoint(str(folder)).load("float32")["layers"] for folder in (kept_in, wide_in))
    for kept, wide in zip(*every, strict=True):
        for one, other in zip(jax.jit(run)(kept), jax.jit(run)(wide), strict=True):
            assert one.dtype == other.dtype
            assert np.linalg.norm(one - other) < 0.05 * np.linalg.norm(other)


def test_the_scales_of_a_device_are_cut_from_those_of_all(folders):
    opened = open_checkpoint(folders("tiny-qwen3_moe")[0])
    layer = leaves(opened.model_config, 2, quantization="fp8_per_block")["layers"][0]
    for key, cut in (("expert_up_gate", np.s_[:, 4:8]), ("expert_down", np.s_[:, :, 1:2])):
        scale = layer[key].scale
        every = assemble_shard(scale, opened.source.block_scales, np.float32, np.s_[:, :, :])
        where = (*cut, *[slice(None)] * (3 - len(cut)))
        own = assemble_shard(scale, opened.source.block_scales, np.float32, where)
        np.testing.assert_array_equal(own, every[where])


@functools.cache
def experts_of(config, devices, whole):
    """Return a function from (a layer's experts, h, chosen experts, their
    weights) to the sum of the outputs.
    """
    mesh = make_mesh(devices)
    layer = leaves(config, devices, quantization="fp8_per_block", expert_parallel=whole)["layers"][-1]
    context = Context(config, REFERENCE, TP if devices > 1 else None, expert_axis=TP if whole else None)

    def run(w, h, experts, shares):
        routing, site = Routing(experts, shares, ops._groups(context, w, experts)), Site(context, w)
        y = ops.expert_down(site, ops.expert_up_gate(site, h, routing), routing)
        return y if devices == 1 else jax.lax.psum(y, TP)

    specs = {key: layer[key].specs for key in QUANTIZED_EXPERTS}
    return jax.jit(over_shards(run, mesh, (specs, *[PartitionSpec()] * 3), PartitionSpec()))


@pytest.mark.parametrize(("devices", "whole"), [(2, False), (2, True), (4, True)])
def test_the_sum_over_devices_is_the_layer_of_one(devices, whole, folders):
    opened, rng = open_checkpoint(folders("tiny-qwen3_moe")[0]), np.random.default_rng(5)
    config = opened.model_config
    h = jnp.asarray(rng.normal(size=(9, config.hidden_size)), jnp.float32)
    experts = jnp.asarray(draw_routing(rng, 9, config.num_experts, 2))
    shares = jnp.asarray(rng.random((9, 2)), jnp.float32)
    found = []
    for number, spread in ((1, False), (devices, whole)):
        layer = opened.load("float32", make_mesh(number), expert_parallel=spread)["layers"][-1]
        own = {key: layer[key] for key in QUANTIZED_EXPERTS}
        found.append(
            np.asarray(experts_of(config, number, spread)(own, h, experts, shares).astype(jnp.float32))
        )
    assert np.linalg.norm(found[1] - found[0]) < 0.01 * np.linalg.norm(found[0])
    wide = open_checkpoint(folders("tiny-qwen3_moe")[1]).load("float32")["layers"][-1]
    exact = np.zeros_like(h)
    for token, choice in np.ndindex(9, 2):
        up_gate, down = (np.asarray(wide[key][experts[token, choice]]) for key in QUANTIZED_EXPERTS)
        gates = np.asarray(
            gate_mul(jnp.asarray(up_gate @ h[token])[None], gates_of(config)["expert_up_gate"], "silu")
        )
        exact[token] += shares[token, choice] * (down @ gates[0])
    assert 0 < np.linalg.norm(found[0] - exact) < 0.05 * np.linalg.norm(exact)  # the rows are e4m3


def test_other_formats_may_be_asked_for(folders):
    opened = open_checkpoint(folders("tiny-qwen3_moe")[0])
    layer = opened.load("float32", quantization="fp8")["layers"][0]
    assert all(isinstance(layer[key], Quantized) for key in ("qkv", *QUANTIZED_EXPERTS))
    streamed = list(opened.stream("float32"))[1]
    wide = open_checkpoint(folders("tiny-qwen3_moe")[1]).load("float32")["layers"][0]
    same(streamed, wide)


def test_a_converted_checkpoint_has_the_numbers_in_16_bits(folders, tmp_path):
    convert(folders("tiny-qwen3_moe")[0], tmp_path / "converted", "float32")
    found = open_checkpoint(str(tmp_path / "converted")).load("float32")
    same(found, open_checkpoint(folders("tiny-qwen3_moe")[1]).load("float32"))


def test_experts_stored_in_16_bits_stay_there(folders, tmp_path):
    kept_in, wide_in = folders("tiny-qwen3_moe")
    numbers = read(kept_in)
    exact = read(wide_in)
    for name in [name for name in numbers if "layers.0" in name and "experts" in name]:
        one = numbers.pop(name)
        if not name.endswith("_scale_inv"):
            assert one.dtype == jnp.float8_e4m3fn
            numbers[name] = exact[name]
    save_file(numbers, tmp_path / "model.safetensors")
    shutil.copy(f"{kept_in}/config.json", tmp_path)
    layers = open_checkpoint(str(tmp_path)).load("float32")["layers"]
    assert layers[0]["expert_down"].dtype == jnp.float32 and isinstance(layers[1]["expert_down"], BlockFp8)


@pytest.mark.parametrize("scale", [0.0, np.nan, -1.0])
def test_a_scale_that_is_no_factor_is_refused(scale, folders, tmp_path):
    numbers = read(folders("tiny-qwen3_moe")[0])
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    numbers[name][1, 0] = scale
    save_file(numbers, tmp_path / "model.safetensors")
    shutil.copy(f"{folders('tiny-qwen3_moe')[0]}/config.json", tmp_path)
    with pytest.raises(CheckpointError, match=f"{name} is not positive and finite"):
        open_checkpoint(str(tmp_path)).load("float32")


def test_dummy_experts_are_the_quantized_form_of_those_in_16_bits_on_any_devices(folders):
    config = open_checkpoint(folders("tiny-deepseek_v3")[0]).model_config
    config = dataclasses.replace(config, intermediate_size=512)  # whole blocks on two devices
    made = functools.partial(dummy_weights, config, jnp.bfloat16, seed=3)
    plain, kept = made(), made(quantization="fp8_per_block")
    same(dummy_weights(config, jnp.bfloat16, make_mesh(2), 3, quantization="fp8_per_block"), kept)
    quantized = jax.jit(quantize_block_fp8, static_argnums=1)
    for before, after in zip(plain["layers"], kept["layers"], strict=True):
        assert {*QUANTIZED_EXPERTS} & after.keys() <= {k for k in after if isinstance(after[k], BlockFp8)}
        for key in after:
            if isinstance(after[key], BlockFp8):
                same(after[key], quantized(before.pop(key), gate_of(config, key)))
        same({key: after[key] for key in before}, before)
    dummy = open_checkpoint(f"{folders('tiny-deepseek_v3')[0]}", load_format="dummy")
    assert dummy.quantization == "fp8_per_block"


def test_cuts_of_blocks_and_other_models_are_refused(folders):
    config = open_checkpoint(folders("tiny-qwen3_moe")[0]).model_config
    leaves(config, 4, quantization="fp8_per_block", expert_parallel=True)
    with pytest.raises(ConfigError, match="the 2 groups of 128 columns of expert_down") as caught:
        leaves(config, 4, quantization="fp8_per_block")
    assert (caught.value.field, caught.value.value) == ("tensor_parallel_size", 4)
    narrow = dataclasses.replace(config, expert_intermediate_size=192)
    dense = open_checkpoint(str(paths.MODELS / "tiny-llama")).model_config
    all_in_one = open_checkpoint(str(paths.MODELS / "tiny-gpt_oss")).model_config
    for one in (narrow, dense, all_in_one):
        with pytest.raises(ConfigError, match="no MLPs of whole blocks of 128 x 128") as caught:
            leaves(one, quantization="fp8_per_block")
        assert (caught.value.field, caught.value.value) == ("quantization", "fp8_per_block")


def test_partial_blocks_are_read_in_16_bits(tmp_path):
    folder = write(tmp_path, "tiny-qwen3_moe", blocks=True, moe_intermediate_size=192)
    opened = open_checkpoint(str(folder))
    assert opened.quantization is None
    assert opened.load("bfloat16")["layers"][0]["expert_down"].dtype == jnp.bfloat16


def test_experts_take_half_of_the_bytes_and_the_cost_model_knows():
    config = open_checkpoint("qwen3-30b-a3b", load_format="dummy").model_config
    held = {
        how: sum(
            a.size * a.dtype.itemsize
            for a in jax.tree.leaves(shapes(config, 1, "bfloat16", quantization=how))
        )
        for how in (None, "fp8_per_block")
    }
    experts, attention = 48 * 128 * 3 * 2048 * 768, 48 * (5120 * 2048 + 2048 * 4096)
    assert held[None] - held["fp8_per_block"] == (experts + attention) * (2 - FP8_BLOCKS.experts)
    device = find_device("NVIDIA H200")
    assert device is not None
    wide_s, kept_s = (
        roofline_step_time(config, 1, device.rates, [64], widths=widths).seconds(64, 0, 0)
        for widths in (BFLOAT16, FP8_BLOCKS)
    )
    assert 0.5 * wide_s < kept_s < 0.6 * wide_s
