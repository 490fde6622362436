"""Quantization of rows in the interpreter against its reference, and the H200 code."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pointwise.quantize import reference
from pallas_kernels.pointwise.quantize.api import quantize_rows


def test_quantize_rows_equals_its_reference():
    """Test rows of all sizes, one of zeros, and more rows than CTAs on an SM."""
    rng = np.random.default_rng(0)
    x = (
        jnp.asarray(rng.normal(size=(13, 320)) * 10.0 ** rng.integers(-12, 12, (13, 1)), jnp.bfloat16)
        .at[2]
        .set(0)
    )
    got, want = (
        quantize_rows(x, sms=1, interpret=plgpu.InterpretGPUParams()),
        reference.quantize_rows(x, sms=1),
    )
    np.testing.assert_array_equal(got.scale, want.scale)
    # 1 / scale rounds once more than a division: a number between two of e4m3's may fall to the other.
    bits = [np.asarray(q.values).view(np.int8).astype(int) for q in (got, want)]
    assert np.abs(bits[0] - bits[1]).max() <= 1 and (bits[0] == bits[1]).mean() > 0.99


@pytest.mark.parametrize(("start", "top_rows"), [(0, 2), (7, 10), (3, 2), (1, 99)])
def test_its_first_rows_may_be_anothers(start, top_rows):
    """Test some, none and all rows from `top`: equal bits."""
    x, top = jax.random.normal(jax.random.key(0), (2, 5, 128), jnp.bfloat16)
    chosen = jnp.concatenate([top, x])[jnp.asarray([i if start + i < top_rows else 5 + i for i in range(5)])]
    for quantize in (
        functools.partial(quantize_rows, interpret=plgpu.InterpretGPUParams()),
        reference.quantize_rows,
    ):
        jax.tree.map(
            np.testing.assert_array_equal,
            quantize(x, top, jnp.int32(top_rows), start=start),
            quantize(chosen),
        )
    with pytest.raises(ValueError, match="or None twice"):
        quantize_rows(x, top)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 100), jnp.bfloat16), ((4, 128), jnp.float32), ((1, 32768), jnp.bfloat16)]
)
def test_quantize_rows_names_unsupported_arguments(shape, dtype):
    with pytest.raises(ValueError, match=r"bfloat16 \[M, C\]"):
        quantize_rows(jnp.zeros(shape, dtype))
    with pytest.raises(ValueError, match="sms=0: accepted are 1 to 132"):
        quantize_rows(jnp.zeros((4, 128), jnp.bfloat16), sms=0)


def test_for_the_h200_it_is_one_kernel_that_spills_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    x = jax.ShapeDtypeStruct((2**18, 16384), jnp.bfloat16)
    compiled = compile_for_h200(functools.partial(quantize_rows, sms=20), *abstract(h200_mesh(), (x,)))
    assert [thunk.kind for thunk in compiled.thunks] == ["kCustomCall"]
    logs, ptx = (
        "".join(p.read_text(errors="replace") for p in tmp_path.glob(f"quantize_rows*{end}"))
        for end in (".ptxas", ".ptx")
    )
    assert set(re.findall(r"(\d+) bytes spill", logs)) == {"0"}
    assert "ld.global.v4" in ptx
