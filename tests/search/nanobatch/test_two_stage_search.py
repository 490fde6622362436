"""Found plans are valid, as fast in the simulation as the solver says, and equal to the plain forward."""

import dataclasses
import math

import drawn
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from search_toys import TOTAL, llama_setting, toy_setting

from jaxflow.model.graph import model_graph
from jaxflow.pipeline.handwritten import phased_plan, sequential_plan
from jaxflow.pipeline.plan import borders, from_json, to_json
from jaxflow.pipeline.program import check
from search.nanobatch import cuts
from search.nanobatch import stages as nanobatch
from search.nanobatch.cyclic import SearchError, one_by_one
from search.nanobatch.layer_tasks import StepShape, chains, repeated_layer
from search.nanobatch.problem import SearchDeadline
from search.nanobatch.simulate import simulate
from search.nanobatch.stages import search
from search.profile.op_times import OpTime

TINY = drawn.config_of("tiny-llama")
POINTWISE = ("attn_norm", "mlp_norm", "rope_append")


def graph_of(tp=1, layers=16, scattered=False):
    """Return the graph of tiny-llama with more layers, so that some layers run in a full pipeline."""
    config = dataclasses.replace(TINY, layers=TINY.layers[-1:] * layers)
    return model_graph(config, tp, scattered=scattered)


def times_of(graph, draw) -> dict[str, float]:
    return {op.name: (0.2 if op.name in POINTWISE else draw()) for op in graph.layers[-1]}


MODES = {
    "all": {},
    "memory": {"overlap": ("memory",)},
    "network": {"overlap": ("network",), "split": True},
    "nano-batches": {"overlap": (), "split": True},
    "sequential": {"overlap": (), "nano_batches": 1},
}


def simulated(setting, plan, load=None):
    return simulate(
        plan, setting.graph, setting.shares, load or setting.load, device=setting.device, power=setting.power
    )


@pytest.mark.parametrize(
    ("mode", "tp", "scattered"),
    [
        ("all", 1, False),
        ("all", 2, False),
        ("all", 2, True),
        ("memory", 1, False),
        ("network", 2, False),
        ("network", 2, True),
        ("nano-batches", 1, False),
        ("sequential", 2, True),
    ],
)
def test_the_simulation_agrees_with_the_solver(mode, tp, scattered):
    graph = graph_of(tp, scattered=scattered)

    @settings(max_examples=2, deadline=None, phases=[Phase.explicit, Phase.generate])
    @given(data=st.data())
    def law(data):
        times = times_of(graph, lambda: float(data.draw(st.integers(1, 8))))
        setting = toy_setting(graph, times, data.draw(st.sampled_from((8, 16))), most_shares=2, **MODES[mode])
        found = search(setting, time_limit_s=0.6)
        check(found.plan, graph)
        period_s = simulated(setting, found.plan).period_s
        # Both bounds are equal if the solver had time for a proof.
        assert found.bound_s * 0.998 <= period_s <= found.period_s * 1.002
        assert found.stage_one_s <= found.period_s * (1 + 1e-6)
        assert found.bound_s <= found.period_s
        if mode != "nano-batches" and mode != "network":
            assert found.period_s <= found.sequential_s * (1 + 1e-6)

    law()


def test_attention_beside_products_is_found_and_is_all_that_overlaps():
    """Products take 8 s and attention 6 s. Only products and the SMs of attention remain in the period."""
    times = dict.fromkeys((op.name for op in graph_of().layers[-1]), 0.0) | {
        "qkv": 1.0,
        "out_proj": 1.0,
        "up_gate": 4.0,
        "down": 2.0,
    }
    setting = toy_setting(graph_of(), times | {"decode_attention": 6.0}, decodes=16, most_shares=2)
    found = search(setting, time_limit_s=60)  # ends by itself within 5 s: a busy machine has longer
    assert found.sequential_s == pytest.approx(14.0)
    assert found.period_s < 0.85 * found.sequential_s
    entries = simulated(setting, found.plan).entries
    for one in entries:
        for other in entries:
            if one.start_s < other.start_s < one.stop_s and other.stop_s > other.start_s:
                assert {"decode_attention"} & {one.run.op.name, other.run.op.name}, (one, other)


def test_tokens_that_do_not_decode_wait_for_no_attention():
    """Attention of these tokens takes no time, so their products do not wait behind other attention."""
    times = dict.fromkeys((op.name for op in graph_of().layers[-1]), 0.0) | {"qkv": 1.0, "out_proj": 1.0}
    times |= {"up_gate": 4.0, "down": 2.0, "rope_append": 0.2}
    # 12 s stand for 16 decodes.
    setting = toy_setting(graph_of(), times | {"decode_attention": 12.0}, decodes=8, most_shares=2)
    found = search(setting, time_limit_s=60)  # ends by itself within 5 s: a busy machine has longer
    assert found.cuts == (8,) and simulated(setting, found.plan).period_s == pytest.approx(
        found.period_s, rel=2e-3
    )
    assert {nano.start: nano.stream for nano in found.plan.nano_ops if nano.op == "decode_attention"} == {
        0: 1,
        8: 2,
    }


