"""The samplers against a plain numpy reading of vLLM's semantics, and the laws of drawing."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hurry import OFTEN
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.model import logprobs, sampling, slot_params
from jaxflow.model.slot_params import (
    BIASED,
    NO_TOKEN,
    SUPPRESSED,
    count_tokens,
    empty_slots,
    set_slot,
    slot_values,
)
from pallas_kernels.pointwise.sample import reference

VOCAB, PADDED, ROWS, SLOTS = 50, 64, 4, 6
ALL = np.ones(ROWS, bool)  # rows that ask for log-probabilities
PLAIN = jax.jit(sampling.plain)
FULL = jax.jit(sampling.full, compiler_options=OFTEN)


@functools.partial(jax.jit, compiler_options=OFTEN)
def of_few_blocks(*args):
    """Limit the blocks of the full sampler to 16 of the 64 logits, so that
    some limits lie below the blocks.
    """
    with mock.patch.multiple(reference, BLOCK=8, BLOCKS=2):
        return sampling.full(*args)


SET = jax.jit(set_slot)
COUNT = jax.jit(count_tokens)


def seeds_of(seeds):
    return np.array([[s & 0xFFFFFFFF, s >> 32] for s in seeds], np.uint32)


def fill_slot(params, counts, slot, values, prompt=(), output=(), piece=8):
    params, counts = SET(params, counts, slot, values)
    known = [(t, False) for t in prompt] + [(t, True) for t in output]
    for start in range(0, len(known), piece):
        part = known[start : start + piece]
        part += [(NO_TOKEN, False)] * (piece - len(part))
        counts = COUNT(counts, slot, np.array([t for t, _ in part], np.int32), np.array([o for _, o in part]))
    return params, counts


def adjusted(
    logits, prompt, output, position, bias, suppressed, min_position, repetition, presence, frequency
):
    """Bias, suppression and penalties, one token after the other."""
    x = np.array(logits, np.float64)
    for token, value in bias.items():
        x[token] += value
    if position < min_position:
        for token in suppressed:
            x[token] = -np.inf
    for token in set(prompt) | set(output):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(output):
        x[token] -= frequency * output.count(token) + presence
    return x


def filtered(x, temperature, min_p, top_k, top_p):
    """Probabilities after temperature, min-p, top-k and top-p, by sorting."""
    x = x / temperature
    p = np.exp(x - x.max())
    x = np.where(p >= min_p, x, -np.inf)
    if 0 < top_k < len(x):
        x = np.where(x >= np.sort(x)[-top_k], x, -np.inf)
    p = np.exp(x - x.max())
    p /= p.sum()
    above = np.array([p[p > value].sum() for value in p])
    p = np.where((above < top_p) | (top_p >= 1), p, 0)
    return p / p.sum()


token_ids = st.integers(0, VOCAB - 1)
# Exclude subnormal numbers: XLA flushes them to zero, numpy does not.
value = st.sampled_from([-3.0, -1.5, -0.0, 0.0, 0.5, 0.5, 2.0, 4.0]) | st.floats(
    -8, 8, width=32, allow_subnormal=False
)
row_settings = st.fixed_dictionaries(
    {
        "logits": st.lists(value, min_size=VOCAB, max_size=VOCAB),
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "seed": st.integers(0, 2**64 - 1),
        "position": st.integers(1, 40),
        "prompt": st.lists(token_ids, max_size=12),
        "output": st.lists(token_ids, max_size=12),
        "bias": st.dictionaries(token_ids, st.floats(-100, 100, width=32, allow_subnormal=False), max_size=4),
        "suppressed": st.lists(token_ids, max_size=4),
        "min_position": st.integers(0, 40),
        "repetition": st.sampled_from([1.0, 1.3, 0.7]),
        "presence": st.sampled_from([0.0, 1.5, -2.0]),
        "frequency": st.sampled_from([0.0, 0.5, -1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        "top_k": st.sampled_from([0, -1, 1, 3, 20, 10**6]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    }
)


@pytest.mark.parametrize("full", [FULL, of_few_blocks])
@given(rows=st.lists(row_settings, min_size=ROWS, max_size=ROWS), slots=st.permutations(range(SLOTS)))
def test_full_is_what_vllm_means(full, rows, slots):
    slots = np.array(slots[:ROWS], np.int32)
    params, counts = empty_slots(SLOTS, PADDED)
    logits = np.full((ROWS, PADDED), -np.inf, np.float32)
    for i, r in enumerate(rows):
        logits[i, :VOCAB] = np.array(r["logits"]) + 0.0  # lax.top_k would put 0 before -0
        names = {
            "repetition": "repetition_penalty",
            "presence": "presence_penalty",
            "frequency": "frequency_penalty",
        }
        kept = ("min_p", "top_k", "top_p", "min_position", "suppressed")
        values = slot_values(
            **{k: r[k] for k in kept}, **{n: r[k] for k, n in names.items()}, logit_bias=r["bias"]
        )
        params, counts = fill_slot(params, counts, slots[i], values, r["prompt"], r["output"])
    temperature, seed = (
        np.array([r["temperature"] for r in rows], np.float32),
        seeds_of(r["seed"] for r in rows),
    )
    position = np.array([r["position"] for r in rows], np.int32)
    tokens, after, out = full(logits, temperature, seed, position, slots, params, counts, ALL)
    noise = np.asarray(sampling.gumbel(seed, position, np.arange(VOCAB)), np.float64)
    for i, r in enumerate(rows):
        token = int(tokens[i])
        keys = (
            "prompt",
            "output",
            "position",
            "bias",
            "suppressed",
            "min_position",
            "repetition",
            "presence",
            "frequency",
        )
        x = adjusted(logits[i, :VOCAB], **{k: r[k] for k in keys})
        if r["temperature"] == 0:
            assert x[token] >= x.max() - 1e-5
        else:
            sharp, wide = (
                filtered(
                    x,
                    r["temperature"],
                    min(1.0, r["min_p"] * (1 - e)),
                    r["top_k"],
                    min(1.0, r["top_p"] * (1 + e)),
                )
                for e in (-1e-5, 1e-5)
            )
            lowest = x[wide > 0].min()
            below = lowest - 1e-5 * max(1.0, abs(lowest))  # ties in float32
            assert x[token] >= below
            if (
                (sharp > 0) == ((wide > 0) | (x >= below))
            ).all():  # no limit within rounding of a token: the very draw is known
                scores = np.where(wide > 0, x + r["temperature"] * noise[i], -np.inf)
                assert scores[token] >= scores.max() - 1e-5
        exact = np.zeros(PADDED, int)
        np.add.at(exact, r["output"], 1)
        exact[token] += 1
        assert (np.asarray(after[slots[i]]) & slot_params.COUNT == exact).all()
    check_logprobs(logits, tokens, out)


def check_logprobs(logits, tokens, out):
    raw = np.asarray(logits, np.float64)
    peak = raw.max(-1, keepdims=True)
    raw = raw - (peak + np.log(np.exp(raw - peak).sum(-1, keepdims=True)))
    for i, token in enumerate(np.asarray(tokens)):
        assert out.chosen[i] == pytest.approx(raw[i, token], abs=1e-5)
        assert out.rank[i] == 1 + (logits[i] > logits[i, token]).sum()
        ids = np.lexsort((np.arange(raw.shape[1]), -logits[i]))[:20]
        assert np.asarray(out.top_ids[i]).tolist() == ids.tolist()
        np.testing.assert_allclose(out.top_logprobs[i], raw[i, ids], atol=1e-5)


def random_logits(rows, vocab=VOCAB, padded=PADDED, seed=0, scale=3.0):
    logits = np.full((rows, padded), -np.inf, np.float32)
    logits[:, :vocab] = np.random.default_rng(seed).normal(size=(rows, vocab)) * scale
    return logits


@pytest.mark.parametrize(("rows", "most"), [(5, 2), (ROWS, 2)])
def test_rows_a_block_at_a_time_are_rows_together(rows, most):
    """Also where the last block repeats rows to be whole: they draw once, and count once."""
    rng = np.random.default_rng(rows)
    params, counts = empty_slots(SLOTS, PADDED)
    for slot in range(SLOTS):
        chosen = slot_values(
            top_k=slot, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2
        )
        params, counts = fill_slot(
            params,
            counts,
            slot,
            chosen,
            rng.integers(0, VOCAB, 4).tolist(),
            rng.integers(0, VOCAB, 4).tolist(),
        )
    logits = np.full((rows, PADDED), -np.inf, np.float32)
    logits[:, :VOCAB] = rng.normal(size=(rows, VOCAB)) * 3
    temperature, position = (
        rng.choice([0.0, 0.7, 1.5], rows).astype(np.float32),
        rng.integers(1, 40, rows).astype(np.int32),
    )
    slots = np.where(np.arange(rows) == 1, -1, rng.permutation(SLOTS)[:rows]).astype(np.int32)
    asked = (
        logits,
        temperature,
        seeds_of(rng.integers(0, 2**62, rows).tolist()),
        position,
        slots,
        params,
        counts,
        np.ones(rows, bool),
    )
    together, apart = (
        FULL(*asked),
        jax.jit(functools.partial(sampling.full_by_rows, most=most), compiler_options=OFTEN)(*asked),
    )
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("most", [ROWS, 3])
def test_one_row_that_asks_gets_the_log_probabilities_that_it_gets_among_others(most):
    """Without a row that asks, the tokens and counts are the same, and no log-probability is computed."""
    params, counts = empty_slots(SLOTS, PADDED)
    row = np.arange(ROWS, dtype=np.int32)
    given = random_logits(ROWS), np.ones(ROWS, np.float32), seeds_of(range(ROWS)), row, row, params, counts
    run = jax.jit(functools.partial(sampling.full_by_rows, most=most), compiler_options=OFTEN)
    (tokens, after, found), one, none = (run(*given, asked) for asked in (ALL, row == 1, row < 0))
    alone = logprobs.token_logprobs(given[0][1:2], tokens[1:2])
    kept = map(jax.tree.leaves, (found, one[2], alone, none[2]))
    for every, own, single, nothing in zip(*kept, strict=True):
        np.testing.assert_array_equal(own[1], every[1])
        np.testing.assert_allclose(own[1], single[0], rtol=1e-6)
        assert not np.asarray(nothing).any()
    for other in (one, none):
        np.testing.assert_array_equal(other[0], tokens)
        np.testing.assert_array_equal(other[1], after)


def test_greedy_is_argmax_and_ties_go_to_the_first():
    logits = random_logits(8)
    logits[3, [7, 30]] = 40.0
    got = PLAIN(logits, np.zeros(8, np.float32), np.zeros((8, 2), np.uint32), np.arange(8, dtype=np.int32))
    assert np.asarray(got).tolist() == logits.argmax(-1).tolist() and got[3] == 7


@pytest.mark.parametrize("temperature", [1e-30, 1e-4, 100.0])
def test_extreme_temperatures_draw_real_tokens(temperature):
    logits = random_logits(8)
    got = PLAIN(logits, np.full(8, temperature, np.float32), seeds_of(range(8)), np.arange(8, dtype=np.int32))
    assert (np.asarray(got) < VOCAB).all() and (np.asarray(got) >= 0).all()
    if temperature < 1:
        assert np.asarray(got).tolist() == logits.argmax(-1).tolist()


def test_rows_of_minus_infinity_are_harmless():
    logits = np.full((4, PADDED), -np.inf, np.float32)
    logits[1, 3] = 2.0  # one possible token
    params, counts = empty_slots(SLOTS, PADDED)
    params, counts = fill_slot(
        params, counts, 2, slot_values(top_p=0.5, top_k=3, min_p=0.1, repetition_penalty=1.5)
    )
    temperature, seed, position = np.ones(4, np.float32), seeds_of(range(4)), np.arange(4, dtype=np.int32)
    slots = np.array([2, 1, SLOTS, -1], np.int32)
    tokens, after, out = FULL(logits, temperature, seed, position, slots, params, counts, ALL)
    assert (
        np.asarray(tokens).tolist()
        == [0, 3, 0, 0]
        == np.asarray(PLAIN(logits, temperature, seed, position)).tolist()
    )
    assert np.asarray(out.chosen)[1] == 0 and not np.isnan(np.asarray(after)).any()
    assert (
        int(np.asarray(after).sum()) == 2
    )  # the rows without a slot count nothing, the last slot is not slot -1


def test_a_draw_depends_on_seed_and_position_only():
    """The same row anywhere in batches of any size, in either sampler, gives the same token."""
    full = jax.jit(sampling.full)  # optimized less than `FULL`: two sizes, a few runs each
    logits, rng = random_logits(1, vocab=1000, padded=1024, scale=1.0)[0], np.random.default_rng(1)
    for _ in range(3):
        seed, position, seen = int(rng.integers(2**63)), int(rng.integers(10_000)), set()
        for rows in (1, 8):
            for at in {0, rows // 2, rows - 1}:
                batch = random_logits(rows, 1000, 1024, seed=rows)
                batch[at] = logits
                temperature = rng.uniform(0, 2, rows).astype(np.float32)
                temperature[at] = 1.0
                seeds = rng.integers(2**32, size=(rows, 2)).astype(np.uint32)
                seeds[at] = seeds_of([seed])[0]
                positions = rng.integers(100, size=rows).astype(np.int32)
                positions[at] = position
                seen.add(int(PLAIN(batch, temperature, seeds, positions)[at]))
                params, counts = empty_slots(rows, 1024)
                asked = np.full(rows, rows, np.int32), params, counts, np.zeros(rows, bool)
                seen.add(int(full(batch, temperature, seeds, positions, *asked)[0][at]))
        assert len(seen) == 1


def test_seeds_and_positions_both_matter():
    n = 64
    logits = np.zeros((n, 1024), np.float32)
    ones, position = np.ones(n, np.float32), np.arange(n, dtype=np.int32)
    same = np.zeros((n, 2), np.uint32)
    low, high = same.copy(), same.copy()
    low[:, 0] = high[:, 1] = np.arange(n)
    for seed, at in ((same, position), (low, 0 * position), (high, 0 * position)):
        assert len(set(np.asarray(PLAIN(logits, ones, seed, at)).tolist())) > n * 0.8


@pytest.mark.parametrize("full", [FULL, of_few_blocks])
@pytest.mark.parametrize(
    "kwargs", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.8, "min_p": 0.02}]
)
def test_frequencies(kwargs, full):
    """Draws at many positions fall as the probabilities say (chi-square at a fixed seed)."""
    n = 1024
    logits = np.tile(random_logits(1, seed=5, scale=1.5), (n, 1))
    expected = (
        filtered(
            logits[0, :VOCAB].astype(np.float64), 0.8, **({"top_k": 0, "top_p": 1.0, "min_p": 0.0} | kwargs)
        )
        * n
    )
    args = (
        logits,
        np.full(n, 0.8, np.float32),
        np.tile(seeds_of([123456789]), (n, 1)),
        np.arange(n, dtype=np.int32),
    )
    if kwargs:
        params, counts = empty_slots(n, PADDED)
        values = slot_values(**kwargs)
        params = jax.tree.map(lambda a, v: jnp.broadcast_to(jnp.asarray(v), a.shape), params, values)
        tokens = full(*args, np.arange(n, dtype=np.int32), params, counts, np.zeros(n, bool))[0]
    else:
        tokens = PLAIN(*args)
    seen = np.bincount(np.asarray(tokens), minlength=VOCAB)
    assert (seen[expected == 0] == 0).all()
    big = expected >= 5
    chi = ((seen - expected)[big] ** 2 / expected[big]).sum()
    dof = big.sum() - 1
    assert chi < dof + 4 * np.sqrt(2 * dof) + 4


def test_ties_at_a_limit_are_kept():
    logits = np.full((ROWS, PADDED), -np.inf, np.float32)
    logits[:, :4], logits[:, 0] = 1.0, 2.0
    params, counts = empty_slots(SLOTS, PADDED)
    params, counts = fill_slot(params, counts, 0, slot_values(top_k=2))
    params, counts = fill_slot(params, counts, 1, slot_values(top_p=0.6))
    seen = [set(), set()]
    for position in range(60):
        slots = np.array([0, 1, SLOTS, SLOTS], np.int32)
        tokens = FULL(
            logits,
            np.ones(4, np.float32),
            seeds_of(range(4)),
            np.full(4, position, np.int32),
            slots,
            params,
            counts,
            ALL,
        )[0]
        seen[0].add(int(tokens[0]))
        seen[1].add(int(tokens[1]))
    assert seen == [{0, 1, 2, 3}] * 2


def test_slots_are_reset_and_counts_saturate():
    params, counts = empty_slots(2, PADDED)
    params, counts = fill_slot(params, counts, 1, slot_values(top_k=4), prompt=[1, 2, 2], output=[2, 3, 3])
    row = np.asarray(counts[1])
    assert (row[1], row[2], row[3]) == (
        slot_params.IN_PROMPT,
        slot_params.IN_PROMPT | 1,
        2,
    ) and not np.asarray(counts[0]).any()
    counts = counts.at[1, 3].set(slot_params.COUNT)
    counts = COUNT(counts, 1, np.array([3], np.int32), np.array([True]))
    counts = slot_params.count_drawn(counts, np.array([1], np.int32), np.array([3], np.int32))
    assert counts[1, 3] == slot_params.COUNT
    params, counts = fill_slot(params, counts, 1, slot_values())
    assert not np.asarray(counts).any()
    assert all(
        (np.asarray(a[1]) == np.asarray(v)).all()
        for a, v in zip(jax.tree.leaves(params), jax.tree.leaves(slot_values()), strict=True)
    )


def test_too_many_entries_are_refused():
    with pytest.raises(ValueError, match=f"suppressed has {SUPPRESSED + 1} entries"):
        slot_values(suppressed=range(SUPPRESSED + 1))
    with pytest.raises(ValueError, match="logit_bias"):
        slot_values(logit_bias=dict.fromkeys(range(BIASED + 1), 1.0))
