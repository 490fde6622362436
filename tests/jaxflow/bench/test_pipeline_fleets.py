"""The best layout of a fleet: memory, joules, mixtures of experts, and the choice."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.bench.pipeline.fleets import (
    FP8_ALL,
    FleetSetting,
    best_of,
    draw,
    dynamic_joules,
    measure,
    model_of,
    run_layout,
    sequences_that_fit,
    steady_rate,
    text,
)
from jaxflow.bench.pipeline.simulate import ReplicaLayout, simulate
from jaxflow.bench.pipeline.splits import DeviceSplit
from jaxflow.bench.pipeline.stage_time import COUNTS, StageTimer
from jaxflow.bench.workload.lengths import constant
from jaxflow.config import ConfigError, Layer, ModelConfig, Rope
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES, dense_parameters, step_timer
from jaxflow.model.energy import shipped_power
from jaxflow.model.graph import BFLOAT16, FP8, model_graph
from jaxflow.scheduler.scheduler import DecodeMaximal

RATES = DEVICES["H200"].datasheet
DENSE = ModelConfig("llama", 32000, 1024, 8, 8, 128, 2816, (Layer(rope=Rope(10000.0)),) * 6, 2048)
MIXTURE = dataclasses.replace(
    DENSE,
    architecture="mixtral",
    layers=(Layer(experts=True),) * 6,
    num_experts=8,
    experts_per_token=2,
    expert_intermediate_size=512,
)
SMALL = FleetSetting(
    models=("llama-3.2-1b:bf16",),
    devices=(2, 3),
    layouts=tuple(DeviceSplit.parse(name) for name in ("1x1", "2x1", "1x2", "1x3", "2x1+ep", "dp2")),
    steps=30,
)


def counts_of(step: Composition) -> np.ndarray:
    return np.array([step.count(what) for what in COUNTS])


@given(
    decodes=st.integers(1, 200), keys=st.integers(1, 3000), chunk=st.integers(0, 900), cut=st.integers(1, 5)
)
def test_stages_of_a_mixture_sum_to_the_time_of_the_model(decodes, keys, chunk, cut):
    step = Composition(decodes, keys, ((chunk, 0),) if chunk else ())
    whole = step_timer(model_graph(MIXTURE, 2), RATES)(step).sequential_s
    split = StageTimer(MIXTURE, (cut, 6 - cut), 2, RATES)(counts_of(step))
    assert split.sum() == pytest.approx(whole)


@given(decodes=st.integers(1, 200), chunk=st.integers(0, 900))
def test_fp8_stages_have_the_times_of_fp8_ops(decodes, chunk):
    step = Composition(decodes, 700, ((chunk, 0),) if chunk else ())
    whole = step_timer(model_graph(DENSE, 1, FP8), RATES, "float8_e4m3fn")(step).sequential_s
    timer = StageTimer(DENSE, (3, 3), 1, RATES, widths=FP8, dtype="float8_e4m3fn")
    assert timer(counts_of(step)).sum() == pytest.approx(whole)


def test_each_op_takes_its_fixed_time():
    counts = counts_of(Composition(8, 100))
    plain, slower = (
        StageTimer(DENSE, (6,), 2, RATES, kernel_s=one, collective_s=other)(counts)
        for one, other in ((0.0, 0.0), (1e-3, 1e-2))
    )
    ops = list(model_graph(DENSE, 2).ops())
    collectives = sum(op.kind == "network" for op in ops)
    assert slower - plain == pytest.approx(1e-3 * (len(ops) - collectives) + 1e-2 * collectives)


def test_the_cost_model_has_the_sizes_of_deepseek_v3():
    config = model_of("deepseek-v3:fp8_all")
    graph = model_graph(config, 1, FP8_ALL)
    weights = sum(each.weight_bytes for op in graph.ops() for what, each in op.demand if what == "step")
    assert weights == pytest.approx(671e9, rel=0.01)
    table = config.vocab_size * config.hidden_size  # looked up, not multiplied
    assert dense_parameters(config) + table == pytest.approx(37e9, rel=0.01)


@given(memory_gb=st.floats(0.01, 80.0), longest=st.integers(1, 4096), tp=st.sampled_from([1, 2, 4]))
def test_what_fits_does_fit_and_one_more_does_not(memory_gb, longest, tp):
    graph = model_graph(DENSE, tp)
    fit = sequences_that_fit(DENSE, graph, (6,), tp, BFLOAT16, memory_gb * 1e9, longest)
    weights = 2 * (dense_parameters(DENSE) + DENSE.vocab_size * DENSE.hidden_size) / tp
    kv = 2 * 6 * 8 * 128 * 2 / tp * longest
    if fit:
        assert weights + fit * kv <= memory_gb * 1e9 * (1 + 1e-9)
    assert weights + (fit + 1) * kv > memory_gb * 1e9 * (1 - 1e-9)


@pytest.mark.parametrize(
    ("config", "dtype", "widths"), [(DENSE, "float8_e4m3fn", FP8), (MIXTURE, "bfloat16", BFLOAT16)]
)
def test_joules_of_a_run_are_those_of_its_steps(config, dtype, widths):
    power = shipped_power("H200")
    step = Composition(40, 300, ((100, 0),))
    once, many = (
        dynamic_joules(model_graph(config, 1, widths), times * counts_of(step), power, dtype, widths, config)
        for times in (1, 50)
    )
    assert many == pytest.approx(50 * once) and once > 0


def test_more_devices_hold_more_replicas_and_the_best_layout_wins():
    report = measure(SMALL, processes=1)
    found = report["models"]["llama-3.2-1b:bf16"]
    assert [row["layout"] for row in found["layouts"]] == ["1x1", "2x1", "1x2", "1x3"]  # no experts to share
    best = found["best"]["2"]["tokens_per_s"]
    for row in found["layouts"]:
        size = row["tp"] * row["pp"]
        assert size == 3 or best["fleet_tokens_per_s"] >= row["tokens_per_s"] * (2 // size)
        assert row["tokens_per_s_per_device"] * size == pytest.approx(row["tokens_per_s"])
        assert row["joules_per_token"] > 0
    assert best_of(found["layouts"], 12)["tokens_per_s"]["fleet_tokens_per_s"] >= 6 * best[
        "fleet_tokens_per_s"
    ] * (1 - 1e-9)
    assert measure(SMALL, processes=1)["models"] == report["models"]
    assert "llama-3.2-1b:bf16" in text(report) and draw(report).axes


def test_the_rate_of_a_loaded_deployment_does_not_depend_on_the_number_of_requests():
    """Full steps of 64 tokens and 1 ms, whatever the number of requests behind them."""
    for number in (200, 400):
        run = simulate(
            constant(number, 60, 4), ReplicaLayout(1, 1, 16, 64), DecodeMaximal, lambda _: np.full(1, 1e-3)
        )
        assert steady_rate(run) == pytest.approx(64e3, rel=0.05)


def test_no_micro_batch_takes_the_requests_of_another():
    """A small model has room for all requests in one micro-batch."""
    row = run_layout(SMALL, "llama-3.2-1b:bf16", DeviceSplit(1, 2))
    assert row["slots"] * 2 <= len(SMALL.items(2)) and row["busy_share"] > 0.6


def test_a_layout_that_does_not_fit_is_left_out():
    fleet = FleetSetting(models=("llama-3-70b:bf16",), devices=(2,), layouts=(DeviceSplit(),), steps=5)
    assert run_layout(fleet, "llama-3-70b:bf16", DeviceSplit()) is None
    found = measure(fleet, processes=1)["models"]["llama-3-70b:bf16"]
    assert found["do_not_fit"] == ["1x1"] and found["best"]["2"]["tokens_per_s"] is None


def test_joules_are_unknown_where_the_device_has_no_power_constants():
    fleet = dataclasses.replace(SMALL, device="A100-80GB", steps=5)
    assert run_layout(fleet, "llama-3.2-1b:bf16", DeviceSplit())["joules_per_token"] is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "abacus"),
        ("devices", (0,)),
        ("models", ("opt-175b",)),
    ],
)
def test_an_impossible_fleet_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        FleetSetting(**{field: value})
