"""The pipeline study: stage times against the cost model, and pipelines against runs of one device."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflow.bench.engine.policies import Hybrid, OrcaBest
from jaxflow.bench.pipeline import assumptions
from jaxflow.bench.pipeline.scenarios import (
    PROMPT_CHUNK,
    STEP_CHUNK,
    Study,
    run_scenario,
    scenarios,
    stage_layers,
)
from jaxflow.bench.pipeline.simulate import ReplicaLayout, simulate
from jaxflow.bench.pipeline.stage_time import COUNTS, CapJoules, StageLink, StageTimer, counts_of
from jaxflow.bench.pipeline.study import measure, text
from jaxflow.bench.workload.lengths import Item, constant
from jaxflow.config import ConfigError, Layer, ModelConfig, Rope
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES, step_timer
from jaxflow.model.graph import Work, model_graph
from jaxflow.model.stage_split import OUTPUT_TOKENS, PROMPT_TOKENS, split_layers
from jaxflow.scheduler.scheduler import DecodeMaximal
from jaxflow.scheduler.state import Chunk, StepWork

CONFIG = ModelConfig("llama", 32000, 1024, 8, 8, 128, 2816, (Layer(rope=Rope(10000.0)),) * 7, 2048)
RATES = DEVICES["A100-80GB"].datasheet


@given(
    decodes=st.integers(0, 200),
    keys=st.integers(1, 3000),
    chunk=st.integers(0, 900),
    start=st.integers(0, 900),
    cut=st.integers(1, 6),
    tile=st.sampled_from([None, 128]),
)
def test_stages_sum_to_the_time_of_the_model(decodes, keys, chunk, start, cut, tile):
    chunks = ((chunk, start),) if chunk else ()
    step = Composition(decodes, keys, chunks, decodes + len(chunks))
    counts = np.array([step.count(what) for what in COUNTS])
    whole = step_timer(model_graph(CONFIG, 2), RATES, tile_rows=tile)(step).sequential_s
    split = StageTimer(CONFIG, (cut, 7 - cut), 2, RATES, tile_rows=tile)(counts)
    assert split.shape == (2,) and split.sum() == pytest.approx(whole)


@given(
    positions=st.lists(st.integers(0, 4000), max_size=30),
    chunks=st.lists(st.tuples(st.integers(1, 900), st.integers(0, 4000), st.booleans()), max_size=4),
)
def test_counts_of_a_step_are_those_of_its_composition(positions, chunks):
    work = StepWork(
        np.empty(len(positions), object),
        np.arange(len(positions), dtype=np.int32),
        np.array(positions, np.int32),
        tuple(Chunk(None, i, start, tokens, samples) for i, (tokens, start, samples) in enumerate(chunks)),
        (),
        tokens := len(positions) + sum(tokens for tokens, *_ in chunks),
        tokens,
        np.empty((0, 4), np.int32),
    )
    step = Composition(
        len(positions),
        float(np.mean(positions)) + 1 if positions else 0.0,
        tuple((tokens, start) for tokens, start, _ in chunks),
        len(positions) + sum(samples for *_, samples in chunks),
    )
    expected = [1.0, *(step.count(what) for what in COUNTS[1:])]
    assert counts_of(work) == pytest.approx(expected)


def test_a_layers_fixed_time_counts_once_a_layer():
    counts = np.array([Composition(8, 100).count(what) for what in COUNTS])
    plain, slower = (StageTimer(CONFIG, (3, 4), 1, RATES, layer_s=each)(counts) for each in (0.0, 1e-3))
    assert slower - plain == pytest.approx([3e-3, 4e-3])


@given(
    cut=st.integers(1, 6), decodes=st.integers(1, 300), keys=st.integers(1, 3000), watts=st.floats(1.0, 1e6)
)
def test_a_stage_takes_its_roofline_or_its_joules(cut, decodes, keys, watts):
    step = Composition(decodes, keys, ((64, 0),), decodes + 1)
    counts, layers = np.array([step.count(what) for what in COUNTS]), (cut, 7 - cut)
    joules = CapJoules({"bfloat16": 9e-13}, 1e-10, watts)
    limited = StageTimer(CONFIG, layers, 1, RATES, joules=joules)(counts)
    work = sum((op.work(step) for op in model_graph(CONFIG, 1).ops()), Work())
    least_s = (9e-13 * work.flops + 1e-10 * work.memory_bytes) / watts
    plain = StageTimer(CONFIG, layers, 1, RATES)(counts)
    assert (limited >= plain).all() and limited.sum() >= least_s * (1 - 1e-9)
    assert limited.sum() <= (plain.sum() + least_s) * (1 + 1e-9)
    cold = StageTimer(CONFIG, layers, 1, RATES, joules=CapJoules(joules.flop, joules.byte, math.inf))(counts)
    np.testing.assert_array_equal(cold, plain)


def test_joules_count_the_experts_that_a_step_reads():
    config = open_checkpoint("qwen3-30b-a3b", load_format="dummy").model_config
    joules = CapJoules({"bfloat16": 0.0}, 1.0, 1.0)
    timer = StageTimer(config, (config.num_layers,), 1, DEVICES["H200"].rates, joules=joules)
    for tokens in (1, 64, 100_000):
        step = Composition(tokens, 1)
        counts = np.array([step.count(what) for what in COUNTS])
        read = sum(op.work(step).memory_bytes for op in model_graph(config, 1).ops())
        (found,) = timer(counts)
        assert found == pytest.approx(read)


@pytest.mark.parametrize("stages", range(1, 8))
def test_layers_are_split_by_time(stages):
    layers = split_layers(CONFIG, stages, 1, RATES)
    assert sum(layers) == 7 and min(layers) >= 1
    step = Composition.steady_state(256, PROMPT_TOKENS, OUTPUT_TOKENS)
    counts = np.array([step.count(what) for what in COUNTS])
    longest = StageTimer(CONFIG, layers, 1, RATES)(counts).max()
    for i in range(stages - 1):  # no layer moved over one border makes the longest stage shorter
        for change in (1, -1):
            other = list(layers)
            other[i], other[i + 1] = other[i] + change, other[i + 1] - change
            if min(other) >= 1:
                assert StageTimer(CONFIG, other, 1, RATES)(counts).max() >= longest * (1 - 1e-9)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="pipeline_parallel_size=8"):
        split_layers(CONFIG, 8, 1, RATES)


def test_equal_micro_batches_fill_every_stage():
    """P micro-batches of equal time leave no bubble; one micro-batch leaves all stages but one idle."""
    items = constant(64, 64, 64)
    run = {
        m: simulate(items, ReplicaLayout(1, m, 8, 64), DecodeMaximal, lambda _: np.full(4, 1e-3))
        for m in (1, 4)
    }
    assert run[4].bubble_s.max() == pytest.approx(0.0, abs=1e-9)
    assert run[4].busy_share > 0.9 and run[1].busy_share == pytest.approx(0.25, rel=0.01)


def test_a_bubble_is_the_idle_time_behind_a_longer_micro_batch():
    """Two stages and two requests in turns: a prompt of 3 s, then decodes of 1 s."""
    items = [Item(30, 3), Item(10, 3)]
    layout = ReplicaLayout(1, 2, 1, 64)
    run = simulate(items, layout, OrcaBest, lambda counts: np.full(2, counts[1] / 10 if counts[5] else 1.0))
    assert run.finished_s.tolist() == pytest.approx([10.0, 11.0])
    assert run.bubble_s.sum() > 0


@pytest.mark.parametrize("policy", [DecodeMaximal, OrcaBest, lambda: Hybrid(24)])
def test_every_request_ends_once_and_sending_takes_time(policy):
    rng = np.random.default_rng(3)
    items = [Item(int(p), int(d)) for p, d in rng.integers(1, 60, (40, 2))]
    timer = StageTimer(CONFIG, split_layers(CONFIG, 3, 1, RATES), 1, RATES, layer_s=1e-4)
    layout = ReplicaLayout(2, 3, 4, 128)
    plain = simulate(items, layout, policy, timer)
    late = simulate(items, layout, policy, timer, StageLink(1e9, 1e-3), send_bytes=2048.0)
    for run in (plain, late):
        assert (run.finished_s > 0).all() and (run.busy_s.sum(axis=0) <= 2 * run.duration_s).all()
    assert late.duration_s > plain.duration_s


OPEN = {
    "moving": True,
    "micro_batches": 5,
    "orca_prompts": 3,
    "requests_per_s": 40.0,
    "length_order": "random",
    "sends_all": True,
    "link": StageLink(1e9, 1e-3, holds_stage=True),
    "host_s": 0.02,
    "compute_share": 0.5,
    "memory_share": 0.5,
    "tile_rows": 128,
}
SMALL = Study(
    model="llama-3.1-8b", requests=16, slots=3, replica_slots=3, stages=4, tp=2, lengths=(64, 256), chunk=32
)


@given(
    changes=st.sets(st.sampled_from(sorted(OPEN)), max_size=4),
    name=st.sampled_from([STEP_CHUNK, PROMPT_CHUNK, "sarathi", "orca-best", "tp only, orca-best"]),
)
@settings(max_examples=12)
def test_every_token_is_computed_once_under_any_assumption(changes, name):
    """A request's last output token is drawn and never computed; a stage is busy with one step at a time."""
    study = dataclasses.replace(SMALL, **{field: OPEN[field] for field in changes})
    run, _ = run_scenario(study, name)
    assert run.counts[COUNTS.index("tokens")] == sum(
        item.prompt_tokens + item.output_tokens - 1 for item in study.items()
    )
    assert (run.finished_s > 0).all() and (run.bubble_s >= 0).all()
    assert (run.busy_s <= run.duration_s * (1 + 1e-9)).all()
    if "requests_per_s" in changes:
        assert (run.finished_s > study.arrivals_s()).all()


