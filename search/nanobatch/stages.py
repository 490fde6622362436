"""NanoFlow's two-stage search (§4.1): the nano-batches, their order, and the SMs of each task.

Stage I takes one set of cuts and finds the tasks that use them and their order, each op at its isolated
speed. Only ops bound by different resources overlap. Stage II keeps the tasks and gives each one SMs, with
the time on them. Cuts are tried in the order of their estimates. Then ops are cut one by one, a boundary a
round, until no round finds a shorter plan. A structure that cannot beat the best plan so far is left out. The
best plan is then offered more SM counts: more of those measured, and those that fill the waves of its
products.
"""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence

from jaxflow.pipeline.plan import Plan, Target
from search.nanobatch.bounds import bound_s, pieces, prices
from search.nanobatch.cuts import cut_places, least_s, make_tasks, most_promising
from search.nanobatch.cyclic import CyclicProblem, CyclicSchedule, Option, SearchError, solve
from search.nanobatch.issue_order import to_plan
from search.nanobatch.layer_tasks import (
    Task,
    apart,
    chains,
    follows,
    has_side_streams,
    repeated_layer,
    starts_outside,
)
from search.nanobatch.list_schedule import list_period_s
from search.nanobatch.op_cuts import Layer, structures
from search.nanobatch.options import task_options, task_s, wave_filling_sms
from search.nanobatch.problem import SearchDeadline, SearchProblem

_ENOUGH = 0.005  # a plan is accepted where no other can be shorter by this share
_STAGE_I_S = 8.0
_STAGE_II_S = 40.0
_GUESSED = 0.2  # the largest share of the time for estimates of cuts
_LATE = 0.05  # the share of the time, beyond the limit, for the bound of the period
_ALIKE = 0.5  # the share of the time for structures whose ops are cut alike, where they may be cut one by one
_LISTED = 0.3  # the largest share of the time of a round for list schedules
_NEAR = 0.02  # a plan that is longer than the best by this share is kept for the simulation
_SOLVED = 12  # structures of a round that the MILP solves


@dataclasses.dataclass(frozen=True)
class FoundPlan:
    """The best plan, its tasks and its period, and a lower bound of the period over all cuts and orders.

    others: plans whose ops are cut one by one, which are nearly as short. A simulation may find one shorter.
    """

    plan: Plan
    period_s: float
    bound_s: float
    stage_one_s: float
    sequential_s: float
    cuts: tuple[int, ...]
    tried: int = 1
    cut_sets: int = 1
    tasks: tuple[Task, ...] = ()
    others: tuple[Plan, ...] = ()

    @property
    def gap(self) -> float:
        """Return the share of the period that a better one may save."""
        return max(0.0, 1 - self.bound_s / self.period_s)


def make_problem(tasks: Sequence[Task], options: Sequence[tuple[Option, ...]], **rest) -> CyclicProblem:
    """Return the problem of these tasks; tasks that take no time exclude no other task."""
    timed = [max(option.seconds for option in own) > 0 for own in options]
    same = {
        (i, j)
        for i, j in itertools.combinations(range(len(tasks)), 2)
        if tasks[i].chain is tasks[j].chain and tasks[i].meets(tasks[j])
    }
    pairs = [
        (i, j)
        for i, j in itertools.permutations(range(len(tasks)), 2)
        if timed[i] and timed[j] and not {(i, j), (j, i)} & same
    ]
    exclusive = frozenset((i, j) for i, j in pairs if i < j and apart(tasks[i], tasks[j]))
    outside = frozenset(
        (i, j) for i, j in pairs if starts_outside(tasks[i], tasks[j]) and not {(i, j), (j, i)} & exclusive
    )
    return CyclicProblem(tuple(options), follows(tasks), exclusive, outside, **rest)


