"""NanoFlow's two-stage search (§4.1): which nano-batches, in which order, with which share of the device.

Stage I takes one set of cuts of the step's tokens and finds which ops use them and in what order, each op at
its speed alone; only ops bound by different resources run together. Stage II keeps the nano-ops and gives
each a share of the SMs, and the times that go with it. Cuts are tried in the order of what stage I could
reach with them at best; stage II's best plan so far ends the search where no other cut can beat it. The best
cut's plan is then offered more shares: more of those that were timed, and those that fill the waves of its
nano-batches' products.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

from jaxflow.pipeline.plan import Plan, Target
from search.nanobatch.cuts import least_s, make_tasks, most_promising
from search.nanobatch.cyclic import Option, Problem, Schedule, SearchError, solve
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
from search.nanobatch.problem import Setting
from search.time_budget import Limit

_ENOUGH = 0.005  # a plan is taken where no other can be so much shorter
_STAGE_I_S = 8.0
_STAGE_II_S = 40.0
_GUESSED = 0.2  # of the time at most, for guesses at which cuts are best
_LATE = 0.05  # of the time, beyond it, for bounds of the cuts that were not tried


@dataclasses.dataclass(frozen=True)
class Found:
    """The best plan, its period, and that below which no plan of the structures tried, and no cut left out,
    can be.
    """

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
        """How much shorter a period may yet be, as a share."""
        return max(0.0, 1 - self.bound_s / self.period_s)


def make_problem(tasks: Sequence[Task], options: Sequence[tuple[Option, ...]], **rest) -> Problem:
    """The problem of these tasks; those that take no time exclude nobody."""
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
    return Problem(tuple(options), follows(tasks), exclusive, outside, **rest)


def stage_one(setting: Setting, cuts: Sequence[int], time_limit_s: float) -> tuple[list[Task], Schedule]:
    """The tasks of the best structure with these cuts, and its schedule at the ops' own speeds."""
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
    setting: Setting, tasks: Sequence[Task], most_s: float | None, time_limit_s: float
) -> tuple[Problem, Schedule]:
    """Shares for the tasks of a structure. Raises: SearchError if no period is at most `most_s`."""
    full = setting.shares.profile.total_sms
    alone = len({task.resource for task in tasks}) == 1  # nothing to share the device with
    steps, most = (
        [setting.load.part(task.start, task.stop) for task in tasks],
        0 if alone else setting.most_shares,
    )
    filling = [
        () if alone or not setting.full_waves else wave_filling_sms(setting.shares, task, step)
        for task, step in zip(tasks, steps, strict=True)
    ]
    left = {full - sms for own in filling for sms in own}  # beside products whose waves are full
    options = [
        task_options(setting.shares, task, step, most, own if task.resource == "compute" else left)
        for task, step, own in zip(tasks, steps, filling, strict=True)
    ]
    parts = sorted({(task.start, task.stop) for task in tasks if "qkv" in task.chain.names})
    problem = make_problem(tasks, options, capacity=full, least_s=setting.energy_s(parts), most_s=most_s)
    return problem, solve(problem, time_limit_s)


def search(
    setting: Setting,
    *,
    time_limit_s: float = 600.0,
    name: str = "searched",
    target: Target | None = None,
    say: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """The best plan found in the time; the sequential one where none is shorter (unless `split`).

    When the time is over, nothing is begun but what the first answer needs. clock: is read for the time, in
    seconds.

    Raises: SearchError naming what leaves no plan.
    """
    limit, late = (Limit(clock() + share * time_limit_s, clock) for share in (1, 1 + _LATE))
    ways, joules_s = _ways(setting), setting.energy_s([(0, setting.load.tokens)])
    sequential = _sequential(setting, target, limit)
    best, chosen = None if setting.split else sequential, setting
    left, tried, number = [sequential.bound_s] if not setting.split else [], 0, 0
    untried: list[tuple[Setting, tuple[int, ...]]] = []  # whose bounds wait: the next way has its turn first
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
            if (
                found.period_s < best.period_s
            ):  # the solver was held to it at another clock than that which it settles at
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


def _ways(setting: Setting) -> list[Setting]:
    """What is searched one after the other: where sums may be hidden without side streams, that first.

    Such a plan is none of those with side streams, whose ops cost more (`options.chain_s`); it is found sooner,
    and then to be beaten.
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


def _wider(setting: Setting) -> list[tuple[str, Setting]]:
    """What the best cut's plan is offered beyond the shares with which cuts were compared."""
    finer = dataclasses.replace(setting, most_shares=2 * setting.most_shares)
    wider = (
        [("finer shares", finer)] if len(setting.shares.offered_sms()) > 2 * setting.most_shares + 1 else []
    )
    waves = setting.shares.knows_waves and "memory" in setting.overlap
    return [*wider, ("full waves", dataclasses.replace(finer, full_waves=True))] if waves else wider


def _sequential(setting: Setting, target: Target | None, limit: Limit) -> Found:
    """Every op on all tokens, one after the other."""
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
    setting: Setting,
    cuts: tuple[int, ...],
    name: str,
    target: Target | None,
    most_s: float | None,
    sequential_s: float,
    limit: Limit,
) -> Found:
    """Both stages for one set of cuts, at the clock at which its joules fit in what is to be beaten; then at
    that which it settles at.
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
    setting: Setting,
    cuts: tuple[int, ...],
    name: str,
    target: Target | None,
    most_s: float | None,
    limit: Limit,
) -> Found:
    tasks, one = stage_one(setting, cuts, limit.most(_STAGE_I_S))
    if most_s is not None and limit.passed:
        raise SearchError(f"the time_limit passed between the stages of cuts {cuts}")
    problem, two = stage_two(setting, tasks, most_s, limit.most(_STAGE_II_S))
    plan = to_plan(name, tasks, problem, two, setting.shares.profile.total_sms, target)
    return Found(plan, two.period_s, two.bound_s, one.period_s, two.period_s, cuts)
