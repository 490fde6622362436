"""The router as one kernel chooses as product and choice do, where a model's rule lets it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest

from jaxflow.config import SigmoidRouter
from jaxflow.model import one_router, ops
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.op_registry import Context, Site
from jaxflow.model.weights import dummy_weights
from pallas_kernels.gemm.router import reference
from pallas_kernels.kernel_set import REFERENCE

TOKENS = 5


@pytest.mark.parametrize(
    ("name", "change", "one"),
    [
        ("tiny-qwen3_moe", {}, True),
        ("tiny-qwen3_moe", {"norm_topk_prob": False}, True),
        ("tiny-gpt_oss", {}, True),
        ("tiny-glm4_moe", {"router": SigmoidRouter(scale=2.5)}, True),
        ("tiny-glm4_moe", {"router": SigmoidRouter(2, 1)}, False),
    ],
)
def test_one_router_is_product_and_choice(name, change, one, monkeypatch):
    monkeypatch.setattr(one_router.limits, "supports", lambda *_: True)  # the weights are in float32
    config = open_checkpoint(str(paths.MODELS / name), load_format="dummy").model_config
    config, seen = dataclasses.replace(config, **change), []

    def route(*given, **how):
        seen.append("one")
        return reference.route(*given, **how)

    w = next(layer for layer in dummy_weights(config, jnp.float32)["layers"] if "router" in layer)
    h = jnp.asarray(np.random.default_rng(0).normal(size=(TOKENS, config.hidden_size)), jnp.float32)
    kernels = dataclasses.replace(REFERENCE, route=route, route_max_tokens=TOKENS)
    contexts = Context(config, kernels, whole=True), Context(config, REFERENCE, whole=True)
    got, want = (jax.jit(lambda h, c=c: ops.router(Site(c, w), h))(h) for c in contexts)
    assert bool(seen) == one
    np.testing.assert_array_equal(got.experts, want.experts)
    np.testing.assert_allclose(got.weights, want.weights, rtol=1e-6)


@pytest.mark.parametrize(
    ("whole", "sms", "tokens"), [(False, None, TOKENS), (True, 64, TOKENS), (True, None, TOKENS - 1)]
)
def test_a_plan_that_cuts_tokens_or_bounds_sms_has_two_kernels(whole, sms, tokens, monkeypatch):
    monkeypatch.setattr(one_router.limits, "supports", lambda *_: True)
    config = open_checkpoint(str(paths.MODELS / "tiny-qwen3_moe"), load_format="dummy").model_config
    w = dummy_weights(config, jnp.float32)["layers"][0]
    kernels = dataclasses.replace(REFERENCE, route=None, route_max_tokens=tokens)
    site = Site(Context(config, kernels, whole=whole, sms=sms), w)
    jax.eval_shape(lambda h: ops.router(site, h), jnp.zeros((TOKENS, config.hidden_size)))


@pytest.mark.parametrize("name", ["tiny-qwen3_moe", "tiny-gpt_oss"])
def test_rows_that_the_router_sorted_give_the_same_layer(name, monkeypatch):
    for limit in ("supports", "supports_sort"):
        monkeypatch.setattr(one_router.limits, limit, lambda *_: True)
    config, seen = open_checkpoint(str(paths.MODELS / name), load_format="dummy").model_config, []

    def route_and_sort(*given, **how):
        seen.append("sorted")
        return reference.route_and_sort(*given, **how)

    def layer(c, h):
        site = Site(c, w)
        routing = ops.router(site, h)
        return ops.expert_down(site, ops.expert_up_gate(site, h, routing), routing)

    w = dummy_weights(config, jnp.float32)["layers"][0]
    h = jnp.asarray(np.random.default_rng(0).normal(size=(TOKENS, config.hidden_size)), jnp.float32)
    limits = {"route_max_tokens": TOKENS, "route_and_sort_max_tokens": TOKENS}
    kernels = dataclasses.replace(REFERENCE, route_and_sort=route_and_sort, sort_rows=None, **limits)
    got = jax.jit(functools.partial(layer, Context(config, kernels, whole=True)))(h)
    want = jax.jit(functools.partial(layer, Context(config, REFERENCE, whole=True)))(h)
    assert seen
    np.testing.assert_array_equal(got, want)
