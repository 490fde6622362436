"""The sum of a token's rows: its order, pairs without a row, and the H200 code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh

from jaxflow.model.routing import weighted_sum
from pallas_kernels.gemm.grouped.groups import Groups


def groups(places: jax.Array, partial: bool) -> Groups:
    """Return groups of which only the places matter."""
    unused = jnp.zeros(1, jnp.int32)
    return Groups(places, *(unused,) * 6, rows=1, align=1, partial=partial)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("tokens", [1, 65])
def test_the_rows_are_added_in_float32_from_the_first_to_the_last(tokens, partial):
    """The order does not depend on the other tokens. Weights are powers of 2, so that only sums are rounded.

    Where pairs may have no row, the rows that no pair has are NaN.
    """
    rng, pairs = np.random.default_rng(96), tokens * 8
    y, places = rng.normal(size=(pairs, 96)).astype(np.float32), rng.permutation(pairs)
    if partial:
        y[places[::3]] = np.nan
        places[::3] = pairs + np.arange(pairs)[::3]
    places = places.reshape(tokens, 8)
    weights = np.exp2(rng.integers(-6, 1, (tokens, 8))).astype(np.float32)
    total = np.zeros((tokens, 96), np.float32)
    for place, weight in zip(places.T, weights.T, strict=True):
        rows = y[np.minimum(place, len(y) - 1)] * weight[:, None]
        total += np.where((place < len(y))[:, None], rows, np.float32(0))
    one = jax.jit(weighted_sum)
    listed = groups(jnp.asarray(places, jnp.int32), partial)
    np.testing.assert_array_equal(one(y, listed, weights), total)
    last = groups(listed.places[-1:], partial)
    np.testing.assert_array_equal(one(y, last, weights[-1:]), total[-1:])


def test_for_the_h200_xla_keeps_no_rows_in_memory():
    def run(y, places, weights):
        return weighted_sum(y, groups(places, False), weights)

    shapes = (
        jax.ShapeDtypeStruct((2048 * 4, 2880), jnp.bfloat16),
        jax.ShapeDtypeStruct((2048, 4), jnp.int32),
        jax.ShapeDtypeStruct((2048, 4), jnp.float32),
    )
    compiled = compile_for_h200(run, *abstract(h200_mesh(), shapes))
    assert len(compiled.thunks) == 1 and compiled.memory.temp_size_in_bytes < 2048 * 2880
