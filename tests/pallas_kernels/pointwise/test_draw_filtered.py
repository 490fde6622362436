"""The draw under filters: the kernel that counts logits in bins against its reference."""

import functools

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pointwise.sample import api, reference

INTERPRET = plgpu.InterpretGPUParams()
KERNEL = jax.jit(functools.partial(api.draw_filtered, interpret=INTERPRET))
TWIN = jax.jit(reference.draw_filtered)


def rows_to_draw(seed, columns):
    """Return rows of every kind of softmax, with the other arguments of draw_filtered."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(12, columns)).astype(np.float32) * 3
    x[1] = np.round(x[1])  # ties
    x[2, 5:] = -np.inf
    x[3] = -np.inf
    x[4, :100] *= 1e30
    x[5] = 0.25  # more copies than there is room for
    x[6] = rng.permutation(columns) * 1e-30
    x[7, 40:60] += 50  # the limit of top-k lies below all bins
    x[8, 100] = 30
    temperature = np.array([1, 0.5, 1, 1, 2, 0.7, 1, 1e-3, 1, 0, 0.05, 1.3], np.float32)
    keys = rng.integers(2**32, size=(12, 3), dtype=np.uint32)
    min_p = np.where(np.arange(12) % 5 == 1, 0.01, 0).astype(np.float32)
    top_k = np.array([300, 0, 3, 0, 40, 9, columns - 1, 100, 60, 5, 200, 0], np.int32)
    top_p = np.array([0.9, 0.8, 0.5, 0.7, 1, 0.3, 0.6, 1, 0.99, 0.9, 0.999, 0.2], np.float32)
    return x, temperature, keys, min_p, top_k, top_p


@pytest.mark.parametrize("columns", [512, 4612])
def test_the_kernel_draws_the_tokens_of_its_reference(columns):
    """Also with full groups of units, more units, and columns that are no multiple of a unit."""
    rows = rows_to_draw(columns, columns)
    got, want = np.asarray(KERNEL(*rows)), np.asarray(TWIN(*rows))
    assert got.tolist() == want.tolist()


def test_a_row_alone_draws_its_token():
    rows = rows_to_draw(3, 512)
    together = np.asarray(KERNEL(*rows))
    order = np.random.default_rng(0).permutation(12)
    assert np.asarray(KERNEL(*(a[order] for a in rows))).tolist() == together[order].tolist()


def test_odd_widths_run_the_reference():
    rows = rows_to_draw(0, 514)
    assert KERNEL(*rows).tolist() == TWIN(*rows).tolist()
