"""Which experts a token goes to."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxflow.model.experts import likeliest


@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (33, 3)])
def test_the_likeliest_are_the_top_the_first_of_equals_before_the_others(experts, chosen):
    scores = jnp.asarray(np.random.default_rng(0).integers(0, 6, (64, experts)) / 6, jnp.float32)
    for got, want in zip(likeliest(scores, chosen), lax.top_k(scores, chosen), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
