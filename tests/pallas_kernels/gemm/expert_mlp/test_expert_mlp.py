"""Both products of experts in one kernel: the interpreter against the reference, and the H200 code."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.expert_mlp import launch, reference
from pallas_kernels.gemm.expert_mlp.api import expert_mlp
from pallas_kernels.gemm.expert_mlp.limits import supports
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.gemm.grouped.swapped import list_groups
from pallas_kernels.pointwise.quantize.reference import quantize_rows
from pallas_kernels.this_device import DeviceKind

listed = jax.jit(list_groups, static_argnums=(1, 2))
interpreted = functools.partial(expert_mlp, sms=2, interpret=plgpu.InterpretGPUParams())


@pytest.mark.parametrize(
    ("picked", "k", "f", "d", "rows", "gate_block"),
    [
        # One token, and experts without a token.
        (draw_routing(np.random.default_rng(0), 1, 4, 2), 256, 128, 128, 8, 64),
        # Several tiles of one expert, and columns past the last block of a stage and of the last expert.
        (draw_routing(np.random.default_rng(1), 21, 3, 2, 1.2), 128, 384, 192, 16, 32),
    ],
    ids=["one token", "zipf"],
)
def test_it_equals_two_products_with_a_quantization(picked, k, f, d, rows, gate_block):
    rng = np.random.default_rng(2)
    drawn = lambda *shape: jnp.asarray(rng.normal(size=shape) * rng.uniform(0.1, 10, (*shape[:-1], 1)))
    x, up, down = (quantize_rows(drawn(*shape)) for shape in ((picked.shape[0], k), (4, 2 * f, k), (4, d, f)))
    groups = listed(jnp.asarray(picked), 4, rows)
    sorted_rows = jax.tree.map(lambda one: one[groups.pairs // picked.shape[1]], x)
    gates = {"activation": "silu", "gate_block": gate_block}
    got, want = (
        np.asarray(jax.jit(functools.partial(form, **gates))(sorted_rows, up, down, groups), np.float32)
        for form in (interpreted, reference.expert_mlp)
    )
    got, want = (y[np.asarray(groups.places)] for y in (got, want))
    # Another rounding before a number in e4m3 may move it to its neighbor, up to 1/8 away.
    assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("picked", "d", "rows", "gate_block"),
    [
        # One token of a step of two, and columns past the last expert.
        (draw_routing(np.random.default_rng(0), 1, 4, 2), 192, 8, 32),
        # Several tiles of one expert.
        (draw_routing(np.random.default_rng(1), 21, 3, 2, 1.2), 128, 16, 64),
    ],
    ids=["one token", "zipf"],
)
def test_it_equals_two_products_in_bfloat16(picked, d, rows, gate_block):
    rng, k, f = np.random.default_rng(2), 256, 128
    drawn = lambda *shape: jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, jnp.bfloat16)
    x, up, down = drawn(picked.shape[0], k) * 16, drawn(4, 2 * f, k), drawn(4, d, f)
    groups = listed(jnp.asarray(picked), 4, rows)
    given = x[groups.pairs // picked.shape[1]], up, down, groups
    gates = {"activation": "silu", "gate_block": gate_block}
    got, want = (
        np.asarray(jax.jit(functools.partial(form, **gates))(*given), np.float32)[np.asarray(groups.places)]
        for form in (interpreted, reference.expert_mlp)
    )
    assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)


def test_no_registers_are_spilled_in_bfloat16_on_an_h200(tmp_path, monkeypatch):
    """Qwen3-30B-A3B's products of one token."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    groups = jax.eval_shape(
        functools.partial(list_groups, num_experts=128), jax.ShapeDtypeStruct((8, 8), jnp.int32)
    )
    shapes = ((len(groups.pairs), 2048), (128, 1536, 2048), (128, 2048, 768))
    x, up, down = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    assert supports(groups.rows, up, down, 32)
    groups = dataclasses.replace(groups, arrived=groups.experts)
    form = functools.partial(expert_mlp, activation="silu", gate_block=32)
    compiled = compile_for_h200(form, *abstract(h200_mesh(), (x, up, down, groups)))
    assert [thunk.kind for thunk in compiled.thunks] == ["kCustomCall"]
    (log,) = tmp_path.glob("expert_*.ptxas")
    assert set(re.findall(r"(\d+) bytes spill stores", log.read_text(errors="replace"))) == {"0"}


@pytest.mark.parametrize("tokens", [1, 64, 256])
def test_no_registers_are_spilled_on_an_h200(tokens, tmp_path, monkeypatch):
    """Qwen3-30B-A3B's products, with tiles of 8 to 32 rows."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    picked = jax.ShapeDtypeStruct((tokens, 8), jnp.int32)
    groups = jax.eval_shape(functools.partial(list_groups, num_experts=128), picked)
    shapes = ((len(groups.pairs), 2048), (128, 1536, 2048), (128, 2048, 768))
    x, up, down = jax.eval_shape(
        lambda *parts: tuple(map(quantize_rows, parts)),
        *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes),
    )
    assert supports(groups.rows, up, down, 32)
    groups = dataclasses.replace(groups, arrived=groups.experts)
    for split in (False, True):
        form = functools.partial(expert_mlp, activation="silu", gate_block=32, split=split)
        compiled = compile_for_h200(form, *abstract(h200_mesh(), (x, up, down, groups)))
        assert [thunk.kind for thunk in compiled.thunks] == ["kCustomCall"] * (1 + split)
    logs = "".join(path.read_text(errors="replace") for path in tmp_path.glob("expert_*.ptxas"))
    assert set(re.findall(r"(\d+) bytes spill stores", logs)) == {"0"}


def test_xla_rounds_the_rows_of_the_reference_on_an_h200():
    picked = jax.ShapeDtypeStruct((8, 2), jnp.int32)
    groups = jax.eval_shape(functools.partial(list_groups, num_experts=4), picked)
    shapes = ((len(groups.pairs), 128), (4, 256, 128), (4, 128, 128))
    operands = jax.eval_shape(
        lambda *parts: tuple(map(quantize_rows, parts)),
        *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes),
    )
    form = functools.partial(reference.expert_mlp, activation="silu", gate_block=64)
    hlo = compile_for_h200(form, *abstract(h200_mesh(), (*operands, groups))).hlo
    rounded = f"f8e4m3fn[{len(groups.pairs)},2,64]"
    assert rounded in hlo


@pytest.mark.parametrize(("sms", "wanted", "has"), [(None, 114, 114), (100, 100, 114), (None, 132, None)])
def test_no_more_workers_wait_for_each_other_than_a_device_has_sms(sms, wanted, has, monkeypatch):
    here = DeviceKind("gpu", "NVIDIA H100 PCIe", "9.0", has)
    monkeypatch.setattr(launch, "this_device", lambda: here)
    assert launch.resident(sms) == wanted
