"""The reference implementation of GEMM against float64 in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gemm import reference as gemm_reference
from pallas_kernels.gemm.int4.reference import dequantize_int4, quantize_int4
from pallas_kernels.pointwise.quantize import reference as quantize_reference
from pallas_kernels.quantized import Quantized

ACTIVATIONS = {
    "silu": lambda v: v / (1 + np.exp(-v)),
    "gelu_tanh": lambda v: 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3))),
    "relu": lambda v: np.maximum(v, 0),
}


def exact(x, w, bias, residual, activation, gate_block):
    y = x @ w.T + (0 if bias is None else bias)
    act = ACTIVATIONS.get(activation, lambda v: v)
    if gate_block:
        pair = y.reshape(len(y), -1, 2, gate_block)
        y = (act(pair[:, :, 0]) * pair[:, :, 1]).reshape(len(y), -1)
    else:
        y = act(y)
    return y + (0 if residual is None else residual)


def close(got, want, tolerance=1e-5):
    assert np.linalg.norm(np.asarray(got, np.float64) - want) <= tolerance * np.linalg.norm(want)


@settings(max_examples=14)
@given(
    seed=st.integers(0, 2**32 - 1),
    m=st.sampled_from([1, 5]),
    activation=st.sampled_from([None, *ACTIVATIONS]),
    gate_block=st.sampled_from([None, 16, 64]),
    bias=st.booleans(),
    residual=st.booleans(),
    weights=st.sampled_from(["plain", "fp8", "int4"]),
    activations=st.sampled_from(["plain", "rows", "blocks", "one"]),
)
def test_gemm_is_the_product_and_its_epilogue(
    seed, m, activation, gate_block, bias, residual, weights, activations
):
    rng = np.random.default_rng(seed)
    n, k = 256, 256
    activation = "silu" if gate_block and activation is None else activation
    if weights == "int4" and activations != "plain":
        activations = "plain"
    x, w, b = (rng.normal(size=shape).astype(np.float32) for shape in ((m, k), (n, k), (n,)))
    r = rng.normal(size=(m, n // 2 if gate_block else n)).astype(np.float32)
    b, r = (b if bias else None), (r if residual else None)
    x_in = {
        "plain": lambda x: x,
        "rows": quantize_reference.quantize_rows,
        "blocks": quantize_reference.quantize_blocks,
        "one": lambda x: Quantized(x.astype(jnp.float8_e4m3fn), jnp.float32(0.5)),
    }[activations](jnp.asarray(x))
    w_in = {"plain": lambda w: w, "fp8": quantize_reference.quantize_rows, "int4": quantize_int4}[weights](
        jnp.asarray(w)
    )
    seen_x = quantize_reference.dequantize(x_in) if isinstance(x_in, Quantized) else x_in
    seen_w = {
        "plain": lambda w: w,
        "fp8": quantize_reference.dequantize,
        "int4": lambda w: dequantize_int4(w, jnp.float32),
    }[weights](w_in)
    if activations in ("rows", "one") and weights == "plain":
        # Products of these operands run in bfloat16.
        w_in = seen_w = seen_w.astype(jnp.bfloat16).astype(jnp.float32)
    settings = {"activation": activation, "gate_block": gate_block}
    got = gemm_reference.gemm(x_in, w_in, b, residual=r, out_dtype=jnp.float32, **settings)
    want = exact(np.asarray(seen_x, np.float64), np.asarray(seen_w, np.float64), b, r, **settings)
    close(got, want)
    quantized = gemm_reference.gemm(
        x_in, w_in, b, residual=r, out_dtype=jnp.float32, quantize=True, **settings
    )
    assert isinstance(quantized, Quantized) and quantized.scale.shape == (m, quantized.shape[1] // 128)
    close(quantize_reference.dequantize(quantized), want, 0.04)  # e4m3 keeps 3 bits


def test_the_result_has_the_dtype_of_x_by_default():
    x, w = jnp.ones((2, 128), jnp.bfloat16), jnp.ones((64, 128), jnp.bfloat16)
    assert gemm_reference.gemm(x, w).dtype == jnp.bfloat16
    assert gemm_reference.gemm(x, w, out_dtype=jnp.float32).dtype == jnp.float32
    assert gemm_reference.gemm(quantize_reference.quantize_rows(x), w).dtype == jnp.bfloat16


@pytest.mark.parametrize("zero", [0.0, 1e-30])
def test_zero_rows_are_quantized_to_zeros(zero):
    q = quantize_reference.quantize_rows(jnp.full((2, 128), zero))
    assert np.isfinite(np.asarray(q.scale)).all()
    assert np.abs(np.asarray(quantize_reference.dequantize(q))).max() < 1e-10
