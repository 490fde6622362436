"""Grouped GEMM with a weight in e4m3 blocks: the interpreter against the reference and float64, and the H200 code."""

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

from pallas_kernels.gemm.grouped import api, reference
from pallas_kernels.gemm.grouped.block_fp8_format import (
    dequantize_block_fp8,
    quantize_block_fp8,
    row_scales,
)
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.gemm.grouped.swapped import grouped_gemm, list_groups
from pallas_kernels.gemm.grouped.tiles import TALLEST, block_tile, supports_blocks
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
        # One token. A stage has 256 columns, and the last one is half beyond the weight; so is a tile's last row.
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
