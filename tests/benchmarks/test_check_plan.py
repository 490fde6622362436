"""The check of plans at full depth: its steps, its comparison of logits, and its statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import MODELS

from benchmarks import check_plan
from benchmarks.check_plan import Lengths
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.pipeline.handwritten import sequential_plan
from jaxflow.pipeline.plan import load, save

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12).map(
    lambda pairs: Lengths(np.array([p for p, _ in pairs]), np.array([p + o for p, o in pairs]))
)


@given(LENGTHS, st.integers(1, 64))
def test_steps_are_full_and_compute_each_position_once_in_order(lengths, tokens):
    steps = list(check_plan.steps_of(lengths, tokens))
    done = np.zeros(len(lengths.prompts), int)
    for decodes, pieces in steps:
        assert len(decodes) + sum(size for *_, size in pieces) == tokens
        for i, position in decodes:
            assert lengths.prompts[i] <= position == done[i] < lengths.totals[i]
        for i, start, size in pieces:
            assert start == done[i] and size > 0 and start + size <= lengths.prompts[i]
        for i, _ in decodes:
            done[i] += 1
        for i, _, size in pieces:
            done[i] += size
    places = check_plan.places_of(steps)
    assert sorted(places.values()) == list(range(tokens * len(steps)))
    assert set(places) == {(i, k) for i in range(len(done)) for k in range(done[i])}


def test_lengths_fit_the_longest():
    lengths = check_plan.drawn_lengths(200, 128, 64, 1500)
    assert (lengths.totals - lengths.prompts == 64).all()
    assert lengths.prompts.min() >= 1 and 500 < lengths.totals.max() <= 1500


def test_equal_logits_differ_in_nothing():
    logits = jax.random.normal(jax.random.key(0), (5, 33))
    found = check_plan.compare(logits, logits)
    assert found["same"].all() and (found["margin"] > 0).all()
    for name in ("kl", "margin_change", "mean_difference", "largest_difference"):
        np.testing.assert_allclose(found[name], 0, atol=1e-6)


def test_the_change_of_the_margin_is_of_the_first_ways_two_best():
    one = jnp.array([[3.0, 2.0, 0.0], [3.0, 2.0, 0.0]])
    other = jnp.array([[2.0, 2.5, 0.0], [3.5, 2.5, 0.5]])
    found = check_plan.compare(one, other)
    np.testing.assert_allclose(found["margin"], [1.0, 1.0])
    np.testing.assert_allclose(found["margin_change"], [1.5, 0.0], atol=1e-6)
    assert found["same"].tolist() == [False, True]
    np.testing.assert_allclose(found["largest_difference"], [1.0, 0.5])
    p, q = (np.exp(x) / np.exp(x).sum() for x in (np.array([3.0, 2, 0]), np.array([2.0, 2.5, 0])))
    np.testing.assert_allclose(found["kl"], [(p * np.log(p / q)).sum(), 0], atol=1e-6)


def test_agreement_counts_only_margins_above_the_floor():
    values = {
        "margin": np.array([0.1, 0.2, 0.5, 0.6, 0.7]),
        "same": np.array([False, True, True, False, True]),
    }
    found = check_plan.agreement(values, 0.3)
    assert (found["positions"], found["above_floor"], found["other_above_floor"]) == (5, 3, 1)
    assert found["share_above_floor"] == 0.6 and found["same_above_floor"] == 2 / 3
    chosen = np.array([True, True, False, False, False])
    assert check_plan.agreement(values, 0.3, chosen)["same_above_floor"] is None


def way(share: float, same: float | None, decodes: float | None = 1.0, kl: float = 1.0) -> dict:
    """Return the parts of a report that decide."""
    kinds = {"decodes": {"same_above_floor": decodes}, "prefill": {"same_above_floor": 1.0}}
    return {"share_above_floor": share, "same_above_floor": same, "kl": {"mean": kl}, **kinds}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (way(0.5, 0.999), True),
        (way(0.49, 1.0), False),
        (way(0.8, 0.998), False),
        (way(0.8, 1.0, decodes=0.998), False),
        (way(0.8, 1.0, decodes=None), True),
        (way(0.0, None), False),
        (way(0.8, 1.0, kl=1.6), False),
    ],
)
def test_a_plan_passes_by_agreement_of_enough_positions_of_each_kind_and_by_its_kl(found, expected):
    assert check_plan.passes(found, way(0.8, 1.0)) is expected


def test_the_floor_is_the_noise_that_one_position_in_a_thousand_exceeds():
    change = np.arange(10_001) / 10_000
    assert check_plan.floor_of({"margin_change": change}) == pytest.approx(0.999)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 16))
def test_every_sequence_has_pages_of_its_own(totals, block_size):
    lengths = Lengths(np.array(totals), np.array(totals))
    width = -(-max(totals) // block_size)
    table = check_plan.page_table(lengths, block_size, (2, len(totals), width))
    used = [
        page for row, total in zip(table[0], totals, strict=True) for page in row[: -(-total // block_size)]
    ]
    assert sorted(used) == list(range(1, len(used) + 1)) and (table[0] == table[1]).all()


def test_a_window_hides_no_key_that_an_early_position_needs(tmp_path):
    """Steps of two sizes compute equal streams, though most sequences are longer than the window."""
    folder = MODELS / "tiny-gemma2"
    plan = tmp_path / "plan.json"
    save(sequential_plan(open_checkpoint(str(folder)).model_config, 32), plan)
    small = "--sequences 6 --prompt 20 --output 8 --longest 60 --block_size 16 --other_tokens 16"
    words = ["--model", str(folder), "--load_format", "auto", "--dtype", "float32", *small.split()]
    flags = check_plan.parse([*words, "--plans", str(plan)])
    lengths = Lengths(np.array([40, 3, 50, 44, 9, 47]), np.array([48, 11, 58, 52, 17, 55]))
    executor = check_plan.executor_of(flags, [load(plan)], lengths)
    ids = np.random.default_rng(0).integers(0, 100, (6, 58)).astype(np.int32)
    found = []
    for size in (16, 32):
        layout = check_plan.layout_of(executor, size, "sequential")
        found.append(check_plan.streams(executor, layout, executor.weights, lengths, ids))
    (one, places), (two, others) = found
    both = sorted(places.keys() & others.keys())
    assert len(both) > 100
    rows = [np.asarray(x)[[where[place] for place in both]] for x, where in ((one, places), (two, others))]
    np.testing.assert_allclose(*rows, rtol=1e-4, atol=1e-4)


def test_no_plan_passes_a_check_that_a_broken_layer_passes(tmp_path, monkeypatch):
    """On a CPU both step sizes give equal bits, so every position is above the floor."""
    folder, plan = MODELS / "tiny-llama", tmp_path / "plan.json"
    save(sequential_plan(open_checkpoint(str(folder)).model_config, 32), plan)
    small = "--sequences 6 --prompt 20 --output 8 --longest 60 --block_size 16 --other_tokens 16 --copies 4,8"
    words = ["--model", str(folder), "--dtype", "float32", *small.split(), "--plans", str(plan)]
    flags = check_plan.parse(words)
    lengths = Lengths(np.array([40, 3, 50, 44, 9, 47]), np.array([48, 11, 58, 52, 17, 55]))
    executor = check_plan.executor_of(flags, [load(plan)], lengths)
    monkeypatch.setattr(check_plan, "broken", lambda weights, layer, devices: {"nothing": (weights, None)})
    report = check_plan.measured(executor, flags, [load(plan)], lengths)
    assert list(report["tried"]) == ["4", "8"] and report["copies"] == 8
    assert report["controls_fail"] == {"nothing": False} and not any(report["passes"].values())
    monkeypatch.undo()
    report = check_plan.run_all(executor, flags, [load(plan)], lengths, executor.weights, {})
    assert len(report["controls_fail"]) == 5 and all(report["controls_fail"].values())
    assert all(report["passes"].values()) and report["same_bits_twice"]
