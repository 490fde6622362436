"""Simulated replicas behind the router: no token is lost, and the router beats
rules that ignore load and caches.
"""

import dataclasses

import numpy as np
import pytest

from jaxflow.bench.__main__ import main
from jaxflow.bench.router.command import RULES, chats, measure
from jaxflow.bench.router.simulate import Cluster, RouterChoice, simulate
from jaxflow.bench.workload.lengths import poisson_arrivals, prompts

CLUSTER = Cluster(replicas=4, slots=16, pages=4000, token_budget=512)


def step_s(counts: np.ndarray) -> np.ndarray:
    """4 ms, and 30 µs a token."""
    return np.array([0.004 + 3e-5 * counts[1]])


@pytest.fixture(scope="module")
def items():
    return poisson_arrivals(chats(64, seed=1, mean_output=30), rate=20.0, seed=1)


@pytest.mark.parametrize("rule", RULES)
def test_every_token_is_computed_or_cached_once(items, rule):
    run = simulate(items, prompts(items, 1000, 0), CLUSTER, RULES[rule](CLUSTER), step_s)
    # The last token of an answer is sampled and never computed.
    wanted = sum(item.prompt_tokens + item.output_tokens - 1 for item in items)
    assert run.computed.sum() + run.cached_tokens == wanted
    assert run.total_tokens == wanted + len(items) >= run.tokens
    assert np.isfinite(run.ttft_s).all() and (run.ttft_s > 0).all()


def test_a_simulation_repeats_itself(items):
    ids = prompts(items, 1000, 0)
    first, second = (simulate(items, ids, CLUSTER, RouterChoice(CLUSTER), step_s) for _ in range(2))
    assert first.seconds == second.seconds and first.cached_tokens == second.cached_tokens


def test_the_router_finds_more_prefixes_than_rules_that_ignore_caches(items):
    found = measure(items, CLUSTER, step_s, load=0.7, balance_requests=64)["balance"]
    assert found["router"]["hits_over_one_engine"] > 1.5 * found["fewest requests"]["hits_over_one_engine"]
    assert found["one engine with all memory"]["hits_over_one_engine"] == 1.0


def test_one_engine_with_all_memory_has_the_pages_and_the_speed_of_all():
    joined = CLUSTER.joined()
    assert (joined.replicas, joined.pages, joined.slots, joined.speed) == (1, 16_000, 64, 4.0)
    assert dataclasses.replace(joined, replicas=4).joined().speed == 16.0


@pytest.mark.parametrize(
    "flags",
    [
        ["--replicas", "1"],
        ["--load", "2"],
        ["--model", "nothing"],
        ["--device", "none"],
        ["--trace", "no.csv"],
    ],
)
def test_wrong_settings_are_errors(no_flags, flags):
    assert main(["bench", "router", *flags]) in (1, 2)
