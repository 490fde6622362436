"""fp8 GEMM: both kernels in the interpreter against the reference, the H200 code, and a stream region."""

import collections
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import compute_on
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm import reference
from pallas_kernels.gemm.block_fp8_format import dequantize_block_fp8
from pallas_kernels.gemm.fp8.api import fp8_gemm
from pallas_kernels.gemm.fp8.epilogue import E4M3
from pallas_kernels.gemm.fp8.flat import fp8_flat_gemm
from pallas_kernels.gemm.fp8.tile_schedule import Fp8Tile, filled, fp8_plan, work
from pallas_kernels.pointwise.quantize.reference import dequantize
from pallas_kernels.quantized import BLOCK, BlockFp8, Quantized

INTERPRET = plgpu.InterpretGPUParams()


def quantized(seed: int, rows: int, columns: int, scales: int) -> Quantized:
    """Return random e4m3 [rows, columns] with a scale of `scales` axes."""
    rng = np.random.default_rng(seed)
    values = jnp.asarray(rng.normal(size=(rows, columns)) * 100, jnp.float32).clip(-448, 448).astype(E4M3)
    shape = ((), (rows,), (rows, columns // BLOCK))[scales]
    return Quantized(values, jnp.asarray(rng.uniform(0.001, 0.01, shape), jnp.float32))


def exact(x, w, bias=None, **settings) -> np.ndarray:
    with jax.default_matmul_precision("highest"):
        return np.asarray(reference.gemm(x, w, bias, out_dtype=jnp.float32, **settings))


def off(got, want) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want))


DENSE, FLAT = (
    functools.partial(fp8_gemm, sms=2),
    functools.partial(fp8_flat_gemm, sms=1),
)  # clusters are beyond the interpreter


@pytest.mark.parametrize(
    ("kernel", "m", "n", "k", "scales", "extra"),
    [
        (DENSE, 77, 384, 256, 0, {"bias": True, "residual": True}),  # edges: tiles are 128 x 256
        (DENSE, 128, 256, 256, 2, {"residual": True}),
        (functools.partial(DENSE, plan=(Fp8Tile(cluster=2), work(1, 1, 1, 1))), 256, 256, 128, 1, {}),
        (DENSE, 64, 512, 128, 1, {"activation": "gelu_tanh", "gate_block": 32, "bias": True}),
        (FLAT, 13, 256, 256, 1, {"bias": True, "residual": True}),
        (FLAT, 8, 128, 512, 2, {"residual": True}),
        (FLAT, 8, 256, 128, 1, {"activation": "silu", "gate_block": 64}),
    ],
)
def test_fp8_gemm_equals_its_reference(kernel, m, n, k, scales, extra):
    x, w = quantized(m, m, k, scales), quantized(n, n, k, 1)
    rng = np.random.default_rng(k)
    arrays = {
        "bias": jnp.asarray(rng.normal(size=n), jnp.bfloat16),
        "residual": jnp.asarray(rng.normal(size=(m, n)), jnp.bfloat16),
    }
    extra = {name: arrays.get(name, value) for name, value in extra.items()}
    got = kernel(x, w, interpret=INTERPRET, **extra)
    assert off(got, exact(x, w, **extra)) < 3e-3  # bfloat16's rounding


