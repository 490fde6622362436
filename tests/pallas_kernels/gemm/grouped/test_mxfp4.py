"""Grouped GEMM with a weight in MXFP4: the interpreter against the reference, the PTX of the conversion by an
interpreter of its few instructions, and the H200 code.
"""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from ptx import misaligned
from thread_code import LANE, WARP, bfloat16, run_as_thread_code, run_ptx, value

from pallas_kernels.gemm.grouped import api, mxfp4_operand, reference
from pallas_kernels.gemm.grouped.mxfp4_format import dequantize_mxfp4, quantize_mxfp4
from pallas_kernels.gemm.grouped.mxfp4_operand import SHIFT, TWO_WORDS
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.gemm.grouped.swapped import grouped_gemm, list_groups
from pallas_kernels.gemm.grouped.tiles import TALLEST, mxfp4_tile, supports_mxfp4
from pallas_kernels.hopper.limits import SMEM_BYTES
from pallas_kernels.quantized import Mxfp4

GATES = {"activation": "silu", "gate_block": 32}
listed = jax.jit(list_groups, static_argnums=(1, 2))
interpreted = functools.partial(grouped_gemm, sms=2, interpret=plgpu.InterpretGPUParams())
packed = jax.jit(quantize_mxfp4)


def given_operands(tokens, experts, n, k):
    """Return rows, and a weight whose groups have scales from 2 ** -12 to 2 ** 3."""
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.normal(size=(tokens, k)), jnp.bfloat16)
    w = packed(jnp.asarray(rng.normal(size=(experts, n, k)) / k**0.5, jnp.float32))
    moved = rng.integers(-8, 4, w.scale.shape).astype(np.uint8)
    return x, w._replace(scale=w.scale + moved)


def error_of(found, rows, w, groups, **epilogue):
    """Return ‖found − exact‖ / ‖exact‖ over the rows of all pairs."""
    wanted = jax.jit(functools.partial(reference.grouped_gemm, **epilogue))(
        rows.astype(jnp.float32), w, groups
    )
    found, wanted = (np.asarray(y[groups.places], np.float32) for y in (found, wanted))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("picked", "n", "k", "rows", "epilogue"),
    [
        # One token. The last stage of K is half beyond the weight, and so is the second warpgroup.
        (draw_routing(np.random.default_rng(0), 1, 3, 2), 192, 192, 8, {}),
        # Experts without a row, and several tiles of one expert.
        (np.ones((20, 1), np.int32), 256, 128, 16, GATES),
        (
            draw_routing(np.random.default_rng(1), 21, 3, 2, 1.2),
            320,
            64,
            48,
            GATES | {"gate_block": 64, "n": 384},
        ),
    ],
    ids=["one token", "one expert", "zipf"],
)
def test_each_row_is_multiplied_with_its_experts_weight(picked, n, k, rows, epilogue):
    n = epilogue.get("n", n)
    epilogue = {name: value for name, value in epilogue.items() if name != "n"}
    x, w = given_operands(picked.shape[0], 3, n, k)
    groups = listed(jnp.asarray(picked), 3, rows)
    given_rows = x[groups.pairs // picked.shape[1]]
    found = jax.jit(functools.partial(interpreted, **epilogue))(given_rows, w, groups)
    assert error_of(found, given_rows, w, groups, **epilogue) < 4e-3


def test_a_shape_without_a_kernel_is_multiplied_in_bfloat16():
    """Copies of 16 rows' scales would be no multiple of 128 bytes."""
    x, w = given_operands(9, 3, 128, 64)
    epilogue = GATES | {"gate_block": 16}
    assert not supports_mxfp4(128, 64, 16)
    groups = listed(jnp.zeros((9, 1), jnp.int32), 3, 16)
    found = interpreted(x[groups.pairs], w, groups, **epilogue)
    np.testing.assert_array_equal(
        np.asarray(found[groups.places], np.float32),
        np.asarray(
            interpreted(x[groups.pairs], dequantize_mxfp4(w), groups, **epilogue)[groups.places], np.float32
        ),
    )


def test_biases_and_clamps_follow_the_product():
    """gpt-oss's experts, whose gates alternate with ups in blocks of 8 rows."""
    x, w = given_operands(9, 3, 128, 64)
    bias = jnp.asarray(np.random.default_rng(4).normal(size=(3, 128)), jnp.bfloat16)
    epilogue = {"bias": bias, "activation": "clamped_swiglu", "gate_block": 8}
    groups = api.list_groups(jnp.asarray(draw_routing(np.random.default_rng(5), 9, 3, 2)), 3)
    rows = x[groups.pairs // 2]
    product = functools.partial(api.grouped_gemm, sms=2, **epilogue)
    found = product(rows, w, groups, interpret=plgpu.InterpretGPUParams())
    assert error_of(found, rows, w, groups, **epilogue) < 4e-3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale": jnp.zeros((2, 128, 4), jnp.uint8)}, r"scales \[2, 128, 4\]: accepted are \[2, 128, 2\]"),
        ({"packed": jnp.zeros((2, 128, 32), jnp.int8)}, r"dtypes \['bfloat16', 'int8', 'uint8'\]"),
    ],
)
def test_wrong_parts_are_named(change, said):
    x, w = given_operands(8, 2, 128, 64)
    groups = list_groups(jnp.zeros((8, 1), jnp.int32), 2, 8)
    with pytest.raises(ValueError, match=said):
        grouped_gemm(x[groups.pairs], w._replace(**change), groups)


