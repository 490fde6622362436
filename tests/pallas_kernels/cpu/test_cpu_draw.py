"""The draw of a CPU against its reference."""

import jax
import numpy as np
import pytest

from pallas_kernels.cpu.draw import draw
from pallas_kernels.pointwise.draw import reference


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("limited", [False, True])
def test_a_draw_equals_its_reference(temperature, limited):
    """For greedy rows alone and for greedy rows beside others, with equal largest logits and with NaN."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 300)).astype(np.float32).round(1)
    x[1], x[2, 100], x[3, 7] = -np.inf, np.nan, 9
    heat = np.where(np.arange(5) == 4, temperature, 0).astype(np.float32)
    keys = rng.integers(2**32, size=(5, 3), dtype=np.uint32)
    limit = np.array([0, -1, -1, np.inf, 0.5], np.float32) if limited else None
    assert (
        jax.jit(draw)(x, heat, keys, limit).tolist() == jax.jit(reference.draw)(x, heat, keys, limit).tolist()
    )