def in_blocks(seed: int, n: int, k: int) -> BlockFp8:
    """Return a random weight whose blocks differ in size by up to 2 ** 7."""
    rng = np.random.default_rng(seed)
    scale = 2.0 ** rng.integers(-4, 4, (n // 64, k // BLOCK)) / 1000
    return BlockFp8(quantized(seed, n, k, 0).values, jnp.asarray(scale, jnp.float32))


@pytest.mark.parametrize(
    ("kernel", "m", "n", "k", "extra"),
    [
        (DENSE, 77, 384, 256, {"residual": True}),  # the last tile has fewer columns
        (DENSE, 64, 512, 256, {"activation": "silu", "gate_block": 64, "bias": True}),
        (FLAT, 13, 256, 640, {"bias": True, "residual": True}),
        (FLAT, 8, 512, 256, {"activation": "silu", "gate_block": 64}),
    ],
)
def test_a_weight_in_blocks_is_scaled_before_the_sums_are_added(kernel, m, n, k, extra):
    x, w, rng = quantized(m, m, k, 2), in_blocks(n, n, k), np.random.default_rng(k)
    arrays = {
        "bias": jnp.asarray(rng.normal(size=n), jnp.bfloat16),
        "residual": jnp.asarray(rng.normal(size=(m, n)), jnp.bfloat16),
    }
    extra = {name: arrays.get(name, value) for name, value in extra.items()}
    weight = dequantize_block_fp8(w, extra.get("gate_block"))
    want = exact(dequantize(x), weight, **extra)
    assert off(kernel(x, w, interpret=INTERPRET, **extra), want) < 3e-3  # bfloat16's rounding
    assert off(reference.gemm(x, w, **extra), want) < 6e-3  # operands in bfloat16


@pytest.mark.parametrize(("kernel", "m"), [(DENSE, 64), (FLAT, 16)])
def test_between_two_products_in_blocks_the_activation_has_scales_of_128_columns(kernel, m):
    x, w = quantized(m, m, 128, 2), in_blocks(0, 512, 128)
    got = kernel(x, w, activation="silu", gate_block=64, quantize=True, interpret=INTERPRET)
    want = exact(dequantize(x), dequantize_block_fp8(w, 64), activation="silu", gate_block=64)
    assert got.scale.shape == (m, 2) and off(dequantize(got), want) < 0.04
    np.testing.assert_allclose(np.asarray(got.scale), np.abs(want.reshape(m, 2, -1)).max(-1) / 448, rtol=1e-4)


@pytest.mark.parametrize(("kernel", "m"), [(DENSE, 72), (FLAT, 16)])
def test_a_quantised_result_uses_its_range_and_loses_what_rounding_loses(kernel, m):
    x, w = quantized(m, m, 128, 1), quantized(0, 512, 128, 1)
    got = kernel(x, w, activation="silu", gate_block=64, quantize=True, interpret=INTERPRET)
    want = exact(x, w, activation="silu", gate_block=64)
    blocks = np.abs(want.reshape(m, -1, BLOCK))
    np.testing.assert_allclose(np.asarray(got.scale), blocks.max(-1) / 448, rtol=1e-4)
    # e4m3 keeps 4 bits; below 2**-6 of its unit it counts in steps of 2**-9.
    close = np.maximum(np.abs(want) / 16, np.repeat(np.asarray(got.scale), BLOCK, axis=1) * 2**-10)
    assert (np.abs(np.asarray(dequantize(got)) - want) <= close * 1.001).all()


def test_scales_past_the_last_column_are_not_written():
    """Three blocks in tiles of two: the second tile's excess block lies on
    the first scale of the next row.
    """
    x, w = quantized(72, 72, 128, 1), quantized(0, 384, 128, 1)
    got = fp8_gemm(
        x, w, activation="relu", quantize=True, plan=(Fp8Tile(256), work(1, 2, 1, 1)), interpret=INTERPRET
    )
    want = exact(x, w, activation="relu").reshape(72, -1, BLOCK)
    np.testing.assert_allclose(np.asarray(got.scale), want.max(-1) / 448, rtol=1e-4)


@settings(max_examples=60)
@given(
    tiles=st.tuples(st.integers(1, 9), st.integers(1, 40)),
    steps=st.integers(1, 120),
    groups=st.integers(1, 66),
    parts=st.sampled_from([1, 2, 4]),
)
def test_every_step_of_every_tile_is_done_once(tiles, steps, groups, parts):
    cut = math.prod(tiles) % groups if parts > 1 else 0
    if cut * parts > groups or parts > steps:
        with pytest.raises(ValueError, match="parts"):
            work(*tiles, steps, groups, parts)
        return
    made = work(*tiles, steps, groups, parts)
    assert made.cut == cut and len(made.table) <= groups
    done = collections.Counter()
    for own in made.table.tolist():
        assert all(
            item[3] == 0 for item in own[next((i for i, item in enumerate(own) if item[3] == 0), len(own)) :]
        )
        for row, column, first, count, part, tile in own:
            done.update((row, column, step) for step in range(first, first + count))
            if tile >= 0:  # an equal share, and its turn in the order of K
                assert first == steps * part // parts and count - steps // parts in (0, 1)
    assert set(done.values()) == {1} and len(done) == math.prod(tiles) * steps


@given(
    m=st.integers(1, 4096),
    n=st.integers(1, 240),
    k=st.integers(1, 112),
    sms=st.integers(1, 132),
    blocked=st.booleans(),
)
def test_a_plan_leaves_no_sm_out_that_it_could_use_and_has_whole_pairs(m, n, k, sms, blocked):
    tile, made = fp8_plan(m, n * 128, k * 128, sms, blocked=blocked, gate_block=None, quantize=False)
    assert len(made.table) * tile.cluster <= sms and bool(tile.moved) == blocked
    assert made.parts == 1 or made.cut == 0 or tile.columns // made.parts % 64 == 0
    rounds = made.table.shape[1]
    assert (rounds - 1) * (sms // tile.cluster) < -(-m // (128 * tile.cluster)) * -(-n * 128 // tile.columns)


@pytest.mark.parametrize("k", [32, 128, 14784])
def test_of_any_depth_a_product_fills_some_of_its_tiles(k):
    """K is padded to a multiple of 128."""
    assert (
        0
        < filled(256, 512, k, 132, blocked=False, quantize=False)
        == filled(256, 512, -(-k // 128) * 128, 132, blocked=False, quantize=False)
    )


@pytest.mark.parametrize(
    ("columns", "whole", "others"), [(28672, 1024, 1280), (22016, 1280, 1024), (29696, 1280, 1024)]
)
def test_filled_tiles_tell_the_best_split_of_2048_rows(columns, whole, others):
    """`up_gate` of Llama-3-70B, DeepSeek-67B and Qwen2-72B on one of two
    devices: halves suit only the first.
    """

    def steps(rows):
        return rows / filled(rows, columns, 8192, 132, blocked=False, quantize=True)

    def parts(cut):
        return steps(cut) + steps(2048 - cut)

    assert parts(whole) == pytest.approx(parts(2048 - whole)) and parts(whole) <= 1.001 * steps(2048)
    assert parts(others) > 1.05 * parts(whole)


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": 192},
        {"n": 320},
        {"gate_block": 24},
        {"activation": "tanh"},
        {"quantize": True, "gate_block": 64, "n": 384},
        {"out_dtype": jnp.float16},
        {"scales": (3,)},
    ],
)
@pytest.mark.parametrize("kernel", [DENSE, FLAT])
def test_fp8_gemm_names_unsupported_arguments(kernel, wrong):
    wrong = dict(wrong)
    n, k, scales = wrong.pop("n", 256), wrong.pop("k", 128), wrong.pop("scales", (8,))
    x = Quantized(jnp.zeros((8, k), E4M3), jnp.ones(scales, jnp.float32))
    w = Quantized(jnp.zeros((n, k), E4M3), jnp.ones((n,), jnp.float32))
    with pytest.raises(ValueError, match=r"multiple|gate_block|activation|dtypes|scales"):
        kernel(x, w, **wrong)


@pytest.mark.parametrize("wrong", [{"gate_block": 32}, {"scales": 1}, {"n": 192}])
@pytest.mark.parametrize("kernel", [DENSE, FLAT])
def test_a_weight_in_blocks_names_unsupported_arguments(kernel, wrong):
    wrong = dict(wrong)
    x, w = quantized(0, 8, 256, wrong.pop("scales", 2)), in_blocks(0, wrong.pop("n", 256), 256)
    with pytest.raises(ValueError, match=r"gate_block|scales"):
        kernel(x, w, **wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"bias": jnp.zeros(64)}, r"bias \[64\]: accepted is \[256\]"),
        (
            {"residual": jnp.zeros((8, 64), jnp.bfloat16)},
            r"residual bfloat16\[8, 64\]: accepted is bfloat16\[8, 256\]",
        ),
        (
            {"residual": jnp.zeros((200, 64), jnp.bfloat16)},
            r"residual bfloat16\[200, 64\]: accepted is bfloat16\[8, 256\]",
        ),
        (
            {"residual": jnp.zeros((8, 256), jnp.bfloat16), "gate_block": 64},
            r"residual bfloat16\[8, 256\]: accepted is bfloat16\[8, 128\]",
        ),
        ({"residual": jnp.zeros((8, 256))}, r"residual float32\[8, 256\]: accepted is bfloat16\[8, 256\]"),
        ({"sms": 0}, "sms=0: accepted are 1 to 132"),
        ({"sms": -1}, "sms=-1: accepted are 1 to 132"),
    ],
)
@pytest.mark.parametrize("kernel", [DENSE, FLAT])
def test_fp8_gemm_names_unsupported_epilogues(kernel, wrong, said):
    x, w = (Quantized(jnp.zeros((rows, 128), E4M3), jnp.ones(rows)) for rows in (8, 256))
    with pytest.raises(ValueError, match=said):
        kernel(x, w, **wrong)


