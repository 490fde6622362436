"""Both products of few tokens without a sort: the interpreter against the reference, and the H200 code."""

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

from pallas_kernels.gemm.expert_mlp import reference
from pallas_kernels.gemm.expert_mlp.few_tokens import few_expert_mlp
from pallas_kernels.gemm.expert_mlp.limits import supports_few
from pallas_kernels.gemm.expert_mlp.touched import FewTokens, touched
from pallas_kernels.gemm.grouped.routings import draw_routing

GATES = {"activation": "silu", "gate_block": 32}
interpreted = functools.partial(few_expert_mlp, sms=2, interpret=plgpu.InterpretGPUParams())


@pytest.mark.parametrize(("tokens", "experts", "used"), [(1, 4, None), (8, 40, 5)])
def test_it_equals_two_products_of_the_pairs(tokens, experts, used):
    rng, k, f, d = np.random.default_rng(0), 256, 128, 192
    drawn = lambda *shape: jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, jnp.bfloat16)
    x, up, down = drawn(tokens, k) * 16, drawn(experts, 2 * f, k), drawn(experts, d, f)
    picked = jnp.asarray(draw_routing(rng, tokens, experts, 3))
    number = None if used is None else jnp.int32(used)
    (got, places), (want, same) = (
        jax.jit(functools.partial(form, **GATES))(x, picked, up, down, used=number)
        for form in (interpreted, reference.few_expert_mlp)
    )
    np.testing.assert_array_equal(places, same)
    assert (np.asarray(places)[used:] == len(got)).all() or used is None
    got, want = (np.asarray(y[places[:used]], np.float32) for y in (got, want))
    assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)


@functools.partial(jax.jit, static_argnums=0)
def listed(form, picked, used):
    own = touched(form, picked, used)
    each = jnp.arange(form.experts, dtype=jnp.int32)
    return own.count(), jax.vmap(own.expert)(jnp.arange(form.most)), jax.vmap(own.before)(each)


@given(data=st.data(), experts=st.sampled_from((5, 33, 128, 512)), used=st.integers(0, 8))
def test_the_experts_of_few_tokens_are_found_in_order(data, experts, used):
    numbers = st.lists(st.integers(0, experts - 1), min_size=3, max_size=3, unique=True)
    picked = np.array([data.draw(numbers) for _ in range(8)], np.int32)
    want = np.unique(picked[:used])
    count, found, before = listed(FewTokens(8, 3, experts, padded=True), picked, jnp.int32(used))
    assert count == len(want)
    np.testing.assert_array_equal(found[: len(want)], want)
    np.testing.assert_array_equal(before, [(want < expert).sum() for expert in range(experts)])


def test_layers_share_their_counters_and_spill_no_registers_on_an_h200(tmp_path, monkeypatch):
    """Qwen3-30B-A3B's products. A layer launches one kernel and the sum, and a step one fill with zeros."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    half = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    layers = [(half(128, 1536, 2048), half(128, 2048, 768))] * 2
    assert supports_few(8, *layers[0], 32)

    def step(x, picked, used, layers):
        for up, down in layers:
            y, places = few_expert_mlp(x, picked, up, down, used=used, **GATES)
            x = jnp.sum(y[places], axis=1).astype(x.dtype)
        return x

    scalars = jax.ShapeDtypeStruct((8, 8), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    compiled = compile_for_h200(step, *abstract(h200_mesh(), (half(8, 2048), *scalars, layers)))
    kinds = [thunk.kind for thunk in compiled.thunks]
    assert len(kinds) == 5 and kinds.count("kCustomCall") == 2
    logs = "".join(path.read_text(errors="replace") for path in tmp_path.glob("expert_*.ptxas"))
    assert set(re.findall(r"(\d+) bytes spill stores", logs)) == {"0"}
