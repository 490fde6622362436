"""The limits of top-k and top-p: XLA's search against a sort, the kernel against XLA's search."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pointwise.sample import api, limits
from pallas_kernels.pointwise.sample.api import token_limits
from pallas_kernels.pointwise.sample.limits import largest_limit

INTERPRET = plgpu.InterpretGPUParams()
TWIN = jax.jit(limits.token_limits)


@jax.jit
def kept(x, k):
    return x >= largest_limit(x, jnp.ones_like, k)[:, None]


normal = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False) | st.sampled_from(
    [-np.inf, -0.0, 0.0, 1.0]
)


@settings(max_examples=20, deadline=None)
@given(st.lists(normal, min_size=33, max_size=33), st.integers(1, 33))
def test_limit_is_the_kth_largest(values, k):
    x = np.array([values], np.float32)
    assert np.asarray(kept(x, np.array([k], np.float32))).tolist() == (x >= np.sort(x[0])[-k]).tolist()


def rows_to_search(seed, columns):
    """Return rows of every kind, with the other arguments of token_limits."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(8, columns)).astype(np.float32) * 3
    x[1] = np.round(x[1])  # ties
    x[2, 5:] = -np.inf
    x[3] = -np.inf
    x[4, :100] *= 1e30
    x[5] = 0.25
    x[6] = rng.permutation(columns) * 1e-30  # all together in nearly nothing
    peak = np.where(np.isfinite(x.max(-1)), x.max(-1), 0).astype(np.float32)
    heat = np.array([1, 0.5, 1, 1, 2, 0.7, 1, 1e-3], np.float32)
    floor = np.where(np.arange(8) == 7, peak - 1, -np.inf).astype(np.float32)
    k = np.array([700, columns, 3, columns, 40, 9, columns - 1, columns], np.float32)
    p = np.array([0.9, 0.8, 0.5, 0.7, 1, 0.3, 0.6, 0.99], np.float32)
    total = np.exp((x - peak[:, None]) / heat[:, None]).sum(-1).astype(np.float32)
    return x, peak, heat, total, floor, k, p


def kernel(x, peak, heat, total, floor, k, p, wanted):
    args = map(jnp.asarray, (x, peak, heat, floor, k, p, wanted))
    return np.asarray(token_limits(*args, interpret=INTERPRET))


@pytest.mark.parametrize(("columns", "room"), [(512, 64), (4612, 64), (2308, 1)])
def test_the_kernel_keeps_the_tokens_of_its_reference(columns, room, monkeypatch):
    """Also with full groups of units and units beside them, and with room for few copies."""
    monkeypatch.setattr(api, "_ROOM", room)
    x, *rest = rows_to_search(columns, columns)
    wanted = np.ones(8, bool)
    got = kernel(x, *rest, wanted)
    want = np.nan_to_num(np.asarray(TWIN(x, *rest, wanted)), nan=-np.inf)
    ours, theirs = x >= got[:, None], x >= want[:, None]
    finite = np.isfinite(x)
    assert ((ours == theirs) | ~finite).all(1).tolist() == [True] * 8


def test_rows_that_nobody_wants_are_left_alone():
    x, *rest = rows_to_search(0, 512)
    wanted = np.arange(8) == 4
    got = kernel(x, *rest, wanted)
    all_of_them = np.asarray(TWIN(x, *rest, np.ones(8, bool)))
    assert got[4] == all_of_them[4]
    assert (got[~wanted] == rest[3][~wanted]).all()
    assert (np.asarray(TWIN(x, *rest, np.zeros(8, bool))) == rest[3]).all()


def test_token_limits_names_unsupported_arguments():
    row = jnp.zeros(2)
    with pytest.raises(ValueError, match=r"float32\[2, 514\]: accepted is float32 \[R, V\]"):
        token_limits(jnp.zeros((2, 514)), row, row, row, row, row, row == 0)


def test_for_the_h200_it_spills_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    row = jax.ShapeDtypeStruct((2**15,), jnp.float32)
    logits, wanted = (
        jax.ShapeDtypeStruct((2**15, 128256), jnp.float32),
        jax.ShapeDtypeStruct((2**15,), jnp.bool_),
    )  # beyond 2^31 numbers
    compiled = compile_for_h200(
        token_limits, *abstract(h200_mesh(), (logits, row, row, row, row, row, wanted))
    )
    assert compiled.machine_code
    logs, ptx = (
        "".join(p.read_text(errors="replace") for p in tmp_path.glob(f"token_limits*{end}"))
        for end in (".ptxas", ".ptx")
    )
    assert set(re.findall(r"(\d+) bytes spill", logs)) == {"0"}
    assert "ld.global.v4" in ptx and ".shared.add.u32" in ptx
