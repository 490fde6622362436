"""The router chooses the experts of a token."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxflow.model.routing import likeliest


@pytest.mark.parametrize("experts", [8, 33])
def test_a_token_of_nan_goes_to_experts_that_there_are(experts):
    """A row that overflows stays within its own request. Otherwise its expert rows would overlap those of
    another token.
    """
    scores = jnp.full((2, experts), jnp.nan).at[1].set(jnp.arange(experts))
    weights, chosen = likeliest(scores, 2)
    assert sorted({*chosen[0].tolist()} & {*range(experts)}) == sorted(chosen[0].tolist()) and chosen[
        1
    ].tolist() == [
        experts - 1,
        experts - 2,
    ]
    assert np.isnan(np.asarray(weights[0])).all() and weights[1].tolist() == [experts - 1, experts - 2]


@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (33, 3)])
def test_the_likeliest_are_the_top_the_first_of_equals_before_the_others(experts, chosen):
    scores = jnp.asarray(np.random.default_rng(0).integers(0, 6, (64, experts)) / 6, jnp.float32)
    for got, want in zip(likeliest(scores, chosen), lax.top_k(scores, chosen), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
