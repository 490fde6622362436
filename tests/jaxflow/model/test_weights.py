"""The fused layouts, against loops over heads and rows; what each shard holds is what its heads and its MLP
columns need.
"""

import collections
import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxflow.config import ConfigError, ModelConfig, gate_block
from jaxflow.model.architectures.hf_config import model_config_from_hf
from jaxflow.model.checkpoints.checkpoint import open_checkpoint, shipped_configs
from jaxflow.model.weight_spec import TENSOR_PARALLEL_AXIS, assemble, assemble_shard, shard_maker
from jaxflow.model.weights import Weights, dummy_weights, leaves, mlp_width, shapes, shardings, tensors
from jaxflow.parallel.mesh import make_mesh
from pallas_kernels.pointwise.quantize.reference import dequantize, quantize_rows


def config_of(name: str, **changes: Any) -> ModelConfig:
    keys = json.loads((paths.MODELS / name / "config.json").read_text())
    keys.pop("quantization_config", None)  # the checkpoint reads this key
    return dataclasses.replace(model_config_from_hf(keys), **changes)


def random_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in tensors(config).items()}


def assembled(
    config: ModelConfig, source: dict[str, np.ndarray], tp: int, dtype: Any = np.float32
) -> Weights:
    return jax.tree.map(lambda leaf: assemble(leaf, source.__getitem__, dtype), leaves(config, tp))


def shard(leaf: np.ndarray, axis: int, index: int, tp: int) -> np.ndarray:
    return np.split(leaf, tp, axis)[index]


