"""Grouped GEMM with a weight in e4m3 blocks: the interpreter against the reference
and float64, and the H200 code.
"""

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

from pallas_kernels.gemm.block_fp8_format import (
    dequantize_block_fp8,
    quantize_block_fp8,
    row_scales,
)
from pallas_kernels.gemm.grouped import api, reference
from pallas_kernels.gemm.grouped.block_products import padded, pieces
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.gemm.grouped.swapped import grouped_gemm, list_groups
from pallas_kernels.gemm.grouped.tiles import TALLEST, block_tile
from pallas_kernels.hopper.limits import SMEM_BYTES
from pallas_kernels.pointwise.quantize.reference import dequantize, quantize_blocks
from pallas_kernels.quantized import BlockFp8

GATES = {"activation": "silu", "gate_block": 32}
listed = jax.jit(list_groups, static_argnums=(1, 2))
interpreted = functools.partial(grouped_gemm, sms=2, interpret=plgpu.InterpretGPUParams())
packed = jax.jit(quantize_block_fp8, static_argnums=1)
quantized = jax.jit(quantize_blocks)


def given_operands(tokens, experts, n, k, gate_block=None):
    """Return rows and a weight in e4m3 whose blocks differ in size by up to 2 ** 7."""
    rng = np.random.default_rng(tokens)
    x = rng.normal(size=(tokens, k // 128, 128)) * 2.0 ** rng.integers(-4, 4, (tokens, k // 128, 1))
    w = rng.normal(size=(experts, n // 64, 64, k // 128, 128)) / k**0.5
    w *= 2.0 ** rng.integers(-4, 4, (experts, n // 64, 1, k // 128, 1))
    as_array = lambda values, *shape: jnp.asarray(values.reshape(shape), jnp.float32)
    return quantized(as_array(x, tokens, k)), packed(as_array(w, experts, n, k), gate_block)


def exact(rows, w, groups, activation=None, gate_block=None):
    """Return the product of the rows that the pairs have, in float64, and their rows."""
    x = np.asarray(dequantize(rows), np.float64)
    weight = np.asarray(dequantize_block_fp8(w, gate_block), np.float64)
    ends = np.cumsum(np.asarray(groups.sizes))
    places = np.asarray(groups.places).reshape(-1)
    y = np.stack([weight[np.searchsorted(ends, at, side="right")] @ x[at] for at in places])
    if gate_block is None:
        return y
    pair = y.reshape(len(y), -1, 2, gate_block)
    gate, up = pair[:, :, 0], pair[:, :, 1]
    return (gate / (1 + np.exp(-gate)) * up).reshape(len(y), -1)


def error_of(found, wanted, groups):
    found = np.asarray(found[groups.places.reshape(-1)], np.float64)
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("picked", "n", "k", "rows", "epilogue"),
    [
        # One token. A stage has 256 columns, and the last one is half beyond the
        # weight; so is a tile's last row.
        (draw_routing(np.random.default_rng(0), 1, 3, 2), 192, 384, 8, {}),
        # Experts without a row, and several tiles of one expert.
        (np.ones((20, 1), np.int32), 256, 256, 16, GATES),
        (draw_routing(np.random.default_rng(1), 21, 3, 2, 1.2), 384, 256, 48, GATES | {"gate_block": 16}),
        (draw_routing(np.random.default_rng(2), 150, 2, 1), 256, 128, 144, GATES | {"gate_block": 64}),
    ],
    ids=["one token", "one expert", "zipf", "tall"],
)
def test_each_row_is_multiplied_with_its_experts_weight(picked, n, k, rows, epilogue):
    x, w = given_operands(picked.shape[0], 3, n, k, epilogue.get("gate_block"))
    groups = listed(jnp.asarray(picked), 3, rows)
    own = jax.tree.map(lambda one: one[groups.pairs // picked.shape[1]], x)
    wanted = exact(own, w, groups, **epilogue)
    for product in (interpreted, reference.grouped_gemm):
        found = jax.jit(functools.partial(product, **epilogue))(own, w, groups)
        assert found.dtype == jnp.bfloat16 and error_of(found, wanted, groups) < 4e-3


def operands(experts, chosen, tokens, n, k):
    picked = jax.ShapeDtypeStruct((tokens, chosen), jnp.int32)
    groups = jax.eval_shape(functools.partial(api.list_groups, num_experts=experts), picked)
    x = jax.eval_shape(quantize_blocks, jax.ShapeDtypeStruct((len(groups.pairs), k), jnp.bfloat16))
    w = BlockFp8(
        jax.ShapeDtypeStruct((experts, n, k), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((experts, n // 64, k // 128), jnp.float32),
    )
    return abstract(h200_mesh(), (x, w, groups))


QWEN, DEEPSEEK = (128, 8), (256, 8)


@pytest.mark.parametrize(
    ("experts", "tokens", "n", "k", "gate_block"),
    [
        (QWEN, 1, 1536, 2048, 32),
        (QWEN, 64, 2048, 768, None),
        (QWEN, 1536, 1536, 2048, 32),
        (QWEN, 2048, 2048, 768, None),
        (DEEPSEEK, 512, 4096, 7168, 64),
        # Fewer scales than a copy has, of tokens and of blocks of columns.
        ((3, 1), 1, 192, 384, None),
    ],
    ids=["qwen 1", "qwen 64", "qwen 1536", "qwen 2048", "deepseek 512", "one row"],
)
def test_on_an_h200_no_register_is_spilled(experts, tokens, n, k, gate_block, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    gates = {} if gate_block is None else {"activation": "silu", "gate_block": gate_block}
    compiled = compile_for_h200(
        functools.partial(api.grouped_gemm, **gates), *operands(*experts, tokens, n, k)
    )
    # XLA puts the scales of the tokens in their order in the stages.
    *before, last = [thunk.kind for thunk in compiled.thunks]
    assert set(before) == {"kCustomKernel"} and last == "kCustomCall"
    logs = "".join(
        path.read_text(errors="replace") for path in tmp_path.glob("grouped_gemm_fp8_blocks*.ptxas")
    )
    assert set(re.findall(r"(\d+) bytes spill stores", logs)) == {"0"} and "serialized" not in logs


@given(rows=st.integers(1, TALLEST // 8).map(lambda eights: 8 * eights))
def test_a_tile_fits_shared_memory_and_boxes_lie_in_one_piece(rows):
    tile = block_tile(rows)
    stage = tile.depth * (tile.columns + rows) + tile.depth // 128 * 4 * padded(rows)
    assert tile.stages >= 3 and tile.stages * stage + tile.warpgroups * 256 * tile.box < SMEM_BYTES
    cut = pieces(tile)
    assert sum(count for _, count in cut) == rows and all(first % tile.box == 0 for first, _ in cut)
    assert all(count > 0 and count % tile.box == 0 for _, count in cut)


@pytest.mark.parametrize("gate_block", [None, 16, 64])
def test_each_block_of_64_rows_and_128_columns_has_a_scale(gate_block):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2, 256, 256)) * rng.uniform(0.1, 10, (2, 256, 1))
    w = packed(jnp.asarray(x, jnp.float32), gate_block)
    assert w.scale.shape == (2, 4, 2) and w.values.dtype == jnp.float8_e4m3fn
    # The rows of a block, by their numbers among the gates and ups.
    rows = np.arange(256).reshape(4, 64)
    if gate_block is not None:
        rows = np.arange(256).reshape(2, -1, 2, gate_block).swapaxes(1, 2).reshape(4, 64)
    for block, of_block in enumerate(rows):
        largest = np.abs(x[:, of_block].reshape(2, 64, 2, 128)).max((1, 3))
        np.testing.assert_allclose(w.scale[:, block], largest / 448, rtol=1e-6)
        of_rows = np.asarray(row_scales(w, gate_block))[:, of_block]
        np.testing.assert_array_equal(of_rows, np.broadcast_to(w.scale[:, block, None], of_rows.shape))
    back = np.asarray(dequantize_block_fp8(w, gate_block))
    off = np.abs(back - x) / np.repeat(np.asarray(row_scales(w, gate_block)), 128, -1)
    assert (
        off.max() <= 16 * (1 + 1e-5)
        and (off <= np.abs(x) / np.repeat(np.asarray(row_scales(w, gate_block)), 128, -1) / 16 + 2**-9).all()
    )


@pytest.mark.parametrize(
    ("n", "k", "gate_block"), [(96, 128, None), (64, 192, None), (192, 128, 32), (256, 128, 48)]
)
def test_partial_blocks_are_refused(n, k, gate_block):
    with pytest.raises(ValueError, match=f"N={n}, K={k}, gate_block={gate_block}: accepted are"):
        quantize_block_fp8(jnp.zeros((1, n, k)), gate_block)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale": jnp.zeros((2, 1, 1))}, r"\(2, 1, 1\)\]: accepted are \[\(16, 1\), \(2, 2, 1\)\]"),
        ({"values": jnp.zeros((2, 128, 128), jnp.int8)}, "dtypes .*int8"),
    ],
)
def test_wrong_parts_are_named(change, said):
    x, w = given_operands(8, 2, 128, 128)
    groups = list_groups(jnp.zeros((8, 1), jnp.int32), 2, 8)
    x = jax.tree.map(lambda one: one[groups.pairs], x)
    with pytest.raises(ValueError, match=said):
        grouped_gemm(x, w._replace(**change), groups)


def test_a_bias_is_added_before_the_gate():
    x, w = given_operands(9, 2, 256, 128, 32)
    picked = jnp.zeros((9, 1), jnp.int32)
    groups = api.list_groups(picked, 2)
    rows = jax.tree.map(lambda one: one[groups.pairs], x)
    bias = jnp.asarray(np.random.default_rng(5).normal(size=(2, 256)), jnp.float32)
    found = jax.jit(functools.partial(api.grouped_gemm, **GATES))(rows, w, groups, bias=bias)
    weight = dequantize_block_fp8(w, 32)
    plain = functools.partial(reference.grouped_gemm, **GATES, bias=bias)
    wanted = jax.jit(plain)(dequantize(rows), weight, groups)
    assert error_of(found, np.asarray(wanted[groups.places.reshape(-1)], np.float64), groups) < 4e-3
