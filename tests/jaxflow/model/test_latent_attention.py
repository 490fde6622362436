"""Latent attention: the layout of its weights and pages, the order of rotary columns, and what it refuses."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from block_checkpoint import BLOCKS, in_blocks
from safetensors.numpy import load_file, save_file
from same_weights import same

from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.engine.settings import resolve
from jaxflow.flexgen.start import make_geometries
from jaxflow.kv.device_cache import page_bytes, page_groups
from jaxflow.model.architectures.hf_config import model_config_from_hf
from jaxflow.model.checkpoints.calibrate import forward_text
from jaxflow.model.checkpoints.checkpoint import CheckpointError, open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.model.graph import Op, Work, layer_ops, model_graph
from jaxflow.model.weight_spec import assemble
from jaxflow.model.weights import leaves, tensors
from pallas_kernels.kernel_set import REFERENCE
from search.placement.workload import workload
from search.profile.op_bench import LayerBench

TINY = paths.MODELS / "tiny-deepseek_v3"


def tiny(**changes: Any) -> ModelConfig:
    return model_config_from_hf(json.loads((TINY / "config.json").read_text()) | changes)


def written(folder: Path, numbers: dict[str, np.ndarray], **changes: Any) -> Path:
    """Write a checkpoint of the tiny model's config with other tensors and other keys."""
    save_file({name: np.ascontiguousarray(x) for name, x in numbers.items()}, folder / "model.safetensors")
    config = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_the_order_of_rotary_columns_is_that_of_the_config(tmp_path: Path) -> None:
    """A checkpoint with the halves of planes apart, and one with neighboring
    columns, may be the same model.
    """
    config, numbers = tiny(), load_file(TINY / "model.safetensors")
    latent = config.latent
    assert latent is not None
    apart = np.arange(latent.rope_dim).reshape(-1, 2).T.reshape(-1)
    query = np.arange(config.num_heads * config.head_dim).reshape(config.num_heads, -1)
    query[:, latent.plain_dim :] = query[:, latent.plain_dim + apart]
    key = np.concatenate([np.arange(latent.rank), latent.rank + apart])
    others = dict(numbers)
    for name in numbers:
        if "q_b_proj" in name:
            others[name] = numbers[name][query.reshape(-1)]
        elif "kv_a_proj_with_mqa" in name:
            others[name] = numbers[name][key]
    given = open_checkpoint(str(TINY)).load("float32")
    same(open_checkpoint(str(written(tmp_path, others, rope_interleave=False))).load("float32"), given)
    wrong = open_checkpoint(str(written(tmp_path, numbers, rope_interleave=False))).load("float32")
    assert not np.array_equal(wrong["layers"][0]["query_up"], given["layers"][0]["query_up"])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_heads_of_the_shards_are_those_of_the_checkpoint(tp: int) -> None:
    """Scores and values from absorbed matrices are those of the checkpoint's keys and values."""
    config, rng = tiny(), np.random.default_rng(0)
    latent, n = config.latent, config.num_heads
    assert latent is not None
    source = {name: rng.standard_normal(shape) for name, shape in tensors(config).items()}
    layer = jax.tree.map(lambda leaf: assemble(leaf, source.__getitem__, np.float64), leaves(config, tp))[
        "layers"
    ][1]
    up = source["model.layers.1.self_attn.kv_b_proj.weight"].reshape(
        n, latent.plain_dim + latent.value_dim, -1
    )
    vector, query = rng.standard_normal(latent.rank), rng.standard_normal((n, latent.plain_dim))
    keys, values = np.split(up @ vector, [latent.plain_dim], axis=1)
    for shard in range(tp):
        own = slice(shard * n // tp, (shard + 1) * n // tp)
        absorbed = np.einsum("nh,nhr->nr", query[own], np.split(layer["key_up"], tp)[shard])
        np.testing.assert_allclose(absorbed @ vector, (query * keys).sum(1)[own])
        np.testing.assert_allclose(np.split(layer["value_up"], tp)[shard] @ vector, values[own])


def test_a_token_has_one_latent_vector_on_each_device() -> None:
    config = open_checkpoint("deepseek-v3", load_format="dummy").model_config
    for tp in (1, 8):
        assert page_bytes(page_groups(config, "bfloat16", tp), 64, tp) == (61 * 64 * 576 * 2,)
    one = Composition(decode_tokens=1, decode_keys=1000)
    for tp in (1, 8):
        ops = {op.name: op for op in model_graph(config, tp).layers[0]}
        work = ops["decode_attention"].work(one)
        assert work.kv_bytes == 1000 * 576 * 2
        assert work.flops == 1000 * 128 // tp * 2 * (576 + 512)


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize(
    ("chunk", "absorbed_gflop", "by_head_gflop"),
    [((512, 0), 54, 28), ((2048, 0), 653, 241), ((2048, 8192), 5326, 1890)],
)
def test_chunks_by_head_make_the_keys_and_values_of_their_context(
    tp: int, chunk: tuple[int, int], absorbed_gflop: float, by_head_gflop: float
) -> None:
    """The forms differ in the work of chunks, the products of queries and outputs included."""
    config = open_checkpoint("deepseek-v3", load_format="dummy").model_config
    absorbed, by_head = (layer_ops(config, 0, tp, by_head=form) for form in (False, True))

    def work(ops: Sequence[Op], step: Composition) -> Work:
        return sum((op.work(step) for op in ops), Work())

    step = Composition(chunks=(chunk,))
    saved = work(absorbed, step).flops - work(by_head, step).flops
    assert saved * tp == pytest.approx((absorbed_gflop - by_head_gflop) * 1e9, rel=0.02)
    decodes = [work(ops, Composition(decode_tokens=64, decode_keys=1000)) for ops in (absorbed, by_head)]
    assert decodes[0].flops == decodes[1].flops
    assert decodes[0].weight_bytes == decodes[1].weight_bytes
    assert decodes[0].kv_bytes == decodes[1].kv_bytes


REFUSED = {
    "quantization": {"quantization": "fp8"},
    "kv_cache_dtype": {"kv_cache_dtype": "int8"},
    "calibration": {"calibration": "some.json"},
}


@pytest.mark.parametrize(("field", "changes"), REFUSED.items())
def test_settings_without_a_form_for_latent_vectors_are_refused(field: str, changes: dict[str, Any]) -> None:
    given = EngineConfig(model=str(TINY))
    with pytest.raises(ConfigError) as caught:
        resolve(dataclasses.replace(given, **changes), tiny())
    assert caught.value.field == field
    assert resolve(given, tiny()).kv_cache_dtype == "float32"


def offloaded(model: ModelConfig) -> None:
    checkpoint = dataclasses.replace(open_checkpoint(str(TINY)), model_config=model)
    make_geometries(mock.Mock(), EngineConfig(model=str(TINY)), checkpoint)


def profiled(model: ModelConfig) -> None:
    LayerBench(model, REFERENCE, dtype="float32", kv_dtype="float32", fp8=False, platform="cpu")


@pytest.mark.parametrize(
    "needs",
    [
        offloaded,
        profiled,
        lambda model: workload("tiny", model, 8, 8),
        lambda model: forward_text(model, {}, jnp.zeros(4, jnp.int32), mock.Mock()),
    ],
    ids=["offloaded run", "profile", "placement", "calibration"],
)
def test_what_needs_keys_and_values_by_head_is_refused(needs: Callable[[ModelConfig], object]) -> None:
    with pytest.raises(ConfigError) as caught:
        needs(tiny())
    assert caught.value.field == "model"


def test_e4m3_weights_in_blocks_are_read_in_16_bits(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    config = tiny(hidden_size=200, intermediate_size=272)
    numbers = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in tensors(config).items()}
    stored, exact = dict(numbers), dict(numbers)
    for name, x in numbers.items():
        if x.ndim == 2 and "layers" in name and "mlp.gate.weight" not in name:
            stored[name], stored[f"{name}_scale_inv"], exact[name] = in_blocks(x)
    changes = {"hidden_size": 200, "intermediate_size": 272}
    (tmp_path / "e4m3").mkdir(), (tmp_path / "wide").mkdir()
    found = open_checkpoint(str(written(tmp_path / "e4m3", stored, quantization_config=BLOCKS, **changes)))
    assert found.quantization is None
    same(
        found.load("float32"),
        open_checkpoint(str(written(tmp_path / "wide", exact, **changes))).load("float32"),
    )

    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    for scales in (None, np.ones((3, 3), np.float32), np.full((3, 2), np.nan, np.float32)):
        broken = {key: x for key, x in stored.items() if key != name} | (
            {} if scales is None else {name: scales}
        )
        folder = written(tmp_path / "e4m3", broken, quantization_config=BLOCKS, **changes)
        with pytest.raises(CheckpointError, match="up_proj"):
            open_checkpoint(str(folder)).load("float32")
