"""Gemma 4: every part that its goldens have changes the logits, and layers of one model have other heads."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from probes import Weights, blanked, model, probes, wanted_probes

from jaxflow.config import ConfigError, ModelConfig, check_has_heads
from jaxflow.kv.device_cache import page_groups
from jaxflow.model.graph import layer_ops
from jaxflow.model.weights import shapes

MIXTURE, DENSE = "tiny-gemma4_text", "tiny-gemma4_dense"
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


@pytest.mark.parametrize("name", [MIXTURE, DENSE])
def test_the_whole_model_has_the_logits_of_the_golden(name: str) -> None:
    np.testing.assert_allclose(probes(name, *model(name)), wanted_probes(name), atol=1e-3)


@pytest.mark.parametrize("part", PARTS)
def test_no_part_can_be_left_out_of_the_golden(part: str) -> None:
    assert np.abs(probes(MIXTURE, *PARTS[part](*model(MIXTURE))) - wanted_probes(MIXTURE)).max() > 0.05


def test_a_page_group_has_the_heads_of_its_layers() -> None:
    full, sliding = page_groups(model(MIXTURE)[0], jnp.float32, 1)
    assert (full.layers, full.kv_heads, full.head_dim, full.value_dim) == ((1,), (1,), 32, 32)
    assert (sliding.layers, sliding.kv_heads, sliding.head_dim, sliding.value_dim) == ((0,), (2,), 16, 16)
    on_two = page_groups(model(MIXTURE)[0], jnp.float32, 2)
    assert [group.kv_heads for group in on_two] == [(2,), (2,)]  # both devices hold the one head


@pytest.mark.parametrize("tp", [1, 2])
def test_the_work_of_a_layer_is_that_of_its_weights(tp: int) -> None:
    """The bytes of the projections in the graph are those of the arrays on one device."""
    config = model(MIXTURE)[0]
    for index, layer in enumerate(shapes(config, tp)["layers"]):
        work = {op.name: dict(op.demand)["step"].weight_bytes for op in layer_ops(config, index, tp)
                if "step" in dict(op.demand)}  # fmt: skip
        for name in ("qkv", "out_proj"):
            assert work[name] == 2 * layer[name].size / tp


def test_what_needs_equal_heads_refuses_them() -> None:
    with pytest.raises(ConfigError, match="equal heads"):
        check_has_heads(model(MIXTURE)[0], "an offloaded run")
