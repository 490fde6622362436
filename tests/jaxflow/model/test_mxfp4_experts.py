"""Experts that stay in MXFP4: the same numbers as in 16 bits on any devices, in fewer bytes, or a refusal."""

import dataclasses
import functools
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from same_weights import same

from jaxflow.config import ConfigError
from jaxflow.engine.step_time_prediction import roofline_step_time
from jaxflow.model import weights
from jaxflow.model.checkpoints import mxfp4
from jaxflow.model.checkpoints.checkpoint import CheckpointError, convert, open_checkpoint
from jaxflow.model.cost import find_device
from jaxflow.model.graph import BFLOAT16, MXFP4
from jaxflow.model.weight_spec import QUANTIZED_EXPERTS, assemble, shard_maker
from jaxflow.model.weights import leaves, shapes, tensors
from jaxflow.parallel.mesh import make_mesh
from pallas_kernels.cards import default_card
from pallas_kernels.gemm.grouped.mxfp4_blocks import from_blocks
from pallas_kernels.gemm.grouped.mxfp4_format import dequantize_mxfp4, quantize_mxfp4
from pallas_kernels.quantized import Mxfp4, Mxfp4Blocks

FOLDER = paths.MODELS / "tiny-gpt_oss"
CONFIG = open_checkpoint(str(FOLDER)).model_config
back = jax.jit(dequantize_mxfp4, static_argnums=1)


@functools.cache
def load(quantization: str | None, devices: int = 1, whole: bool = False) -> dict[str, Any]:
    mesh = make_mesh(devices)
    opened = open_checkpoint(str(FOLDER))
    return opened.load("float32", mesh, quantization=quantization, expert_parallel=whole)


