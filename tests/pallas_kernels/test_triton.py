"""The Triton kernels: in Triton's interpreter beside their twins, compiled for Ampere and Hopper, and what they refuse."""

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

from pallas_kernels.triton.decode_attention import decode_attention
from pallas_kernels.triton.flat_gemm import flat_gemm


def test_they_are_their_twins():
    """In a process of its own: Triton decides when it is imported whether it interprets or compiles."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/pallas_kernels/interpreted_triton.py"]
    run = subprocess.run(command, cwd=paths.ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"k_scale": jnp.ones(2)}, "cache of few bits"),
        ({"head": 24}, "head width 24"),
        ({"page": 32}, "pages"),
        ({"dtype": jnp.int8}, "dtypes"),
        ({"kv": 3}, "8 query heads over 3"),
    ],
)
def test_what_decode_attention_does_not_take_is_named(change, complaint):
    h, page, kv = change.pop("head", 16), change.pop("page", 64), change.pop("kv", 2)
    pages = jnp.zeros((3, kv, page, h), change.pop("dtype", jnp.bfloat16))
    with pytest.raises(ValueError, match=complaint):
        decode_attention(
            jnp.zeros((1, 8, h), jnp.bfloat16), pages, pages, jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32), scale=1.0, **change
        )


@pytest.mark.parametrize("capability", [80, 90])
def test_they_compile_for_real_shapes(capability, monkeypatch):
    """With wide asynchronous copies: of sizes known at run time alone Triton does not know that rows are aligned, and loads two bytes."""
    codes, compile_ttir = [], triton_lib.compile_ttir_inplace
    monkeypatch.setattr(triton_lib, "compile_ttir_inplace", lambda *args: codes.append(compile_ttir(*args)) or codes[-1])

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype)

    pages = shape(2048, 8, 64, 128)  # 2**27 elements: their places need 64 bits only beyond, and are computed in 64
    decode = shape(64, 32, 128), pages, pages, shape(64, 40, dtype=jnp.int32), shape(64, dtype=jnp.int32)
    attend = functools.partial(decode_attention, scale=0.1, sms=108, capability=capability)
    assert compile_for_h200(attend, *abstract(h200_mesh(), decode)).machine_code
    multiply = functools.partial(flat_gemm, sms=108, capability=capability)
    compiled = compile_for_h200(multiply, *abstract(h200_mesh(), (shape(16, 4096), shape(6144, 4096))))
    assert compiled.machine_code
    assert [thunk.kind for thunk in compiled.thunks].count("kCustomCall") == 1
    streaming = [code.llir for code in codes if "join" not in code.name]
    assert len(streaming) == 2
    assert all("cp.async.cg.shared.global" in llir and "ld.global.b16" not in llir for llir in streaming)
