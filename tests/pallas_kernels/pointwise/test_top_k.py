"""The largest scores of each row: the reference, the kernel in the interpreter, and the H200 code."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pointwise.top_k import api, reference

interpreted = functools.partial(api.top_k, interpret=plgpu.InterpretGPUParams())


def drawn(rows: int, number: int) -> jax.Array:
    """Return scores with many equal ones, some of them negative, and a row with -inf."""
    drawn = np.random.default_rng(number).integers(-20, 20, (rows, number)) / 6
    return jnp.asarray(drawn + 0.0, jnp.float32).at[0, ::2].set(-jnp.inf)


@pytest.mark.parametrize("top_k", [reference.top_k, interpreted])
@pytest.mark.parametrize("experts", [8, 33])
def test_a_token_of_nan_goes_to_experts_that_there_are(top_k, experts):
    """A row that overflows stays within its own request.

    Otherwise its expert rows would overlap those of another token.
    """
    scores = jnp.full((2, experts), jnp.nan).at[1].set(jnp.arange(experts))
    weights, chosen = top_k(scores, 2)
    first, second = chosen[0].tolist()
    assert first != second and {first, second} <= {*range(experts)}
    assert np.isnan(np.asarray(weights[0])).all()
    assert chosen[1].tolist() == weights[1].tolist() == [experts - 1, experts - 2]


@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (33, 3)])
def test_the_largest_come_the_first_of_equals_before_the_others(experts, chosen):
    scores = drawn(64, experts)
    for got, want in zip(reference.top_k(scores, chosen), lax.top_k(scores, chosen), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("experts", "chosen"), [(128, 8), (32, 4), (200, 3), (16, 16), (8, 2)])
def test_the_kernel_equals_its_reference(experts, chosen):
    """Test numbers that fill the threads and numbers that do not, and more rows than CTAs on an SM."""
    scores = drawn(13, experts)
    for softmax in (False, True):
        got, want = (one(scores, chosen, softmax=softmax, sms=1) for one in (interpreted, reference.top_k))
        np.testing.assert_array_equal(got[1], want[1])
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6 if softmax else 0)


def test_the_kernel_names_unsupported_arguments():
    for scores, chosen in (
        (jnp.zeros((4, 8)), 9),
        (jnp.zeros((4, 8)), 0),
        (jnp.zeros((4, 8), jnp.bfloat16), 2),
    ):
        with pytest.raises(ValueError, match="accepted are float32"):
            api.top_k(scores, chosen)
    with pytest.raises(ValueError, match="sms=0: accepted are 1 to 132"):
        api.top_k(jnp.zeros((4, 8)), 2, sms=0)


def test_for_the_h200_it_is_one_kernel_that_spills_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    scores = jax.ShapeDtypeStruct((2048, 128), jnp.float32)
    one = functools.partial(api.top_k, chosen=8, softmax=True)
    compiled = compile_for_h200(one, *abstract(h200_mesh(), (scores,)))
    assert [thunk.kind for thunk in compiled.thunks] == ["kCustomCall"]
    logs, ptx = (
        "".join(p.read_text(errors="replace") for p in tmp_path.glob(f"top_k*{end}"))
        for end in (".ptxas", ".ptx")
    )
    assert set(re.findall(r"(\d+) bytes spill", logs)) == {"0"}
    assert {*re.findall(r"(?:max|min|setp\.lt)\.[su]32", ptx)} == {"max.s32", "min.s32", "setp.lt.s32"}
