"""NanoFlow's two-stage search (§4.1): the nano-batches, their order, and the SMs of each task.

Stage I takes one set of cuts and finds the tasks that use them and their order, each op at its isolated
speed. Only ops bound by different resources overlap. Stage II keeps the tasks and gives each one SMs, with
the time on them. Cuts are tried in the order of their estimates. The search ends where no other cut can beat
the best plan so far. The best cut's plan is then offered more SM counts: more of those measured, and those
that fill the waves of its products.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

from jaxflow.pipeline.plan import Plan, Target
from search.nanobatch.cuts import least_s, make_tasks, most_promising
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
from search.nanobatch.options import task_options, task_s, wave_filling_sms
from search.nanobatch.problem import SearchDeadline, SearchProblem

_ENOUGH = 0.005  # a plan is accepted where no other can be shorter by this share
_STAGE_I_S = 8.0
_STAGE_II_S = 40.0
_GUESSED = 0.2  # the largest share of the time for estimates of cuts
_LATE = 0.05  # the share of the time, beyond the limit, for bounds of untried cuts


@dataclasses.dataclass(frozen=True)
class FoundPlan:
    """The best plan, its period, and a lower bound of the period over all structures and cuts."""

    plan: Plan
    period_s: float
    bound_s: float
    stage_one_s: float
    sequential_s: float
    cuts: tuple[int, ...]
    tried: int = 1
    cut_sets: int = 1

    @property
    def gap(self) -> float:
        """Return the share by which a shorter period remains possible."""
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
    """Return the tasks of the best structure with these cuts, and its schedule at isolated op times."""
    tasks, covers = make_tasks(setting, cuts)
    full = setting.shares.profile.total_sms
    options = [
        (Option(0, task_s(setting.shares, task, setting.load.part(task.start, task.stop), full)),)
        for task in tasks
    ]
    least = setting.energy_s([(0, setting.load.tokens)])
    found = solve(make_problem(tasks, options, covers=tuple(covers), least_s=least), time_limit_s)
    return [task for task, option in zip(tasks, found.chosen, strict=True) if option is not None], found


def stage_two(
    setting: SearchProblem, tasks: Sequence[Task], most_s: float | None, time_limit_s: float
) -> tuple[CyclicProblem, CyclicSchedule]:
    """Return the SM problem of a structure and its schedule.

    Raises: SearchError if no period is at most `most_s`.
    """
    full = setting.shares.profile.total_sms
    alone = len({task.resource for task in tasks}) == 1  # no task of another resource
    steps, most = (
        [setting.load.part(task.start, task.stop) for task in tasks],
        0 if alone else setting.most_shares,
    )
    filling = [
        () if alone or not setting.full_waves else wave_filling_sms(setting.shares, task, step)
        for task, step in zip(tasks, steps, strict=True)
    ]
    left = {full - sms for own in filling for sms in own}  # SMs next to products with full waves
    options = [
        task_options(setting.shares, task, step, most, own if task.resource == "compute" else left)
        for task, step, own in zip(tasks, steps, filling, strict=True)
    ]
    parts = sorted({(task.start, task.stop) for task in tasks if "qkv" in task.chain.names})
    problem = make_problem(tasks, options, capacity=full, least_s=setting.energy_s(parts), most_s=most_s)
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
    ways, joules_s = _ways(setting), setting.energy_s([(0, setting.load.tokens)])
    sequential = _sequential(setting, target, limit)
    best, chosen = None if setting.split else sequential, setting
    left, tried, number = [sequential.bound_s] if not setting.split else [], 0, 0
    untried: list[tuple[SearchProblem, tuple[int, ...]]] = []  # their bounds are computed last
    for at, way in enumerate(ways):
        turn = limit.part(1 / (len(ways) - at))
        sets = most_promising(way, sequential.period_s, turn.part(_GUESSED))
        number += len(sets)
        for cuts in sets:
            most_s = best and best.period_s * (1 - _ENOUGH)
            if most_s is not None and turn.passed:
                untried.append((way, cuts))
                continue
            if most_s is not None and (least := least_s(way.in_time(cuts, most_s)[0], cuts)) >= most_s:
                left.append(least)
                continue
            tried += 1
            try:
                best, chosen = _solve(way, cuts, name, target, most_s, sequential.period_s, turn), way
                left.append(best.bound_s)
                say(
                    f"cuts {cuts}: {1e6 * best.period_s:.1f} us a layer, at most "
                    f"{100 * best.gap:.1f} % above the best of this structure"
                )
            except SearchError as error:
                if best is None:
                    raise
                unknown = "time_limit" in str(error)
                left.append(
                    least_s(way.in_time(cuts, best.period_s)[0], cuts)
                    if unknown
                    else best.period_s * (1 - _ENOUGH)
                )
                say(f"cuts {cuts}: nothing shorter")
    assert best is not None
    for what, offered in _wider(chosen):
        if not best.cuts or limit.passed:
            break
        with contextlib.suppress(SearchError):
            found = _solve(offered, best.cuts, name, target, best.period_s, sequential.period_s, limit)
            left.append(found.bound_s)
            if found.period_s < best.period_s:  # the solver's limit held at another clock
                best = found
                say(f"{what}: {1e6 * best.period_s:.1f} us a layer")
    left += [
        joules_s if late.passed else least_s(way.in_time(cuts, best.period_s)[0], cuts)
        for way, cuts in untried
    ]
    return dataclasses.replace(
        best,
        bound_s=min(best.period_s, *left),
        sequential_s=sequential.period_s,
        tried=tried,
        cut_sets=number,
    )


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
) -> FoundPlan:
    """Solve both stages for one set of cuts, and convert the period to the clock that the card settles at.

    The stages run at the clock at which the joules fit in the period to beat.
    """
    setting, clock = setting.in_time(cuts, most_s or sequential_s)
    found = _stages(setting, cuts, name, target, most_s, limit)
    settled = setting.settled_s(cuts, found.period_s, clock) / found.period_s
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
) -> FoundPlan:
    tasks, one = stage_one(setting, cuts, limit.most(_STAGE_I_S))
    if most_s is not None and limit.passed:
        raise SearchError(f"the time_limit passed between the stages of cuts {cuts}")
    problem, two = stage_two(setting, tasks, most_s, limit.most(_STAGE_II_S))
    plan = to_plan(name, tasks, problem, two, setting.shares.profile.total_sms, target)
    return FoundPlan(plan, two.period_s, two.bound_s, one.period_s, two.period_s, cuts)