@pytest.mark.parametrize(
    "change", [{"host_s": 0.02}, {"link": StageLink(1e9, 0.02)}, {"layer_s": 1e-3}, {"compute_share": 0.1}]
)
def test_time_that_a_step_takes_longer_lengthens_the_run(change):
    runs = [run_scenario(dataclasses.replace(SMALL, **each), STEP_CHUNK)[0] for each in ({}, change)]
    assert runs[1].duration_s > runs[0].duration_s and runs[1].steps == runs[0].steps


def test_equal_moving_micro_batches_fill_every_stage():
    items = constant(64, 64, 64)
    layout = ReplicaLayout(1, 4, 8, 64, moving=True)
    run = simulate(items, layout, lambda: Hybrid(56), lambda _: np.full(4, 1e-3))
    assert run.busy_share > 0.9


def test_a_held_stage_is_busy_while_it_sends():
    """Steps of 1 ms and sends of 2 ms: the first of two stages is held for 3 ms a step."""
    items, link = constant(16, 32, 16), StageLink(1e9, 2e-3, holds_stage=True)
    run = simulate(items, ReplicaLayout(1, 2, 4, 64), DecodeMaximal, lambda _: np.full(2, 1e-3), link)
    assert run.busy_s[0] == pytest.approx([3e-3 * run.steps, 1e-3 * run.steps])


