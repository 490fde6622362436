"""Grouped GEMM with swapped operands: the interpreter against the reference, heights, and the H200 code."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import compute_on
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm import reference as gemm_reference
from pallas_kernels.gemm.grouped import reference
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.gemm.grouped.swapped import grouped_gemm, list_groups
from pallas_kernels.gemm.grouped.tiles import TALLEST, grouped_tile, tile_rows
from pallas_kernels.hopper.limits import SMEM_BYTES
from pallas_kernels.pointwise.quantize.reference import dequantize, quantize_rows

GATES = {"activation": "silu", "gate_block": 32}
# One program each: eager operations would be a program each.
listed = jax.jit(list_groups, static_argnums=(1, 2))
interpreted = functools.partial(grouped_gemm, sms=2, interpret=plgpu.InterpretGPUParams())


def given_rows(tokens, experts, n, k, dtype=jnp.bfloat16):
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.normal(size=(tokens, k)), dtype)
    return x, jnp.asarray(rng.normal(size=(experts, n, k)) / k**0.5, dtype)


def relative_error(got, x, w, picked, **epilogue):
    """Return ‖got − exact‖ / ‖exact‖ over all pairs; got: [T, e, N]."""
    off = total = 0.0
    for expert in range(w.shape[0]):
        token, choice = np.nonzero(picked == expert)
        want = np.asarray(
            gemm_reference.gemm(x.astype(jnp.float32), w[expert].astype(jnp.float32), **epilogue)
        )
        off += np.sum((got[token, choice] - want[token]) ** 2)
        total += np.sum(want[token] ** 2)
    return (off / total) ** 0.5


ONE_EXPERT = np.zeros((20, 1), np.int32)


@pytest.mark.parametrize(
    ("picked", "experts", "n", "k", "rows", "epilogue"),
    [
        # One token, and experts without a token.
        (draw_routing(np.random.default_rng(0), 1, 4, 2), 4, 128, 128, 8, GATES | {"gate_block": 64}),
        # Several tiles of one expert, the last one incomplete; no other expert has a row.
        (ONE_EXPERT, 3, 192, 128, 16, {}),
        # The last columns of a tile are beyond the last expert's weight. Two warpgroups.
        (draw_routing(np.random.default_rng(1), 21, 3, 2, 1.2), 3, 192, 64, 48, GATES),
    ],
    ids=["one token", "one expert", "zipf"],
)
def test_each_row_is_multiplied_with_its_experts_weight(picked, experts, n, k, rows, epilogue):
    x, w = given_rows(picked.shape[0], experts, n, k)
    groups = listed(jnp.asarray(picked), experts, rows)
    sorted_rows = x[groups.pairs // picked.shape[1]]
    y = jax.jit(functools.partial(interpreted, **epilogue))(sorted_rows, w, groups)
    got = np.asarray(y[groups.places], np.float32)
    assert relative_error(got, x, w, picked, **epilogue) < 4e-3


@pytest.mark.parametrize(
    ("picked", "n", "rows", "epilogue"),
    [
        (np.zeros((1, 1), np.int32), 128, 8, GATES | {"gate_block": 64}),
        (
            draw_routing(np.random.default_rng(1), 21, 3, 2, 1.2),
            384,
            48,
            GATES,
        ),  # two warpgroups, the last half empty
        (draw_routing(np.random.default_rng(2), 21, 3, 2, 1.2), 256, 48, GATES | {"gate_block": 16}),
        (draw_routing(np.random.default_rng(3), 9, 3, 2), 384, 16, {}),
    ],
    ids=["one token", "blocks of 32", "blocks of 16", "no gates"],
)
def test_e4m3_rows_are_multiplied_and_scaled(picked, n, rows, epilogue):
    x, w = given_rows(picked.shape[0], 3, n, 256)
    spread = jnp.asarray(np.random.default_rng(4).uniform(0.1, 10, (3, n, 1)), w.dtype)
    x, w = quantize_rows(x), quantize_rows(w * spread)
    groups = listed(jnp.asarray(picked), 3, rows)
    sorted_rows = jax.tree.map(lambda one: one[groups.pairs // picked.shape[1]], x)
    y = jax.jit(functools.partial(interpreted, **epilogue))(sorted_rows, w, groups)
    got = np.asarray(y[groups.places], np.float32)
    assert relative_error(got, dequantize(x), dequantize(w), picked, **epilogue) < 4e-3
    plain = jax.jit(functools.partial(reference.grouped_gemm, **epilogue))
    same = plain(sorted_rows, w, groups)[groups.places]
    assert (
        relative_error(np.asarray(same, np.float32), dequantize(x), dequantize(w), picked, **epilogue) < 4e-3
    )


@given(
    tokens=st.integers(1, 5000),
    form=st.sampled_from([(128, 8), (8, 2), (256, 8), (32, 4), (60, 1)]),
    itemsize=st.sampled_from([1, 2]),
)
def test_a_tile_fits_shared_memory_and_holds_a_mean_expert(tokens, form, itemsize):
    experts, chosen = form
    rows = tile_rows(tokens, chosen, experts)
    tile = grouped_tile(rows, itemsize)
    stage = (tile.columns + rows) * tile.depth * itemsize
    assert tile.rows == rows and rows % tile.box == 0 and tile.box % 8 == 0
    assert tile.stages >= 3 and tile.stages * stage + tile.warpgroups * 256 * tile.box < SMEM_BYTES
    assert rows >= min(tokens * chosen / experts, TALLEST / 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k": 64}, "equal K and M"),
        ({"rows": 152}, "up to 144 rows"),
        ({"rows": 12}, "multiple of 8"),
        ({"dtype": jnp.float32}, "bfloat16 twice"),
        ({"sms": 0}, "sms=0: accepted are 1 to 132"),
        ({"tile": grouped_tile(16)}, "a tile of 16 rows: accepted are the groups' 8"),
    ],
)
def test_unsupported_arguments_are_named(change, said):
    x, w = given_rows(8, 2, 128, 128, change.get("dtype", jnp.bfloat16))
    groups = list_groups(jnp.zeros((8, 2), jnp.int32), 2, change.get("rows", 8))
    settings = {name: change[name] for name in ("sms", "tile") if name in change}
    with pytest.raises(ValueError, match=said):
        grouped_gemm(x[groups.pairs // 2], w[:, :, : change.get("k")], groups, **settings)


def test_one_operand_in_e4m3_is_refused():
    x, w = given_rows(8, 2, 128, 128)
    groups = list_groups(jnp.zeros((8, 2), jnp.int32), 2, 8)
    with pytest.raises(ValueError, match="bfloat16 twice, or float8_e4m3fn"):
        grouped_gemm(x[groups.pairs // 2], quantize_rows(w), groups)
    rows = quantize_rows(x[groups.pairs // 2])
    with pytest.raises(ValueError, match="one for each row"):
        grouped_gemm(rows._replace(scale=rows.scale[:1]), quantize_rows(w), groups)


def _operands(tokens, experts, chosen, n, k, *, e4m3=False):
    picked = jax.ShapeDtypeStruct((tokens, chosen), jnp.int32)
    groups = jax.eval_shape(functools.partial(list_groups, num_experts=experts), picked)
    shapes = ((len(groups.pairs), k), (experts, n, k))
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    if e4m3:
        x, w = jax.eval_shape(lambda *both: tuple(map(quantize_rows, both)), x, w)
    return abstract(h200_mesh(), (x, w, groups))


@pytest.mark.parametrize(
    ("tokens", "e4m3", "spilled"),
    [(1, False, 0), (64, False, 0), (256, False, 0), (2048, False, 0), (64, True, 0), (2048, True, 36)],
)
def test_few_registers_are_spilled_on_an_h200(tokens, e4m3, spilled, tmp_path, monkeypatch):
    """Qwen3-30B-A3B's two products, with tiles of 8 to 144 rows. spilled:
    bytes that a thread stores at most.
    """
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    for n, k, epilogue in ((1536, 2048, GATES), (2048, 768, {})):
        product = functools.partial(grouped_gemm, **epilogue)
        compiled = compile_for_h200(product, *_operands(tokens, 128, 8, n, k, e4m3=e4m3))
        assert [thunk.kind for thunk in compiled.thunks] == ["kCustomCall"] and compiled.machine_code
    logs = "".join(path.read_text(errors="replace") for path in tmp_path.glob("grouped_gemm*.ptxas"))
    assert max(map(int, re.findall(r"(\d+) bytes spill stores", logs))) <= spilled


def test_it_fits_a_stream_region():
    def step(x, w, groups):
        region = compute_on.compute_on(
            lambda *args: grouped_gemm(*args, sms=104),
            compute_type="gpu_stream:1",
            out_memory_spaces=jax.memory.Space.Device,
        )
        return region(x, w, groups)

    compiled = compile_for_h200(step, *_operands(512, 8, 2, 4096, 4096))
    assert [
        thunk.kind for thunk in compiled.thunks if thunk.depth and thunk.stream == "computation_stream[1]"
    ] == ["kCustomCall"]
