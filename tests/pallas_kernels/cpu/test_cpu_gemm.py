"""Laws of the products on a CPU: they equal the reference implementation, and one row copies no weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu.gemm import e4m3_numbers, gemm, one_row
from pallas_kernels.gemm import reference
from pallas_kernels.gemm.int4.reference import quantize_int4
from pallas_kernels.pointwise.quantize.reference import quantize_blocks, quantize_rows
from pallas_kernels.quantized import Quantized

WEIGHTS = {
    "float32": lambda w: w,
    "bfloat16": lambda w: w.astype(jnp.bfloat16),
    "e4m3": quantize_rows,
    "one scale": lambda w: Quantized(w.astype(jnp.float8_e4m3fn), jnp.float32(0.5)),
    "scales of 128": lambda w: Quantized(*_blocks(w)),
    "int4": quantize_int4,
}


def _blocks(w):
    found = quantize_blocks(w)
    return found.values, found.scale


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@pytest.mark.parametrize("quantized", [False, True], ids=["floats", "e4m3 rows"])
@pytest.mark.parametrize("n, k", [(96, 192), (7, 64), (64, 3136)])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_products_equal_the_reference(kind, rows, n, k, quantized):
    w = WEIGHTS[kind](normal(0, n, k))
    x = normal(1, rows, k).astype(jnp.bfloat16 if kind == "bfloat16" else jnp.float32)
    given = quantize_rows(x) if quantized else x
    bias = normal(2, n)
    one, other = (np.asarray(f(given, w, bias, out_dtype=jnp.float32)) for f in (gemm, reference.gemm))
    np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-4 * np.abs(other).max())


@pytest.mark.parametrize("k", [1, 63, 96, 576, 47 * 64, 49 * 64, 53 * 64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_one_row_sums_every_column_once(dtype, k):
    w = jnp.ones((5, k), dtype)
    x = jnp.asarray(2.0 ** (np.arange(k) % 8), jnp.float32)[None]
    assert np.asarray(one_row(x, w)).tolist() == [[float(x.sum())] * 5]


def test_every_e4m3_number_is_converted_exactly():
    bits = jnp.arange(256, dtype=jnp.uint8)
    numbers = jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
    want, got = np.asarray(numbers, np.float32), np.asarray(jax.jit(e4m3_numbers)(numbers))
    finite = ~np.isnan(want)
    assert finite.sum() == 254
    np.testing.assert_array_equal(got[finite], want[finite])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "e4m3"])
def test_one_row_needs_no_float32_copy_of_the_weights(kind):
    w = WEIGHTS[kind](normal(0, 3072, 576))
    x = normal(1, 1, 576)
    x = quantize_rows(x) if kind == "e4m3" else x.astype(w.dtype)
    program = jax.jit(lambda x, w: gemm(x, w, out_dtype=jnp.float32)).lower(x, w).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * 3072 * 576 / 2
