"""A plan keeps the exclusions of its schedule by data, streams and waits alone.

The simulated device of these tests runs any number of nano-ops at once.
"""

import collections
import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_toys import TOTAL, toy_setting
from test_two_stage_search import graph_of, simulated

from jaxflow.pipeline.plan import Plan
from search.nanobatch.cyclic import CyclicProblem, CyclicSchedule, Option
from search.nanobatch.issue_order import to_plan
from search.nanobatch.layer_tasks import Task, apart, starts_outside
from search.nanobatch.options import task_options
from search.nanobatch.problem import SearchProblem
from search.nanobatch.simulate import SimulatedRun, _before
from search.nanobatch.stages import make_problem, make_tasks, stage_one, stage_two

LAYERS, CUT, NEAR = 10, 8, 1e-6


def checked(
    setting: SearchProblem, tasks: list[Task], problem: CyclicProblem, found: CyclicSchedule
) -> list[SimulatedRun]:
    """Return the runs of the schedule's plan on a device without limits, checked for exclusions."""
    plan = to_plan("found", tasks, problem, found, TOTAL)
    entries = begun_early(simulated(setting, plan).entries)
    check_apart(plan, entries)
    return entries


def begun_early(entries: tuple[SimulatedRun, ...]) -> list[SimulatedRun]:
    """Return the runs with each one started at the end of its predecessors, for any number of SMs."""
    found: list[SimulatedRun] = []
    for entry, before in zip(entries, _before(tuple(entry.run for entry in entries)), strict=True):
        start_s = max((found[at].stop_s for at in before), default=0.0)
        found.append(
            dataclasses.replace(entry, start_s=start_s, stop_s=start_s + entry.stop_s - entry.start_s)
        )
    return found


def check_apart(plan: Plan, entries: list[SimulatedRun]) -> None:
    """Check exclusions in full rounds. At both ends of a step some nano-ops and their waits are missing."""
    ahead = [nano.ahead for nano in plan.nano_ops]
    full = range(-min(ahead), LAYERS - max(ahead))
    long = [
        one
        for one in entries
        if one.stop_s - one.start_s > 2 * NEAR and one.run.layer - one.run.nano.ahead in full
    ]
    assert long
    for one in long:
        together = [other for other in long if other.start_s <= one.start_s + NEAR < other.stop_s]
        shown = [(other.run.nano.id, other.run.layer, other.sms) for other in together]
        assert sum(other.sms for other in together) <= TOTAL, shown
        assert max(collections.Counter(map(resource, together)).values()) == 1, shown
        for a, b in itertools.permutations(together, 2):
            assert (
                a.run.layer != b.run.layer or a.run.nano.op != "rope_append" or b.run.op.kind != "attention"
            ), shown


def resource(entry: SimulatedRun) -> str:
    """Return the resource that bounds a run in a toy setting. Norms of scattered rows count as network."""
    if entry.run.op.kind == "network" or entry.run.op.local_rows:
        return "network"
    return "memory" if entry.run.nano.op in ("decode_attention", "rope_append") else "compute"


def check_in_time(tasks: list[Task], found: CyclicSchedule, entries: list[SimulatedRun]) -> None:
    """Check that no run starts later than scheduled: the plan adds no waits."""
    starts = {
        (task.chain.ops[0].name, task.start): found.stages[at] + found.phases[at]
        for at, task in enumerate(tasks)
    }
    first = min(starts.values())
    for one in entries:
        key = one.run.nano.op, one.run.nano.start
        if key in starts:
            assert one.start_s <= found.period_s * (one.run.layer + starts[key] - first + 1e-4), (
                one.run.nano.id,
                one.run.layer,
            )


def drawn(setting: SearchProblem, r: random.Random) -> tuple[list[Task], CyclicProblem, CyclicSchedule]:
    """Return a random valid schedule: random shares, random order, each task at its first free moment."""
    tasks, covers = make_tasks(setting, (CUT,))
    assert not covers
    ways = [task_options(setting.shares, task, setting.load.part(task.start, task.stop), 2) for task in tasks]
    few = r.random()  # probability of the smallest share, which leaves room for others
    chosen = tuple(options[0] if r.random() < few else r.choice(options) for options in ways)
    problem, pairs = (
        make_problem(tasks, ways, capacity=TOTAL),
        list(itertools.permutations(range(len(tasks)), 2)),
    )
    kept = dataclasses.replace(  # also for tasks of no length, which hold a place on their stream
        problem,
        exclusive=frozenset((i, j) for i, j in pairs if apart(tasks[i], tasks[j])),
        outside=frozenset((i, j) for i, j in pairs if starts_outside(tasks[i], tasks[j])),
    )
    order: list[int] = []
    while left := set(range(len(tasks))) - {*order}:
        order.append(
            r.choice(
                [
                    j
                    for j in sorted(left)
                    if not any(i in left for i, k, rounds in problem.follows if k == j and not rounds)
                ]
            )
        )
    period_s = max(1.0, *(option.seconds for option in chosen))
    while (starts := placed(kept, chosen, order, period_s)) is None:
        period_s *= 1.1
    at = [start / period_s + 1e-9 for start in starts]
    return (
        tasks,
        problem,
        CyclicSchedule(
            period_s, period_s, tuple(x % 1 for x in at), tuple(math.floor(x) for x in at), chosen
        ),
    )


