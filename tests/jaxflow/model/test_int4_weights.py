"""Weights in 4 bits: quantised on load from any checkpoint, cut between groups; what cannot be cut is
refused.
"""

import dataclasses
from pathlib import Path
from typing import Any

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from jax.sharding import PartitionSpec

from jaxflow.config import ConfigError
from jaxflow.model import transformer
from jaxflow.model.checkpoints.checkpoint import convert, open_checkpoint
from jaxflow.model.weight_spec import QUANTIZED
from jaxflow.model.weights import shapes, shardings
from jaxflow.parallel.mesh import make_mesh
from pallas_kernels.gemm.grouped.int4_format import quantize_experts
from pallas_kernels.gemm.int4.reference import dequantize_int4, quantize_int4
from pallas_kernels.quantized import ExpertInt4, Int4


def load(name: Path | str, dtype: str = "float32", **options: Any) -> Any:
    return open_checkpoint(str(paths.MODELS / name)).load(dtype, **options)


def is_int4(x: Any) -> bool:
    return isinstance(x, Int4)


def same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), err_msg=str(path))


@pytest.mark.parametrize(
    ("name", "tp"), [("tiny-llama", 1), ("tiny-gpt_oss", 1), ("tiny-opt", 1), ("tiny-qwen3", 2)]
)
def test_matrices_are_quantised_on_load_and_all_else_stays(name: str, tp: int) -> None:
    """On two devices as on one: a shard's groups are those of the whole."""
    mesh = make_mesh(tp)
    wide, found = load(name, mesh=mesh), load(name, mesh=mesh, quantization="int4")
    config = open_checkpoint(str(paths.MODELS / name)).model_config
    told, specs = (
        shapes(config, tp, jnp.float32, quantization="int4"),
        shardings(config, mesh, quantization="int4"),
    )
    assert jax.tree.map(lambda a: (a.shape, a.dtype), found) == jax.tree.map(
        lambda a: (a.shape, a.dtype), told
    )
    assert jax.tree.map(lambda a: a.sharding.spec, found) == specs
    assert specs["layers"][0]["out_proj"] == Int4(*[PartitionSpec(None, "tp")] * 3)  # pyright: ignore
    for layer, before in zip(found["layers"], wide["layers"], strict=True):
        assert {key for key, leaf in layer.items() if is_int4(leaf)} == {
            key for key in QUANTIZED if key in before
        }
        for key, leaf in layer.items():
            kinds = {Int4: quantize_int4, ExpertInt4: quantize_experts}
            made = kinds.get(type(leaf), lambda array: array)
            same(jax.device_get(leaf), jax.jit(made)(np.asarray(before[key])))
    same({k: v for k, v in found.items() if k != "layers"}, {k: v for k, v in wide.items() if k != "layers"})


def test_from_a_converted_checkpoint(tmp_path: Path) -> None:
    convert(str(paths.MODELS / "tiny-llama"), tmp_path / "converted", "float32")
    same(load(tmp_path / "converted", quantization="int4"), load("tiny-llama", quantization="int4"))


def test_dummies_are_the_wide_ones_quantised() -> None:
    checkpoint = open_checkpoint(str(paths.MODELS / "tiny-llama"), load_format="dummy")
    wide, found = (checkpoint.load("bfloat16", seed=3, quantization=chosen) for chosen in (None, "int4"))
    for layer, before in zip(found["layers"], wide["layers"], strict=True):
        for key in QUANTIZED:
            same(layer[key], jax.jit(quantize_int4)(before[key]))


@pytest.mark.parametrize(
    ("name", "tp", "field", "accepted"),
    [
        ("stories260K", 1, "quantization", "fp8 or unset: down has 172 columns"),
        ("tiny-mixtral", 1, "quantization", "fp8 or unset: expert_down has 32 columns"),
        ("tiny-llama", 2, "tensor_parallel_size", "a divisor of the 1 groups of 64 columns of out_proj"),
        ("tiny-qwen3", 4, "tensor_parallel_size", "a divisor of the 2 groups of 64 columns of out_proj"),
    ],
)
def test_a_group_that_would_be_cut_is_refused(name: str, tp: int, field: str, accepted: str) -> None:
    with pytest.raises(ConfigError, match=accepted) as caught:
        load(name, mesh=make_mesh(tp), quantization="int4")
    assert caught.value.field == field


def test_a_forward_is_that_of_the_weights_read_back() -> None:
    bench = drawn.Bench(drawn.config_of("tiny-qwen3"), quantization="int4")
    weights, kv, forward = drawn.plain(bench)
    step = drawn.step(bench.config, 16, (), 3, (9,))
    read_back = jax.tree.map(
        lambda w: dequantize_int4(w, jnp.float32) if is_int4(w) else w, weights, is_leaf=is_int4
    )
    on_them = dataclasses.replace(bench, quantization=None).jitted(transformer.forward)
    jax.tree.map(drawn.equal, forward(weights, kv, step), on_them(read_back, kv, step))
