"""The programs of a step's parts compute what the step computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.bench.plans.bed import USUAL, make_bed
from jaxflow.bench.plans.steady import StepWorkload, average_step
from jaxflow.config import EngineConfig
from jaxflow.model import ops
from jaxflow.model.op_registry import Site
from search.profile.op_bench import PAGE_SIZE
from search.profile.step_parts import attention, layers, pages_of, products

NAME, TOKENS, WORKLOAD = str(paths.MODELS / "tiny-llama"), 32, StepWorkload(24, 16)


@pytest.fixture(scope="module")
def inputs():
    """An executor with one step, its programs and layout, the batch, a residual stream and the buffer."""
    config = EngineConfig(model=NAME, load_format="dummy", dtype="float32", plan="sequential")
    bed = make_bed(config, [], [TOKENS], [WORKLOAD], [USUAL])
    ((steady, _),) = bed.ready(WORKLOAD).values()
    executor, programs = steady.executor, steady.executor.programs
    x = jax.random.normal(jax.random.key(0), (TOKENS, programs.context.config.hidden_size))
    own, buffer = dataclasses.replace(programs, embeds=False), jnp.asarray(steady.buffer)
    _, batch, _ = own.inputs(steady.layout, executor.page_table, x, buffer)
    return executor, programs, steady.layout, batch, x, buffer


def copied(executor):
    return jax.tree.map(jnp.copy, (executor.kv, executor.page_table))


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(64, 4096))
def test_a_cache_of_the_pages_of_a_step_holds_the_step(prompt, output, tokens):
    workload, rows = StepWorkload(prompt, output), {"most_rows": 2 * tokens, "page_size": PAGE_SIZE}
    step = average_step(workload, tokens, kv_tokens=10**9, **rows)
    held = PAGE_SIZE * (pages_of(workload, step) - 1)
    assert average_step(workload, tokens, kv_tokens=held, **rows) == step


def test_the_layers_are_the_step_without_its_embedding(inputs):
    executor, programs, layout, batch, _, buffer = inputs
    forward = executor.lower.forward_of(layout)
    kv, table = copied(executor)
    sampled = executor.last_tokens[jnp.arange(TOKENS) % len(executor.last_tokens)]  # row i is in slot i
    ids = jnp.where(batch.token_ids < 0, sampled, batch.token_ids)
    x = ops.embed(Site(programs.context, executor.weights), ids, batch.positions)
    part = layers(programs, layout, forward)(executor.weights, kv, table, x, buffer)
    whole = executor.advance(layout, np.asarray(buffer), np.empty((0, 4), np.int32), executor.last_tokens)
    for one, other in zip(jax.tree.leaves((whole, executor.kv)), jax.tree.leaves(part[:4]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_without_attention_the_queries_are_the_heads(inputs):
    executor, programs, layout, batch, stream, buffer = inputs
    kv, _ = copied(executor)
    c, x, y = programs.context, stream, None
    for index, (layer, w) in enumerate(zip(c.config.layers, executor.weights["layers"], strict=True)):
        site = Site(c, w, layer, batch, 0, TOKENS)
        x, h = ops.attn_norm(site, x, y)
        q, kv[index] = ops.rope_append(site, ops.qkv(site, h), kv[index])
        x, h = ops.mlp_norm(site, x, ops.out_proj(site, q))
        y = ops.down(site, ops.up_gate(site, h))
    kv_then, table_then = copied(executor)
    forward = executor.lower.forward_of(layout)
    program = layers(programs, layout, forward, attends=False)
    _, found, _, pages, _ = program(executor.weights, kv_then, table_then, stream, buffer)
    np.testing.assert_allclose(found, x + y, rtol=1e-4, atol=1e-4)
    for one, other in zip(jax.tree.leaves(kv), jax.tree.leaves(pages), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_attention_and_products_are_those_of_all_layers(inputs):
    executor, programs, layout, batch, x, buffer = inputs
    c, weights = programs.context, executor.weights
    q = jax.random.normal(jax.random.key(1), (TOKENS, c.config.num_heads, c.config.head_dim))
    found = attention(programs, layout)(weights, executor.kv, executor.page_table, q, buffer)
    for index, (layer, w) in enumerate(zip(c.config.layers, weights["layers"], strict=True)):
        site, kv = Site(c, w, layer, batch, 0, TOKENS), executor.kv[index]
        q = ops.decode_attention(site, q, kv, ops.chunk_attention(site, q, kv))
    np.testing.assert_allclose(found, q, rtol=1e-4, atol=1e-5)
    heads = q.reshape(TOKENS, -1)
    given = {"qkv": x, "out_proj": q, "up_gate": 2 * x}
    made = products(c)(weights, given, None)
    for w, one in zip(weights["layers"], made, strict=True):
        site = Site(c, w)
        assert set(one) == {"qkv", "out_proj", "down"}
        np.testing.assert_allclose(one["qkv"], x @ w["qkv"].T, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(one["out_proj"], heads @ w["out_proj"].T, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            one["down"], ops.down(site, ops.up_gate(site, 2 * x)), rtol=1e-4, atol=1e-5
        )
