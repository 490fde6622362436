"""Residual add and norm in the interpreter against the reference, and the H200 code."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pointwise.norm import reference as norm_reference
from pallas_kernels.pointwise.norm.api import add_norm
from pallas_kernels.pointwise.norm.weighted_rows import WeightedRows
from pallas_kernels.pointwise.quantize import reference as quantize_reference
from pallas_kernels.quantized import Quantized

INTERPRET = plgpu.InterpretGPUParams()


def numbers(seed, *shape, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.bfloat16)


def true_values(h):
    return np.asarray(quantize_reference.dequantize(h) if isinstance(h, Quantized) else h, np.float32)


@settings(max_examples=5)
@given(
    rows=st.integers(1, 5) | st.just(13),
    width=st.sampled_from([128, 192, 256, 384, 704, 2048]),
    adds=st.integers(0, 2),
    centres=st.booleans(),
    quantizes=st.booleans(),
    offset=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
)
def test_add_norm_equals_its_reference(rows, width, adds, centres, quantizes, offset, seed):
    x, y = numbers(seed, rows, width, scale=3.0).at[0].set(0), numbers(seed + 1, rows, width)
    y, other = (
        y.at[0].set(0) if adds else None,
        numbers(seed + 4, rows, width).at[0].set(0) if adds > 1 else None,
    )
    weight, bias = numbers(seed + 2, width), numbers(seed + 3, width) if centres else None
    how = {
        "eps": 1e-5,
        "offset": 0.0 if centres else offset,
        "quantize": quantizes,
        "other": other,
        "sms": 1 if rows > 5 else None,
    }
    got_sum, got = add_norm(x, y, weight, bias, **how, interpret=INTERPRET)
    want_sum, want = norm_reference.add_norm(x, y, weight, bias, **how)
    np.testing.assert_array_equal(got_sum, want_sum)
    assert jax.tree.map(jnp.dtype, got) == jax.tree.map(jnp.dtype, want)
    # A sum in another order may round a value to its neighbour: 2^-8 of it in bfloat16, 2^-3 in e4m3.
    near = np.abs(true_values(want)) * (0.13 if quantizes else 0.008)
    assert (np.abs(true_values(got) - true_values(want)) <= near + 1e-2).all()
    error = np.linalg.norm(true_values(got) - true_values(want)) / max(
        np.linalg.norm(true_values(want)), 1e-6
    )
    assert error < (5e-3 if quantizes else 1e-3)


@pytest.mark.parametrize("quantizes", [False, True])
def test_a_sum_of_weighted_rows_equals_its_reference(quantizes):
    rng, (tokens, chosen, width) = np.random.default_rng(0), (5, 3, 320 if quantizes else 256)
    rows = numbers(0, 20, width).at[19].set(jnp.nan)  # no token has the last row
    places = jnp.asarray(rng.permutation(19)[: tokens * chosen].reshape(tokens, chosen), jnp.int32)
    places = places.at[1, 2].set(20).at[4].set(21)  # terms that add nothing
    shares = jnp.asarray(rng.uniform(size=(tokens, chosen)), jnp.float32)
    given = numbers(1, tokens, width), WeightedRows(rows, places, shares, partial=True), numbers(2, width)
    got_sum, got = add_norm(*given, eps=1e-5, quantize=quantizes, interpret=INTERPRET)
    want_sum, want = norm_reference.add_norm(*given, eps=1e-5, quantize=quantizes)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got_sum, want_sum)), rtol=2**-7)
    np.testing.assert_array_equal(got_sum[4], given[0][4])
    assert np.linalg.norm(true_values(got) - true_values(want)) < 0.01 * np.linalg.norm(true_values(want))


@pytest.mark.parametrize(("x", "y"), [((4, 100), (4, 100)), ((4, 256), (5, 256))])
def test_add_norm_names_unsupported_arguments(x, y):
    with pytest.raises(ValueError, match=r"x, y and other are .*: accepted are .* bfloat16 \[T, D\]"):
        add_norm(
            jnp.zeros(x, jnp.bfloat16), jnp.zeros(y, jnp.bfloat16), jnp.zeros(x[1], jnp.bfloat16), eps=1e-5
        )
    with pytest.raises(ValueError, match="sms=0: accepted are 1 to 132"):
        add_norm(jnp.zeros((4, 256), jnp.bfloat16), None, jnp.zeros(256, jnp.bfloat16), eps=1e-5, sms=0)


@pytest.mark.parametrize(("width", "quantizes"), [(4096, False), (8192, True), (3584, False), (2880, False)])
def test_for_the_h200_it_spills_nothing(width, quantizes, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    row, weight = (
        jax.ShapeDtypeStruct((2**19, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((width,), jnp.bfloat16),
    )  # 2^31 numbers and more
    other = {"other": row} if quantizes else {}  # the most that a row may need
    kernel = functools.partial(add_norm, eps=1e-5, quantize=quantizes, sms=20 if quantizes else None)
    arguments = abstract(h200_mesh(), ((row, row, weight), other))
    compiled = compile_for_h200(lambda given, other: kernel(*given, **other), *arguments)
    assert [thunk.kind for thunk in compiled.thunks] == ["kCustomCall"]
    logs, ptx = (
        "".join(p.read_text(errors="replace") for p in tmp_path.glob(f"add_norm*{end}"))
        for end in (".ptxas", ".ptx")
    )
    assert set(re.findall(r"(\d+) bytes spill", logs)) == {"0"}
    assert ("ld.global.v4" in ptx) or width == 3584
