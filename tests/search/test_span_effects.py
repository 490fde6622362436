"""The divergence from full attention, and the effect of every span on it."""

import jax.numpy as jnp
import numpy as np
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.config import Span
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from search import span_effects, spans

TOKENS = 24


def some_head(seed, groups=2, width=8):
    """Return the queries, keys and values of one KV head, and a gradient of its output."""
    rng = np.random.default_rng(seed)
    shapes = (groups, TOKENS, width), (TOKENS, width), (TOKENS, width), (groups, TOKENS, width)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@given(st.integers(0, 1000), st.integers(0, 5), st.sampled_from([None, 2.0]))
def test_products_are_those_of_attention_over_the_seen_keys(seed, sinks, soft_cap):
    q, k, v, gradient = some_head(seed)
    some = [Span(sinks, 1, 0), Span(sinks, 3, 256), Span(sinks, 9, 0), Span(sinks, 0, 1024)]
    first = span_effects.first_keys(some, TOKENS)
    settings = {"sinks": sinks, "scale": 0.7, "soft_cap": soft_cap}
    found = span_effects.products(q, k, v, gradient, jnp.asarray(first), **settings)
    for c, span in enumerate(some):
        product = 0.0
        for p in range(TOKENS):
            keys = [j for j in range(p + 1) if j < sinks or p - j < span.window(p)]
            for g in range(2):
                scores = 0.7 * k[keys] @ q[g, p]
                scores = scores if soft_cap is None else np.tanh(scores / soft_cap) * soft_cap
                weights = np.exp(scores) / np.exp(scores).sum()
                product += gradient[g, p] @ (weights @ v[keys])
        assert found[c] == pytest.approx(product, abs=1e-3)


def test_a_window_far_below_the_largest_score_keeps_its_own_output():
    """The third key has nearly all weight, and the last query's window does not see it."""
    q, k, v, gradient = some_head(0, groups=1)
    k[2], q[0, -1] = 0, 0
    k[2, 0] = q[0, -1, 0] = 5
    k[-4:, 0] = 1
    gradient[:, :-1] = 0
    first = np.zeros((1, TOKENS), np.int32)
    first[0, -1] = TOKENS - 4
    found = span_effects.products(q, k, v, gradient, first, sinks=0, scale=1.0, soft_cap=None)
    assert found[0] == pytest.approx(gradient[0, -1] @ v[-4:].mean(0), rel=1e-3)


@pytest.fixture(scope="module")
def measurement():
    """Return a measurement, and the numbers of its candidates and of all heads.

    Attention adds a hundredth of what it adds in the model, so that first-order
    changes are near the real ones.
    """
    checkpoint = open_checkpoint(str(paths.MODELS / "tiny-llama"))
    config, weights = checkpoint.model_config, checkpoint.load("float32")
    layers = [layer | {"out_proj": layer["out_proj"] * 0.01} for layer in weights["layers"]]
    texts = np.random.default_rng(0).integers(3, 200, (2, TOKENS)).astype(np.int32)
    some = spans.candidates(Span(1, 6, 0), TOKENS)
    measure = span_effects.Measurement(config, weights | {"layers": layers}, texts, some)
    return measure, len(some), config.num_layers * config.num_kv_heads


def test_full_attention_does_not_diverge(measurement):
    measure, candidates, heads = measurement
    found = measure(np.full(heads, candidates - 1))
    assert found.loss == pytest.approx(0.0, abs=1e-6)
    assert np.abs(found.changes).max() < 1e-5  # the divergence is smallest here


def test_the_effect_of_a_small_change_is_the_change_of_the_loss(measurement):
    """From one window to the next, one head at a time."""
    measure, candidates, heads = measurement
    near = candidates // 2
    before = np.full(heads, near)
    found = measure(before)
    assert found.loss > 0
    assert np.all(found.changes[np.arange(heads), before] == 0)
    moved = [before + np.eye(heads, dtype=int)[head] for head in range(heads)]
    real = np.array([measure(choice).loss for choice in moved]) - found.loss
    slopes = found.changes[np.arange(heads), near + 1]
    # The mean of the slopes at both ends is the change to second order.
    other = np.array([measure(choice).changes[head, near] for head, choice in enumerate(moved)])
    assert real == pytest.approx((slopes - other) / 2, abs=0.05 * np.abs(real).max())


def test_the_loss_falls_to_nothing_as_spans_grow(measurement):
    measure, candidates, heads = measurement
    losses = [measure(np.full(heads, c)).loss for c in range(candidates)]
    assert losses[0] > losses[candidates // 2] > losses[-1] - 1e-9