@given(
    rows=st.integers(1, TALLEST // 8).map(lambda eights: 8 * eights),
    k=st.sampled_from([64, 768, 2880, 4096]),
    warpgroups=st.sampled_from([1, 2]),
)
def test_a_tile_fits_shared_memory(rows, k, warpgroups):
    tile = mxfp4_tile(rows, k, warpgroups)
    stage = tile.columns * tile.depth // 2 + rows * tile.depth * 2
    scales, results = 2 * tile.columns * k // 32, tile.warpgroups * 256 * tile.box
    assert tile.stages >= 2 and tile.stages * stage + scales + results < SMEM_BYTES


def test_the_ptx_makes_the_numbers_of_the_bytes():
    """Every byte under every scale that a checkpoint may have, for each lane of a row."""
    byte, scale = np.meshgrid(np.arange(256, dtype=np.uint64), np.arange(34, 161, dtype=np.uint64))
    wanted = np.asarray(
        dequantize_mxfp4(
            Mxfp4(
                jnp.asarray(np.tile(byte[0].astype(np.uint8)[:, None], 16)),
                jnp.full((256, 1), 127, jnp.uint8),
            ),
            jnp.float32,
        ),
        np.float64,
    )
    rng = np.random.default_rng(0)
    for quad in range(4):
        other = rng.integers(0, 2**32, (2, *byte.shape), dtype=np.uint64)  # the bytes of the other lanes
        mask = ~np.uint64(255 << 8 * quad)
        words = [
            (other[0] & mask) | byte << np.uint64(8 * quad),
            (other[1] & mask) | (255 - byte) << np.uint64(8 * quad),
        ]
        once = (scale + np.uint64(126 - SHIFT)) << np.uint64(7)
        found = run_ptx(
            TWO_WORDS,
            {
                "$2": words[0],
                "$3": words[1],
                "$4": np.uint64(0x0404 + 0x1111 * quad),
                "$5": once | once << np.uint64(16),
            },
        )
        for name, of_byte in (("$0", byte), ("$1", 255 - byte)):
            for column in range(2):
                number = bfloat16(found[name] >> np.uint64(16 * column) & np.uint64(0xFFFF))
                exact = wanted[of_byte.astype(int), column] * 2.0 ** (scale.astype(float) - 127 - SHIFT)
                np.testing.assert_array_equal(number, exact)


@pytest.mark.parametrize(("first", "of_pairs"), [(0, None), (64, None), (64, 0), (0, 1)])
def test_each_thread_has_its_part_of_the_operand(first, of_pairs, monkeypatch):
    """The code of a thread runs with integers in place of MLIR values, for the 128
    threads of a warpgroup at once.

    TMA's order: tiles of 8 rows of 32 bytes, and 16 bytes lie at their address xor bit 7 of
    it. wgmma's order: a thread has two neighboring columns of each 8 in rows lane / 4 and lane
    / 4 + 8 of its warp's 16 rows. Of pairs, the warps have every other 16 rows of 128.
    """
    rng, k, pair, height = np.random.default_rng(first), 448, 5, 64 if of_pairs is None else 128
    bytes_of_rows = rng.integers(0, 256, (height, 64), np.uint8)  # a stage of 128 columns
    scales = rng.integers(100, 140, (height, k // 32), np.uint8)
    row, byte = np.indices((height, 64))
    at = (row // 8 * 2 + byte // 32) * 256 + row % 8 * 32 + byte % 32
    image = np.zeros(height * 64, np.uint64)
    image[at ^ (at >> 7 & 1) << 4] = bytes_of_rows

    packed_ref = value(image, get_strides_and_offset=lambda: ((512, 256, 32, 1), 0))
    scales_ref = value(scales.reshape(-1).astype(np.uint64), shape=(height // 8, k // 64, 16))

    def read(ref, offset, count):
        return sum(ref.data[offset.astype(int) + i] << np.uint64(8 * i) for i in range(count))

    def read_words(ref, offset, count, plus):
        offset = offset + np.uint64(plus)
        assert (offset % (4 * count) == 0).all()
        return [read(ref, offset + np.uint64(4 * i), 4) for i in range(count)]

    warp, lane = WARP, LANE
    own_names = {
        "read_words": read_words,
        "_read_two": lambda ref, offset, plus: read(ref, offset + np.uint64(plus), 2),
    }
    run_as_thread_code(monkeypatch, mxfp4_operand, **own_names)
    number = types.SimpleNamespace(registers=np.array(np.uint64(pair)))
    registers = mxfp4_operand._unpack(packed_ref, scales_ref, number, first, of_pairs)

    own = Mxfp4(
        jnp.asarray(bytes_of_rows[:, first // 2 : first // 2 + 32]),
        jnp.asarray(scales[:, 2 * pair : 2 * pair + 2]),
    )
    wanted = np.asarray(dequantize_mxfp4(own, jnp.float32), np.float64) * 2.0**-SHIFT
    for eight, half, odd in np.ndindex(8, 2, 2):
        bits = registers[0, eight, 0, 0, half, 0, 0, 0, 0] >> np.uint64(16 * odd) & np.uint64(0xFFFF)
        block = warp if of_pairs is None else 2 * warp + of_pairs
        rows, columns = 16 * block + 8 * half + lane // 4, 8 * eight + 2 * (lane % 4) + odd
        np.testing.assert_array_equal(bfloat16(bits), wanted[rows.astype(int), columns.astype(int)])


def _operands(tokens, n, k, biased):
    picked = jax.ShapeDtypeStruct((tokens, 4), jnp.int32)
    groups = jax.eval_shape(functools.partial(api.list_groups, num_experts=32), picked)
    w = Mxfp4(*(jax.ShapeDtypeStruct((32, n, k // per), jnp.uint8) for per in (2, 32)))
    bias = [jax.ShapeDtypeStruct((32, n), jnp.bfloat16)] if biased else []
    rows = jax.ShapeDtypeStruct((len(groups.pairs), k), jnp.bfloat16)
    return abstract(h200_mesh(), (rows, w, groups, *bias))


@pytest.mark.parametrize("tokens", [1, 64, 1024, 2048])
def test_on_an_h200_bytes_go_to_tensor_cores_through_registers(tokens, tmp_path, monkeypatch):
    """gpt-oss-20b's products, with tiles of 8 to 144 rows. Two have its biases and its gates."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))

    def product(x, w, groups, bias=None):
        epilogue = {} if bias is None else {"bias": bias, "activation": "clamped_swiglu", "gate_block": 8}
        return api.grouped_gemm(x, w, groups, **epilogue)

    compiled = compile_for_h200(product, *_operands(tokens, 5760, 2880, biased=tokens in (64, 2048)))
    assert [thunk.kind for thunk in compiled.thunks] == ["kCustomCall"] and compiled.machine_code
    assert compiled.memory.temp_size_in_bytes < 2**20
    logs, ptx = (
        "".join(path.read_text(errors="replace") for path in tmp_path.glob(f"grouped_gemm_mxfp4*{end}"))
        for end in (".ptxas", ".ptx")
    )
    assert set(re.findall(r"(\d+) bytes spill stores", logs)) == {"0"}
    assert "serialized" not in logs and "mul.rn.bf16x2" in ptx and not misaligned(ptx)
