"""The simulated balance of experts over devices."""

import itertools
import json

import numpy as np
import paths
import pytest

from jaxflow.bench.__main__ import main
from jaxflow.bench.engine import expert_balance
from jaxflow.bench.engine.expert_balance import ExpertLayout, Mixture, Routes, simulate


def test_a_step_sends_each_token_to_different_experts():
    routes = Routes(Mixture("m", 16, 4), 300, 1.0, 50.0)
    steps = list(itertools.islice(routes.counts(np.random.default_rng(0)), 200))
    for tokens in steps:
        assert tokens.sum() == 300 * 4 and tokens.max() <= 300
    busiest = [int(np.argmax(tokens)) for tokens in steps]
    assert len(set(busiest)) > 2  # the order drifts
    even = Routes(Mixture("m", 16, 4), 300, 0.0, 50.0)
    (tokens,) = itertools.islice(even.counts(np.random.default_rng(0)), 1)
    assert tokens.max() < 1.5 * tokens.min() < tokens.mean() * 1.5 and steps[0].max() > 5 * steps[0].min()


def test_copies_share_the_tokens_of_their_expert():
    layout = ExpertLayout(2, 2, False, np.array([0, 1, 0, 2]))
    layout.take(np.array([1000, 10, 10]), np.random.default_rng(0))
    assert layout.balances[0] > 0.9  # without copies 1,010 of 1,020 tokens could be on one device
    layout.rebalance(np.array([1, 1, 1000]))
    assert layout.placed.tolist() == [0, 1, 0, 2] and not layout.moves


def test_placements_by_measured_loads_are_more_even():
    routes = Routes(Mixture("m", 32, 4), 1024, 1.0, 1e6)
    rows = simulate(routes, [8], 0.25, steps=60, window_size=20, step_interval=20, seed=2)
    in_order, placed, copied = (row["mean_over_max_load"] for row in rows)
    assert in_order < placed < copied and copied > 0.9
    assert [row["slots"] for row in rows] == [32, 32, 40]
    assert rows[2]["moved_slots_per_rebalance"] < 10


def test_the_committed_balance_is_at_least_95_percent():
    report = json.loads((paths.ROOT / "benchmarks/cpu/engine/expert-balance.json").read_text())
    assert (report["zipf"], report["spare"], report["steps"]) == (1.0, 0.25, 1000)
    rows = [
        row
        for row in report["rows"]
        if (row["experts"], row["drift_steps"], row["tokens_per_step"]) == (128, 1e5, 2048)
        and row["layout"] == "placed by load, with copies"
    ]
    assert [row["devices"] for row in rows] == [2, 4, 8]
    assert all(row["slots"] == 160 and row["mean_over_max_load"] >= 0.95 for row in rows)


@pytest.mark.parametrize(
    "words", ["--devices=0", "--devices=7", "--devices=", "--tokens=-1", "--tokens=x", "--drift_steps=0"]
)
def test_a_number_that_cannot_work_is_refused(no_flags, monkeypatch, capsys, words):
    monkeypatch.setattr(expert_balance, "simulate", lambda *_, **__: pytest.fail("a simulation ran"))
    assert main(["bench", "expert_balance", words]) == 1
    assert words.removeprefix("--").partition("=")[0] in capsys.readouterr().err