def placed(
    problem: CyclicProblem, chosen: tuple[Option, ...], order: list[int], period_s: float
) -> list[float] | None:
    """Return each task's start, or None if the order does not fit into the period."""
    starts: dict[int, float] = {}
    long = [option.seconds for option in chosen]

    def gap(since: float, now: float) -> float:
        """Return the seconds from `since` to `now` around the period."""
        found = (now - since) % period_s
        return 0.0 if period_s - found < NEAR else found

    def disjoint(i: int, j: int) -> bool:
        after = gap(starts[i], starts[j])
        return long[i] - NEAR <= after <= period_s - long[j] + NEAR

    def fits(j: int, now: float) -> bool:
        starts[j] = now
        for i in starts.keys() - {j}:
            if (i, j) in problem.exclusive and not disjoint(i, j) and not disjoint(j, i):
                return False
            if any(
                pair in problem.outside
                and NEAR < gap(starts[pair[0]], starts[pair[1]]) < long[pair[0]] - NEAR
                for pair in ((i, j), (j, i))
            ):
                return False
        running = (
            [i for i in starts if gap(starts[i], moment) < long[i] - NEAR] for moment in starts.values()
        )
        return all(sum(chosen[i].share for i in some) <= TOTAL for some in running)

    for j in order:
        least = max(
            (
                starts[i] + long[i] - rounds * period_s
                for i, k, rounds in problem.follows
                if k == j and i in starts
            ),
            default=0.0,
        )
        moments = {
            least,
            *(least + gap(least, starts[i] + after) for i in starts for after in (0.0, long[i])),
        }
        starts.pop(j, None)
        if not any(fits(j, now) for now in sorted(moments)):
            return None
    late = any(starts[i] + long[i] > starts[j] + rounds * period_s + NEAR for i, j, rounds in problem.follows)
    return None if late else [starts[i] for i in range(len(order))]


@pytest.mark.parametrize(("tp", "decodes"), [(1, 8), (2, 4)])
def test_found_plans_keep_apart_what_their_schedules_do(tp, decodes):
    graph = graph_of(tp, LAYERS)
    times = {op.name: 4.0 if op.kind == "attention" else 1.0 for op in graph.layers[-1]}
    setting = toy_setting(graph, times, decodes, most_shares=1)
    tasks, _ = stage_one(setting, (CUT,), 1.0)
    checked(setting, tasks, *stage_two(setting, tasks, None, 1.5))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_plan_keeps_apart_what_its_schedule_does_and_no_more(seed):
    """Draw times of 0 to 8 s, one or two devices, decodes and chunks in any share."""
    r = random.Random(seed)
    tp = r.choice((1, 2))
    graph = graph_of(tp, LAYERS, scattered=tp == 2 and r.random() < 0.3)
    check_drawn(
        graph, {op.name: float(r.randint(0, 8)) for op in graph.layers[-1]}, r.choice((0, 4, 8, 12, 16)), r
    )


@pytest.mark.parametrize(
    ("tp", "decodes", "long"),
    [
        (
            2,
            (4, 12),
            ("decode_attention", "chunk_attention", "attn_reduce", "mlp_reduce"),
        ),  # both attentions of one half, with sums of the other half
        (
            1,
            (0,),
            ("rope_append", "chunk_attention"),
        ),  # memory-bound on the main stream, compute-bound on another stream
    ],
    ids=["three at once", "one cache"],
)
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_what_is_long_is_kept_apart(tp, decodes, long, seed):
    r, graph = random.Random(seed), graph_of(tp, LAYERS)
    times = {op.name: float(r.randint(4, 16)) if op.name in long else 1.0 for op in graph.layers[-1]}
    check_drawn(graph, times, r.choice(decodes), r)


def check_drawn(graph, times: dict[str, float], decodes: int, r: random.Random) -> None:
    setting = toy_setting(graph, times, decodes)
    tasks, problem, found = drawn(setting, r)
    check_in_time(tasks, found, checked(setting, tasks, problem, found))