def test_what_cannot_overlap_is_left_sequential():
    """Without attention a cut has only costs."""
    times = dict.fromkeys((op.name for op in graph_of().layers[-1]), 1.0) | {
        "decode_attention": 0.0,
        "rope_append": 0.0,
    }
    found = search(toy_setting(graph_of(), times, decodes=0, fixed=0.1), time_limit_s=3)
    assert found.plan.name == "sequential" and found.cuts == ()
    assert [nano.op for nano in found.plan.nano_ops] == [
        nano.op for nano in sequential_plan(TINY, 16).nano_ops
    ]


def test_an_op_may_leave_out_a_cut():
    """A second read of the weights costs `down` more than a cut gains, so `down` stays whole."""
    times = dict.fromkeys((op.name for op in graph_of().layers[-1]), 0.0) | {
        "qkv": 4.0,
        "out_proj": 4.0,
        "up_gate": 4.0,
        "decode_attention": 4.0,
    }
    setting = toy_setting(graph_of(), times, decodes=16)
    profile = setting.shares.profile
    whole = tuple(
        msgspec.structs.replace(one, seconds=6.0) if one.op == "down" else one for one in profile.op_times
    )
    shares = type(setting.shares)(msgspec.structs.replace(profile, op_times=whole), setting.graph)
    found = search(dataclasses.replace(setting, shares=shares, split=True), time_limit_s=30)
    assert sum(nano.op == "down" for nano in found.plan.nano_ops) == 1
    assert sum(nano.op == "decode_attention" for nano in found.plan.nano_ops) == 2


def test_llama_on_a_modelled_h200(monkeypatch):
    wider = nanobatch._wider
    # No finer shares: other tests cover full waves.
    monkeypatch.setattr(nanobatch, "_wider", lambda setting: wider(setting)[:1])
    setting = llama_setting(2048, 1024, 512, most_shares=1, step=1024)
    found = search(setting, time_limit_s=300)
    check(found.plan, setting.graph)
    timeline = simulated(setting, found.plan)
    # Fixed times do not follow the clock.
    assert timeline.period_s == pytest.approx(found.period_s, rel=2e-2)
    assert setting.energy_s(setting.whole) < found.period_s < 0.95 * found.sequential_s
    # Counts are data: the plan stays, and its time changes.
    fewer = simulated(setting, found.plan, StepShape(2048, 200, 1280.0, 500.0))
    assert 0.5 * timeline.step_s < fewer.step_s < timeline.step_s
    assert from_json(to_json(found.plan)) == found.plan
    assert all(nano.sms is None or nano.sms <= 132 for nano in found.plan.nano_ops)


def test_a_plan_by_hand_is_simulated_too():
    setting = llama_setting(2048, 1024, 512)
    config = dataclasses.replace(TINY, layers=TINY.layers[:1] * 32)
    sequential = simulated(setting, sequential_plan(config, 2048))
    phased = simulated(setting, phased_plan(config, 2048, 384, sms=(40, 92)))
    # Attention overlaps products.
    assert phased.step_s < 0.85 * sum(entry.stop_s - entry.start_s for entry in phased.entries)
    assert sequential.step_s == pytest.approx(
        32 * search(llama_setting(2048, 1024, 512, overlap=(), nano_batches=1)).period_s, rel=5e-3
    )


def found_plan(tp, scattered, numbers, streams, rest, data, time_limit_s):
    """Return a bench, and the plan that the search finds for drawn op times."""
    bench = drawn.Bench(TINY, tp, **numbers)
    graph = model_graph(TINY, tp, scattered=scattered)
    times = times_of(graph, lambda: float(data.draw(st.integers(2, 8))))
    found = search(
        toy_setting(
            graph, times, 8, most_shares=2, split=True, quantized=bench.quantization == "fp8", **rest
        ),
        time_limit_s=time_limit_s,
    )
    assert any(nano.op == "attn_scatter" for nano in found.plan.nano_ops) == scattered
    assert {nano.stream for nano in found.plan.nano_ops} == streams
    steps = (
        drawn.step(TINY, 16, borders(found.plan), *work) for work in ((8, (8,)), (3, (9, 4)), (0, (16,)))
    )
    return bench, found.plan, steps


SEARCHED_FORMS = pytest.mark.parametrize(
    ("tp", "scattered", "numbers", "streams", "rest"),
    [
        (4, True, {"quantization": "fp8"}, {0, 1, 2}, {}),
        (1, False, {"quantization": "fp8", "kv": "float8_e4m3fn"}, {0, 1, 2}, {}),
        (2, False, {"quantization": "fp8"}, {0}, {"overlap": ("network",)}),
    ],
    ids=["scattered", "fp8", "fp8, sums alone"],
)
LAW = settings(
    deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)


