"""An engine that computes chunks in two forms of latent attention gives the golden tokens in both."""

import dataclasses

import jax
import numpy as np
import pytest
import toy
from test_goldens import FEW, check, requests

from jaxflow.bench.engine.policies import Hybrid
from jaxflow.model import latent_ops
from pallas_kernels import kernel_set
from pallas_kernels.attention.latent.reference import up_chunk_attention

MODEL, BUDGET = "tiny-deepseek_v3", 80  # no other test has an executor with this budget


@pytest.fixture(autouse=True)
def both_forms(monkeypatch):
    """Let chunks of the tiny model run with keys and values by head, and record such calls."""
    kernels = dataclasses.replace(kernel_set.CPU, latent_up_chunk_attention=counted)
    monkeypatch.setattr(kernel_set, "CPU", kernels)
    monkeypatch.setattr(latent_ops, "prefers_heads", lambda _, chunks, *sizes: chunks[:, 1].max() > 20)
    calls.clear()


calls: list[int] = []


def counted(q, *given, **settings):
    jax.debug.callback(lambda: calls.append(1))
    return up_chunk_attention(q, *given, **settings)


@pytest.mark.parametrize("tp", [1, 2])
def test_goldens_with_chunks_in_both_forms(tp, goldens):
    """Prompts in whole, in chunks of a part of a step beside decodes, and after pages of the prefix cache."""
    golden = goldens(MODEL)
    for changes in ({}, {"policy": Hybrid(53)}):
        engine = toy.loop(MODEL, tp=tp, budget=BUDGET, **changes)
        check(golden, toy.run(engine, requests(golden, max_tokens=FEW)), FEW)
        jax.effects_barrier()
        assert calls
        calls.clear()
    again = toy.run(engine, requests(golden, max_tokens=FEW))
    check(golden, again, FEW)
    assert any(result.started.cached_prompt_tokens for result in again.values())


@pytest.mark.parametrize(
    ("chunks", "by_head"),
    [
        # The first four are faster by head on an H200 (benchmarks/h200/kernels/latent-prefill.json).
        ([(2048, 0)], True),
        ([(2048, 8192)], True),
        ([(512, 0)], True),
        ([(8192, 0)], True),
        ([(300, 0)], False),  # fewer products, but not by as much as the fixed cost of a window
        ([(100, 8192)], False),
        ([(16, 0), (0, 0)], False),
        ([(256, 0)] * 8, True),
        ([(64, 4096)] * 32, False),
        ([(1024, 60_000)], True),
        ([(1024, 500_000)], False),  # more windows than a work list has
    ],
)
def test_the_form_is_that_of_fewer_products(chunks, by_head, monkeypatch):
    """For the widths of DeepSeek-V3, 128 heads, and programs of at least 2,048 tokens."""
    monkeypatch.undo()
    latent = latent_ops.Latent(1536, 512, 128, 64, 128, True)
    given = np.asarray([(0, new, 0, before) for new, before in chunks], np.int32)
    tokens = max(2048, int(given[:, 1].sum()))
    assert bool(latent_ops.prefers_heads(latent, given, tokens, 128)) == by_head


def test_the_fixed_cost_of_a_window_counts_more_with_few_heads(monkeypatch):
    monkeypatch.undo()
    latent = latent_ops.Latent(1536, 512, 128, 64, 128, True)
    given = np.asarray([(0, 512, 0, 0)], np.int32)
    assert [bool(latent_ops.prefers_heads(latent, given, 512, heads)) for heads in (16, 128)] == [False, True]
