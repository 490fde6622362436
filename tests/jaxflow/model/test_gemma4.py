"""Gemma 4: every part that its goldens have changes the logits, and layers of one model have other heads."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Weights, blanked, model, probes, wanted_probes

from jaxflow.config import ConfigError, ModelConfig, check_has_heads
from jaxflow.kv.device_cache import page_groups
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES
from jaxflow.model.graph import layer_ops, model_graph
from jaxflow.model.stage_split import split_layers
from jaxflow.model.weights import leaves, shapes

MIXTURE, DENSE, SHARED = "tiny-gemma4_text", "tiny-gemma4_dense", "tiny-gemma4_e2b"
Changed = Callable[[ModelConfig, Weights], tuple[ModelConfig, Weights]]


def other_full_layer(config: ModelConfig, **changes: object) -> ModelConfig:
    sliding, full = config.layers
    return dataclasses.replace(config, layers=(sliding, dataclasses.replace(full, **changes)))  # pyright: ignore[reportArgumentType]


def other_rope(config: ModelConfig, **changes: object) -> ModelConfig:
    rope = config.layers[1].rope
    assert rope is not None
    return other_full_layer(config, rope=dataclasses.replace(rope, **changes))  # pyright: ignore[reportArgumentType]


def without(config: ModelConfig, **changes: object) -> ModelConfig:
    return dataclasses.replace(config, **changes)  # pyright: ignore[reportArgumentType]


PARTS: dict[str, Changed] = {
    "the norm of values": lambda c, w: (without(c, value_norm=False), w),
    "the factor of the stream": lambda c, w: (c, blanked(w, "layer_scalar", 1.0)),
    "the frequencies of a whole head": lambda c, w: (other_rope(c, scaling="default", part=1.0), w),
    "the part that rotates": lambda c, w: (other_rope(c, part=1.0), w),
    "the scale of attention": lambda c, w: (without(c, attention_scale=None), w),
    "the soft cap": lambda c, w: (without(c, logits_soft_cap=None), w),
    "the router's input": lambda c, w: (c, blanked(w, "router_columns", 1.0)),
    "the size of the router's input": lambda c, w: (without(c, router_scales=False), w),
    "the experts' factors": lambda c, w: (c, blanked(w, "expert_factors", 1.0)),
    "the norm of the shared input": lambda c, w: (c, blanked(w, "shared_norm", 1.0)),
    "the norm of the experts' input": lambda c, w: (c, blanked(w, "routed_norm", 1.0)),
    "the norm of the shared output": lambda c, w: (c, blanked(w, "post_shared_norm", 1.0)),
    "the norm of the experts' output": lambda c, w: (c, blanked(w, "post_routed_norm", 1.0)),
}


def outer(w: Weights, key: str, value: float) -> Weights:
    return w | {key: jnp.full_like(w[key], value)}


LAYER_INPUTS: dict[str, Changed] = {
    "the embeddings of each layer": lambda c, w: (c, outer(w, "layer_embed", 0.0)),
    "the product of the embedding": lambda c, w: (c, outer(w, "layer_embed_proj", 0.0)),
    "the norm of the product": lambda c, w: (c, outer(w, "layer_embed_norm", 1.0)),
    "the gate of a layer's input": lambda c, w: (c, blanked(w, "layer_gate")),
    "the norm of a layer's input": lambda c, w: (c, blanked(w, "post_layer_norm", 1.0)),
    "the factor of the stream": lambda c, w: (c, blanked(w, "layer_scalar", 1.0)),
}


@pytest.mark.parametrize("name", [MIXTURE, DENSE, SHARED])
def test_the_whole_model_has_the_logits_of_the_golden(name: str) -> None:
    np.testing.assert_allclose(probes(name, *model(name)), wanted_probes(name), atol=1e-3)


@pytest.mark.parametrize("part", PARTS)
def test_no_part_can_be_left_out_of_the_golden(part: str) -> None:
    assert np.abs(probes(MIXTURE, *PARTS[part](*model(MIXTURE))) - wanted_probes(MIXTURE)).max() > 0.05


@pytest.mark.parametrize("part", LAYER_INPUTS)
def test_no_part_of_a_layers_input_can_be_left_out(part: str) -> None:
    changed = probes(SHARED, *LAYER_INPUTS[part](*model(SHARED)))
    assert np.abs(changed - wanted_probes(SHARED)).max() > 0.05


def test_layers_that_share_keys_and_values_have_no_pages() -> None:
    config, weights = model(SHARED)
    assert [config.cache_of(layer) for layer in range(5)] == [0, 1, 2, 1, 2]
    full, sliding = page_groups(config, jnp.float32, 1)
    assert (full.layers, sliding.layers) == ((2,), (0, 1))
    for index, layer in enumerate(weights["layers"]):
        rows = 4 if config.layers[index].shares_kv else 6  # query heads, and one key and one value
        assert layer["qkv"].shape[0] == rows * config.for_layer(config.layers[index]).head_dim
        assert ("k_norm" in layer) != config.layers[index].shares_kv
    tensors = {
        piece.name for leaf in jax.tree.leaves(leaves(config, kv_scales=True)) for piece in leaf.pieces
    }
    assert "model.layers.1.self_attn.k_scale" in tensors
    assert not any(name.startswith("model.layers.3.self_attn.k") for name in tensors)


def test_a_page_group_has_the_heads_of_its_layers() -> None:
    full, sliding = page_groups(model(MIXTURE)[0], jnp.float32, 1)
    assert (full.layers, full.kv_heads, full.head_dim, full.value_dim) == ((1,), (1,), 32, 32)
    assert (sliding.layers, sliding.kv_heads, sliding.head_dim, sliding.value_dim) == ((0,), (2,), 16, 16)
    on_two = page_groups(model(MIXTURE)[0], jnp.float32, 2)
    assert [group.kv_heads for group in on_two] == [(2,), (2,)]  # both devices hold the one head


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", [MIXTURE, SHARED])
def test_the_work_of_a_layer_is_that_of_its_weights(name: str, tp: int) -> None:
    """The bytes of the projections in the graph are those of the arrays on one device."""
    config = model(name)[0]
    for index, layer in enumerate(shapes(config, tp)["layers"]):
        work = {op.name: dict(op.demand)["step"].weight_bytes for op in layer_ops(config, index, tp)
                if "step" in dict(op.demand)}  # fmt: skip
        if name == MIXTURE:
            spread, whole = ("qkv", "out_proj"), ()
        else:
            spread, whole = ("out_proj", "up_gate", "down"), ("layer_gate", "layer_proj")
        assert all(work[key] == 2 * layer[key].size / tp for key in spread)
        assert all(work[key] == 2 * layer[key].size for key in whole)


def test_the_work_of_shared_layers_has_no_append_and_twice_the_mlp() -> None:
    config = model(SHARED)[0]
    own, shared = ({op.name: op for op in layer_ops(config, index)} for index in (1, 3))
    step = Composition(decode_tokens=4, decode_keys=9)
    assert "rope_append" in own and "rope_append" not in shared and "rope" in shared
    assert shared["rope"].work(step).kv_bytes == 0 < own["rope_append"].work(step).kv_bytes
    assert shared["up_gate"].work(step).flops == 2 * own["up_gate"].work(step).flops
    assert shared["decode_attention"].work(step) == own["decode_attention"].work(step)
    embed = {op.name: op for op in model_graph(config).before}["layer_embed"]
    table, proj = (shapes(config)[key] for key in ("layer_embed", "layer_embed_proj"))
    assert embed.work(step).weight_bytes == 2 * (4 * table.shape[1] + proj.size)


def test_a_pipeline_stage_refuses_layers_that_read_other_layers() -> None:
    config = model(SHARED)[0]
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2 .* keys and values of their own"):
        split_layers(config, 2, 1, DEVICES["H200"].rates)
    alone = tuple(dataclasses.replace(layer, shares_kv=False) for layer in config.layers)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2 .* embeddings of each layer"):
        split_layers(dataclasses.replace(config, layers=alone), 2, 1, DEVICES["H200"].rates)


def test_what_needs_equal_heads_refuses_them() -> None:
    with pytest.raises(ConfigError, match="equal heads"):
        check_has_heads(model(MIXTURE)[0], "an offloaded run")
