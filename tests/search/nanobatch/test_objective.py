"""The objective of a plan search: predicted joules, and the laws of the plans that are kept."""

import dataclasses
import statistics

import measured_reports as measured
import msgspec
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_toys import llama_setting, llama_shares

from jaxflow.pipeline.choice import is_sequential
from jaxflow.pipeline.handwritten import sequential_plan
from jaxflow.pipeline.plan import load
from pallas_kernels.tune.rules import OBJECTIVES
from search.__main__ import main
from search.nanobatch.known_orders import ORDERS, best_known, sequential, simulated
from search.nanobatch.layer_tasks import StepShape
from search.nanobatch.objective import ENERGY, TIME, step_joules, token_cost
from search.nanobatch.problem import SearchProblem
from search.profile.op_times import OpTime, Profile, save_profile
from search.profile.op_watts import OpWatts
from search.profile.share_times import ShareTimes

LLAMA = measured.LLAMA_8B
PROFILE = str(paths.ROOT / "search" / "profiles" / "h200-llama-3.1-8b.json")
NO_WATTS = msgspec.structs.replace(
    llama_shares().profile,
    op_times=tuple(msgspec.structs.replace(one, watts=None) for one in llama_shares().profile.op_times),
)
WATTS = 300.0
pytestmark = pytest.mark.usefixtures("no_flags")


@pytest.mark.parametrize("tokens", [1024, 2048])
def test_each_objective_keeps_the_plan_of_its_least_cost(tokens):
    kept = {}
    for objective in OBJECTIVES:
        setting = dataclasses.replace(
            llama_setting(tokens, 1024, 512), places=(tokens - 640,), objective=objective
        )
        kept[objective] = best_known(LLAMA, setting, ORDERS)
        assert kept[objective].cost <= sequential(LLAMA, setting).cost
    for objective, best in kept.items():
        setting = dataclasses.replace(llama_setting(tokens, 1024, 512), objective=objective)
        for other in kept.values():
            assert best.cost <= token_cost(other.plan, other.timeline, setting)


def test_a_card_that_draws_the_same_watts_in_all_ops_needs_these_for_the_whole_step():
    own = llama_shares()
    steady = msgspec.structs.replace(
        own.profile,
        op_times=tuple(
            msgspec.structs.replace(one, joules=WATTS * one.seconds) for one in own.profile.op_times
        ),
    )
    shares = ShareTimes(steady, own.graph, own.products, own.card)
    setting = SearchProblem(own.graph, shares, StepShape.steady_state(2048, 1024, 512))
    found = sequential(LLAMA, setting)
    assert step_joules(found.plan, found.timeline, setting) == pytest.approx(WATTS * found.step_s)
    energy = dataclasses.replace(setting, objective=ENERGY)
    assert simulated(found.plan, energy).cost == pytest.approx(WATTS * found.cost)


@given(st.lists(st.floats(50, 700), min_size=4, max_size=4), st.integers(1, 300), st.integers(20, 140))
def test_watts_are_those_of_the_entries_and_between_them(watts, tokens, sms):
    points = [(count, part) for count in (64, 128) for part in (48, 132)]
    entries = [
        OpTime("qkv", count, 0, part, 2e-3, joules=2e-3 * each)
        for (count, part), each in zip(points, watts, strict=True)
    ]
    found = OpWatts.of(Profile("toy", {}, "toy", 1, "float32", "float32", 132, "drawn", tuple(entries)))
    for (count, part), each in zip(points, watts, strict=True):
        assert found.at("qkv", count, 0, part) == pytest.approx(each)
    between = found.at("qkv", tokens, 0, sms)
    assert between is not None and min(watts) * (1 - 1e-9) <= between <= max(watts) * (1 + 1e-9)
    assert found.at("down", tokens, 0, sms) is None


@pytest.mark.parametrize(("name", "mean"), [("8b-fp8", 0.03), ("8b-fourth", 0.04)])
def test_joules_of_measured_steps_are_predicted(name, mean):
    report, errors = measured.REPORTS[name], []
    times, plans = measured.share_times_of(report), measured._plans(report)
    for step in measured.predicted_steps(report):
        row = step.row
        plan = plans.get(step.plan_name) or sequential_plan(LLAMA, row["tokens"], 1)
        prompt, output = map(int, row["workload"].split("/"))
        keys = StepShape.steady_state(row["tokens"], prompt, output).chunk_keys
        shape = StepShape(row["tokens"], row["decode_tokens"], row["mean_context_tokens"] or 0.0, keys)
        setting = SearchProblem(times.graph, times, shape, measured.H200, measured.POWER)
        joules = row["watts"] * row["step_ms"] / 1e3
        errors.append(abs(step_joules(plan, step.timeline, setting) / joules - 1))
    assert statistics.mean(errors) < mean and max(errors) < 0.08, errors


def test_the_command_writes_the_plan_with_the_fewest_joules(tmp_path, capsys):
    times, out = measured.share_times_of(measured.REPORTS["8b-fourth"]), tmp_path / "plan.json"
    shape = StepShape.steady_state(1536, 1024, 512)
    setting = SearchProblem(
        times.graph, times, shape, measured.H200, measured.POWER, places=(384,), objective=ENERGY
    )
    fastest = best_known(LLAMA, dataclasses.replace(setting, objective=TIME), ("sequential", "phases"))
    line = ["--profile", PROFILE, "--tokens", "1536", "--cuts", "384", "--orders", "sequential,phases"]
    assert main(["search", "plan", *line, "--objective", "energy", "--out", str(out)]) == 0
    assert "predicted mJ a token" in capsys.readouterr().out
    assert fastest is not None and is_sequential(fastest.plan)
    assert simulated(load(out), setting).cost < simulated(fastest.plan, setting).cost


@pytest.mark.parametrize("objective", sorted({*OBJECTIVES} - {TIME}))
def test_a_profile_without_joules_is_refused(objective, tmp_path, capsys):
    save_profile(NO_WATTS, tmp_path / "h200.json")
    line = ["--profile", str(tmp_path / "h200.json"), "--tokens", "1024", "--objective", objective]
    assert main(["search", "plan", *line, "--out", str(tmp_path / "p.json")]) == 2
    said = capsys.readouterr().err
    assert f"objective='{objective}'" in said and "python -m search measure --model llama-3.1-8b" in said


def test_tokens_at_an_unknown_cap_are_refused(tmp_path, capsys):
    save_profile(msgspec.structs.replace(llama_shares().profile, device="a card"), tmp_path / "card.json")
    line = ["--profile", str(tmp_path / "card.json"), "--tokens", "1024", "--objective", "tokens"]
    assert main(["search", "plan", *line, "--out", str(tmp_path / "p.json")]) == 2
    assert "the power cap of a card is not known" in capsys.readouterr().err
