"""The number of pages that fit, and the arrays of the cache."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.config import ConfigError, Layer, ModelConfig
from jaxflow.kv.device_cache import cache_shapes, fit_pages, kv_heads, make_cache, page_bytes, page_groups
from jaxflow.parallel.mesh import make_mesh
from jaxflow.request import Request, SamplingParams
from jaxflow.scheduler.config import SchedulerConfig, accept

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=32,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=64,
    layers=(Layer(),),
    max_position=4096,
)

windows = st.lists(st.one_of(st.none(), st.integers(1, 200)), min_size=1, max_size=6)


@st.composite
def settings(draw):
    """Return a model with any windows, and the arguments of `fit_pages` without the budget."""
    model = dataclasses.replace(
        MODEL,
        layers=tuple(Layer(window=w) for w in draw(windows)),
        num_kv_heads=draw(st.sampled_from([1, 2, 4])),
    )
    return model, {
        "block_size": draw(st.sampled_from([1, 4, 16, 64])),
        "dtype": draw(st.sampled_from([jnp.float32, jnp.bfloat16])),
        "tp": draw(st.sampled_from([1, 2, 4])),
        "max_num_seqs": draw(st.integers(1, 40)),
        "token_budget": draw(st.integers(40, 300)),
        "max_model_len": draw(st.integers(1, 4096)),
    }


def one_sequence(model, block_size, max_model_len, **_):
    """Return the most pages of each group that one sequence holds, counted position by position."""
    most = []
    for window in model.windows:
        held = 0
        for last in range(max_model_len):
            first = 0 if window is None else max(0, last - window + 1)
            held = max(held, last // block_size - first // block_size + 1)
            if window is None:
                held = (max_model_len - 1) // block_size + 1
                break
            if last > 2 * window + 2 * block_size:
                break
        most.append(held)
    return most


@given(settings(), st.integers(0, 2**25))
def test_fits_or_is_refused(setting, budget):
    model, more = setting
    groups = page_groups(model, more.pop("dtype"), more["tp"])
    sizes = page_bytes(groups, more["block_size"], more["tp"])
    needs = one_sequence(model, **more)
    try:
        counts = fit_pages(groups, budget, **more)
    except ConfigError as error:
        # Only where one sequence does not fit, straddled pages and all, and the message says the truth.
        assert (
            sum((n + (w is not None)) * size for n, w, size in zip(needs, model.windows, sizes, strict=True))
            > budget
        )
        assert (error.field, error.value) == ("max_model_len", more["max_model_len"])
        needed, free = map(float, re.findall(r"([\d.]+) GiB", error.accepted))
        assert needed >= free
        return
    assert sum(n * size for n, size in zip(counts, sizes, strict=True)) <= budget
    assert all(n >= need for n, need in zip(counts, needs, strict=True))
    in_flight = -(-more["token_budget"] // more["block_size"])
    for n, need in zip(counts, needs, strict=True):
        assert n <= more["max_num_seqs"] * (need + 1) + in_flight


@given(settings(), st.integers(0, 2**25))
def test_a_sequence_of_max_model_len_is_within_the_request_limits(setting, budget):
    model, more = setting
    groups = page_groups(model, more.pop("dtype"), more["tp"])
    try:
        counts = fit_pages(groups, budget, **more)
    except ConfigError:
        return
    length, tokens = more["max_model_len"], more["token_budget"]
    config = SchedulerConfig(
        tokens, more["max_num_seqs"], more["block_size"], model.windows, counts, length, (tokens,)
    )
    if length > 1:
        assert accept(config, Request("a", [0] * (length - 1), SamplingParams(max_tokens=1))).limit == length


@given(settings(), st.integers(0, 2**24), st.integers(0, 2**24))
def test_more_memory_gives_no_fewer_full_attention_pages(setting, budget, more_bytes):
    model, more = setting
    model = dataclasses.replace(model, layers=(*model.layers, Layer()))
    groups = page_groups(model, more.pop("dtype"), more["tp"])
    try:
        few = fit_pages(groups, budget, **more)
    except ConfigError:
        return
    assert fit_pages(groups, 2 * (budget + more_bytes), **more)[0] >= few[0] * 0.98


def test_slightly_less_memory_gives_the_same_number_of_pages():
    setting = {
        "block_size": 16,
        "tp": 1,
        "max_num_seqs": 4096,
        "token_budget": 64,
        "max_model_len": 64,
    }
    groups = page_groups(MODEL, jnp.float32, 1)
    size = page_bytes(groups, 16, 1)[0]
    counts = {fit_pages(groups, pages * size, **setting) for pages in range(6200, 6250)}
    assert len(counts) <= 2


def test_window_layers_leave_room_for_full_attention():
    """With many running sequences whose windows could fill the memory, one long sequence still fits."""
    model = dataclasses.replace(MODEL, layers=(Layer(window=64), Layer()))
    setting = {
        "block_size": 16,
        "tp": 1,
        "max_num_seqs": 1000,
        "token_budget": 64,
        "max_model_len": 1024,
    }
    groups = page_groups(model, jnp.float32, 1)
    size = page_bytes(groups, 16, 1)[0]
    assert fit_pages(groups, (64 + 5) * size, **setting) == (64, 5)
    with pytest.raises(
        ConfigError, match=r"max_model_len=1024 .* lower max_model_len or raise gpu_memory_utilization"
    ):
        fit_pages(groups, (64 + 5) * size - 1, **setting)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8], ids=str)
@pytest.mark.parametrize("tp", [1, 4])
def test_the_cache_takes_the_predicted_bytes(tp, dtype):
    """Keys and values, transposed 8-bit values, and the scales of int8."""
    model = dataclasses.replace(MODEL, layers=(Layer(), Layer(window=8), Layer()))
    mesh, pages = make_mesh(tp), (6, 3)
    groups = page_groups(model, dtype, tp)
    cache = make_cache(groups, pages, 16, mesh)
    heads = kv_heads(model, tp)
    assert heads == max(2, tp)
    assert [k.shape for k, _ in cache] == [(6, heads, 16, 4), (3, heads, 16, 4), (6, heads, 16, 4)]
    assert cache[1][1].shape == ((3, heads, 16, 4) if dtype == jnp.bfloat16 else (3, heads, 4, 16))
    arrays = jax.tree.leaves(cache)
    assert len(arrays) == (12 if dtype == jnp.int8 else 6)
    on_one = sum(a.addressable_shards[0].data.nbytes for a in arrays)
    assert on_one == sum(n * size for n, size in zip(pages, page_bytes(groups, 16, tp), strict=True))
    assert not any(np.asarray(a, np.float32).any() for a in arrays)


def test_page_groups_partition_the_layers_by_window():
    model = dataclasses.replace(MODEL, layers=(Layer(window=8), Layer(), Layer(window=8), Layer(window=3)))
    groups = page_groups(model, jnp.int8, 4)
    assert [group.layers for group in groups] == [(1,), (3,), (0, 2)]
    assert [group.window for group in groups] == [None, 3, 8]
    assert [group.kv_heads for group in groups] == [(4,), (4,), (4, 4)]
    assert {(group.head_dim, group.dtype) for group in groups} == {(4, "int8")}
    assert [group.pages_of(100, 16) for group in groups] == [7, 2, 2]
    pages = [jax.tree.leaves(layer)[0].shape[0] for layer in cache_shapes(groups, (9, 5, 7), 16)]
    assert pages == [7, 9, 7, 5]
