"""Grouped GEMM: the choice of a kernel, tiles of 128 rows in the interpreter against the reference, and the
H200 code.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from jax.experimental import compute_on
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxflow.model import ops
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.op_registry import Context, Site
from jaxflow.model.routing import weighted_sum
from pallas_kernels.gemm import reference as gemm_reference
from pallas_kernels.gemm.grouped import api, padded, swapped
from pallas_kernels.gemm.grouped import groups as expert_groups
from pallas_kernels.gemm.grouped import reference as grouped_reference
from pallas_kernels.gemm.grouped.groups import HeldExperts
from pallas_kernels.gemm.grouped.padded import ROWS, grouped_gemm, list_groups
from pallas_kernels.gemm.tile_schedule import GemmTile
from pallas_kernels.kernel_set import kernel_set_for


def given_rows(tokens, experts, n, k, dtype=jnp.bfloat16):
    rng = np.random.default_rng(tokens)
    x, w = (
        jnp.asarray(rng.normal(size=(tokens, k)), dtype),
        jnp.asarray(rng.normal(size=(experts, n, k)) / k**0.5, dtype),
    )
    return x, w, jnp.asarray(rng.integers(0, experts, (tokens, 2)), jnp.int32)


def test_the_kernel_is_each_row_times_its_experts_weight():
    gates = {"activation": "silu", "gate_block": 32}
    x, w, chosen = given_rows(70, 2, 192, 64)
    groups = list_groups(chosen, 2)
    tile = GemmTile(
        ROWS, 128, 2
    )  # a column of tiles that is half beyond the weight: the next expert's rows, which are not stored
    rows = grouped_gemm(
        x[groups.pairs // 2], w, groups, **gates, sms=2, tile=tile, interpret=plgpu.InterpretGPUParams()
    )
    got = np.asarray(rows[groups.places], np.float32)
    for e in range(2):
        want = np.asarray(gemm_reference.gemm(x.astype(jnp.float32), w[e].astype(jnp.float32), **gates))
        for choice in range(2):
            here = np.asarray(chosen)[:, choice] == e
            assert np.linalg.norm(got[here, choice] - want[here]) < 4e-3 * np.linalg.norm(want[here])


@pytest.mark.parametrize("kernel", [padded, swapped])
def test_a_device_multiplies_the_rows_of_its_own_experts(kernel):
    """Experts 2 and 3 of 6 on this device, and experts 4 and 5, to which no token goes."""
    x, w, _ = given_rows(20, 6, 64, 64)
    chosen = jnp.asarray(np.random.default_rng(5).permuted(np.tile(np.arange(4), (20, 1)), axis=1)[:, :2])
    products = {}
    for first in (2, 4):
        lists = functools.partial(kernel.list_groups, held=HeldExperts(jnp.int32(first), 2))
        groups = jax.jit(lists, static_argnums=1)(chosen, 6)
        rows = x[groups.pairs // 2]
        products[first] = weighted_sum(
            kernel.grouped_gemm(
                rows, w[first : first + 2], groups, sms=1, interpret=plgpu.InterpretGPUParams()
            ),
            groups,
            jnp.ones((20, 2)),
        )
    assert not np.asarray(products[4]).any()
    wide, own = np.asarray(x, np.float32), np.asarray(w, np.float32)
    wanted = sum(np.where(np.asarray(chosen) == e, 1, 0).sum(1)[:, None] * (wide @ own[e].T) for e in (2, 3))
    found = np.asarray(products[2], np.float32)
    assert np.linalg.norm(found - wanted) < 6e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k": 64}, "equal K"),
        ({"rows": 4}, "one tile for every 128"),
        ({"dtype": jnp.float32}, "bfloat16 twice"),
        ({"sms": 0}, "sms=0: accepted are 1 to 132"),
    ],
)
def test_grouped_gemm_names_unsupported_arguments(change, said):
    x, w, chosen = given_rows(8, 2, 128, 128, change.get("dtype", jnp.bfloat16))
    groups = expert_groups.list_groups(chosen, 2, change.get("rows", ROWS), change.get("rows", ROWS))
    with pytest.raises(ValueError, match=said):
        grouped_gemm(x[groups.pairs // 2], w[:, :, : change.get("k")], groups, sms=change.get("sms"))


def test_biases_and_clamps_are_those_of_each_rows_expert():
    """gpt-oss: g · sigmoid(1.702 · g) · (u + 1), with a gate of at most 7 and an up from -7 to 7, by the
    reference and after the kernel's product.
    """
    x, w, chosen = given_rows(9, 3, 128, 64)
    w, bias = w * 9, jnp.asarray(np.random.default_rng(4).normal(size=(3, 128)), jnp.bfloat16)
    gates = {"bias": bias, "activation": "clamped_swiglu", "gate_block": 8}
    kernels = functools.partial(api.grouped_gemm, sms=2, interpret=plgpu.InterpretGPUParams())
    of_any, of_few, of_128 = (
        jax.jit(lists, static_argnums=1)(chosen, 3)
        for lists in (expert_groups.list_groups, api.list_groups, list_groups)
    )
    ways = [
        (of_any, grouped_reference.grouped_gemm),
        (of_few, kernels),
        (of_128, kernels),
    ]
    wide = [np.asarray(a, np.float64) for a in (x, w, bias)]
    for groups, way in ways:
        found = np.asarray(
            jax.jit(functools.partial(way, **gates))(x[groups.pairs // 2], w, groups), np.float64
        )
        for (token, choice), row in np.ndenumerate(np.asarray(groups.places)):
            expert = int(chosen[token, choice])
            pair = (wide[0][token] @ wide[1][expert].T + wide[2][expert]).reshape(-1, 2, 8)
            gate, up = np.minimum(pair[:, 0], 7), np.clip(pair[:, 1], -7, 7)
            wanted = (gate / (1 + np.exp(-1.702 * gate)) * (up + 1)).reshape(-1)
            assert (pair > 7).any() and (pair < -7).any()
            np.testing.assert_allclose(
                found[row], wanted, rtol=0.02, atol=0.1
            )  # products are rounded to bfloat16 before


@pytest.mark.parametrize("kernel", [padded, swapped])
def test_gates_in_blocks_of_8_follow_the_kernels_product(kernel):
    """Gemma 4 26B-A4B: tensor parallelism over 8 devices divides its dense MLP in blocks of 8."""
    x, w, chosen = given_rows(9, 3, 128, 64)
    groups, gates = kernel.list_groups(chosen, 3), {"activation": "gelu_tanh", "gate_block": 8}
    run = functools.partial(api.grouped_gemm, sms=2, interpret=plgpu.InterpretGPUParams(), **gates)
    given = x[groups.pairs // 2], w, groups
    assert "ragged_dot" not in str(jax.make_jaxpr(run)(*given))
    found = np.asarray(run(*given), np.float32)[groups.places]
    wanted = np.asarray(grouped_reference.grouped_gemm(*given, **gates), np.float32)[groups.places]
    assert np.linalg.norm(found - wanted) < 8e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("tokens", "chosen", "experts", "align"),
    [
        (1, 8, 128, 8),
        (2048, 8, 128, 8),
        (256, 2, 8, 8),
        (576, 2, 8, 8),
        (577, 2, 8, ROWS),
        (2048, 2, 8, ROWS),
    ],
)
def test_experts_of_more_rows_than_the_largest_tile_have_tiles_of_128(tokens, chosen, experts, align):
    picked = jax.ShapeDtypeStruct((tokens, chosen), jnp.int32)
    groups = jax.eval_shape(functools.partial(api.list_groups, num_experts=experts), picked)
    assert groups.align == align
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((len(groups.pairs), 128), (experts, 256, 128))
    )
    assert jax.eval_shape(api.grouped_gemm, x, w, groups).shape == (len(groups.pairs), 256)


def test_weights_are_not_copied_and_rows_meet_only_their_expert(tmp_path, monkeypatch):
    """Test Mixtral's two products of 512 tokens. XLA's version copies every weight and multiplies every row
    with all weights.


    """
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    config = open_checkpoint("mixtral-8x7b", load_format="dummy").model_config
    heads: dict[str, Any] = {
        "head_dim": config.head_dim,
        "queries_per_kv_head": config.num_heads // config.num_kv_heads,
        "page_size": 64,
    }
    kernels = kernel_set_for(
        "gpu", "9.0", **heads, dtype="bfloat16", kv_dtype="bfloat16", device="NVIDIA H200"
    )
    c = Context(config, kernels)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    e, d, f = config.num_experts, config.hidden_size, config.expert_intermediate_size
    weights = {
        "router": shape((e, d)),
        "expert_up_gate": shape((e, 2 * f, d)),
        "expert_down": shape((e, d, f)),
    }

    def layer(w, h):
        site = Site(c, w)
        routing = ops.router(site, h)
        return ops.expert_down(site, ops.expert_up_gate(site, h, routing), routing)

    compiled = compile_for_h200(layer, *abstract(h200_mesh(), (weights, shape((512, d)))))
    assert [thunk.kind for thunk in compiled.thunks].count("kCustomCall") >= 2
    rows = (512 * 2 // ROWS + e) * ROWS
    assert compiled.memory.temp_size_in_bytes < 2 * 2 * rows * (f + 2 * d)
    logs = "".join(path.read_text(errors="replace") for path in tmp_path.glob("grouped_gemm*.ptxas"))
    assert set(re.findall(r"(\d+) bytes spill", logs)) == {"0"}


def test_it_fits_a_stream_region():
    def step(x, w, groups):
        region = compute_on.compute_on(
            lambda *args: grouped_gemm(*args, sms=104),
            compute_type="gpu_stream:1",
            out_memory_spaces=jax.memory.Space.Device,
        )
        return region(x, w, groups)

    groups = jax.eval_shape(
        functools.partial(list_groups, num_experts=8), jax.ShapeDtypeStruct((512, 2), jnp.int32)
    )
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((len(groups.pairs), 4096), (8, 4096, 4096))
    )
    compiled = compile_for_h200(step, *abstract(h200_mesh(), (x, w, groups)))
    assert [
        thunk.kind for thunk in compiled.thunks if thunk.depth and thunk.stream == "computation_stream[1]"
    ] == ["kCustomCall"]