def stage_one(
    setting: SearchProblem, cuts: Sequence[int], time_limit_s: float
) -> tuple[list[Task], CyclicSchedule]:
    """Return the tasks of the best structure with these cuts, and its schedule at isolated op times.

    First every op is cut at all of them. Then ops may leave cuts out.
    """
    tasks, covers = make_tasks(setting, cuts)
    least, edges, layers = (
        setting.energy_s(setting.whole),
        set(setting.edges(cuts)),
        len(setting.graph.layers),
    )
    parts = [task for task in tasks if (task.start, task.stop) in edges]
    started = time.monotonic()
    problem = make_problem(parts, _alone(setting, parts), least_s=least, layers=layers)
    found = solve(problem, time_limit_s / 2)
    if not covers:
        return parts, found
    limits = {"covers": tuple(covers), "most_s": found.period_s * (1 - _ENOUGH)}
    try:
        left_s = time_limit_s - (time.monotonic() - started)
        problem = make_problem(tasks, _alone(setting, tasks), **limits, least_s=least, layers=layers)
        other = solve(problem, left_s)
    except SearchError:
        return parts, found
    return [task for task, option in zip(tasks, other.chosen, strict=True) if option is not None], other


def _alone(setting: SearchProblem, tasks: Sequence[Task]) -> list[tuple[Option, ...]]:
    """Return the one option of each task in stage I: its isolated time."""
    steps = (setting.load.part(task.start, task.stop) for task in tasks)
    return [
        (Option(0, task_s(setting.shares, task, step, setting.capacity)),)
        for task, step in zip(tasks, steps, strict=True)
    ]


def stage_two(
    setting: SearchProblem, tasks: Sequence[Task], most_s: float | None, time_limit_s: float
) -> tuple[CyclicProblem, CyclicSchedule]:
    """Return the SM problem of a structure and its schedule.

    Raises: SearchError if no period is at most `most_s`.
    """
    full = setting.capacity
    steps = [setting.load.part(task.start, task.stop) for task in tasks]
    held: dict[str, int] = {}  # by resource
    for task, step in zip(tasks, steps, strict=True):
        share = task_options(setting.shares, task, step, 0)[0].share
        held[task.resource] = max(share, held.get(task.resource, 0))
    alone = sum(held.values()) <= full  # all that may run at once fits, as beside copies, which hold none
    most = 0 if alone else setting.most_shares
    filling = [
        () if alone or not setting.full_waves else wave_filling_sms(setting.shares, task, step)
        for task, step in zip(tasks, steps, strict=True)
    ]
    left = {full - sms for own in filling for sms in own}  # SMs next to products with full waves
    options = [
        task_options(setting.shares, task, step, most, own if task.resource == "compute" else left)
        for task, step, own in zip(tasks, steps, filling, strict=True)
    ]
    least = setting.energy_s(setting.work_of(tasks))
    limits = {"least_s": least, "most_s": most_s, "layers": len(setting.graph.layers)}
    problem = make_problem(tasks, options, capacity=full, **limits)
    return problem, solve(problem, time_limit_s)


