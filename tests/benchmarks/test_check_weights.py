"""The weights of a check: numbers in several columns, and matrices with wrong columns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import MODELS

from benchmarks import check_weights
from benchmarks.check_weights import first_of_group, gains, repeat_matrix
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from pallas_kernels.pointwise.quantize.reference import dequantize, quantize_rows
from pallas_kernels.quantized import Quantized


def test_loud_rows_are_as_many_as_asked_and_evenly_spaced():
    scale = check_weights.loud_rows(1000, 16)
    assert (scale == 1).sum() == 16 and (scale < 0.1).sum() == 984
    assert set(np.diff(np.flatnonzero(scale == 1))) <= {62, 63}


def wide(weight: jax.Array | Quantized) -> np.ndarray:
    """Return the numbers that a weight stands for."""
    return np.asarray(dequantize(weight) if isinstance(weight, Quantized) else weight)


@pytest.mark.parametrize(
    ("copies", "rows", "columns", "quantized"), [(1, 2, 3, True), (4, 3, 2, False), (8, 2, 4, True)]
)
def test_a_product_of_copies_is_the_copies_of_a_product(copies, rows, columns, quantized):
    weight = jax.random.normal(jax.random.key(0), (rows * copies, columns * copies))
    small = np.asarray(jax.random.normal(jax.random.key(1), (columns,)))
    stored = quantize_rows(weight) if quantized else weight
    exact, found = wide(stored), wide(repeat_matrix(stored, copies))
    product = found @ (np.repeat(small, copies) * np.resize(gains(copies), columns * copies))
    expected = exact[::copies, ::copies] @ small * gains(copies).sum() / copies**0.5
    np.testing.assert_allclose(product, np.outer(expected, gains(copies)).ravel(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantized", [False, True])
def test_more_copies_of_copies_are_those_of_the_drawn_matrix(quantized):
    weight = jax.random.normal(jax.random.key(0), (16, 24))
    weight = quantize_rows(weight) if quantized else weight
    twice = repeat_matrix(repeat_matrix(weight, 4), 8, before=4)
    for one, other in zip(jax.tree.leaves(twice), jax.tree.leaves(repeat_matrix(weight, 8)), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=1e-5)


def test_of_queries_keys_and_values_the_values_alone_have_groups():
    weight = jax.random.normal(jax.random.key(0), (2 * 4 * 8, 16))
    found = np.asarray(repeat_matrix(weight, 8, head=(4, 8))).reshape(2, 4, 8, 16)
    drawn = np.asarray(weight)[:, first_of_group(16, 8)].reshape(2, 4, 8, 16) * 8**-0.5
    np.testing.assert_allclose(found[:, :3], drawn[:, :3], rtol=1e-6)
    values = drawn[:, 3, :1] * gains(8)[:, None]
    np.testing.assert_allclose(found[:, 3], values, rtol=1e-6)


def test_copies_average_their_rounding_errors():
    weight, x = (jax.random.normal(jax.random.key(i), (1024, 1024)) for i in (0, 1))
    errors = {}
    for copies in (1, 16):
        inputs = x[:, first_of_group(1024, copies)] * np.resize(gains(copies), 1024)
        matrix = wide(repeat_matrix(weight, copies))
        exact, rounded = (a @ matrix.T for a in (inputs, dequantize(quantize_rows(inputs))))
        errors[copies] = float(jnp.linalg.norm(exact - rounded) / jnp.linalg.norm(exact))
    assert errors[16] < errors[1] / 3


@pytest.mark.parametrize(
    ("model", "expected"), [("tiny-llama", 8), ("tiny-qwen3_moe", 1), ("tiny-deepseek_v3", 1)]
)
def test_copies_divide_a_dense_models_widths(model, expected):
    config = open_checkpoint(str(MODELS / model)).model_config
    assert check_weights.most_copies(config, 8) == expected


def test_a_missing_sum_keeps_the_first_devices_columns():
    matrix = jnp.ones((3, 8))
    assert check_weights.first_columns(matrix, 4).sum(0).tolist() == [3, 3, 0, 0, 0, 0, 0, 0]
    columns = check_weights.swapped_halves(jnp.arange(8.0)[None])
    assert columns[0].tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
