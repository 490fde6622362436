"""A sigmoid router chooses experts of the best groups by biased scores, and weighs
them by the scores themselves.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.config import ModelConfig, SigmoidRouter
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.sigmoid_router import choose_experts
from pallas_kernels.pointwise.top_k.reference import top_k

EXPERTS, CHOSEN = 8, 3


@functools.cache
def config(router: SigmoidRouter, norm_topk_prob: bool = True) -> ModelConfig:
    model = open_checkpoint(str(paths.MODELS / "tiny-glm4_moe")).model_config
    return dataclasses.replace(model, router=router, norm_topk_prob=norm_topk_prob)


def by_definition(logits: np.ndarray, bias: np.ndarray, router: SigmoidRouter, normed: bool) -> np.ndarray:
    """Return each expert's weight, 0 for experts that are not chosen."""
    scores = 1 / (1 + np.exp(-logits))
    ranked, weights = scores + bias, np.zeros(EXPERTS)
    groups = np.split(np.arange(EXPERTS), router.groups)
    best = sorted(groups, key=lambda group: -np.sort(ranked[group])[-2:].sum())[: router.groups_per_token]
    chosen = sorted(np.concatenate(best), key=lambda expert: -ranked[expert])[:CHOSEN]
    weights[chosen] = scores[chosen] / (scores[chosen].sum() if normed else 1)
    return weights * router.scale


@given(
    st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_it_is_the_definition(groups: tuple[int, int], normed: bool, seed: int) -> None:
    rng, router = np.random.default_rng(seed), SigmoidRouter(*groups, scale=2.5)
    logits, bias = rng.normal(size=(5, EXPERTS)), rng.normal(size=EXPERTS) / 2
    choose = jax.jit(functools.partial(choose_experts, top_k=top_k), static_argnums=2)
    given_ = jnp.asarray(logits, jnp.float32), jnp.asarray(bias, jnp.float32)
    experts, weights = map(np.asarray, choose(*given_, config(router, normed)))
    for token in range(5):
        found = np.zeros(EXPERTS)
        found[experts[token]] = weights[token]
        np.testing.assert_allclose(found, by_definition(logits[token], bias, router, normed), rtol=1e-5)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_a_token_of_nan_goes_to_experts_that_there_are(groups: tuple[int, int]) -> None:
    """The rows of its experts would overlap those of other tokens otherwise."""
    logits = jnp.full((1, EXPERTS), jnp.nan)
    experts, weights = choose_experts(logits, jnp.zeros(EXPERTS), config(SigmoidRouter(*groups)), top_k=top_k)
    assert len({*experts[0].tolist()} & {*range(EXPERTS)}) == CHOSEN and np.isnan(np.asarray(weights)).all()
