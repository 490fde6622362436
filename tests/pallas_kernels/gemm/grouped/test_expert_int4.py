"""Grouped GEMM with a weight in int4: the interpreter against the reference, and the H200 code."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from ptx import misaligned
from thread_code import LANE, WARP, bfloat16, run_as_thread_code, value

from pallas_kernels.gemm.grouped import api, int4_operand, reference
from pallas_kernels.gemm.grouped.int4_format import dequantize_experts, quantize_experts
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.gemm.grouped.swapped import grouped_gemm, list_groups
from pallas_kernels.gemm.grouped.tiles import TALLEST, int4_tile, supports_int4
from pallas_kernels.gemm.int4.reference import (
    dequantize_int4,
    nearest_levels,
    nearest_to_zero_point,
    quantize_int4,
)
from pallas_kernels.hopper.limits import SMEM_BYTES
from pallas_kernels.quantized import ExpertInt4

GATES = {"activation": "silu", "gate_block": 32}
listed = jax.jit(list_groups, static_argnums=(1, 2))
interpreted = functools.partial(grouped_gemm, sms=2, interpret=plgpu.InterpretGPUParams())
packed = jax.jit(quantize_experts, static_argnums=(1, 2))


def given_operands(tokens, experts, n, k, group, nearest=nearest_levels):
    """Return rows, and a weight whose groups differ in size and in their middle."""
    rng = np.random.default_rng(tokens)
    w = rng.normal(size=(experts, n, k // group, group)) + rng.normal(size=(experts, n, k // group, 1))
    w *= 2.0 ** rng.integers(-4, 3, (experts, n, k // group, 1)) / k**0.5
    x = jnp.asarray(rng.normal(size=(tokens, k)), jnp.bfloat16)
    return x, packed(jnp.asarray(w.reshape(experts, n, k), jnp.float32), group, nearest)


def error_of(found, rows, w, groups, **epilogue):
    """Return ‖found − exact‖ / ‖exact‖ over the rows of all pairs."""
    exact = jax.jit(functools.partial(reference.grouped_gemm, **epilogue))
    wide = dequantize_experts(w).astype(jnp.float32)  # the kernel multiplies numbers in bfloat16
    wanted = exact(rows.astype(jnp.float32), wide, groups)
    found, wanted = (np.asarray(y[groups.places], np.float32) for y in (found, wanted))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("group", [64, 128])
def test_the_numbers_are_the_nearest_levels_of_their_groups(group):
    rng = np.random.default_rng(group)
    x = (rng.normal(size=(2, 8, 256)) + 1).astype(np.float32)
    w = packed(jnp.asarray(x), group)
    assert w.shape == x.shape and w.group == group and w.packed.dtype == jnp.uint8
    back = np.asarray(dequantize_experts(w, jnp.float32)).reshape(2, 8, -1, group)
    scale = np.asarray(w.factors[..., 0], np.float32).swapaxes(1, 2)[..., None]
    split = x.reshape(back.shape)
    # Half a level, and what the rounding of the zero and of the scale takes from the outer levels.
    assert (np.abs(back - split) <= 0.5 * scale + 2.0**-7 * np.abs(split).max(-1, keepdims=True)).all()


def test_an_expert_in_groups_of_64_has_the_numbers_of_the_dense_format():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 16, 128)), jnp.float32)
    dense, experts = quantize_int4(x), packed(x, 64)
    np.testing.assert_array_equal(np.asarray(dense.packed), np.asarray(experts.packed))
    np.testing.assert_array_equal(
        np.asarray(dequantize_int4(dense, jnp.float32)), np.asarray(dequantize_experts(experts, jnp.float32))
    )


@pytest.mark.parametrize(
    ("picked", "n", "k", "rows", "group", "nearest", "epilogue"),
    [
        # One token. The last stage of K is half beyond the weight, and so is the second warpgroup.
        (draw_routing(np.random.default_rng(0), 1, 3, 2), 192, 192, 8, 64, nearest_levels, {}),
        # Experts without a row, and several tiles of one expert.
        (np.ones((20, 1), np.int32), 256, 256, 16, 128, nearest_to_zero_point, GATES),
        (
            draw_routing(np.random.default_rng(1), 21, 3, 2, 1.2),
            *(384, 64, 48, 64, nearest_levels),
            GATES | {"gate_block": 64},
        ),
    ],
    ids=["one token", "one expert", "zipf"],
)
def test_each_row_is_multiplied_with_its_experts_weight(picked, n, k, rows, group, nearest, epilogue):
    x, w = given_operands(picked.shape[0], 3, n, k, group, nearest)
    groups = listed(jnp.asarray(picked), 3, rows)
    given_rows = x[groups.pairs // picked.shape[1]]
    found = jax.jit(functools.partial(interpreted, **epilogue))(given_rows, w, groups)
    assert error_of(found, given_rows, w, groups, **epilogue) < 4e-3


def test_a_shape_without_a_kernel_is_multiplied_in_bfloat16():
    x, w = given_operands(9, 3, 96, 64, 64)
    assert not supports_int4(96, 64, None)
    groups = listed(jnp.zeros((9, 1), jnp.int32), 3, 16)
    rows = x[groups.pairs]
    assert error_of(interpreted(rows, w, groups), rows, w, groups) < 4e-3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"factors": jnp.zeros((2, 128, 2, 2), jnp.bfloat16)}, r"factors \[2, 128, 2, 2\]: accepted are"),
        ({"packed": jnp.zeros((2, 128, 64), jnp.int8)}, r"dtypes \['bfloat16', 'int8', 'bfloat16'\]"),
    ],
)
def test_wrong_parts_are_named(change, said):
    x, w = given_operands(8, 2, 128, 128, 64)
    groups = list_groups(jnp.zeros((8, 1), jnp.int32), 2, 8)
    with pytest.raises(ValueError, match=said):
        grouped_gemm(x[groups.pairs], w._replace(**change), groups)


@pytest.mark.parametrize(("k", "group"), [(96, 64), (192, 128), (256, 32)])
def test_partial_groups_are_refused(k, group):
    with pytest.raises(ValueError, match=f"K={k}, group={group}: accepted are groups of"):
        quantize_experts(jnp.zeros((1, 8, k)), group)


@given(
    rows=st.integers(1, TALLEST // 8).map(lambda eights: 8 * eights),
    group=st.sampled_from([64, 128]),
    warpgroups=st.sampled_from([1, 2]),
)
def test_a_tile_fits_shared_memory(rows, group, warpgroups):
    tile = int4_tile(rows, group, warpgroups)
    stage = tile.columns * (tile.depth // 2 + 4 * tile.depth // group) + rows * tile.depth * 2
    assert tile.stages >= 2 and tile.stages * stage + tile.warpgroups * 256 * tile.box < SMEM_BYTES


@pytest.mark.parametrize("nearest", [nearest_levels, nearest_to_zero_point])
@pytest.mark.parametrize(("first", "block"), [(0, 64), (64, 64), (64, 32), (0, 16)])
def test_each_thread_has_its_part_of_the_operand(first, block, nearest, monkeypatch):
    """The code of a thread runs with integers in place of MLIR values, for the 128
    threads of a warpgroup at once.

    TMA's order: tiles of 8 rows of 32 bytes, and 16 bytes lie at their address xor bit 7 of
    it. wgmma's order: a thread has two neighboring columns of each 8 in rows lane / 4 and lane
    / 4 + 8 of its warp's 16 rows.
    """
    rng = np.random.default_rng(first + block)
    w = packed(jnp.asarray(rng.normal(size=(1, 64, 128)), jnp.float32), 64, nearest)  # a stage
    row, byte = np.indices((64, 64))
    at = (row // 8 * 2 + byte // 32) * 256 + row % 8 * 32 + byte % 32
    image = np.zeros(64 * 64, np.uint64)
    image[at ^ (at >> 7 & 1) << 4] = np.asarray(w.packed[0])
    factors = np.asarray(w.factors[0]).reshape(2, 64 // block, 2 * block).swapaxes(0, 1)

    packed_ref = value(image, get_strides_and_offset=lambda: ((512, 256, 32, 1), 0))
    factors_ref = value(
        np.ascontiguousarray(factors).view(np.uint8).reshape(-1).astype(np.uint64), shape=factors.shape
    )

    def read_words(ref, offset, count, plus):
        start = offset.astype(int) + plus
        assert (start % (4 * count) == 0).all()
        bytes_at = lambda word, i: ref.data[start + 4 * word + i] << np.uint64(8 * i)
        return [sum(bytes_at(word, i) for i in range(4)) for word in range(count)]

    warp, lane = WARP, LANE
    run_as_thread_code(monkeypatch, int4_operand, read_words=read_words)
    zero_points = nearest is nearest_to_zero_point
    registers = int4_operand._unpack(packed_ref, factors_ref, first, first // 64, zero_points)

    wanted = np.asarray(dequantize_experts(w)[0, :, first : first + 64], np.float64)
    for eight, half, odd in np.ndindex(8, 2, 2):
        bits = registers[0, eight, 0, 0, half, 0, 0, 0, 0] >> np.uint64(16 * odd) & np.uint64(0xFFFF)
        rows, columns = 16 * warp + 8 * half + lane // 4, 8 * eight + 2 * (lane % 4) + odd
        np.testing.assert_array_equal(bfloat16(bits), wanted[rows.astype(int), columns.astype(int)])


def operands(experts, chosen, tokens, n, k, group, factors):
    picked = jax.ShapeDtypeStruct((tokens, chosen), jnp.int32)
    groups = jax.eval_shape(functools.partial(api.list_groups, num_experts=experts), picked)
    w = ExpertInt4(
        jax.ShapeDtypeStruct((experts, n, k // 2), jnp.uint8),
        jax.ShapeDtypeStruct((experts, k // group, n, 2), factors),
    )
    return abstract(h200_mesh(), (jax.ShapeDtypeStruct((len(groups.pairs), k), jnp.bfloat16), w, groups))


QWEN, MIXTRAL = (128, 8), (8, 2)


@pytest.mark.parametrize(
    ("experts", "tokens", "n", "k", "gate_block", "group", "factors"),
    [
        (QWEN, 64, 1536, 2048, 32, 64, jnp.int16),
        (QWEN, 1, 2048, 768, None, 128, jnp.bfloat16),
        (MIXTRAL, 2048, 28672, 4096, 64, 64, jnp.bfloat16),
        (MIXTRAL, 512, 4096, 14336, None, 128, jnp.bfloat16),
    ],
    ids=["qwen 64", "qwen 1", "mixtral 2048", "mixtral 512"],
)
def test_on_an_h200_nibbles_go_to_tensor_cores_through_registers(
    experts, tokens, n, k, gate_block, group, factors, tmp_path, monkeypatch
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    gates = {} if gate_block is None else {"activation": "silu", "gate_block": gate_block}
    product = functools.partial(api.grouped_gemm, **gates)
    compiled = compile_for_h200(product, *operands(*experts, tokens, n, k, group, factors))
    assert [thunk.kind for thunk in compiled.thunks] == ["kCustomCall"] and compiled.machine_code
    assert compiled.memory.temp_size_in_bytes < 2**20
    logs, ptx = (
        "".join(path.read_text(errors="replace") for path in tmp_path.glob(f"grouped_gemm_int4*{end}"))
        for end in (".ptxas", ".ptx")
    )
    assert set(re.findall(r"(\d+) bytes spill stores", logs)) == {"0"}
    made = "mul.rn.bf16x2" if factors == jnp.int16 else "fma.rn.bf16x2"
    assert "serialized" not in logs and made in ptx and not misaligned(ptx)
