"""Experts in int4: the quantized form of the 16-bit ones on any devices, in fewer bytes, or a refusal."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from same_weights import same
from test_gpt_oss import model, probes

from jaxflow.config import ConfigError
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.graph import Widths
from jaxflow.model.weight_spec import QUANTIZED_EXPERTS
from jaxflow.model.weights import dummy_weights, leaves, shapes
from jaxflow.parallel.mesh import make_mesh
from pallas_kernels.gemm.grouped.int4_format import dequantize_experts, quantize_experts
from pallas_kernels.quantized import ExpertInt4, Int4

FOLDER = str(paths.MODELS / "tiny-gpt_oss")
TINY = open_checkpoint(str(paths.MODELS / "tiny-qwen3_moe")).model_config
CONFIG = dataclasses.replace(TINY, expert_intermediate_size=128)
quantized = jax.jit(quantize_experts)


@pytest.mark.parametrize(("devices", "whole"), [(1, False), (2, False), (2, True)])
def test_experts_are_the_quantized_form_of_those_in_16_bits_on_any_devices(devices, whole):
    made = functools.partial(dummy_weights, CONFIG, jnp.bfloat16, make_mesh(devices), expert_parallel=whole)
    wide, kept = made(), made(quantization="int4")
    for before, after in zip(wide["layers"], kept["layers"], strict=True):
        assert isinstance(after["qkv"], Int4)
        for key in QUANTIZED_EXPERTS:
            assert isinstance(after[key], ExpertInt4)
            same(after[key], quantized(before[key]))
            assert all(part.addressable_shards[0].data.size * devices == part.size for part in after[key])
            # The rows of the weight, and those of its factors, lie on the same device.
            _, n, k = before[key].addressable_shards[0].data.shape
            assert after[key].packed.addressable_shards[0].data.shape[1:] == (n, k // 2)
            assert after[key].factors.addressable_shards[0].data.shape[1:] == (k // 64, n, 2)
            numbers = np.asarray(dequantize_experts(after[key], jnp.float32))
            shards = (part.addressable_shards for part in after[key])
            for one, factors in zip(*shards, strict=True):
                experts, rows, packed = one.index
                columns = slice(*(None if end is None else 2 * end for end in (packed.start, packed.stop)))
                own = dequantize_experts(jax.device_get(ExpertInt4(one.data, factors.data)), jnp.float32)
                np.testing.assert_array_equal(np.asarray(own), numbers[experts, rows, columns])
    told = shapes(CONFIG, devices, jnp.bfloat16, quantization="int4", expert_parallel=whole)
    form = functools.partial(jax.tree.map, lambda a: (a.shape, a.dtype))
    assert form(kept) == form(told)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_logits_are_those_of_the_numbers(dtype):
    kept = open_checkpoint(FOLDER).load(dtype, quantization="int4")
    wide = kept | {
        "layers": [
            layer | {key: dequantize_experts(layer[key], dtype) for key in QUANTIZED_EXPERTS}
            for layer in kept["layers"]
        ]
    }
    np.testing.assert_array_equal(probes(model()[0], kept), probes(model()[0], wide))


def test_cuts_and_widths_with_partial_groups_are_refused():
    one_group = dataclasses.replace(CONFIG, expert_intermediate_size=64)
    leaves(one_group, 2, quantization="int4", expert_parallel=True)
    with pytest.raises(ConfigError, match="the 1 groups of 64 columns of expert_down") as caught:
        leaves(one_group, 2, quantization="int4")
    assert (caught.value.field, caught.value.value) == ("tensor_parallel_size", 2)
    with pytest.raises(ConfigError, match="expert_down has 32 columns") as caught:
        leaves(TINY, quantization="int4")
    assert (caught.value.field, caught.value.value) == ("quantization", "int4")


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b"])
def test_a_mixture_takes_the_bytes_that_the_cost_model_counts(name):
    config = open_checkpoint(name, load_format="dummy").model_config
    experts = [
        shapes(config, 1, jnp.bfloat16, quantization=how)["layers"][0]["expert_up_gate"]
        for how in (None, "int4")
    ]
    wide, kept = (sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(one)) for one in experts)
    assert kept / wide == Widths(weights=0.5625).experts / 2
