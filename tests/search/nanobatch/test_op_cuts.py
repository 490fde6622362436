"""Structures whose ops are cut one by one: their list, their schedules, and the plans that are found."""

import dataclasses
import itertools

import drawn
import msgspec
import pytest
from search_toys import TOTAL, toy_setting

from jaxflow.model.graph import model_graph
from jaxflow.pipeline.plan import borders
from jaxflow.pipeline.program import check
from search.nanobatch import stages
from search.nanobatch.bounds import bound_s, pieces, prices
from search.nanobatch.cuts import least_s
from search.nanobatch.cyclic import (
    CyclicProblem,
    CyclicSchedule,
    Option,
    SearchError,
    one_by_one,
    solve,
)
from search.nanobatch.list_schedule import list_period_s
from search.nanobatch.op_cuts import Layer, structures
from search.nanobatch.problem import SearchProblem
from search.nanobatch.stages import search
from search.profile.op_times import OpTime

TINY = drawn.config_of("tiny-llama")
# Seconds by tokens: `qkv` is shortest if cut at 4, and `up_gate` if cut at 8.
STEPPED = {
    "qkv": {1: 1.0, 4: 1.0, 8: 4.0, 12: 3.0, 16: 7.0},
    "up_gate": {1: 8.0, 4: 8.0, 8: 4.0, 12: 8.0, 16: 15.0},
}
TIMES = {"decode_attention": 4.0, "out_proj": 1.0, "down": 2.0}


def stepped(**rest) -> SearchProblem:
    """Return a problem on two devices whose products prefer different cuts."""
    graph = model_graph(TINY, 2)
    names = [op.name for op in graph.layers[-1]]
    times = dict.fromkeys(names, 0.0) | TIMES | {name: 1.0 for name in names if name.endswith("_reduce")}
    setting = toy_setting(graph, times, 8, overlap=("network",), **rest)
    profile = setting.shares.profile
    kept = [one for one in profile.op_times if one.op not in STEPPED]
    drawn_times = [
        OpTime(name, tokens, 0, TOTAL, seconds)
        for name, own in STEPPED.items()
        for tokens, seconds in own.items()
    ]
    shares = type(setting.shares)(
        msgspec.structs.replace(profile, op_times=(*kept, *drawn_times)), setting.graph
    )
    return dataclasses.replace(setting, shares=shares, step=4)


def in_sequence(problem: CyclicProblem, _: float) -> CyclicSchedule:
    """Return a schedule without overlap, in place of the solver's."""
    found = one_by_one(problem)
    if problem.most_s is not None and found.period_s > problem.most_s:
        raise SearchError(f"no schedule has a period of at most {problem.most_s:g} s")
    return found


@pytest.mark.parametrize(
    "solves", [in_sequence, pytest.param(solve, marks=pytest.mark.slow)], ids=["in sequence", "by the solver"]
)
def test_each_op_is_cut_where_it_is_shortest(solves, monkeypatch):
    """The plan is the plain forward, with fewer decodes than it was made for."""
    monkeypatch.setattr(stages, "solve", solves)
    alike, found = (search(stepped(nano_ops=most, places=(4, 8)), time_limit_s=20.0) for most in (1, 3))
    check(found.plan, stepped().graph)
    starts = {op: {nano.start for nano in found.plan.nano_ops if nano.op == op} for op in ("qkv", "up_gate")}
    assert starts == {"qkv": {0, 4}, "up_gate": {0, 8}}
    assert found.bound_s <= found.period_s < 0.95 * alike.period_s
    drawn.Bench(TINY, 2).check_op_by_op(found.plan, drawn.step(TINY, 16, borders(found.plan), 3, (9, 4)))


def test_structures_are_those_one_boundary_away():
    setting = stepped()
    layer = Layer.of(setting, (4, 8, 12))
    count = len(layer.blocks)
    base = ((8,),) * count
    near = structures(layer, [base], (4,), 3, float("inf"))
    assert {*near} | {base} == {*itertools.product(((8,), (4,), (4, 8)), repeat=count)}
    costs = [layer.cost_s(one) for one in near]
    assert costs == sorted(costs)
    assert structures(layer, [base], (4,), 3, costs[5]) == [
        one for one in near if layer.cost_s(one) < costs[5]
    ]
    assert {*structures(layer, [base], (4,), 2, float("inf"))} < {*near}  # two nano-ops an op at most
    assert all(layer.structure(layer.tasks(one)) == one for one in near[:9])


@pytest.mark.parametrize("overlap", [("network",), ("memory", "network")])
def test_the_bound_is_below_each_structures_own(overlap):
    setting = dataclasses.replace(stepped(), overlap=overlap)
    found = pieces(setting, (4, 8, 12))
    given = prices(found, TOTAL)
    whole = bound_s(found, given)
    layer = dataclasses.replace(Layer.of(setting, (4, 8, 12)), given=given)
    near = structures(layer, [((8,),) * len(layer.blocks)], (4,), 3, float("inf"))
    assert 0 < whole <= min(map(layer.cost_s, near)) * (1 + 1e-6)
    assert whole <= least_s(setting, (8,)) * (1 + 1e-6)


def test_a_list_schedule_is_near_the_optimum():
    """Two nano-batches of a product, a sum and a product: sums are hidden, or are not."""
    options = tuple((Option(0, seconds),) for seconds in (3.0, 2.0, 1.0, 3.0, 2.0, 1.0))
    follows = tuple((i + j, i + (j + 1) % 3, j // 2) for i in (0, 3) for j in range(3))
    products = (0, 2, 3, 5)
    exclusive = frozenset({(1, 4), *itertools.combinations(products, 2)})
    for outside in (frozenset(), frozenset((i, j) for i in products for j in (1, 4))):
        problem = CyclicProblem(options, follows, exclusive, outside)
        best_s = solve(problem).period_s
        assert 0.9 * best_s <= list_period_s(problem, frozenset({1, 4})) <= 1.1 * best_s
