"""int4 GEMM: the format, and the H200 code. The interpreter does not support operands in registers."""

import itertools
import operator
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import compute_on
from jax.experimental.mosaic import gpu as mgpu
from thread_code import LANE, WARP, bfloat16, run_as_thread_code, value

from pallas_kernels.gemm.int4 import api, mma
from pallas_kernels.gemm.int4 import reference as int4
from pallas_kernels.gemm.int4.api import int4_gemm
from pallas_kernels.hopper import wgmma_registers
from pallas_kernels.hopper.wgmma_registers import in_tile
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


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1), groups=st.integers(1, 3), shift=st.sampled_from([-9.0, 0.0, 0.5, 9.0]))
def test_with_zero_points_a_level_is_zero_and_the_others_are_its_multiples(seed, groups, shift):
    rng = np.random.default_rng(seed)
    w = (rng.normal(size=(4, 64 * groups)) + shift).astype(np.float32)
    w[:, 5] = 0
    packed = int4.quantize_int4(w, nearest=int4.nearest_to_zero_point)
    assert (packed.scale.dtype, packed.zero.dtype) == (jnp.bfloat16, jnp.int16)
    back = np.asarray(int4.dequantize_int4(packed, jnp.float32))
    assert not back[:, 5].any()
    steps = np.repeat(np.asarray(packed.scale, np.float32), 64, axis=1)
    nibbles = np.asarray(int4.unpack(packed.packed.reshape(4, groups, 32)), np.int64).reshape(w.shape)
    assert (back == (nibbles - np.repeat(np.asarray(packed.zero), 64, axis=1)) * steps).all()
    # Half a level, up to half a level of the zero point, and the rounding of the scale.
    assert (np.abs(back - w) <= steps + np.abs(w) / 128).all()
    again = np.asarray(int4.dequantize_int4(packed), np.float32)
    assert (again == np.asarray(jnp.asarray(back).astype(jnp.bfloat16), np.float32)).all()