def shapes(m, n, k, scales=1) -> tuple[Any, Any]:
    def of(rows, axes):
        scale: Any = jax.ShapeDtypeStruct(((), (rows,), (rows, k // BLOCK))[axes], jnp.float32)
        values: Any = jax.ShapeDtypeStruct((rows, k), E4M3)
        return Quantized(values, scale)

    return of(m, scales), of(n, 1)


def shapes_in_blocks(m, n, k) -> tuple[Any, Any]:
    scale = jax.ShapeDtypeStruct((n // 64, k // BLOCK), jnp.float32)
    return shapes(m, n, k, 2)[0], BlockFp8(jax.ShapeDtypeStruct((n, k), E4M3), scale)  # pyright: ignore[reportArgumentType]


GATE = {"activation": "silu", "gate_block": 64}


COMMON_FORMS = [
    (fp8_gemm, (2048, 6144, 4096)),
    (functools.partial(fp8_gemm, **GATE, quantize=True), (2048, 28672, 4096)),
    # A full tile and then a part of one. ptxas once had too few registers for both.
    (fp8_gemm, (1536, 4096, 14336, 2)),
    (functools.partial(fp8_flat_gemm, **GATE, quantize=True), (64, 28672, 4096)),
]
OTHER_FORMS = [
    (fp8_gemm, (2048, 4096, 14336, 2)),
    (fp8_gemm, (256, 4096, 14336, 2)),
    # Plans of more rounds, with a full tile and then a part of one.
    (functools.partial(fp8_gemm, sms=100), (1024, 4096, 14336, 2)),
    (functools.partial(fp8_gemm, sms=92), (3072, 4096, 14336, 2)),
    (fp8_flat_gemm, (64, 4096, 14336, 2)),
]


BLOCK_FORMS = [
    (functools.partial(fp8_gemm, **GATE, quantize=True), (2048, 24576, 4096)),
    (fp8_gemm, (1536, 4096, 12288)),
    (functools.partial(fp8_flat_gemm, **GATE, quantize=True), (64, 24576, 4096)),
]


@pytest.mark.parametrize(
    "forms",
    [pytest.param(COMMON_FORMS, id="common"), pytest.param(OTHER_FORMS, id="others", marks=pytest.mark.slow)],
)
def test_for_the_h200_it_uses_its_units_and_does_not_spill(forms, tmp_path, monkeypatch):
    check_forms(forms, shapes, tmp_path, monkeypatch)


def test_for_the_h200_a_weight_in_blocks_does_not_spill(tmp_path, monkeypatch):
    check_forms(BLOCK_FORMS, shapes_in_blocks, tmp_path, monkeypatch)


def check_forms(forms, shapes, tmp_path, monkeypatch):
    """One program holds all forms; the last form is flat."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))

    def step(operands):
        return [kernel(*x) for (kernel, _), x in zip(forms, operands, strict=True)]

    compiled = compile_for_h200(step, *abstract(h200_mesh(), ([shapes(*shape) for _, shape in forms],)))
    assert compiled.machine_code
    logs, texts = (
        [path.read_text(errors="replace") for path in tmp_path.glob(f"fp8*{end}")]
        for end in (".ptxas", ".ptx")
    )
    assert max(int(n) for n in re.findall(r"(\d+) bytes spill stores", "".join(logs))) == 0
    assert len(texts) == len(forms) and all(
        "f32.e4m3.e4m3" in ptx and "cp.async.bulk.tensor" in ptx for ptx in texts
    )
    # The warpgroups' registers equal those of the CTA (3 · 168). A larger request would wait forever.
    registers = [
        sorted(int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx))
        for ptx in texts
    ]
    assert sorted(registers) == [[]] + [[24, 240]] * (len(forms) - 1)


@pytest.mark.parametrize(("kernel", "m"), [(fp8_gemm, 512), (fp8_flat_gemm, 64)])
def test_values_and_scales_pass_between_the_products_of_one_stream_region(kernel, m):
    """A region returns one array, so the quantized activation must stay inside."""

    def mlp(x, up_gate, down, residual):
        return kernel(kernel(x, up_gate, sms=104, **GATE, quantize=True), down, residual=residual, sms=104)

    def step(*args):
        return compute_on.compute_on(
            mlp, compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device
        )(*args)

    (x, up_gate), (_, down) = shapes(m, 28672, 4096), shapes(m, 4096, 14336)
    compiled = compile_for_h200(
        step, *abstract(h200_mesh(), (x, up_gate, down, jax.ShapeDtypeStruct((m, 4096), jnp.bfloat16)))
    )
    on_stream = [
        thunk.kind for thunk in compiled.thunks if thunk.depth and thunk.stream == "computation_stream[1]"
    ]
    assert on_stream == ["kCustomCall", "kCustomCall"]
