"""Log-probabilities without sorting or holding a vocabulary, against those that do."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from jaxflow.model import logprobs


@pytest.mark.parametrize("n", [1, 20, 21, 512, 1280, 50304 // 16, 97])
@pytest.mark.parametrize("k", [1, 20])
def test_top_is_a_stable_sort(n, k):
    rng = np.random.default_rng(n + k)
    x = rng.integers(-6, 6, (5, n)).astype(np.float32)  # many ties
    x[1] = -np.inf
    x[2, : n // 2] = -np.inf
    if k > n:
        x = np.pad(x, ((0, 0), (0, k - n)), constant_values=-np.inf)
    values, columns = jax.jit(logprobs.top, static_argnums=1)(x, k)  # one program, not one an operation
    want = np.argsort(-x, axis=1, kind="stable")[:, :k]
    assert np.asarray(columns).tolist() == want.tolist()
    assert np.asarray(values).tolist() == np.take_along_axis(x, want, 1).tolist()


def reference(hidden, lm_head, targets, vocab_size, soft_cap):
    logits = hidden.astype(np.float64) @ lm_head.astype(np.float64).T
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    logits = logits[:, :vocab_size]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = logp[np.arange(len(targets)), targets]
    order = np.argsort(-logp, axis=1, kind="stable")[:, :20]
    return chosen, 1 + (logp > chosen[:, None]).sum(-1), order, np.take_along_axis(logp, order, 1)


def check(out, want):
    np.testing.assert_allclose(out.chosen, want[0], atol=2e-5)
    np.testing.assert_array_equal(out.rank, want[1])
    np.testing.assert_array_equal(out.top_ids, want[2])
    np.testing.assert_allclose(out.top_logprobs, want[3], atol=2e-5)


@settings(max_examples=6, deadline=None)
@given(
    vocab=st.integers(20, 250),
    padding=st.integers(0, 70),
    block=st.sampled_from([16, 64, 100, 4096]),
    soft_cap=st.sampled_from([None, 5.0]),
    seed=st.integers(0, 2**31),
)
def test_prompt_logprobs(vocab, padding, block, soft_cap, seed):
    rng = np.random.default_rng(seed)
    hidden, lm_head = (
        rng.normal(size=(6, 8)).astype(np.float32),
        rng.normal(size=(vocab + padding, 8)).astype(np.float32),
    )
    targets = rng.integers(0, vocab, 6).astype(np.int32)
    before, logprobs.VOCABULARY_BLOCK = logprobs.VOCABULARY_BLOCK, block
    try:
        out = logprobs.prompt_logprobs(hidden, lm_head, targets, vocab_size=vocab, soft_cap=soft_cap)
    finally:
        logprobs.VOCABULARY_BLOCK = before
    check(out, reference(hidden, lm_head, targets, vocab, soft_cap))


def test_prompt_logprobs_over_a_sharded_vocabulary():
    """Padding rows fill the last shard wholly; the answer is that of one device."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    rng = np.random.default_rng(3)
    hidden, lm_head = rng.normal(size=(5, 8)).astype(np.float32), rng.normal(size=(256, 8)).astype(np.float32)
    lm_head[130] = lm_head[20]  # a tie across shards
    targets = rng.integers(0, 150, 5).astype(np.int32)

    def body(hidden, lm_head, targets):
        return logprobs.prompt_logprobs(hidden, lm_head, targets, vocab_size=150, axis="tp")

    spec = PartitionSpec
    sharded = jax.shard_map(
        body, mesh=mesh, in_specs=(spec(), spec("tp", None), spec()), out_specs=spec(), check_vma=False
    )
    check(jax.jit(sharded)(hidden, lm_head, targets), reference(hidden, lm_head, targets, 150, None))


def test_no_array_of_all_logits():
    """The largest intermediate of prompt log-probabilities is a block wide, not a vocabulary."""
    T, V, D = 64, 131072, 8
    abstract = jax.ShapeDtypeStruct
    compiled = jax.jit(lambda h, w, t: logprobs.prompt_logprobs(h, w, t, vocab_size=V)).lower(
        abstract((T, D), np.float32), abstract((V, D), np.float32), abstract((T,), np.int32)
    )
    stats = compiled.compile().memory_analysis()
    assert stats is not None and stats.temp_size_in_bytes < 0.25 * T * V * 4