@SEARCHED_FORMS
@settings(LAW, max_examples=1)
@given(data=st.data())
def test_found_plans_are_the_plain_forward(tp, scattered, numbers, streams, rest, data):
    """Law 1 at the plan's decodes, at fewer decodes, and without decodes,
    for the plan's function op by op.
    """
    bench, plan, steps = found_plan(tp, scattered, numbers, streams, rest, data, time_limit_s=0.6)
    bench.check_op_by_op(plan, *steps)


@pytest.mark.slow
@SEARCHED_FORMS
@settings(LAW, max_examples=7)
@given(data=st.data())
def test_many_found_plans_are_the_plain_forward(tp, scattered, numbers, streams, rest, data):
    bench, plan, steps = found_plan(tp, scattered, numbers, streams, rest, data, time_limit_s=0.6)
    bench.check_op_by_op(plan, *steps)


@pytest.mark.slow
@SEARCHED_FORMS
@settings(LAW, max_examples=1)  # each example compiles a step
@given(data=st.data())
def test_compiled_found_plans_are_the_plain_forward(tp, scattered, numbers, streams, rest, data):
    bench, plan, steps = found_plan(tp, scattered, numbers, streams, rest, data, time_limit_s=3)
    bench.check(plan, *steps)


@pytest.mark.parametrize("quantized", [False, True])
def test_collectives_do_not_drag_products_along(quantized):
    """A gather of 8-bit rows makes values and scales on the main stream, so consumers are free."""
    found = chains(repeated_layer(graph_of(4, scattered=True)), quantized)
    assert [op.name for chain in found for op in chain.ops] == [
        op.name for op in graph_of(4, scattered=True).layers[-1]
    ]
    assert not any(chain.is_network and any(op.kind == "dense" for op in chain.ops) for chain in found)


def test_what_leaves_no_plan_is_named():
    times = dict.fromkeys((op.name for op in graph_of().layers[-1]), 1.0)
    with pytest.raises(SearchError, match="nano_batches=1"):
        search(toy_setting(graph_of(), times, split=True, nano_batches=1))
    with pytest.raises(SearchError, match="cut at a multiple of 16"):
        search(dataclasses.replace(toy_setting(graph_of(), times, split=True), step=16))


def test_no_stage_is_begun_when_the_time_is_over(monkeypatch):
    """Each stage takes 10 s of 35 s: two stages for the sequential step, two for the first cut."""
    now, begun = [0.0], []

    def slow(stage):
        def staged(*arguments):
            begun.append((stage.__name__, now[0]))
            now[0] += 10.0
            return stage(*arguments)

        return staged

    monkeypatch.setattr(nanobatch, "solve", lambda problem, _: one_by_one(problem))
    for stage in (nanobatch.stage_one, nanobatch.stage_two):
        monkeypatch.setattr(nanobatch, stage.__name__, slow(stage))
    times = dict.fromkeys((op.name for op in graph_of().layers[-1]), 1.0) | {"decode_attention": 6.0}
    setting = dataclasses.replace(toy_setting(graph_of(), times, decodes=16, most_shares=1), step=4)
    found = search(setting, time_limit_s=35, clock=lambda: now[0])
    assert begun == [
        (f"stage_{name}", at) for name, at in (("one", 0.0), ("two", 10.0), ("one", 20.0), ("two", 30.0))
    ]
    assert (found.tried, found.cut_sets) == (1, 3)
    begun.clear()
    # Stage I without stage II gives no plan.
    assert search(setting, time_limit_s=25, clock=lambda: now[0]).cuts == ()
    assert [name for name, _ in begun] == ["stage_one", "stage_two", "stage_one"]
    begun.clear()
    split = search(dataclasses.replace(setting, split=True), time_limit_s=5, clock=lambda: now[0])
    assert split.cuts and len(begun) == 4  # `split` demands a plan with a cut


