"""The Triton kernels: in Triton's interpreter, compiled for Ampere and Hopper, and their refusals."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import paths
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from jax_triton import triton_lib

from pallas_kernels import kernel_set
from pallas_kernels.kernel_set import kernel_set_for
from pallas_kernels.quantized import ExpertInt4, Quantized
from pallas_kernels.triton import grouped_gemm
from pallas_kernels.triton.decode_attention import decode_attention, shared_bytes
from pallas_kernels.triton.flat_gemm import flat_gemm


def test_triton_kernels_equal_their_references():
    """Triton chooses interpreter or compiler at import, so this test needs a separate process."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/pallas_kernels/triton/interpreted_triton.py",
    ]
    run = subprocess.run(
        command, cwd=paths.ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"k_scale": jnp.ones(2)}, "8-bit cache"),
        ({"head": 24}, "head width 24"),
        ({"page": 32}, "pages"),
        ({"dtype": jnp.int8}, "dtypes"),
        ({"kv": 3}, "8 query heads over 3"),
    ],
)
def test_triton_decode_attention_names_unsupported_arguments(change, complaint):
    h, page, kv = change.pop("head", 16), change.pop("page", 64), change.pop("kv", 2)
    pages = jnp.zeros((3, kv, page, h), change.pop("dtype", jnp.bfloat16))
    with pytest.raises(ValueError, match=complaint):
        decode_attention(
            jnp.zeros((1, 8, h), jnp.bfloat16),
            pages,
            pages,
            jnp.zeros((1, 2), jnp.int32),
            jnp.ones(1, jnp.int32),
            scale=1.0,
            **change,
        )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"k": 32}, "equal K and M"),
        ({"rows": 8}, "tiles of 8 rows"),
        ({"dtype": jnp.float16}, "dtypes bfloat16 and float16"),
        ({"gate_block": 24}, "a multiple of 48"),
    ],
)
def test_triton_grouped_gemm_names_unsupported_arguments(change, complaint):
    groups = grouped_gemm.list_groups(jnp.zeros((3, 1), jnp.int32), 2, rows=change.pop("rows", 16))
    x = jnp.zeros((groups.pairs.shape[0], 64), jnp.bfloat16)
    w = jnp.zeros((2, 64, change.pop("k", 64)), change.pop("dtype", jnp.bfloat16))
    with pytest.raises(ValueError, match=complaint):
        grouped_gemm.grouped_gemm(x, w, groups, **change)


@pytest.mark.parametrize("capability", [80, 90])
def test_they_compile_for_real_shapes(capability, monkeypatch):
    """Triton needs static sizes to prove the alignment of rows. Otherwise it loads two bytes at a time."""
    codes, compile_ttir = [], triton_lib.compile_ttir_inplace
    monkeypatch.setattr(
        triton_lib, "compile_ttir_inplace", lambda *args: codes.append(compile_ttir(*args)) or codes[-1]
    )

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype)

    pages = shape(
        2048, 8, 64, 128
    )  # 2**27 elements: their places need 64 bits only beyond, and are computed in 64
    decode = shape(64, 32, 128), pages, pages, shape(64, 40, dtype=jnp.int32), shape(64, dtype=jnp.int32)
    attend = functools.partial(decode_attention, scale=0.1, sms=108, capability=capability)
    assert compile_for_h200(attend, *abstract(h200_mesh(), decode)).machine_code
    multiply = functools.partial(flat_gemm, sms=108, capability=capability)
    compiled = compile_for_h200(multiply, *abstract(h200_mesh(), (shape(16, 4096), shape(6144, 4096))))
    assert compiled.machine_code
    assert [thunk.kind for thunk in compiled.thunks].count("kCustomCall") == 1

    def experts(x, w, chosen):
        groups, rows = grouped_gemm.sort_rows(x, chosen, 128)
        gates = {"activation": "silu", "gate_block": 32}
        return grouped_gemm.grouped_gemm(rows, w, groups, capability=capability, **gates)

    mixture = shape(64, 2048), shape(128, 1536, 2048), shape(64, 8, dtype=jnp.int32)
    compiled = compile_for_h200(experts, *abstract(h200_mesh(), mixture))
    assert compiled.machine_code
    assert compiled.memory.temp_size_in_bytes < 2**23  # XLA's product has temporaries of gigabytes
    streaming = [code.llir for code in codes if "join" not in code.name]
    assert len(streaming) == 3
    assert all("cp.async.cg.shared.global" in llir and "ld.global.b16" not in llir for llir in streaming)


