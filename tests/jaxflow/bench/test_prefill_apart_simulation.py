"""Simulated prefill replicas: each token is computed once, and without prefill replicas nothing changes."""

import functools

import numpy as np
import pytest

from jaxflow.bench.__main__ import main
from jaxflow.bench.router.apart import simulate_apart, take_pages
from jaxflow.bench.router.command import chats
from jaxflow.bench.router.simulate import BLOCK_SIZE, Cluster, RouterChoice, simulate
from jaxflow.bench.workload.lengths import Item, poisson_arrivals, prompts
from jaxflow.kv.pages import PagePool
from serving.cluster.apart import ApartRule

CLUSTER = Cluster(replicas=4, slots=16, pages=4000, token_budget=512)
TOKEN_S = 3e-5


def step_s(counts: np.ndarray) -> np.ndarray:
    """4 ms, and 30 µs a token."""
    return np.array([0.004 + TOKEN_S * counts[1]])


def run(items, prefills, rule=ApartRule.ALWAYS, moved_token_s=1e-6):
    times = {"token_s": TOKEN_S, "moved_token_s": moved_token_s}
    return simulate_apart(items, prompts(items, 1000, 0), CLUSTER, prefills, step_s, rule=rule, **times)


@functools.cache
def conversations() -> list[Item]:
    return poisson_arrivals(chats(64, seed=1, mean_output=30), rate=20.0, seed=1)


@functools.cache
def strangers() -> list[Item]:
    """Requests without a common prefix. The first one has less than a page."""
    lengths = np.random.default_rng(3).integers(200, 3000, 40).tolist()
    return poisson_arrivals([Item(n, 5 + n % 7) for n in [BLOCK_SIZE - 1, *lengths]], rate=20.0, seed=1)


def test_without_prefill_replicas_it_is_the_plain_simulation():
    items = conversations()
    plain = simulate(items, prompts(items, 1000, 0), CLUSTER, RouterChoice(CLUSTER), step_s)
    found = run(items, 0)
    np.testing.assert_array_equal(found.ttft_s, plain.ttft_s)
    np.testing.assert_array_equal(found.computed, plain.computed)
    assert not found.apart.any()


def test_each_token_is_computed_once_by_a_replica_of_its_kind():
    items = strangers()
    found = run(items, 1)
    full = np.array([(item.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE for item in items])
    np.testing.assert_array_equal(found.apart, full > 0)
    assert found.computed[3] == full.sum()
    whole = np.array([item.prompt_tokens + item.output_tokens - 1 for item in items])
    assert found.computed.sum() == whole.sum()
    assert np.isfinite(found.ttft_s).all() and (found.ttft_s > 0).all() and (found.tpot_s > 0).all()
    assert len(found.gaps_s) == sum(item.output_tokens - 1 for item in items)


def test_long_prompts_no_longer_delay_other_tokens():
    items = strangers()
    together, apart = (run(items, prefills).gaps_s.max() for prefills in (0, 1))
    assert apart < together / 2


@pytest.mark.parametrize(("moved_token_s", "share"), [(0.0, (0.2, 1.0)), (1.0, (0.0, 0.0))])
def test_the_rule_counts_the_transfer(moved_token_s, share):
    found = run(conversations(), 2, ApartRule.PREDICTED, moved_token_s)
    assert share[0] <= found.apart.mean() <= share[1]


def test_pages_enter_a_full_cache_as_far_as_it_has_room():
    pool = PagePool(4)
    held = pool.allocate(2)
    take_pages(pool, [b"a", b"b", b"c"])
    assert [pool.find(name) >= 0 for name in (b"a", b"b", b"c")] == [True, True, False]
    take_pages(pool, [b"a", b"c"])
    assert pool.find(b"c") >= 0 and pool.available == 2 and pool.references(held[0]) == 1


@pytest.mark.parametrize(
    "flags", [["--prefill_replicas", "8"], ["--prefill_replicas", "x"], ["--model", "nothing"]]
)
def test_wrong_settings_are_errors(no_flags, flags):
    assert main(["bench", "prefill_apart", *flags]) == 1
