"""Every drawn token equals the token that a plain reading of the sampling parameters gives.

The reference takes raw logits of the plain forward, teacher-forced over the answer. It applies the settings
in float64 numpy, one after the other, by sorting. Only the noise of (seed, position, token id) comes from the
engine.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxflow.kv.device_cache import make_cache
from jaxflow.model import ops, transformer
from jaxflow.model.batch import Batch, cache_slots
from jaxflow.model.op_registry import Site
from jaxflow.model.sampling import gumbel
from jaxflow.request import FinishReason, Request, SamplingParams

MODEL, LONGEST, PAGE = "stories260K", 128, 16
PROMPT, MOST = 40, 20  # tokens of a prompt and of an answer, at most
VOCAB = 512
noises = jax.jit(gumbel)


@functools.cache
def _forward():
    _, executor = toy.executor(MODEL)
    context = executor.programs.context

    @jax.jit
    def run(weights, kv, ids, length):
        positions = jnp.arange(LONGEST)
        rows = jnp.where(positions < length, 0, -1)
        table = jnp.arange(LONGEST // PAGE)[None, None]
        batch = Batch(
            token_ids=ids,
            positions=positions,
            slots=cache_slots(table, rows, positions, PAGE),
            page_table=table,
            lengths=length[None],
            num_decodes=jnp.int32(0),
            chunks=jnp.stack([jnp.int32(0), length, jnp.int32(0), jnp.int32(0)])[None],
            sample_tokens=length[None] - 1,
        )
        _, x, _ = transformer.forward(context, weights, kv, batch)
        ends = Site(context, weights)
        return ops.logits(ends, ops.final_norm(ends, x, None)[1])

    kv = make_cache(executor.page_groups, (LONGEST // PAGE,), PAGE, executor.programs.mesh)
    return lambda ids: run(
        executor.weights, kv, jnp.array([*ids, *[0] * (LONGEST - len(ids))]), jnp.int32(len(ids))
    )


def raw_logits(ids):
    """[tokens, V] float64: row t predicts token t + 1."""
    vocab = toy.executor(MODEL)[1].programs.context.config.vocab_size
    return np.asarray(_forward()(ids), np.float64)[: len(ids), :vocab]


def draw(logits, s, prompt, answer, suppressed, noise):
    """Return the next token by the meanings of the parameters, and its lead over the second."""
    x = logits.copy()
    for token, bias in s.logit_bias.items():
        x[token] += bias
    if len(answer) < s.min_tokens:
        x[list(suppressed)] = -np.inf
    for token in {*prompt, *answer}:
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(answer):
        x[token] -= s.frequency_penalty * answer.count(token) + s.presence_penalty
    if s.temperature == 0:
        return int(x.argmax()), np.inf
    p = np.exp((x - x.max()) / s.temperature)
    p[p < s.min_p] = 0.0  # the likeliest weighs 1
    if s.top_k > 0:
        p[p < np.sort(p)[-min(s.top_k, len(p))]] = 0.0
    if s.top_p < 1:
        ordered = np.sort(p)[::-1]
        p[p < ordered[np.searchsorted(np.cumsum(ordered), s.top_p * p.sum())]] = 0.0
    scores = np.where(p > 0, x + s.temperature * noise, -np.inf)
    second, first = np.sort(scores)[-2:]
    return int(scores.argmax()), first - second


def replay(request, result, eos):
    """Draws the answer again, and says how it should have ended."""
    s, prompt, found = request.sampling, list(map(int, request.prompt_token_ids)), result.tokens
    logits = raw_logits([*prompt, *found])[len(prompt) - 1 : -1]
    suppressed = {*s.stop_token_ids, *(() if s.ignore_eos else eos)}
    seed = result.started.seed
    words = np.array([[seed >> 32, seed & 0xFFFFFFFF]] * MOST, np.uint32)
    noise = np.asarray(noises(words, len(prompt) + np.arange(MOST), np.arange(VOCAB)), np.float64)
    for i, token in enumerate(found):
        expected, lead = draw(logits[i], s, prompt, found[:i], suppressed, noise[i])
        assert token == expected or lead < 1e-4, f"token {i} of {request}"
        if token in suppressed and i + 1 > s.min_tokens:
            return FinishReason.STOP, token, i + 1
    return FinishReason.LENGTH, None, s.max_tokens


def some_params(rng, i):
    """Every setting by itself, then all settings together."""

    def maybe(value, otherwise, kind):
        return value if kind in (i % 12, 11) or i % 12 == 11 else otherwise

    vocab = VOCAB
    tokens = int(rng.integers(2, MOST))
    return SamplingParams(
        temperature=float(maybe(rng.choice([0.0, 0.3, 1.7]), 1.0, 0)),
        top_k=int(maybe(rng.integers(1, 12), 0, 1)),
        top_p=float(maybe(rng.uniform(0.3, 0.95), 1.0, 2)),
        min_p=float(maybe(rng.uniform(0.02, 0.5), 0.0, 3)),
        repetition_penalty=float(maybe(rng.uniform(0.5, 2.0), 1.0, 4)),
        presence_penalty=float(maybe(rng.uniform(-2, 2), 0.0, 5)),
        frequency_penalty=float(maybe(rng.uniform(-2, 2), 0.0, 6)),
        logit_bias=maybe({int(t): float(rng.uniform(-20, 20)) for t in rng.integers(0, vocab, 30)}, {}, 7),
        min_tokens=int(maybe(rng.integers(1, tokens), 0, 8)),
        stop_token_ids=maybe(rng.integers(0, vocab, 64).tolist(), (), 9)
        if i % 12 != 8
        else rng.integers(0, vocab, 64).tolist(),
        ignore_eos=bool(maybe(True, False, 10)),
        max_tokens=tokens,
        seed=int(rng.integers(-(2**63), 2**63)) if i % 3 else None,
        logprobs=int(rng.integers(0, 20)) if i % 4 == 0 else None,
    )


def test_every_setting_means_what_it_says():
    rng = np.random.default_rng(11)
    golden = [int(t) for p in toy.prompts(toy.paths.golden(MODEL)) for t in p]
    requests = []
    for i in range(72):
        start = int(rng.integers(0, len(golden) - PROMPT))
        requests.append(
            Request(f"r{i}", golden[start : start + int(rng.integers(1, PROMPT))], some_params(rng, i))
        )
    engine = toy.loop(MODEL)
    results = toy.run(engine, requests, preempt_at=(9, 21, 40, 41))
    eos = toy.executor(MODEL)[1].programs.context.config.eos_token_ids
    stopped = 0
    for request in requests:
        result = results[request.request_id]
        reason, by, tokens = replay(request, result, eos)
        end = result.finished[0]
        assert (end.reason, end.stop_token_id, len(result.tokens)) == (reason, by, tokens), request
        stopped += reason is FinishReason.STOP
    assert 5 < stopped < 67
    assert engine.scheduler.num_preemptions == 4


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_logprobs_are_of_the_raw_logits(k):
    """Whatever the settings do to the draw: chosen token, rank, the k likeliest; of answer and prompt."""
    prompt = [int(t) for t in toy.prompts(toy.paths.golden(MODEL))[2]]
    s = SamplingParams(
        temperature=1.5,
        logit_bias={7: 9.0},
        frequency_penalty=1.0,
        top_k=40,
        seed=k,
        max_tokens=12,
        logprobs=k,
        prompt_logprobs=k,
        ignore_eos=True,
    )
    [result] = toy.run(toy.loop(MODEL), [Request("a", prompt, s)]).values()
    logits = raw_logits([*prompt, *result.tokens])
    logprobs = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    found = [*result.started.prompt_logprobs, *result.logprobs[0]]
    assert found[0] is None
    assert len(found) == len(prompt) + len(result.tokens)
    for row, entry, token in zip(logprobs, found[1:], [*prompt[1:], *result.tokens], strict=False):
        order = np.argsort(-row, kind="stable")
        assert next(iter(entry)) == token
        assert set(entry) == {token, *order[:k].tolist()}
        for other, value in entry.items():
            assert value.logprob == pytest.approx(row[other], abs=1e-4)
            assert value.rank == 1 + (row > row[other]).sum()