@pytest.mark.parametrize(
    ("capability", "dtype", "width"),
    [("7.5", "bfloat16", 128), ("8.6", "float32", 128), ("8.6", "bfloat16", 256)],
)
def test_supported_heads_fit_the_shared_memory(capability, dtype, width, monkeypatch):
    """Test GPUs with the least shared memory, at the widest heads of `kernel_set_for`."""
    codes, compile_ttir = [], triton_lib.compile_ttir_inplace
    monkeypatch.setattr(
        triton_lib, "compile_ttir_inplace", lambda *args: codes.append(compile_ttir(*args)) or codes[-1]
    )
    settings = {"queries_per_kv_head": 4, "page_size": 64, "dtype": dtype, "kv_dtype": dtype}
    takes = [
        not kernel_set_for("gpu", capability, head_dim=h, kernels="triton", **settings).fallbacks
        for h in (width, 2 * width)
    ]
    assert takes == [True, False]

    def shape(*dims, kind=dtype):
        return jax.ShapeDtypeStruct(dims, kind)

    def lower(function, *shapes):
        jax.jit(functools.partial(function, sms=84, capability=int(capability.replace(".", "")))).trace(
            *shapes
        ).lower(lowering_platforms=("cuda",))
        return codes.pop(0).shared_mem_bytes

    pages, most = shape(64, 2, 64, width), kernel_set._KIB.get(capability, kernel_set._LEAST_KIB) << 10
    attends = lower(
        functools.partial(decode_attention, scale=0.1),
        shape(4, 8, width),
        pages,
        pages,
        shape(4, 40, kind="int32"),
        shape(4, kind="int32"),
    )
    assert 0 < attends <= shared_bytes(width, jnp.dtype(dtype).itemsize) <= most
    codes.clear()
    assert 0 < lower(flat_gemm, shape(16, 4096), shape(28672, 4096)) <= most


@pytest.mark.parametrize("stored", ["bfloat16", "e4m3", "int4", "int4 float32"])
def test_tiles_of_experts_fit_the_least_shared_memory(stored, monkeypatch):
    codes, compile_ttir = [], triton_lib.compile_ttir_inplace
    monkeypatch.setattr(
        triton_lib, "compile_ttir_inplace", lambda *args: codes.append(compile_ttir(*args)) or codes[-1]
    )

    def array(kind, *dims):
        return jax.ShapeDtypeStruct(dims, kind)

    def experts(x, w, chosen, rows):
        groups = grouped_gemm.list_groups(chosen, 8, rows=rows)
        x = jax.tree.map(lambda part: part[groups.pairs // 2], x)
        gates = {"activation": "silu", "gate_block": 32}
        return grouped_gemm.grouped_gemm(x, w, groups, capability=80, **gates)

    def operands(n, k):
        if stored == "e4m3":
            x = Quantized(array(jnp.float8_e4m3fn, 300, k), array("float32", 300))
            return x, Quantized(array(jnp.float8_e4m3fn, 8, n, k), array("float32", 8, n))
        if "int4" in stored:
            w = ExpertInt4(array("uint8", 8, n, k // 2), array("bfloat16", 8, k // 64, n, 2))
            return array("float32" if "float32" in stored else "bfloat16", 300, k), w
        return array(stored, 300, k), array(stored, 8, n, k)

    for rows in grouped_gemm.TILES:
        traced = jax.jit(experts, static_argnums=3).trace(*operands(1536, 1920), array("int32", 300, 2), rows)
        traced.lower(lowering_platforms=("cuda",))
        assert 0 < codes.pop().shared_mem_bytes <= 61440
