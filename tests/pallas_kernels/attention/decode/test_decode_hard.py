"""The hard checks of decode attention detect wrong kernels."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.decode.gpu_check import TOLERANCE
from pallas_kernels.attention.decode.gpu_check_hard import SCORES, worst_kind

WANT = jnp.ones((2 * len(SCORES), 4, 64))


@pytest.mark.parametrize("kind", range(len(SCORES)))
@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1.1])
def test_a_kind_of_scores_that_is_wrong_fails_all(kind, wrong):
    """A NaN in any kind of scores must fail, not only in the first."""
    assert worst_kind(WANT, WANT) < TOLERANCE
    assert not worst_kind(WANT.at[kind].set(wrong), WANT) < TOLERANCE