def search(
    setting: SearchProblem,
    *,
    time_limit_s: float = 600.0,
    name: str = "searched",
    target: Target | None = None,
    say: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> FoundPlan:
    """Return the best plan found in the time: the sequential one where none is shorter, unless `split`.

    After the limit only the work for a first answer begins. clock: returns seconds.

    Raises: SearchError naming the constraint that leaves no plan.
    """
    limit, late = (SearchDeadline(clock() + share * time_limit_s, clock) for share in (1, 1 + _LATE))
    ways = _ways(setting)
    sequential = _sequential(setting, target, limit)
    best, chosen = None if setting.split else sequential, setting
    tried, number = 0, 0
    others: list[FoundPlan] = []
    for at, way in enumerate(ways):
        turn = limit.part(1 / (len(ways) - at))
        by_op = _by_op(way)
        alike = turn.part(_ALIKE) if by_op else turn
        sets = most_promising(way, sequential.period_s, alike.part(_GUESSED))
        number += len(sets)
        for cuts in sets:
            most_s = best and best.period_s * (1 - _ENOUGH)
            if most_s is not None and (
                alike.passed or least_s(way.in_time(way.whole, most_s)[0], cuts) >= most_s
            ):
                continue
            tried += 1
            try:
                best, chosen = _solve(way, cuts, name, target, most_s, sequential.period_s, alike), way
                say(
                    f"cuts {cuts}: {1e6 * best.period_s:.1f} us a layer, at most "
                    f"{100 * best.gap:.1f} % above the best of this structure"
                )
            except SearchError:
                if best is None:
                    raise
                say(f"cuts {cuts}: nothing shorter")
        while by_op and best is not None and not turn.passed:
            near, count = _cut_by_op(way, best, chosen is way, name, target, turn)
            tried, number, others = tried + count, number + count, [*others, *near]
            shortest = min(near, key=lambda found: found.period_s, default=best)
            if shortest.period_s > best.period_s * (1 - _ENOUGH):
                break
            best, chosen = shortest, way
            at_cuts = ", ".join(map(str, best.cuts))
            say(f"ops cut one by one at {at_cuts}: {1e6 * best.period_s:.1f} us a layer")
    assert best is not None
    for what, offered in _wider(chosen):
        if not best.cuts or limit.passed:
            break
        with contextlib.suppress(SearchError):
            rest = best.period_s, sequential.period_s, limit, best.tasks
            found = _solve(offered, best.cuts, name, target, *rest)
            if found.period_s < best.period_s:  # the solver's limit held at another clock
                best = found
                say(f"{what}: {1e6 * best.period_s:.1f} us a layer")
    return dataclasses.replace(
        best,
        bound_s=min(best.period_s, *(_least_s(way, best.period_s, late) for way in ways)),
        sequential_s=sequential.period_s,
        tried=tried,
        cut_sets=number,
        others=tuple(found.plan for found in others),
    )


def _least_s(way: SearchProblem, period_s: float, limit: SearchDeadline) -> float:
    """Return a lower bound of periods of at most `period_s`, over all cuts of each op and all orders.

    After the limit, and for a step that is not split, it is that of the joules alone.
    """
    joules_s = way.energy_s(way.whole)
    if way.nano_batches == 1 or limit.passed:
        return joules_s
    way, _ = way.in_time(way.whole, period_s)
    places = cut_places(way)
    given = prices(pieces(way, places[len(places) // 2 :][:1]), way.capacity)
    return max(joules_s, bound_s(pieces(way, places), given))


def _by_op(way: SearchProblem) -> bool:
    """Return whether ops may be cut one by one; scattered rows are cut alike."""
    several = way.nano_batches > 1 and way.nano_ops > 1 and len(cut_places(way)) > 1
    return several and not way.graph.scattered


def _cut_by_op(
    way: SearchProblem,
    best: FoundPlan,
    own: bool,
    name: str,
    target: Target | None,
    limit: SearchDeadline,
) -> tuple[list[FoundPlan], int]:
    """Return plans whose ops are cut one by one, at most a little longer than the best one, and the number of
    structures solved.

    A round begins at the best plan's structure if it is one of this problem (`own`) and its ops have unlike
    cuts. Otherwise it begins at each structure whose ops are cut alike.
    """
    most_s = best.period_s * (1 - _ENOUGH)
    setting, _ = way.in_time(way.whole, most_s)
    places = cut_places(way)
    layer = Layer.of(setting, places)
    alike = [((place,),) * len(layer.blocks) for place in places]
    base = layer.structure(best.tasks) if own else None
    bases = alike if base is None or len(set(base)) == 1 else [base]
    listed = limit.part(_LISTED)
    ranked = []
    for structure in structures(layer, bases, places, way.nano_ops, most_s):
        if listed.passed:
            break
        tasks = layer.tasks(structure)
        problem = make_problem(tasks, _alone(setting, tasks), least_s=layer.cost_s(structure))
        first = frozenset(at for at, task in enumerate(tasks) if task.chain.is_network)
        ranked.append((list_period_s(problem, first), structure))
    found, count = [], 0
    for _, structure in sorted(ranked)[:_SOLVED]:
        if limit.passed:
            break
        tasks, count = layer.tasks(structure), count + 1
        cuts = tuple(sorted({task.start for task in tasks} - {0}))
        with contextlib.suppress(SearchError):
            near_s = best.period_s * (1 + _NEAR)
            found.append(_solve(way, cuts, name, target, near_s, near_s, limit, tasks))
    return found, count


def _ways(setting: SearchProblem) -> list[SearchProblem]:
    """Return the problems to search in turn: overlapped collectives without side streams first, where
    possible.

    A plan without side streams is outside the problem with them, since its ops cost less
    (`options.chain_s`). It is found sooner, and then is the period to beat.
    """
    scattered, network = setting.graph.scattered, tuple(one for one in setting.overlap if one != "memory")
    sums = any(chain.is_network for chain in chains(repeated_layer(setting.graph)))
    plain = (
        sums
        and network
        and has_side_streams(setting.overlap, scattered)
        and not has_side_streams(network, scattered)
    )
    return [dataclasses.replace(setting, overlap=network), setting] if plain else [setting]


def _wider(setting: SearchProblem) -> list[tuple[str, SearchProblem]]:
    """Return the problems with more SM counts, for the best cut's plan."""
    finer = dataclasses.replace(setting, most_shares=2 * setting.most_shares)
    wider = (
        [("finer shares", finer)] if len(setting.shares.offered_sms()) > 2 * setting.most_shares + 1 else []
    )
    waves = setting.shares.knows_waves and "memory" in setting.overlap
    return [*wider, ("full waves", dataclasses.replace(finer, full_waves=True))] if waves else wider


def _sequential(setting: SearchProblem, target: Target | None, limit: SearchDeadline) -> FoundPlan:
    """Return the plan with every op on all tokens, in sequence."""
    whole, (part, governor) = (
        dataclasses.replace(setting, overlap=(), nano_batches=1, split=False),
        (setting.edges(()), setting.governor),
    )
    if governor is not None:
        full, step, ops = (
            setting.shares.profile.total_sms,
            setting.load.part(*part[0]),
            repeated_layer(setting.graph),
        )
        clock = governor.settle(
            lambda hz: sum(setting.shares.at(hz).seconds(op, step, full) for op in ops), setting.work(part)
        )
        whole = dataclasses.replace(whole, shares=setting.shares.at(clock))
    return _stages(
        whole,
        (),
        "sequential, sums scattered" if setting.graph.scattered else "sequential",
        target,
        None,
        limit,
    )


def _solve(
    setting: SearchProblem,
    cuts: tuple[int, ...],
    name: str,
    target: Target | None,
    most_s: float | None,
    sequential_s: float,
    limit: SearchDeadline,
    tasks: Sequence[Task] = (),
) -> FoundPlan:
    """Solve both stages for one set of cuts, and convert the period to the clock that the card settles at.

    The stages run at the clock at which the joules fit in the period to beat. tasks: of a known structure,
    for which stage I is left out.
    """
    work = setting.work_of(tasks) if tasks else setting.work(setting.edges(cuts))
    setting, clock = setting.in_time(work, most_s or sequential_s)
    found = _stages(setting, cuts, name, target, most_s, limit, tasks)
    settled = setting.settled_s(work, found.period_s, clock) / found.period_s
    return dataclasses.replace(
        found,
        period_s=found.period_s * settled,
        bound_s=found.bound_s * settled,
        stage_one_s=found.stage_one_s * settled,
    )


def _stages(
    setting: SearchProblem,
    cuts: tuple[int, ...],
    name: str,
    target: Target | None,
    most_s: float | None,
    limit: SearchDeadline,
    tasks: Sequence[Task] = (),
) -> FoundPlan:
    stage_one_s = math.inf
    if not tasks:
        tasks, one = stage_one(setting, cuts, limit.most(_STAGE_I_S))
        stage_one_s = one.period_s
    if most_s is not None and limit.passed:
        raise SearchError(f"the time_limit passed between the stages of cuts {cuts}")
    problem, two = stage_two(setting, tasks, most_s, limit.most(_STAGE_II_S))
    plan = to_plan(name, tasks, problem, two, setting.capacity, target)
    periods = two.period_s, two.bound_s, min(stage_one_s, two.period_s), two.period_s
    return FoundPlan(plan, *periods, cuts, tasks=tuple(tasks))
