"""The router: the kernel in the interpreter against its reference, and the H200 code."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.router import api, reference
from pallas_kernels.gemm.sorted_rows.api import sort_by_xla
from pallas_kernels.gemm.sorted_rows.gpu_check import used
from pallas_kernels.pointwise.quantize.reference import quantize_rows

interpreted, sorted_by_kernel = (
    functools.partial(one, interpret=plgpu.InterpretGPUParams()) for one in (api.route, api.route_and_sort)
)


def drawn(tokens, experts, columns):
    """Return x and w of small integers, whose logits are exact and often equal, and two biases."""
    rng = np.random.default_rng(tokens)
    x, w = (rng.integers(-1, 2, (rows, columns)) / 4 for rows in (tokens, experts))
    bias, score_bias = (rng.integers(-2, 3, experts) / 8 for _ in range(2))
    return *(jnp.asarray(each, jnp.bfloat16) for each in (x, w)), *map(jnp.float32, (bias, score_bias))


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "sigmoid", "how"),
    [
        (9, 128, 8, False, {}),
        (2, 32, 4, False, {"normalized": False}),
        (3, 160, 6, True, {"scale": 2.5}),
        (2, 24, 5, True, {"normalized": False}),
    ],
)
def test_the_kernel_equals_its_reference(tokens, experts, chosen, sigmoid, how):
    x, w, bias, score_bias = drawn(tokens, experts, 512)
    given = (x, w, bias, score_bias) if sigmoid else (x, w, None if how else bias)
    got, want = (
        jax.jit(functools.partial(one, chosen=chosen, **how))(*given)
        for one in (interpreted, reference.route)
    )
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_allclose(got[0], want[0], rtol=2e-6)


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "quantize", "kept"),
    [(8, 128, 8, True, None), (3, 24, 3, False, None), (4, 136, 2, True, 3)],
)
def test_it_sorts_as_the_sort_of_its_choice(tokens, experts, chosen, quantize, kept):
    x, w, *_ = drawn(tokens, experts, 512)
    padding = {} if kept is None else {"used": jnp.int32(kept)}
    run = functools.partial(sorted_by_kernel, chosen=chosen, quantize=quantize)
    weights, picked, *got = jax.jit(run)(x, w, **padding)
    want = jax.jit(functools.partial(reference.route, chosen=chosen))(x, w)
    np.testing.assert_array_equal(picked, want[1])
    np.testing.assert_allclose(weights, want[0], rtol=2e-6)
    groups, _ = jax.jit(sort_by_xla, static_argnums=2)(x, picked, experts, **padding)
    # NumPy takes parts of arrays: JAX would compile a program for each shape.
    groups, got, own = jax.tree.map(np.asarray, (groups, got, jax.jit(quantize_rows)(x) if quantize else x))
    rows = jax.tree.map(lambda part: part[groups.pairs // chosen], own)
    for one, other in zip(used(*got), used(groups, rows), strict=True):
        np.testing.assert_array_equal(one, other)
    assert jax.tree.structure(got[0]) != jax.tree.structure(groups)  # counters of tiles
    assert not got[0].arrived.any() and got[0].rows == groups.rows and got[0].partial == groups.partial
    if kept is not None:
        assert (np.asarray(got[0].places)[kept:] == len(groups.pairs)).all()


def test_a_token_of_nan_goes_to_experts_that_there_are():
    x, w, *_ = drawn(2, 32, 512)
    weights, experts = jax.jit(functools.partial(interpreted, chosen=3))(x.at[0, 3].set(jnp.nan), w)
    assert len({*experts[0].tolist()} & {*range(32)}) == 3
    assert np.isnan(np.asarray(weights[0])).all() and not np.isnan(np.asarray(weights[1])).any()


def test_the_kernel_names_unsupported_arguments():
    x, w = jnp.zeros((4, 512), jnp.bfloat16), jnp.zeros((32, 512), jnp.bfloat16)
    for given, chosen in (((x, w), 33), ((x, w[:, :448]), 2), ((jnp.float32(x), w), 2), ((x, w[:20]), 2)):
        with pytest.raises(ValueError, match="accepted are bfloat16"):
            api.route(*given, chosen=chosen)


@pytest.mark.parametrize(
    ("tokens", "experts", "columns", "chosen", "how"),
    [
        (64, 128, 2048, 8, {}),
        (1, 32, 2880, 4, {}),
        (8, 128, 2048, 8, {"quantize": True}),
        (1, 256, 2048, 8, {"quantize": False}),
    ],
)
def test_for_the_h200_it_is_one_kernel_that_spills_nothing(
    tmp_path, monkeypatch, tokens, experts, columns, chosen, how
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    shapes = [jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16) for rows in (tokens, experts)]
    one = functools.partial(api.route_and_sort if how else api.route, chosen=chosen, **how)
    compiled = compile_for_h200(one, *abstract(h200_mesh(), shapes))
    assert [thunk.kind for thunk in compiled.thunks].count("kCustomCall") == 1
    logs, ptx = (
        "".join(p.read_text(errors="replace") for p in tmp_path.glob(f"route*{end}"))
        for end in (".ptxas", ".ptx")
    )
    assert set(re.findall(r"(\d+) bytes spill", logs)) == {"0"}
    assert ptx.count("barrier.cluster.wait.acquire") == (2 if how else 1)