FAMILIES = [name for name in paths.TINY_MODELS if name != "tiny-llama3rope"]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "tiny-deepseek_v3"])
def test_each_shard_holds_its_heads(name: str, tp: int) -> None:
    config = config_of(name)
    own = config.for_layer(config.layers[1])
    h, heads, kv_heads = own.head_dim, own.num_heads, own.num_kv_heads
    source = random_tensors(config)
    prefix = "model.decoder.layers.1." if name == "tiny-opt" else "model.layers.1."
    out_name = "out_proj" if name == "tiny-opt" else "o_proj"
    layer = assembled(config, source, tp)["layers"][1]
    local_kv = max(kv_heads, tp) // tp
    local_q = heads // tp
    order = list(range(h))
    if name == "tiny-glm4_moe":  # 16 of 32 columns rotate: the halves of the planes are 16 columns apart here
        order = [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]
    for s in range(tp):
        for key, suffix in (("qkv", "weight"), ("qkv_bias", "bias")):
            if key not in layer:
                assert not config.qkv_bias
                continue
            rows = shard(layer[key], 0, s, tp)
            roles = "qkk" if config.layers[1].keys_are_values else "qkv"
            q, k, v = (source[f"{prefix}self_attn.{role}_proj.{suffix}"] for role in roles)
            at = 0
            for group in range(local_kv):
                first = s * local_q + group * (
                    local_q // local_kv
                )  # query heads keep their order over the shards
                for head in range(first, first + local_q // local_kv):
                    np.testing.assert_array_equal(rows[at : at + h], q[head * h : (head + 1) * h][order])
                    at += h
                kv = first // (heads // kv_heads)  # the key head those query heads look at
                np.testing.assert_array_equal(rows[at : at + h], k[kv * h : (kv + 1) * h][order])
                np.testing.assert_array_equal(rows[at + h : at + 2 * h], v[kv * h : (kv + 1) * h])
                at += 2 * h
            assert at == len(rows)
        columns = shard(layer["out_proj"], 1, s, tp)
        np.testing.assert_array_equal(
            columns,
            source[f"{prefix}self_attn.{out_name}.weight"][:, s * local_q * h : (s + 1) * local_q * h],
        )


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-opt", "tiny-gemma2", "stories260K"])
def test_the_shards_of_the_mlp_add_up(name: str, tp: int) -> None:
    """Σ over shards of down_s · act(gate_s x) * (up_s x) is the MLP of the checkpoint's own matrices."""
    config = config_of(name)
    source = {key: value.astype(np.float64) for key, value in random_tensors(config).items()}
    layer = assembled(config, source, tp, np.float64)["layers"][0]
    x = np.random.default_rng(1).standard_normal(config.hidden_size)
    total, block = 0.0, gate_block(config.intermediate_size)
    for s in range(tp):
        y = shard(layer["up_gate"], 0, s, tp) @ x
        if config.mlp_bias:
            y = y + shard(layer["up_gate_bias"], 0, s, tp)
        if config.gated_mlp:
            y = np.concatenate(
                [np.tanh(two[:block]) * two[block:] for two in np.split(y, len(y) // (2 * block))]
            )
        else:
            y = np.tanh(y)
        total = total + shard(layer["down"], 1, s, tp) @ y
    if config.gated_mlp:
        gate, up, down = (source[f"model.layers.0.mlp.{role}_proj.weight"] for role in ("gate", "up", "down"))
        expected = down @ (np.tanh(gate @ x) * (up @ x))
    else:
        up, bias, down = (
            source[f"model.decoder.layers.0.{role}"] for role in ("fc1.weight", "fc1.bias", "fc2.weight")
        )
        expected = down @ np.tanh(up @ x + bias)
        np.testing.assert_array_equal(layer["down_bias"], source["model.decoder.layers.0.fc2.bias"])
    np.testing.assert_allclose(total, expected, rtol=1e-12)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-qwen3_moe", "tiny-glm4_moe", "tiny-gemma4_text"])
def test_the_shards_of_each_expert_add_up(name: str, tp: int) -> None:
    config = config_of(name)
    source = {key: value.astype(np.float64) for key, value in random_tensors(config).items()}
    layer = assembled(config, source, tp, np.float64)["layers"][1]
    x = np.random.default_rng(1).standard_normal(config.hidden_size)
    block = gate_block(config.expert_intermediate_size)
    roles = ("w1", "w3", "w2") if name == "tiny-mixtral" else ("gate_proj", "up_proj", "down_proj")
    prefix = "model.layers.1." + ("block_sparse_moe" if name == "tiny-mixtral" else "mlp")
    router = "model.layers.1.router.proj" if name == "tiny-gemma4_text" else f"{prefix}.gate"
    np.testing.assert_array_equal(layer["router"], source[f"{router}.weight"])
    for expert in range(config.num_experts):
        total = 0.0
        for s in range(tp):
            y = shard(layer["expert_up_gate"], 1, s, tp)[expert] @ x
            y = np.concatenate(
                [np.tanh(two[:block]) * two[block:] for two in np.split(y, len(y) // (2 * block))]
            )
            total = total + shard(layer["expert_down"], 2, s, tp)[expert] @ y
        if name == "tiny-gemma4_text":
            gate, up = np.split(source["model.layers.1.experts.gate_up_proj"][expert], 2)
            down = source["model.layers.1.experts.down_proj"][expert]
        else:
            gate, up, down = (source[f"{prefix}.experts.{expert}.{role}.weight"] for role in roles)
        np.testing.assert_allclose(total, down @ (np.tanh(gate @ x) * (up @ x)), rtol=1e-12)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_shards_of_the_shared_experts_add_up(tp: int) -> None:
    config, total = config_of("tiny-glm4_moe"), 0.0
    source = {key: value.astype(np.float64) for key, value in random_tensors(config).items()}
    layer = assembled(config, source, tp, np.float64)["layers"][1]
    x = np.random.default_rng(1).standard_normal(config.hidden_size)
    block = gate_block(config.shared_expert_intermediate_size)
    for s in range(tp):
        y = shard(layer["shared_up_gate"], 0, s, tp) @ x
        y = np.concatenate([np.tanh(two[:block]) * two[block:] for two in np.split(y, len(y) // (2 * block))])
        total = total + shard(layer["shared_down"], 1, s, tp) @ y
    roles = ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (source[f"model.layers.1.mlp.shared_experts.{role}.weight"] for role in roles)
    np.testing.assert_allclose(total, down @ (np.tanh(gate @ x) * (up @ x)), rtol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_of_a_checkpoint_is_used_once(name: str) -> None:
    """Arranging loses and repeats nothing on one device: the sum over all
    arrays is the sum over all tensors. Keys that are values too are there twice.
    """
    config = config_of(name)
    source = random_tensors(config)
    arrays = jax.tree.leaves(assembled(config, source, 1))
    kept = np.sort(np.concatenate([array[array != 0].ravel() for array in arrays]))
    twice = [i for i, layer in enumerate(config.layers) if layer.keys_are_values]
    given_ = [*source.values(), *(source[f"model.layers.{i}.self_attn.k_proj.weight"] for i in twice)]
    given_ = np.sort(np.concatenate([tensor.ravel() for tensor in given_]))
    np.testing.assert_array_equal(kept, given_[given_ != 0])


def test_norms_and_positions_keep_their_places() -> None:
    for name, key, tensor in (
        ("tiny-gemma3_text", "post_attn_norm", "post_attention_layernorm.weight"),
        ("tiny-gemma3_text", "mlp_norm", "pre_feedforward_layernorm.weight"),
        ("tiny-gemma3_text", "post_mlp_norm", "post_feedforward_layernorm.weight"),
        ("tiny-gemma3_text", "k_norm", "self_attn.k_norm.weight"),
        ("tiny-gemma4_text", "shared_norm", "pre_feedforward_layernorm.weight"),
        ("tiny-gemma4_text", "routed_norm", "pre_feedforward_layernorm_2.weight"),
        ("tiny-gemma4_text", "post_shared_norm", "post_feedforward_layernorm_1.weight"),
        ("tiny-gemma4_text", "post_routed_norm", "post_feedforward_layernorm_2.weight"),
        ("tiny-gemma4_text", "post_mlp_norm", "post_feedforward_layernorm.weight"),
        ("tiny-llama", "attn_norm", "input_layernorm.weight"),
        ("tiny-llama", "mlp_norm", "post_attention_layernorm.weight"),
    ):
        config = config_of(name)
        source = random_tensors(config)
        np.testing.assert_array_equal(
            assembled(config, source, 1)["layers"][0][key], source[f"model.layers.0.{tensor}"]
        )
    config = config_of("tiny-opt")
    source = random_tensors(config)
    weights = assembled(config, source, 2)
    np.testing.assert_array_equal(weights["positions"], source["model.decoder.embed_positions.weight"])
    np.testing.assert_array_equal(weights["final_norm_bias"], source["model.decoder.final_layer_norm.bias"])


@pytest.mark.parametrize(
    ("vocabulary", "tp", "rows"), [(512, 1, 512), (500, 1, 512), (513, 1, 576), (500, 4, 512), (513, 4, 768)]
)
def test_the_vocabulary_is_padded_with_zeros(vocabulary: int, tp: int, rows: int) -> None:
    config = config_of("tiny-llama", vocab_size=vocabulary)
    source = random_tensors(config)
    weights = assembled(config, source, tp)
    for key, name in (("embed", "model.embed_tokens.weight"), ("lm_head", "lm_head.weight")):
        assert weights[key].shape == (rows, 64)
        np.testing.assert_array_equal(weights[key][:vocabulary], source[name])
        assert not weights[key][vocabulary:].any()


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 3), st.integers(0, 2), st.integers(1, 3))
def test_repeated_rows_name_the_rows_they_repeat(
    kv_heads: int, more_queries: int, more_devices: int, half_dim: int
) -> None:
    """The row table of repeated heads (dummy and converted weights use it) agrees with arranging from the
    tensors.
    """
    tp = kv_heads << more_devices
    config = config_of(
        "tiny-llama",
        num_kv_heads=kv_heads,
        num_heads=tp << more_queries,
        head_dim=2 * half_dim,
        intermediate_size=64 * tp,
    )
    leaf, alone = leaves(config, tp)["layers"][0]["qkv"], leaves(config, 1)["layers"][0]["qkv"]
    source = random_tensors(config)
    repeated, whole = (assemble(one, source.__getitem__, np.float32) for one in (leaf, alone))
    np.testing.assert_array_equal(repeated, whole if leaf.rows is None else whole[leaf.rows])
    assert (leaf.rows is None) == (tp <= kv_heads)


@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_left_in_memory_do_not_reach_an_array(name: str) -> None:
    config = config_of(name)
    source = random_tensors(config)

    def filled_with(number: float) -> Weights:
        memory = lambda shape, dtype: np.full(shape, number, dtype)
        make = lambda leaf: assemble(leaf, source.__getitem__, np.float32, memory)
        return jax.tree.map(make, leaves(config, 4))

    jax.tree.map(np.testing.assert_array_equal, filled_with(0), filled_with(7))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_shapes_and_shardings_tell_what_there_is(name: str, tp: int) -> None:
    config = config_of(name)
    weights = assembled(config, random_tensors(config), tp)
    told = shapes(config, tp, jnp.bfloat16)
    specs = shardings(config, make_mesh(tp))
    assert jax.tree.map(np.shape, weights) == jax.tree.map(lambda array: array.shape, told)
    assert {array.dtype for array in jax.tree.leaves(told)} == {
        jnp.dtype(jnp.bfloat16),
        *([jnp.dtype(jnp.float32)] if config.router else []),  # the bias of its scores
    }
    assert jax.tree.structure(specs) == jax.tree.structure(told)
    for (path, array), spec in zip(jax.tree.leaves_with_path(told), jax.tree.leaves(specs), strict=True):
        assert isinstance(spec, PartitionSpec) and len(spec) <= len(array.shape), path
        for size, axis in zip(array.shape, spec, strict=False):
            assert axis is None or size % tp == 0, path


@pytest.mark.parametrize(
    ("name", "changes", "tp"),
    [
        ("tiny-llama", {}, 3),
        ("tiny-llama", {}, 8),
        ("tiny-llama", {}, 0),
        ("tiny-llama", {"num_kv_heads": 3, "num_heads": 6}, 2),
        ("tiny-llama", {"intermediate_size": 130}, 4),
        ("tiny-mixtral", {"expert_intermediate_size": 34}, 4),
    ],
)
def test_cuts_that_are_not_even_are_refused(name: str, changes: dict[str, Any], tp: int) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        leaves(config_of(name, **changes), tp)


def test_dummy_weights_keep_activations_sane() -> None:
    config = config_of("tiny-gemma3_text", hidden_size=256, vocab_size=500)
    weights = dummy_weights(config, jnp.float32)
    assert jax.tree.map(np.shape, weights) == jax.tree.map(lambda array: array.shape, shapes(config))
    layer = weights["layers"][0]
    assert float(jnp.std(layer["up_gate"])) == pytest.approx(256**-0.5, rel=0.02)
    assert float(jnp.std(layer["down"])) == pytest.approx(config.intermediate_size**-0.5, rel=0.02)
    assert abs(float(jnp.mean(layer["up_gate"]))) < 0.002
    assert not layer["attn_norm"].any() and not weights["final_norm"].any()  # Gemma's norms scale by 1 + w
    assert not weights["embed"][500:].any() and weights["embed"][499].all()
    # No row, no matrix and no layer is like another.
    rows = np.concatenate(
        [layer["up_gate"], weights["layers"][1]["up_gate"], layer["qkv"], weights["embed"][:500]]
    )
    alike = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(alike).max() < 6 / 256**0.5
    opt = dummy_weights(config_of("tiny-opt"), jnp.float32)
    assert (opt["layers"][0]["attn_norm"] == 1).all() and not opt["layers"][0]["attn_norm_bias"].any()
    assert not opt["layers"][0]["qkv_bias"].any()


def test_dummy_norms_give_scores_the_usual_size() -> None:
    """A normed query and a normed key have H numbers of size 1. Their product has the size sqrt(H)."""
    configs = [open_checkpoint(name, load_format="dummy").model_config for name in shipped_configs()]
    normed = [config for config in configs if config.qk_norm]
    assert {config.attention_scale for config in normed} >= {None, 1.0}
    for config in normed:
        config = dataclasses.replace(config, layers=tuple(dict.fromkeys(config.layers)))
        for layer, tree in zip(config.layers, leaves(config)["layers"], strict=True):
            own = config.for_layer(layer)
            keys = 1.0 if layer.shares_kv else tree["k_norm"].norm
            assert own.scale * own.head_dim**0.5 * tree["q_norm"].norm * keys == pytest.approx(1.0)


def test_only_attention_without_a_scale_changes_dummy_norms() -> None:
    config = config_of("tiny-gemma4_dense")
    ours, usual = (
        dummy_weights(dataclasses.replace(config, attention_scale=scale), jnp.float32)
        for scale in (1.0, None)
    )
    for layer, mine, other in zip(config.layers, ours["layers"], usual["layers"], strict=True):
        assert (other["q_norm"] == 1.0).all()
        np.testing.assert_allclose(mine["q_norm"], config.for_layer(layer).head_dim ** -0.5)
        for key in mine.keys() - {"q_norm"}:
            np.testing.assert_array_equal(mine[key], other[key])


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3_moe"])
def test_dummy_weights_are_the_same_numbers_on_every_mesh(name: str) -> None:
    config = config_of(name, vocab_size=500)
    alone = dummy_weights(config, jnp.float32, seed=3)
    for tp in (1, 2, 4):
        mesh = make_mesh(tp)
        spread = dummy_weights(config, jnp.float32, mesh, seed=3)
        for leaf, mine, other in zip(
            jax.tree.leaves(leaves(config, tp)), jax.tree.leaves(alone), jax.tree.leaves(spread), strict=True
        ):
            assert other.sharding.spec == leaf.spec and len(other.sharding.device_set) == tp
            expected = np.asarray(mine) if leaf.rows is None else np.asarray(mine)[leaf.rows]
            np.testing.assert_array_equal(np.asarray(other)[: len(expected)], expected)
            assert not np.asarray(other)[len(expected) :].any()
    other_seed = dummy_weights(config, jnp.float32, seed=4)
    assert not np.array_equal(other_seed["embed"], alone["embed"])
    rounded = dummy_weights(config, jnp.bfloat16, seed=3)
    np.testing.assert_array_equal(rounded["embed"], alone["embed"].astype(jnp.bfloat16))


def test_dummy_weights_compile_once_a_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda fn, **settings: compiled.append(fn) or jit(fn, **settings))
    config = config_of("tiny-qwen3_moe")
    dense = dataclasses.replace(config.layers[0], experts=False)
    dummy_weights(dataclasses.replace(config, layers=(config.layers * 3 + (dense,) * 2)), jnp.float32)
    assert len(compiled) == 3  # weights outside the layers, layers of experts, dense layers


def test_an_mlp_of_8_bits_is_filled_up_to_whole_blocks_of_each_device() -> None:
    """The padded layout has 2016 columns and 32 zeros.

    The first 2016 equal the plain layout, for dummy weights as well.
    """
    assert [mlp_width(29568, tp, "fp8") for tp in (1, 2, 4)] == [29568, 29696, 29696]  # Qwen2-72B
    assert (
        mlp_width(29568, 2, None) == mlp_width(29568, 2, "int4") == 29568 and mlp_width(176, 2, "fp8") == 176
    )
    config = config_of("tiny-llama", intermediate_size=2016)
    config = dataclasses.replace(config, layers=config.layers[:1])
    source = random_tensors(config)
    filled = jax.tree.map(
        lambda leaf: assemble(leaf, source.__getitem__, np.float32), leaves(config, 2, quantization="fp8")
    )
    for key, (rows, columns) in {"up_gate": (4032, None), "down": (None, 2016)}.items():
        plain, wide = assembled(config, source, 2)["layers"][0][key], filled["layers"][0][key]
        np.testing.assert_array_equal(wide[:rows, :columns], plain)
        assert (
            np.count_nonzero(wide) == np.count_nonzero(plain)
            and max(wide.shape) == max(rows or 0, columns or 0) // 63 * 64
        )
    drawn = {
        tp: dummy_weights(config, jnp.float32, make_mesh(tp), quantization="fp8")["layers"][0]
        for tp in (1, 2)
    }
    plain = dummy_weights(config, jnp.float32)["layers"][0]
    for key in ("up_gate", "down"):
        one, two = (np.asarray(dequantize(drawn[tp][key])) for tp in (1, 2))
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(
            np.asarray(dequantize(quantize_rows(plain[key]))),
            one[: plain[key].shape[0], : plain[key].shape[1]],
        )


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "name", ["tiny-llama", "tiny-gemma2", "tiny-opt", "tiny-qwen3_moe", "tiny-glm4_moe", "tiny-deepseek_v3"]
)
def test_a_shard_alone_is_the_same_and_reads_no_more(name: str, tp: int) -> None:
    """A process makes its own shard without the whole array."""
    config = model_config_from_hf(json.loads((paths.MODELS / name / "config.json").read_text("utf-8")))
    rng = np.random.default_rng(tp)
    for leaf in jax.tree.leaves(leaves(config, tp, kv_scales=True)):
        read = {piece.name: rng.integers(1, 99, piece.shape).astype(np.float32) for piece in leaf.pieces}
        whole, axis = assemble(leaf, read.__getitem__, np.float32), TENSOR_PARALLEL_AXIS.get(leaf.key)
        for shard in range(1 if axis is None else tp):
            index = [slice(None)] * len(leaf.shape)
            if axis is not None:
                rows = leaf.shape[axis] // tp
                index[axis] = slice(shard * rows, (shard + 1) * rows)
            found = assemble_shard(leaf, read.__getitem__, np.float32, tuple(index))
            np.testing.assert_array_equal(found, whole[tuple(index)])
            assert np.count_nonzero(found.base if axis is not None else found) == np.count_nonzero(found)


def test_devices_with_the_same_shard_read_it_once() -> None:
    config, source, reads = (
        config_of("tiny-llama"),
        random_tensors(config_of("tiny-llama")),
        collections.Counter(),
    )

    def read(name: str) -> np.ndarray:
        reads[name] += 1
        return source[name]

    mesh = make_mesh(4)
    for leaf in jax.tree.leaves(leaves(config, 4)):
        reads.clear()
        sharding = NamedSharding(mesh, leaf.spec)
        made = jax.make_array_from_callback(leaf.shape, sharding, shard_maker(leaf, read, np.float32))
        np.testing.assert_array_equal(made, assemble(leaf, source.__getitem__, np.float32))
        distinct = len({str(shard.index) for shard in made.addressable_shards})
        assert reads == collections.Counter([piece.name for piece in leaf.pieces] * distinct)
