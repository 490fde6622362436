"""int4 GEMM: the format, and the H200 code. The interpreter does not support operands in registers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import compute_on

from pallas_kernels.gemm.int4 import reference as int4
from pallas_kernels.gemm.int4.api import int4_gemm
from pallas_kernels.quantized import Int4


@jax.jit
def there_and_back(w):
    """Return the packed weight, and the weight of it in float32 and in bfloat16."""
    packed = int4.quantize_int4(w)
    return packed, int4.dequantize_int4(packed, jnp.float32), int4.dequantize_int4(packed)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    groups=st.integers(1, 3),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    shift=st.sampled_from([0.0, 3.0]),
)
def test_a_weight_comes_back_within_half_a_level(seed, groups, scale, shift):
    w = (np.random.default_rng(seed).normal(size=(4, 64 * groups)) + shift).astype(np.float32) * scale
    packed, back, again = there_and_back(w)
    back = np.asarray(back)
    levels = np.repeat(np.asarray(packed.scale, np.float32), 64, axis=1)
    # bfloat16 scales and zeros: 15 levels of a scale that is up to 2**-9 off, and a minimum that is as much
    # off.
    slack = (
        np.repeat(
            np.abs(w).reshape(4, groups, 64).max(-1) + np.ptp(w.reshape(4, groups, 64), axis=-1), 64, axis=1
        )
        / 256
    )
    assert (np.abs(back - w) <= levels / 2 + slack).all()
    assert (
        np.asarray(again, np.float32) == np.asarray(jnp.asarray(back).astype(jnp.bfloat16), np.float32)
    ).all()


def test_the_order_of_the_nibbles_is_the_one_written_down():
    levels = np.random.default_rng(0).integers(0, 16, (3, 128))
    levels[:, ::64], levels[:, 1::64] = 0, 15  # so that the scale is 1 and the zero 0
    packed = np.asarray(int4.quantize_int4(jnp.asarray(levels, jnp.float32)).packed)
    for column in range(128):
        group, c = divmod(column, 64)
        j, half, high, lane, odd = c // 32, c // 16 % 2, c // 8 % 2, c % 8 // 2, c % 2
        byte = packed[:, 32 * group + 8 * lane + 4 * j + 2 * odd + half]
        assert ((byte >> 4 if high else byte & 15) == levels[:, column]).all()


def test_groups_of_equal_values_are_exact():
    w = jnp.full((2, 64), 0.75)
    assert (int4.dequantize_int4(int4.quantize_int4(w), jnp.float32) == w).all()


def test_the_format_names_unsupported_shapes():
    with pytest.raises(ValueError, match="K=96"):
        int4.quantize_int4(jnp.zeros((2, 96)))
    x, w = jnp.zeros((2, 576), jnp.bfloat16), int4.quantize_int4(jnp.zeros((8, 576)))
    with pytest.raises(ValueError, match="a multiple of 512"):
        int4_gemm(x, w)


@pytest.mark.parametrize(
    ("group", "wrong", "said"),
    [
        (
            128,
            {},
            r"w's scale and zero are \['bfloat16\[256, 4\]', 'bfloat16\[256, 4\]'\]: accepted is "
            r"bfloat16\[256, 8\] for both",
        ),
        (64, {"bias": jnp.zeros(64)}, r"bias \[64\]: accepted is \[256\]"),
        (
            64,
            {"residual": jnp.zeros((8, 64), jnp.bfloat16)},
            r"residual bfloat16\[8, 64\]: accepted is bfloat16\[8, 256\]",
        ),
        (
            64,
            {"residual": jnp.zeros((8, 256), jnp.bfloat16), "gate_block": 64},
            r"residual bfloat16\[8, 256\]: accepted is bfloat16\[8, 128\]",
        ),
        (64, {"sms": 0}, "sms=0: accepted are 1 to 132"),
    ],
)
def test_int4_gemm_names_unsupported_arguments(group, wrong, said):
    factor = jnp.ones((256, 512 // group), jnp.bfloat16)
    with pytest.raises(ValueError, match=said):
        int4_gemm(
            jnp.zeros((8, 512), jnp.bfloat16), Int4(jnp.zeros((256, 256), jnp.uint8), factor, factor), **wrong
        )


def test_the_kernel_takes_factors_of_bfloat16_alone():
    w = Int4(jnp.zeros((256, 256), jnp.uint8), jnp.ones((256, 8), jnp.bfloat16), jnp.zeros((256, 8)))
    with pytest.raises(ValueError, match=r"'bfloat16\[256, 8\]', 'float32\[256, 8\]'"):
        int4_gemm(jnp.zeros((8, 512), jnp.bfloat16), w)


@pytest.mark.parametrize(
    ("m", "n", "k", "added", "extra"),
    [
        (1, 4096, 4096, False, {}),
        (8, 28672, 4096, False, {"activation": "silu", "gate_block": 64}),
        (8, 4096, 14336, True, {}),
        (16, 28672, 4096, False, {"activation": "silu", "gate_block": 64}),
        (64, 4096, 14336, False, {"sms": 28, "out_dtype": jnp.float32}),
    ],
)
def test_for_the_h200_it_uses_its_units_and_spills_nothing(m, n, k, added, extra, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    half, group = (
        jax.ShapeDtypeStruct((n, k // 2), jnp.uint8),
        jax.ShapeDtypeStruct((n, k // 64), jnp.bfloat16),
    )
    args = (
        jax.ShapeDtypeStruct((m, k), jnp.bfloat16),
        Int4(half, group, group),
        jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
    )

    def product(x, w, residual):
        return int4_gemm(x, w, residual=residual if added else None, **extra)

    region = compute_on.compute_on(
        product, compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device
    )
    compiled = compile_for_h200(lambda *args: region(*args), *abstract(h200_mesh(), args))
    assert compiled.machine_code
    assert [
        thunk.kind for thunk in compiled.thunks if thunk.stream == "computation_stream[1]" and thunk.depth
    ] == ["kCustomCall"]
    assert [thunk.kind for thunk in compiled.thunks].count("kCustomCall") == 1
    logs, ptx = (
        "".join(p.read_text(errors="replace") for p in tmp_path.glob(f"int4_gemm*{end}"))
        for end in (".ptxas", ".ptx")
    )
    assert set(re.findall(r"(\d+) bytes spill", logs)) == {"0"}
    # The warpgroups request at most the registers of the CTA. A larger request would wait forever.
    threads, given = (
        int(re.findall(pattern, text)[0])
        for pattern, text in ((r"maxntid (\d+)", ptx), (r"Used (\d+) registers", logs))
    )
    asked = {how: int(n) for how, n in re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", ptx)}
    assert asked.keys() == ({"inc", "dec"} if m <= 8 else set())
    assert not asked or asked["dec"] + asked["inc"] * (threads // 128 - 1) <= given * (threads // 128)
    assert (
        "mma.sync.aligned.m16n8k16" if m <= 8 else f"wgmma.mma_async.sync.aligned.m64n{m}k16"
    ) in ptx and "lop3.b32" in ptx
