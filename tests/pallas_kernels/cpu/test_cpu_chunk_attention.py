"""Laws of chunk attention on a CPU: it equals attention over all keys at once, for long and short chunks."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.chunk import reference
from pallas_kernels.cpu.chunk_attention import chunk_attention

PAGES, S, H, KV, G = 70, 16, 16, 2, 3
# More tokens than a tile, at a later position and at 0; few tokens; no tokens.
CHUNKS = np.array([[3, 150, 2, 700], [153, 140, 0, 0], [293, 20, 1, 900], [0, 0, 0, 0]], np.int32)
TOKENS = 320


def drawn(seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((TOKENS, KV * G, H)).astype(np.float32)
    k, v = rng.standard_normal((2, PAGES, KV, S, H)).astype(np.float32)
    return q, k, v, rng.integers(0, PAGES, (3, 60)).astype(np.int32)


def all_at_once(q, k, v, table, window=None, soft_cap=None, spans=None, sinks=0, sink_logits=None):
    """Return the attention in float64, row by row."""
    out = np.zeros(q.shape)
    for first, tokens, row, position in CHUNKS:
        keys, values = (np.concatenate(list(np.float64(x[table[row]])), axis=1) for x in (k, v))
        for i in range(tokens):
            end = position + i + 1
            for head in range(KV * G):
                kv = head // G
                seen = end if spans is None and window is None else window or spans[kv]
                key = np.arange(end)
                used = key[(key >= end - seen) | (key < sinks)]
                score = keys[kv, used] @ q[first + i, head] * 0.3
                if soft_cap is not None:
                    score = np.tanh(score / soft_cap) * soft_cap
                weight = np.exp(score - score.max())
                extra = 0.0 if sink_logits is None else np.exp(sink_logits[head] - score.max())
                out[first + i, head] = weight @ values[kv, used] / (weight.sum() + extra)
    return out


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"window": 40},
        {"window": 600},
        {"soft_cap": 2.0},
        {"spans": np.array([30, 650], np.int32), "sinks": 20},
        {"sink_logits": np.linspace(-1, 3, KV * G).astype(np.float32)},
    ],
    ids=lambda settings: ",".join(settings) or "plain",
)
def test_it_equals_attention_over_all_keys_at_once(settings):
    given = drawn()
    q, k, v, table = map(jnp.asarray, given)
    got = chunk_attention(q, k, v, table, jnp.asarray(CHUNKS), scale=0.3, **settings)
    want = all_at_once(*given, **settings)
    np.testing.assert_allclose(np.asarray(got), want, rtol=2e-5, atol=2e-5)


def test_in_bfloat16_it_is_as_close_as_the_weights_of_the_softmax_are():
    q, k, v, table = map(jnp.asarray, drawn())
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    got = chunk_attention(q, k, v, table, jnp.asarray(CHUNKS), scale=0.25)
    want = reference.chunk_attention(q, k, v, table, jnp.asarray(CHUNKS), scale=0.25)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=2**-7, atol=2**-7)
