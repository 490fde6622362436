"""The sort of more tokens in two kernels, and the experts that a device holds, against the reference."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.grouped.groups import Groups, HeldExperts
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.gemm.sorted_rows import api, counted
from pallas_kernels.gemm.sorted_rows.adds import sort_by_adds
from pallas_kernels.gemm.sorted_rows.counted import sort_counted
from pallas_kernels.gemm.sorted_rows.gpu_check import used as defined
from pallas_kernels.quantized import Quantized

TOKENS, EXPERTS, CHOSEN, HELD = 19, 6, 2, 3  # three blocks of tokens


@functools.partial(jax.jit, static_argnames=("sort", "held", "quantize"))
def sorted_by(sort, x, picked, used, first, *, held: bool, quantize: bool):
    """Return the groups and the rows of a kernel, or of the reference for None."""
    placed: dict[str, Any] = {
        "used": used,
        "held": HeldExperts(first, HELD) if held else None,
        "quantize": quantize,
    }
    if sort is None:
        return api.sort_by_xla(x, picked, EXPERTS, interpret=plgpu.InterpretGPUParams(), **placed)
    return sort(x, picked, EXPERTS, sms=1, interpret=plgpu.InterpretGPUParams(), **placed)


def check(sort, x, picked, used, first, *, held: bool, quantize: bool = False) -> Groups:
    """Compare all defined integers and the bits of all defined rows."""
    args = x, jnp.asarray(picked, jnp.int32), jnp.int32(used), jnp.int32(first)
    groups, parts = sorted_by(sort, *args, held=held, quantize=quantize)
    rows = Quantized(*parts) if quantize else parts[0]
    wanted = sorted_by(None, *args, held=held, quantize=quantize)
    for one, other in zip(
        *(defined(*jax.tree.map(np.asarray, each)) for each in ((groups, rows), wanted)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(groups.places >= len(groups.pairs), wanted[0].places >= len(groups.pairs))
    for name in ("rows", "align", "partial"):
        assert getattr(groups, name) == getattr(wanted[0], name)
    assert groups.pairs.shape == wanted[0].pairs.shape
    return groups


def rows_of(tokens: int, columns: int = 128) -> jax.Array:
    return jnp.asarray(np.random.default_rng(tokens).normal(size=(tokens, columns)), jnp.bfloat16)


pairs = st.lists(st.integers(0, EXPERTS), min_size=CHOSEN, max_size=CHOSEN, unique=True)
routes = st.one_of(
    st.lists(pairs, min_size=TOKENS, max_size=TOKENS),
    pairs.map(lambda chosen: [chosen] * TOKENS),  # all tokens choose the same experts
)


@pytest.mark.parametrize(
    ("sort", "held"), [(sort_by_adds, True), (sort_counted, True), (sort_counted, False)]
)
@settings(max_examples=8, deadline=None)
@given(picked=routes, used=st.integers(0, TOKENS), first=st.integers(0, EXPERTS - HELD))
def test_any_routing_has_the_places_of_the_reference(sort, held, picked, used, first):
    """Number `EXPERTS` is the expert of gathered padding, where a device holds some of the experts."""
    if not held:
        picked = [[one % EXPERTS for one in chosen] for chosen in picked]
        picked = [chosen if len(set(chosen)) == CHOSEN else [1, 4] for chosen in picked]
    check(sort, rows_of(TOKENS), picked, used, first, held=held)


@pytest.mark.parametrize("sort", [sort_by_adds, sort_counted])
def test_a_device_without_a_pair_has_no_tile(sort):
    groups = check(sort, rows_of(TOKENS), [[0, 1]] * TOKENS, TOKENS, 3, held=True)
    assert int(groups.count[0]) == 0 == int(groups.sizes.sum())
    assert (np.asarray(groups.places) >= len(groups.pairs)).all()


@pytest.mark.parametrize("sort", [sort_by_adds, sort_counted])
def test_quantized_rows_have_the_bits_of_the_reference(sort):
    rng = np.random.default_rng(0)
    picked = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :CHOSEN]
    check(sort, rows_of(TOKENS, 256), picked, TOKENS - 1, 2, held=True, quantize=True)


@pytest.mark.parametrize("sms", [1, 132])
def test_a_block_of_many_tokens_has_the_places_of_the_reference(sms, monkeypatch):
    """Test one block of 64 tokens, with CTAs of 16 tokens, and with one for each token."""
    monkeypatch.setattr(counted, "_BLOCKS", 1)
    tokens = 35
    picked = jnp.asarray(draw_routing(np.random.default_rng(1), tokens, EXPERTS, CHOSEN, 1.2))
    x, held = rows_of(tokens), HeldExperts(jnp.int32(0), 4)
    groups, rows = sort_counted(
        x,
        picked,
        EXPERTS,
        quantize=False,
        held=held,
        used=None,
        sms=sms,
        interpret=plgpu.InterpretGPUParams(),
    )
    wanted = jax.jit(lambda x, picked: api.sort_by_xla(x, picked, EXPERTS, held=held))(x, picked)
    for one, other in zip(
        *(defined(*jax.tree.map(np.asarray, each)) for each in ((groups, rows[0]), wanted)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


SIZES = [  # tokens, experts, columns, quantize, whether there is padding, devices
    (64, 128, 2048, False, False, 2),
    (128, 128, 2048, True, False, 2),
    (512, 128, 2048, True, False, 2),
    (2048, 128, 2048, False, True, 1),
    (2048, 256, 7168, True, False, 8),
]


@pytest.mark.parametrize(("tokens", "experts", "columns", "quantize", "padded", "devices"), SIZES)
def test_for_the_h200_they_are_one_or_two_kernels_that_spill_nothing(
    tokens, experts, columns, quantize, padded, devices, tmp_path, monkeypatch
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = (
        jax.ShapeDtypeStruct((tokens, columns), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, 8), jnp.int32),
    )

    def one(x, picked, used, first):
        groups, rows = api.sort_rows(
            x,
            picked,
            experts,
            quantize=quantize,
            used=used if padded else None,
            held=HeldExperts(first, experts // devices) if devices > 1 else None,
            max_tokens=api.MOST_COUNTED,
            held_max_tokens=api.MOST_COUNTED,
        )
        return groups.places, groups.pairs, groups.experts, groups.starts, groups.ends, groups.count, rows

    compiled = compile_for_h200(one, *abstract(h200_mesh(), (*shapes, number, number)))
    assert [thunk.kind for thunk in compiled.thunks] == ["kCustomCall"] * (1 if tokens <= 128 else 2)
    logs = "".join(path.read_text(errors="replace") for path in tmp_path.glob("*.ptxas"))
    assert set(re.findall(r"(\d+) bytes spill", logs)) == {"0"}