def test_cuts_that_there_is_no_time_for_cost_none(monkeypatch):
    """A guess or a bound takes 1 s. Guesses get a fifth of 40 s, and bounds the rest."""
    now, asked = [0.0], []

    def slow(what):
        def asks(*arguments):
            asked.append(what.__name__)
            now[0] += 1.0
            return what(*arguments)

        return asks

    def nothing(*_):
        raise SearchError("no schedule has a period of at most 1 s")

    monkeypatch.setattr(cuts, "estimate_s", slow(cuts.estimate_s))
    monkeypatch.setattr(nanobatch, "least_s", slow(nanobatch.least_s))
    times = dict.fromkeys((op.name for op in graph_of().layers[-1]), 1.0) | {"decode_attention": 6.0}
    setting = dataclasses.replace(
        toy_setting(graph_of(), times, decodes=16, most_shares=1, nano_batches=3), step=1
    )
    alone = nanobatch._sequential(setting, None, SearchDeadline(math.inf, lambda: 0.0))
    monkeypatch.setattr(nanobatch, "_sequential", lambda *_: alone)
    monkeypatch.setattr(nanobatch, "_solve", nothing)
    found = search(setting, time_limit_s=40, clock=lambda: now[0])
    assert found.cut_sets == 15 + 105 and found.cuts == ()
    assert asked.count("estimate_s") == 9 and found.tried == len(asked) - 9 > 0 and now[0] <= 42
    assert 0 < found.bound_s < found.period_s
    now[0] = 0.0
    monkeypatch.setattr(nanobatch, "_LATE", -1.0)  # no time is left for the bound, and no joules are known
    assert search(setting, time_limit_s=40, clock=lambda: now[0]).bound_s == 0.0


@pytest.mark.parametrize("places", [(4, 8), (4, 12)])
def test_a_bound_cuts_a_chain_where_that_is_shorter(places):
    """`down` of 16 tokens is slower than 8 + 8 tokens, and 8 tokens are faster than 4 + 4."""
    setting = toy_setting(
        graph_of(), dict.fromkeys((op.name for op in graph_of().layers[-1]), 1.0), nano_batches=3
    )
    profile = setting.shares.profile
    steps = {1: 2.0, 4: 3.0, 8: 5.0, 12: 9.0, 16: 14.0}
    kept = [one for one in profile.op_times if one.op != "down"]
    down = [OpTime("down", tokens, 0, TOTAL, seconds) for tokens, seconds in steps.items()]
    shares = type(setting.shares)(msgspec.structs.replace(profile, op_times=(*kept, *down)), setting.graph)
    setting = dataclasses.replace(setting, shares=shares, step=4, most_shares=0)
    tasks, one = nanobatch.stage_one(setting, places, 60.0)  # the solver ends by itself after about 3 s
    _, two = nanobatch.stage_two(setting, tasks, None, 60.0)
    assert one.period_s * 0.99 <= cuts.least_s(setting, places) <= two.period_s * (1 + 1e-6)


def test_bounds_of_one_way_take_no_time_from_the_next(monkeypatch):
    """A bound takes 1 s and a cut 2 s. Plans with side streams get the second half of the time."""
    now, tried = [0.0], []

    def slow(*arguments):
        now[0] += 1.0
        return 0.0

    def nothing(setting, *_):
        tried.append((setting.overlap, now[0]))
        now[0] += 2.0
        raise SearchError("no schedule has a period of at most 1 s")

    op_times = dict.fromkeys((op.name for op in graph_of(2).layers[-1]), 1.0)
    setting = dataclasses.replace(toy_setting(graph_of(2), op_times, most_shares=1, nano_batches=3), step=1)
    alone = nanobatch._sequential(setting, None, SearchDeadline(math.inf, lambda: 0.0))
    monkeypatch.setattr(nanobatch, "most_promising", lambda setting, *_: cuts.cut_sets(setting)[1:])
    monkeypatch.setattr(nanobatch, "least_s", slow)
    monkeypatch.setattr(nanobatch, "_sequential", lambda *_: alone)
    monkeypatch.setattr(nanobatch, "_solve", nothing)
    found = search(setting, time_limit_s=60, clock=lambda: now[0])
    assert found.tried == len(tried) and found.cut_sets == 2 * (15 + 105) and now[0] <= 60 * 1.05 + 3
    assert {overlap for overlap, at in tried if at <= 30} == {("network",)}
    assert [overlap for overlap, at in tried if at > 34] == [("memory", "network")] * 9


@pytest.mark.parametrize("times", [0.9, 1.001])
def test_finer_shares_are_kept_only_where_the_plan_is_shorter(monkeypatch, times):
    """The solver's period is no longer, but the card settles at another clock."""
    asked, lines, solved = [], [], nanobatch._solve

    def settled(setting, *rest):
        found = solved(setting, *rest)
        asked.append((setting.most_shares, found.period_s))
        return dataclasses.replace(found, period_s=asked[0][1] * times) if setting.most_shares == 2 else found

    monkeypatch.setattr(nanobatch, "_solve", settled)
    monkeypatch.setattr(nanobatch, "solve", lambda problem, _: one_by_one(problem))
    op_times = dict.fromkeys((op.name for op in graph_of().layers[-1]), 1.0)
    found = search(toy_setting(graph_of(), op_times, most_shares=1, split=True), say=lines.append)
    assert [most for most, _ in asked] == [1, 2]
    assert found.period_s == pytest.approx(asked[0][1] * min(1.0, times))
    assert any("finer" in line for line in lines) == (times < 1)