def test_each_assumption_is_another_study():
    changed = assumptions.studies(SMALL)
    assert set(changed) == set(assumptions.CHANGES)
    assert len(set(map(repr, changed.values()))) == len(changed)
    default, fitted = Study(), changed["the last three"]
    assert (default.layer_s, default.link, default.host_s) == (fitted.layer_s, fitted.link, fitted.host_s)


def test_assumptions_are_deterministic_and_in_the_table(monkeypatch):
    kept = dict(list(assumptions.CHANGES.items())[-2:])
    monkeypatch.setattr(assumptions, "CHANGES", kept)
    study = dataclasses.replace(SMALL, requests=8)
    first, second = (assumptions.measure(study, processes=1) for _ in range(2))
    assert first["assumptions"] == second["assumptions"] and set(first["assumptions"]) == set(kept)
    assert all(name in assumptions.text(first) for name in kept)


def test_layers_are_balanced_for_a_step_of_the_studys_chunk():
    """The head weighs more in a short step, so the last stage has fewer layers."""
    last = [stage_layers(dataclasses.replace(SMALL, slots=1, chunk=chunk))[-1] for chunk in (1, 2048)]
    assert last[0] < last[1]


def test_only_the_papers_deployment_is_compared_with_the_paper():
    assert Study(requests=5, layer_s=0.0).is_papers
    assert not Study(device="H100").is_papers and not Study(chunk=512).is_papers


def test_a_small_study_has_the_shape_of_the_paper():
    study = Study(requests=36, slots=6, replica_slots=3, stages=4, lengths=(256, 1024), chunk=128)
    study = dataclasses.replace(study, **assumptions.BASE)
    report = measure(study, processes=1)
    assert set(report["scenarios"]) == set(scenarios(study))
    found = {name: row["duration_s"] for name, row in report["scenarios"].items()}
    assert found["sarathi"] < found["orca-best"] and found["sarathi"] < found["request-level"]
    assert report["ratios"]["bubble_orca_best_over_sarathi"] > 2
    assert all(name in text(report) for name in found)
    assert set(report["simulation_cpu_s"]) == set(found)
    fewer = measure(study, processes=1, ratios_only=True, also=("sarathi",))
    assert "sarathi" in fewer["scenarios"] and "orca-worst" not in fewer["scenarios"]
    assert fewer["ratios"] == report["ratios"] and len(fewer["scenarios"]) == 5


@pytest.mark.parametrize(
    "change",
    [
        {"stages": 0},
        {"chunk": 8},
        {"device": "abacus"},
        {"compute_share": 1.5},
        {"host_s": -1.0},
        {"length_order": "falling"},
        {"requests_per_s": 0.0},
    ],
)
def test_an_impossible_study_is_refused_by_name(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        dataclasses.replace(Study(), **change)


def test_measured_rates_are_those_of_the_device():
    assert Study(device="H200", measured=True).rates.flops_per_s == DEVICES["H200"].rates.flops_per_s
    assert Study(device="H200").rates.flops_per_s == DEVICES["H200"].datasheet.flops_per_s