@pytest.mark.parametrize("group", range(8))
def test_each_thread_has_its_part_of_the_operand_with_zero_points(group, monkeypatch):
    """The thread code runs with integers, as in the tests of experts. A stage has tiles of 8 rows of 128
    bytes, and a piece of 16 bytes lies at its number xor the row.
    """
    rng = np.random.default_rng(group)
    nibbles = rng.integers(0, 16, (64, 8, 64), np.uint8)
    scale = jnp.asarray(rng.normal(size=(64, 8)), jnp.bfloat16)
    zero = rng.integers(0, 17, (64, 8)).astype(np.int16)
    packed = np.asarray(int4.pack(jnp.asarray(nibbles))).reshape(64, 256)
    row, byte = np.indices(packed.shape)
    slab, piece = byte // 128, byte % 128 // 16 ^ row % 8
    image = np.zeros(packed.size, np.uint64)
    image[(row // 8 * 2 + slab) * 1024 + row % 8 * 128 + piece * 16 + byte % 16] = packed

    def read_words(ref, offset, count):
        start = offset.astype(int)
        return [sum(ref.data[start + 4 * w + i] << np.uint64(8 * i) for i in range(4)) for w in range(count)]

    own = {"read_words": read_words, "in_tile": in_tile, "llvm": Words}
    run_as_thread_code(monkeypatch, wgmma_registers)
    run_as_thread_code(monkeypatch, api, **own)
    of_rows = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(api._WORDS), dtype=object)
    for half, (i, factor) in itertools.product(range(2), enumerate((scale, zero))):
        line = (16 * WARP + 8 * half + LANE // 4).astype(int)
        words = np.asarray(factor).view(np.uint16)[line].view(np.uint32).astype(np.uint64)
        for j in range(2):
            of_rows[0, 2 * i + j, 0, 0, half, 0, 0, 0, 0] = [words[:, 2 * j], words[:, 2 * j + 1]]
    stage = value(image, get_strides_and_offset=lambda: ((2048, 1024, 128, 1), 0))
    registers = api._unpack(stage, types.SimpleNamespace(registers=of_rows), group, True)
    wanted = int4.dequantize_int4(Int4(jnp.asarray(packed), scale, jnp.asarray(zero)))
    wanted = np.asarray(wanted, np.float64)[:, 64 * group :]
    for eight, half, odd in np.ndindex(8, 2, 2):
        bits = registers[0, eight, 0, 0, half, 0, 0, 0, 0] >> np.uint64(16 * odd) & np.uint64(0xFFFF)
        rows, columns = 16 * WARP + 8 * half + LANE // 4, 8 * eight + 2 * (LANE % 4) + odd
        np.testing.assert_array_equal(bfloat16(bits), wanted[rows.astype(int), columns.astype(int)])


class Words:
    """Stands for the module `llvm`: a vector is a list."""

    extractelement = staticmethod(lambda words, which: words[int(which)])


@pytest.mark.parametrize("group", range(4))
def test_the_factors_of_a_groups_sums_are_those_of_its_numbers(group, monkeypatch):
    """mma multiplies 128 + nibble, and the group's sum of tokens takes the rest off."""
    rng = np.random.default_rng(group)
    scale = np.asarray(jnp.asarray(rng.normal(size=(128, 4)), jnp.bfloat16))
    zero = rng.integers(0, 17, (128, 4)).astype(np.int16)
    words = [list(of.view(np.uint32).astype(np.uint64).T) for of in (scale, zero)]
    constant = types.SimpleNamespace(get=lambda _, number: number)
    arith = types.SimpleNamespace(
        constant=lambda _, number: number, shrui=operator.rshift, andi=operator.and_, mulf=operator.mul,
        subf=operator.sub, sitofp=lambda _, whole: whole.astype(np.float64),
    )  # fmt: skip
    monkeypatch.setattr(mma, "arith", arith)
    monkeypatch.setattr(mma, "const", np.uint64)
    monkeypatch.setattr(mma, "ir", types.SimpleNamespace(FloatAttr=constant))
    wide = lambda word, high: value_of(bfloat16(word >> np.uint64(16 * high) & np.uint64(0xFFFF)))
    monkeypatch.setattr(mma, "_wide", wide)
    s, rest = mma._factors((words[0], words[1]), group, True)
    own, shift = scale[:, group].astype(np.float64), zero[:, group]
    np.testing.assert_array_equal(s, own)
    np.testing.assert_array_equal(rest, -(128 + shift) * own)


def value_of(numbers):
    """Return numbers with the attribute `type` of an MLIR value."""
    typed = numbers.view(type("Typed", (np.ndarray,), {"type": None}))
    return typed


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
            r"bfloat16\[256, 8\] for both, or zero points in int16",
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
    ("m", "n", "k", "added", "zeros", "extra"),
    [
        (1, 4096, 4096, False, jnp.bfloat16, {}),
        (8, 28672, 4096, False, jnp.bfloat16, {"activation": "silu", "gate_block": 64}),
        (8, 4096, 14336, True, jnp.int16, {}),
        (16, 28672, 4096, False, jnp.bfloat16, {"activation": "silu", "gate_block": 64}),
        (64, 4096, 14336, False, jnp.bfloat16, {"sms": 28, "out_dtype": jnp.float32}),
        (32, 28672, 4096, False, jnp.int16, {"activation": "silu", "gate_block": 64}),
    ],
)
def test_for_the_h200_it_uses_its_units_and_spills_nothing(
    m, n, k, added, zeros, extra, tmp_path, monkeypatch
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    half, group = (
        jax.ShapeDtypeStruct((n, k // 2), jnp.uint8),
        jax.ShapeDtypeStruct((n, k // 64), jnp.bfloat16),
    )
    args = (
        jax.ShapeDtypeStruct((m, k), jnp.bfloat16),
        Int4(half, group, jax.ShapeDtypeStruct((n, k // 64), zeros)),
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