def wide(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights with float32 experts in place of MXFP4."""
    layers = [
        layer | {key: back(layer[key], jnp.float32) for key in QUANTIZED_EXPERTS}
        for layer in weights["layers"]
    ]
    return weights | {"layers": layers}


@given(
    seed=st.integers(0, 2**32 - 1),
    low=st.sampled_from([1, 100, 230]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_every_byte_under_every_scale_is_what_a_load_to_16_bits_makes_of_it(seed, low, dtype):
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (4, 3, 16), np.uint8)
    scales = rng.integers(low + 1, low + 24, (4, 3), np.uint8)
    found = back(Mxfp4(jnp.asarray(blocks.reshape(4, 48)), jnp.asarray(scales)), dtype)
    wanted = mxfp4.dequantize(blocks, scales).astype(np.float32)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found, np.float32), wanted)


@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([1e-20, 0.02, 1e6]))
def test_the_nearest_number_is_chosen_and_numbers_of_the_format_stay(seed, size):
    x = (np.random.default_rng(seed).normal(size=(4, 64)) * size).astype(np.float32)
    packed = jax.jit(quantize_mxfp4)(x)
    once = np.asarray(back(packed, jnp.float32))
    same(jax.jit(quantize_mxfp4)(once), packed)
    unit = np.ldexp(1.0, np.repeat(np.asarray(packed.scale, np.int32), 32, axis=1) - 127)
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = np.abs(np.abs(x[..., None]) - unit[..., None] * numbers).min(-1)
    np.testing.assert_allclose(np.abs(x - once), nearest, rtol=1e-5, atol=1e-7 * size)
    largest = np.abs(x / unit).reshape(4, 2, 32).max(-1)
    assert ((largest >= 4) & (largest < 8)).all()


def test_a_middle_goes_to_the_even_mantissa():
    x = np.zeros((1, 32), np.float32)
    x[0, :9] = [4.0, 0.25, -0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 7.9]
    found = np.asarray(back(quantize_mxfp4(jnp.asarray(x)), jnp.float32))[0, :9]
    assert found.tolist() == [4.0, 0.0, -1.0, 1.0, 2.0, 2.0, -4.0, 4.0, 6.0]


@pytest.mark.parametrize(("devices", "whole"), [(1, False), (2, False), (2, True), (4, True)])
def test_kept_experts_are_the_experts_in_16_bits(devices, whole):
    kept = load("mxfp4", devices, whole)
    same(wide(kept), load(None, devices, whole))
    for leaf in (layer[key] for layer in kept["layers"] for key in QUANTIZED_EXPERTS):
        assert isinstance(leaf, Mxfp4)
        assert all(part.dtype == jnp.uint8 for part in leaf)
        assert all(part.addressable_shards[0].data.size * devices == part.size for part in leaf)
        assert leaf.packed.sharding.spec == leaf.scale.sharding.spec
    told = shapes(CONFIG, devices, "float32", quantization="mxfp4", expert_parallel=whole)
    form = functools.partial(jax.tree.map, lambda a: (a.shape, a.dtype))
    assert form(kept) == form(told)


@pytest.mark.parametrize(("devices", "whole"), [(1, False), (2, True)])
def test_a_card_with_blocks_has_the_same_experts(devices, whole, monkeypatch):
    kept = load("mxfp4", devices, whole)
    card = dataclasses.replace(default_card(), mxfp4_in_blocks=True)
    monkeypatch.setattr(weights, "this_card", lambda: card)
    found = load.__wrapped__("mxfp4", devices, whole)
    told = shapes(CONFIG, devices, "float32", quantization="mxfp4", expert_parallel=whole)
    form = functools.partial(jax.tree.map, lambda a: (a.shape, a.dtype))
    assert form(found) == form(told)
    for before, after in zip(kept["layers"], found["layers"], strict=True):
        for key in QUANTIZED_EXPERTS:
            assert isinstance(after[key], Mxfp4Blocks)
            assert after[key].words.sharding.is_equivalent_to(before[key].packed.sharding, 3)
            same(jax.jit(from_blocks)(after[key]), before[key])
    # Columns of a device that are no whole blocks stay as they are.
    cut = leaves(CONFIG, 2, quantization="mxfp4")["layers"][0]
    assert [cut[key].in_blocks for key in QUANTIZED_EXPERTS] == [True, False]


def test_padded_experts_are_filled_with_zeros():
    """736 columns are 11.5 tiles of 64, so two devices store 768."""
    config, rng = dataclasses.replace(CONFIG, expert_intermediate_size=736), np.random.default_rng(1)
    source: dict[str, np.ndarray] = {}
    for name, shape in tensors(config).items():
        if name.endswith("_proj") and "experts" in name:
            e, columns, rows = shape
            blocks = source[f"{name}_blocks"] = rng.integers(0, 256, (e, rows, columns // 32, 16), np.uint8)
            scales = source[f"{name}_scales"] = rng.integers(110, 130, (e, rows, columns // 32), np.uint8)
            made = [mxfp4.dequantize(*one) for one in zip(blocks, scales, strict=True)]
            source[name] = np.stack(made).swapaxes(1, 2)
    tree = leaves(config, 2, quantization="mxfp4")["layers"][0]
    for key in QUANTIZED_EXPERTS:
        packed, scale = (assemble(part, source.__getitem__, np.uint8) for part in tree[key].stored)
        found = back(Mxfp4(jnp.asarray(packed), jnp.asarray(scale)), "float32")
        wanted = assemble(tree[key], source.__getitem__, np.float32)
        assert wanted.shape[1 if key == "expert_up_gate" else 2] % 768 == 0
        np.testing.assert_array_equal(np.asarray(found), wanted)


def test_dummy_experts_are_the_quantized_form_of_those_in_16_bits_on_any_devices():
    checkpoint = open_checkpoint(str(FOLDER), load_format="dummy")
    plain, kept = (checkpoint.load("bfloat16", seed=3, quantization=how) for how in (None, "mxfp4"))
    same(checkpoint.load("bfloat16", make_mesh(2), seed=3, quantization="mxfp4"), kept)
    for before, after in zip(plain["layers"], kept["layers"], strict=True):
        for key in QUANTIZED_EXPERTS:
            same(after[key], jax.jit(quantize_mxfp4)(before.pop(key)))
        same({key: after[key] for key in before}, before)


def test_a_process_reads_only_the_scales_of_its_experts(tmp_path):
    """Scales that are no numbers lie in the experts of another process."""
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    stored[name][:2] = 255
    save_file(stored, folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder))
    _, scale = leaves(CONFIG, 4, quantization="mxfp4", expert_parallel=True)["layers"][0][
        "expert_down"
    ].stored
    read = checkpoint.source.stored
    make = shard_maker(scale, read, np.uint8, read)
    every = (slice(None), slice(None))
    np.testing.assert_array_equal(make((slice(2, 4), *every)), stored[name][2:4])
    with pytest.raises(CheckpointError, match="down_proj_scales has scales that are not numbers"):
        make((slice(0, 2), *every))


@pytest.mark.parametrize(("scale", "said"), [(255, "not numbers"), (161, r"above 2 \*\* 33")])
def test_a_scale_that_no_kernel_holds_is_refused(scale, said, tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.1.mlp.experts.gate_up_proj_scales"][3, 5, 1] = scale
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"gate_up_proj_scales has scales that are {said}"):
        open_checkpoint(str(folder)).load("float32", quantization="mxfp4")


@pytest.mark.parametrize("model", ["tiny-mixtral", "tiny-llama"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_other_models_are_refused(model, load_format):
    with pytest.raises(ConfigError, match="has experts in MXFP4") as caught:
        open_checkpoint(str(paths.MODELS / model), load_format=load_format).load(
            "float32", quantization="mxfp4"
        )
    assert (caught.value.field, caught.value.value) == ("quantization", "mxfp4")


def test_experts_in_16_bits_are_refused(tmp_path, monkeypatch):
    convert(str(FOLDER), tmp_path / "converted", "float32")
    monkeypatch.setattr(
        "jaxflow.model.checkpoints.orbax_file.OrbaxFolder.load",
        lambda *_, **__: pytest.fail("a weight was read"),
    )
    with pytest.raises(ConfigError, match="gate_up_proj in another format") as caught:
        open_checkpoint(str(tmp_path / "converted")).load("float32", quantization="mxfp4")
    assert caught.value.field == "quantization"


def test_cuts_and_widths_with_partial_groups_are_refused():
    with pytest.raises(ConfigError, match="the 2 groups of 32 columns of expert_down") as caught:
        leaves(CONFIG, 4, quantization="mxfp4")
    assert (caught.value.field, caught.value.value) == ("tensor_parallel_size", 4)
    odd = dataclasses.replace(CONFIG, expert_intermediate_size=80)
    with pytest.raises(ConfigError, match="expert_down has 80 columns") as caught:
        leaves(odd, quantization="mxfp4")
    assert caught.value.field == "quantization"


def test_gpt_oss_takes_a_fraction_of_the_bytes_and_the_cost_model_knows():
    config = open_checkpoint("gpt-oss-20b", load_format="dummy").model_config
    held = {
        how: sum(
            a.size * a.dtype.itemsize
            for a in jax.tree.leaves(shapes(config, 1, "bfloat16", quantization=how))
        )
        for how in (None, "mxfp4")
    }
    experts = 24 * 32 * 3 * 2880 * 2880
    assert held[None] - held["mxfp4"] == experts * (2 - 17 / 32)
    assert 12e9 < held["mxfp4"] < 14e9 < 41e9 < held[None]
    device = find_device("NVIDIA H200")
    assert device is not None
    wide_s, kept_s = (
        roofline_step_time(config, 1, device.rates, [64], widths=widths).seconds(64, 0, 0)
        for widths in (BFLOAT16, MXFP4)
    )
    assert kept_s < wide_s / 2
