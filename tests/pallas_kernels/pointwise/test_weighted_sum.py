"""The sum of a token's rows: the reference, the kernel in the interpreter, and the H200 code."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pointwise.weighted_sum import api, reference

interpreted = functools.partial(api.weighted_sum, interpret=plgpu.InterpretGPUParams())


def given(tokens: int, chosen: int, columns: int, dtype, partial: bool):
    """Return rows, places and weights. Where pairs may have no row, the rows that no pair has are NaN."""
    rng, pairs = np.random.default_rng(columns), tokens * chosen
    y = rng.normal(size=(pairs, columns))
    places = rng.permutation(pairs)
    if partial:
        y[places[::3]] = np.nan
        places[::3] = pairs + np.arange(pairs)[::3]
    weights = jnp.asarray(rng.random((tokens, chosen)), jnp.float32)
    return jnp.asarray(y, dtype), jnp.asarray(places.reshape(tokens, chosen), jnp.int32), weights


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("tokens", [1, 65])
def test_the_rows_are_added_in_float32_from_the_first_to_the_last(tokens, partial):
    """The order does not depend on the other tokens. Weights are powers of 2, so that only sums are rounded."""
    y, places, weights = given(tokens, 8, 96, jnp.float32, partial)
    weights = jnp.exp2(jnp.round(jnp.log2(weights)))
    total = np.zeros((tokens, 96), np.float32)
    for place, weight in zip(np.asarray(places).T, np.asarray(weights).T, strict=True):
        rows = np.asarray(y)[np.minimum(place, len(y) - 1)] * weight[:, None]
        total += np.where((place < len(y))[:, None], rows, np.float32(0))
    one = jax.jit(functools.partial(reference.weighted_sum, partial=partial))
    np.testing.assert_array_equal(one(y, places, weights), total)
    np.testing.assert_array_equal(one(y, places[-1:], weights[-1:]), total[-1:])


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    ("tokens", "chosen", "columns"), [(13, 4, 384), (1, 8, 2048), (3, 1, 128), (3, 2, 96)]
)
def test_the_kernel_equals_its_reference(tokens, chosen, columns, partial):
    """Test one and several blocks of columns, more items than CTAs on an SM, and columns that XLA adds."""
    y, places, weights = given(tokens, chosen, columns, jnp.bfloat16, partial)
    got, want = (
        one(y, places, weights, partial=partial, sms=1) for one in (interpreted, reference.weighted_sum)
    )
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_the_kernel_names_unsupported_arguments():
    y, places, weights = given(3, 2, 128, jnp.bfloat16, False)
    for arguments in (
        (y.astype(jnp.float32), places, weights),
        (y, places, weights[:2]),
        (y, places, weights.astype(jnp.bfloat16)),
    ):
        with pytest.raises(ValueError, match=r"accepted are y bfloat16 \[M, D\]"):
            api.weighted_sum(*arguments)
    with pytest.raises(ValueError, match="sms=0: accepted are 1 to 132"):
        api.weighted_sum(y, places, weights, sms=0)


def _shapes(tokens: int, chosen: int, columns: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (
        jax.ShapeDtypeStruct((tokens * chosen, columns), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, chosen), jnp.int32),
        jax.ShapeDtypeStruct((tokens, chosen), jnp.float32),
    )


def test_for_the_h200_it_is_one_kernel_that_reads_16_bytes_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    compiled = compile_for_h200(api.weighted_sum, *abstract(h200_mesh(), _shapes(2048, 8, 2048)))
    assert [thunk.kind for thunk in compiled.thunks] == ["kCustomCall"]
    logs, ptx = (
        "".join(p.read_text(errors="replace") for p in tmp_path.glob(f"weighted_sum*{end}"))
        for end in (".ptxas", ".ptx")
    )
    assert set(re.findall(r"(\d+) bytes spill", logs)) == {"0"}
    assert len(re.findall(r"ld\.global\.v4", ptx)) >= 8  # each of the rows


def test_for_the_h200_xla_keeps_no_row_of_the_reference_in_memory():
    compiled = compile_for_h200(reference.weighted_sum, *abstract(h200_mesh(), _shapes(2048, 4, 2880)))
    assert len(compiled.thunks) == 1 and compiled.memory.temp_size_in_bytes < 2048 * 2880
