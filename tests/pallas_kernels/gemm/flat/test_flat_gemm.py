"""Flat GEMM: the kernel in the interpreter against its reference, its tiles, and the H200 code."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import compute_on
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm import reference
from pallas_kernels.gemm.flat.api import flat_gemm
from pallas_kernels.gemm.flat.tiles import FlatTile, flat_tile, int4_tile
from pallas_kernels.hopper.limits import SMEM_BYTES

INTERPRET = plgpu.InterpretGPUParams()


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def error(got, want):
    got, want = (np.asarray(a, np.float32) for a in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize(
    ("m", "n", "k", "sms", "tile", "extra"),
    [
        (1, 192, 128, 2, FlatTile(64, 1, 128, 2, 1), {}),  # two tiles on one SM, one on the other
        (5, 256, 192, 1, FlatTile(64, 2, 64, 2, 1), {"bias": True, "activation": "relu"}),
        (
            13,
            256,
            128,
            2,
            FlatTile(128, 1, 64, 3, 1),
            {"gate_block": 64, "activation": "silu", "residual": True},
        ),
        (
            9,
            256,
            320,
            1,
            FlatTile(64, 1, 64, 4, 1, turns=2),
            {"residual": True},
        ),  # an odd number of stages in turns
        (24, 128, 64, 132, FlatTile(64, 2, 64, 1, 1), {"activation": "gelu_tanh", "out_dtype": jnp.float32}),
    ],
)
def test_flat_gemm_equals_its_reference(m, n, k, sms, tile, extra):
    x, w = normal(0, m, k), normal(1, n, k) * k**-0.5
    given = dict(extra)
    bias = normal(2, n) if given.pop("bias", False) else None
    residual = normal(3, m, n // 2 if "gate_block" in given else n) if given.pop("residual", False) else None
    # One program for each function: eager operations would be a program each.
    got = jax.jit(functools.partial(flat_gemm, sms=sms, tile=tile, interpret=INTERPRET, **given))(
        x, w, bias, residual=residual
    )
    out_dtype = given.pop("out_dtype", jnp.bfloat16)
    twin = jax.jit(functools.partial(reference.gemm, **given))
    want: Any = twin(x.astype(jnp.float32), w.astype(jnp.float32), bias, residual=residual)
    assert got.dtype == out_dtype and got.shape == want.shape
    assert error(got, want) < (1e-5 if out_dtype == jnp.float32 else 3e-3)


@given(
    m=st.integers(1, 64),
    n=st.integers(1, 20_000).map(lambda n: 128 * n),
    k=st.integers(1, 512).map(lambda k: 64 * k),
    sms=st.one_of(st.just(132), st.integers(8, 132)),
    gated=st.booleans(),
)
def test_tiles_fit(m, n, k, sms, gated):
    padded = -(-m // 8) * 8
    for tile, bits in ((flat_tile(m, n, k, sms, gated), 16), (int4_tile(m, n, k, sms, gated), 4.5)):
        ring = tile.stages * (tile.columns * tile.depth * bits / 8 + padded * tile.depth * 2)
        assert (
            ring + tile.columns * padded * (6 + 4 * (tile.cluster - 1) + 4 * (tile.turns - 1)) <= SMEM_BYTES
        )
        assert tile.stages >= (2 if bits == 16 else 1) and tile.stages % tile.turns == 0
        assert tile.cluster <= (2 if sms == 132 else 1) and (tile.cluster - 1) * tile.depth < k
        assert tile.rows == 128 or not gated


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": (65, 128)}, "65 rows"),
        ({"x": (8, 96), "w": (64, 96)}, "a multiple of 64"),
        ({"w": (64, 256)}, "the same K"),
        ({"w": (60, 128)}, "N=60"),
        ({"gate_block": 32}, "gate_block=32"),
        ({"activation": "tanh"}, "activation='tanh'"),
        ({"dtype": jnp.float32}, "float32"),
        ({"out_dtype": jnp.float16}, "float16"),
        ({"bias": jnp.zeros(64)}, r"bias \[64\]: accepted is \[128\]"),
        (
            {"residual": jnp.zeros((8, 64), jnp.bfloat16)},
            r"residual bfloat16\[8, 64\]: accepted is bfloat16\[8, 128\]",
        ),
        (
            {"residual": jnp.zeros((1, 128), jnp.bfloat16)},
            r"residual bfloat16\[1, 128\]: accepted is bfloat16\[8, 128\]",
        ),
        (
            {"residual": jnp.zeros((8, 128), jnp.bfloat16), "gate_block": 64},
            r"residual bfloat16\[8, 128\]: accepted is bfloat16\[8, 64\]",
        ),
        (
            {"residual": jnp.zeros((8, 128)), "out_dtype": jnp.float32},
            r"residual float32\[8, 128\]: accepted is bfloat16\[8, 128\]",
        ),
        ({"sms": 0}, "sms=0: accepted are 1 to 132"),
        ({"sms": 133}, "sms=133: accepted are 1 to 132"),
    ],
)
def test_flat_gemm_names_unsupported_arguments(change, said):
    change = {"x": (8, 128), "w": (128, 128), "dtype": jnp.bfloat16, **change}
    x, w = (jnp.zeros(change.pop(name), change["dtype"]) for name in ("x", "w"))
    del change["dtype"]
    with pytest.raises(ValueError, match=said):
        flat_gemm(x, w, **change)


def shapes(m, n, k):
    return jax.ShapeDtypeStruct((m, k), jnp.bfloat16), jax.ShapeDtypeStruct((n, k), jnp.bfloat16)


FORMS = [
    ((1, 4096, 4096), {}),
    ((64, 28672, 4096), {"activation": "silu", "gate_block": 64}),
    ((64, 4096, 14336), {"sms": 28}),
    ((40, 128256, 4096), {"out_dtype": jnp.float32}),
    ((16, 2**20 + 8, 4096), {}),  # more than 2**31 elements, and a last tile that is not whole
]


def test_for_the_h200_it_uses_its_units_and_spills_nothing(tmp_path, monkeypatch):
    """One program holds all variants."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))

    def step(operands):
        return [flat_gemm(*x, **extra) for (_, extra), x in zip(FORMS, operands, strict=True)]

    compiled = compile_for_h200(step, *abstract(h200_mesh(), ([shapes(*shape) for shape, _ in FORMS],)))
    assert compiled.machine_code
    assert [thunk.kind for thunk in compiled.thunks] == ["kCustomCall"] * len(
        FORMS
    )  # no pass fills or cuts the one row
    logs, texts = (
        [path.read_text(errors="replace") for path in tmp_path.glob(f"flat_gemm*{end}")]
        for end in (".ptxas", ".ptx")
    )
    assert set(re.findall(r"(\d+) bytes spill", "".join(logs))) == {"0"}
    columns = [
        int(n)
        for ptx in texts
        for n in set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", ptx))
    ]
    assert sorted(columns) == sorted(max(8, shape[0]) for shape, _ in FORMS)
    assert all("cp.async.bulk.tensor" in ptx for ptx in texts)


def test_it_fits_a_stream_region():
    def step(x, w):
        region = compute_on.compute_on(
            lambda *args: flat_gemm(*args, sms=104),
            compute_type="gpu_stream:1",
            out_memory_spaces=jax.memory.Space.Device,
        )
        return region(x, w)

    compiled = compile_for_h200(step, *abstract(h200_mesh(), shapes(64, 4096, 4096)))
    on_stream = [
        thunk.kind for thunk in compiled.thunks if thunk.depth and thunk.stream == "computation_stream[1]"
    ]
    assert on_stream == ["kCustomCall"]
