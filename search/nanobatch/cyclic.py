"""Cyclic scheduling as a MILP: the tasks of one layer repeat once a period.

A task of layer l starts at period · (l + stage + phase), with the phase in [0, 1) and an integer stage.
Layers overlap as in a software pipeline. Divided by the period, every constraint is linear in the phases,
the stages and the *rate* 1 / period. The solver maximises the rate, so no bisection is needed. The SMs of
concurrent tasks add up to the device's at most, ΣR ≤ 1 (NanoFlow's stage II).
"""

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from search import INSTALL, UserError

try:
    import mip
except ImportError:  # only solving needs the extra `search`
    mip: Any = None

STAGES = 3  # the most layers between a task and the first task
_SAFE = 1e-7  # relative error of a rate that the solver accepts as feasible
_TIDY_S = 2.0  # the second objective, the open layers, does not change the period


class SearchError(UserError):
    """A search without an answer. The message names the constraint that leaves none."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One choice for a task: a number of SMs, and the task's time on these SMs."""

    share: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class CyclicProblem:
    """Tasks 0..n-1 of one layer.

    options: of each task; one is chosen. follows: (i, j, distance): task j of layer l + distance starts
    after task i of layer l ended. exclusive: (i, j) never run at the same time, on any layers; a task never
    runs on two layers at once. outside: (i, j): j does not start while i runs. covers: groups with exactly
    one running task; a task in no group always runs, and constraints of tasks that do not run do not hold.
    capacity: the largest sum of SMs of concurrent tasks; None: unlimited. least_s: a lower bound of the
    period. most_s: an upper limit. layers: the most layers between two tasks; None for what `STAGES` allows.
    """

    options: tuple[tuple[Option, ...], ...]
    follows: tuple[tuple[int, int, int], ...] = ()
    exclusive: frozenset[tuple[int, int]] = frozenset()
    outside: frozenset[tuple[int, int]] = frozenset()
    covers: tuple[tuple[int, ...], ...] = ()
    capacity: int | None = None
    least_s: float = 0.0
    most_s: float | None = None
    layers: int | None = None

    def longest_s(self) -> float:
        """Return the time of all tasks in sequence: no optimum is longer."""
        return max(self.least_s, sum(max(option.seconds for option in options) for options in self.options))


@dataclasses.dataclass(frozen=True)
class CyclicSchedule:
    """A solution: its period, a lower bound of the period, and each task's phase, stage and option.

    An option of None belongs to a task that does not run.
    """

    period_s: float
    bound_s: float
    phases: tuple[float, ...]
    stages: tuple[int, ...]
    chosen: tuple[Option | None, ...]

    @property
    def gap(self) -> float:
        """Return the share of the period that a better one may save."""
        return max(0.0, 1 - self.bound_s / self.period_s) if self.period_s else 0.0


def check_solver() -> None:
    """Raises: SearchError where the MILP solver is not installed."""
    if mip is None:
        raise SearchError(f"orders=solver needs the MILP solver mip: {INSTALL}")


def solve(
    problem: CyclicProblem, time_limit_s: float = 60.0, clock: Callable[[], float] = time.monotonic
) -> CyclicSchedule:
    """Return the schedule of shortest period with the fewest open layers; at the time limit, the best so
    far.

    clock: returns seconds.

    Raises: SearchError naming the constraints that leave no schedule; or where none has a period of at most
    `most_s`; or where the time was too short for one.
    """
    check_solver()
    stop_s = clock() + time_limit_s
    if problem.capacity is not None:
        for i, options in enumerate(problem.options):
            if min(option.share for option in options) > problem.capacity:
                raise SearchError(
                    f"no schedule: task {i} needs a share of more than {problem.capacity}, which is "
                    f"all there is"
                )
    milp = CyclicMilp(problem)
    found = milp.solve(max(0.0, stop_s - clock()))
    if isinstance(found, CyclicSchedule):
        return found
    if found == mip.OptimizationStatus.INFEASIBLE:
        if (
            problem.most_s is not None
        ):  # the usual outcome of a search, so the cause is not worth another solution
            raise SearchError(f"no schedule has a period of at most {problem.most_s:g} s")
        raise SearchError(f"no schedule: {_culprit(problem, stop_s - clock())}")
    if problem.most_s is None:
        slow = one_by_one(problem)
        return dataclasses.replace(slow, bound_s=min(slow.period_s, max(slow.bound_s, milp.busiest_s())))
    raise SearchError(
        f"time_limit_s={time_limit_s:g} passed before a schedule was found of at most {problem.most_s:g} s"
    )


def one_by_one(problem: CyclicProblem) -> CyclicSchedule:
    """Return a schedule without overlap, with each task at its fastest option.

    Of covers it runs the tasks that fill one group. It is the answer where time is too short for another.
    """
    groups = collections.Counter(i for group in problem.covers for i in group)
    left = {i for i in range(len(problem.options)) if groups[i] <= 1}
    fastest = [
        min(own, key=lambda option: option.seconds) if i in left else None
        for i, own in enumerate(problem.options)
    ]
    period_s = max(problem.least_s, sum(option.seconds for option in fastest if option is not None))
    phases, now = [0.0] * len(fastest), 0.0
    while left:
        ready = [
            j
            for j in left
            if not any(k == j and i in left and not distance for i, k, distance in problem.follows)
        ]
        if not ready:
            raise SearchError("no schedule: what must follow what leaves none")
        one = min(ready)
        left.remove(one)
        phases[one] = now / period_s
        now += min(option.seconds for option in problem.options[one])
    return CyclicSchedule(
        period_s, max(problem.least_s, 0.0), tuple(phases), (0,) * len(phases), tuple(fastest)
    )


def _culprit(problem: CyclicProblem, time_limit_s: float) -> str:
    """Return the constraint that leaves no schedule of any period.

    Capacity and exclusion always leave one: the tasks in sequence in the order of their starts. The cause is
    therefore the order or the covers.
    """
    alone = dataclasses.replace(
        problem, follows=(), exclusive=frozenset(), outside=frozenset(), capacity=None
    )
    found = CyclicMilp(alone).solve(time_limit_s) if time_limit_s > 0 else None
    if isinstance(found, CyclicSchedule):
        return "what must follow what leaves none"
    if found == mip.OptimizationStatus.INFEASIBLE:
        return "its covers leave none: no tasks are one of each group"
    return "the time is over before it is known which constraint leaves none"


class CyclicMilp:
    """Variables and constraints of a problem; the unit of time is the problem's longest period."""

    def __init__(self, problem: CyclicProblem):
        self.problem, self.unit, self.tasks = problem, problem.longest_s() or 1.0, range(len(problem.options))
        model: Any = mip.Model(sense=mip.MAXIMIZE, solver_name=mip.HIGHS)
        self.model, model.verbose, model.threads = model, 0, 1
        self.grouped = {i for group in problem.covers for i in group}
        fastest = [min(option.seconds for option in options) for options in problem.options]
        least = max(
            problem.least_s, self.busiest_s(), *(min(fastest[i] for i in group) for group in problem.covers)
        )
        self.top = max(1.0, self.unit / (least or self.unit / (len(problem.options) + 1)))
        self.rate = model.add_var(
            "rate", lb=max(1 - _SAFE, self.unit / (problem.most_s or math.inf)), ub=self.top
        )
        self.phase = [model.add_var(f"phase{i}", lb=0, ub=1) for i in self.tasks]
        self.stage = [
            model.add_var(f"stage{i}", lb=-STAGES, ub=STAGES, var_type=mip.INTEGER) for i in self.tasks
        ]
        self.runs: list = [
            model.add_var(f"runs{i}", var_type=mip.BINARY) if i in self.grouped else 1.0 for i in self.tasks
        ]
        for group in problem.covers:
            self.model.add_constr(total(self.runs[i] for i in group) == 1)
        self.pick: list[list] = []
        self.rates: list[
            list
        ] = []  # the rate where an option is chosen, else 0: a linearised product with a binary
        for i in self.tasks:
            self._choose(i)
        self.length = [
            total(rate * (option.seconds / self.unit) for rate, option in zip(rates, options, strict=True))
            for rates, options in zip(self.rates, problem.options, strict=True)
        ]  # each task's part of a period
        self._shift()
        if problem.layers is not None and problem.layers < 2 * STAGES:
            self._keep_near(problem.layers)
        self._order()
        self._exclude()
        if problem.capacity is not None:
            share(self, problem.capacity)

    def solve(self, time_limit_s: float) -> Any:
        stop = time.monotonic() + time_limit_s
        self.model.objective = self.rate
        status = self.model.optimize(max_seconds=time_limit_s)
        if not _has_solution(status):
            return status
        rate, bound = self.rate.x, max(self.rate.x, min(self.top, self.model.objective_bound))
        found = self._schedule(rate, bound)
        if stop - time.monotonic() < 0.2:
            return found
        # Among the schedules with this period, choose one with the fewest open layers.
        span = self.model.add_var("span", lb=0)
        for i, j in itertools.permutations(self.tasks, 2):
            self.model.add_constr(span >= self.stage[j] - self.stage[i])
        self.model.add_constr(self.rate >= rate * (1 - _SAFE))
        self.model.sense = mip.MINIMIZE
        self.model.objective = span + total(0.01 * (self.stage[i] + self.phase[i]) for i in self.tasks)
        status = self.model.optimize(max_seconds=min(_TIDY_S, stop - time.monotonic()))
        return self._schedule(self.rate.x, bound) if _has_solution(status) else found

    def _schedule(self, rate: float, bound: float) -> CyclicSchedule:
        chosen = tuple(
            next((option for pick, option in zip(picks, options, strict=True) if _value(pick) > 0.5), None)
            for picks, options in zip(self.pick, self.problem.options, strict=True)
        )
        phases, stages = [phase.x for phase in self.phase], [round(stage.x) for stage in self.stage]
        return CyclicSchedule(self.unit / rate, self.unit / bound, tuple(phases), tuple(stages), chosen)

    def busiest_s(self) -> float:
        """Return a bound of the period: the longest time of tasks that all run and exclude each other."""
        best = [
            0.0 if i in self.grouped else min(option.seconds for option in options)
            for i, options in enumerate(self.problem.options)
        ]
        return max((sum(best[i] for i in clique) for clique in self._cliques()), default=0.0)

    def _cliques(self) -> list[tuple[int, ...]]:
        """Return sets of tasks that exclude each other, one grown from each task."""
        pairs, found = self.problem.exclusive | {(j, i) for i, j in self.problem.exclusive}, set()
        for first in self.tasks:
            clique = [first]
            for i in self.tasks:
                if all((i, other) in pairs for other in clique):
                    clique.append(i)
            found.add(tuple(sorted(clique)))
        return sorted(found)

    def _choose(self, i: int) -> None:
        options = self.problem.options[i]
        if len(options) == 1:
            self.pick.append([self.runs[i]])
        else:
            self.pick.append(
                [self.model.add_var(f"pick{i}.{o}", var_type=mip.BINARY) for o in range(len(options))]
            )
            self.model.add_constr(total(self.pick[i]) == self.runs[i])
        if len(options) == 1 and i not in self.grouped:
            self.rates.append([self.rate])
            return
        self.rates.append([self.model.add_var(f"rate{i}.{o}", lb=0) for o in range(len(options))])
        for rate, pick in zip(self.rates[i], self.pick[i], strict=True):
            self.model.add_constr(rate <= self.top * pick)
        self.model.add_constr(total(self.rates[i]) <= self.rate)
        self.model.add_constr(total(self.rates[i]) >= self.rate - self.top * self.absent(i))

    def absent(self, *tasks: int) -> Any:
        """Return the number of these tasks that do not run."""
        optional = [i for i in tasks if i in self.grouped]
        return len(optional) - total(self.runs[i] for i in optional)

    def _shift(self) -> None:
        """Fix the first task that always runs at the start, since a shifted schedule is the same schedule."""
        always = next((i for i in self.tasks if i not in self.grouped), None)
        if always is not None:
            self.model.add_constr(self.phase[always] == 0)
            self.model.add_constr(self.stage[always] == 0)

    def _keep_near(self, layers: int) -> None:
        """Keep all tasks within so many layers."""
        first = self.model.add_var("first", lb=-STAGES, ub=STAGES)
        for stage in self.stage:
            self.model.add_constr(stage >= first)
            self.model.add_constr(stage <= first + layers)

    def _order(self) -> None:
        slack = 2 * STAGES + 3
        for i, j, distance in self.problem.follows:
            absent, later = slack * self.absent(i, j), self.stage[j] + distance - self.stage[i]
            self.model.add_constr(self.phase[j] + later >= self.phase[i] + self.length[i] - absent)
            self.model.add_constr(later >= -1 * absent)

    def apart(self, i: int, j: int, length: Any, slack: Any) -> None:
        """Keep i's end before j's start and j's end, after `length`, before i's next start; or the other way
        round.
        """
        later = self.model.add_var(f"later{i}.{j}", var_type=mip.BINARY)
        after = self.phase[j] - self.phase[i] + 1 - later
        self.model.add_constr(after >= self.length[i] - 2 * slack)
        self.model.add_constr(after <= 1 - length + 2 * slack)

    def _exclude(self) -> None:
        for clique in self._cliques():
            self.model.add_constr(total(self.length[i] for i in clique) <= 1)
        for i, j in sorted(self.problem.exclusive):
            self.apart(i, j, self.length[j], self.absent(i, j))
        for i, j in sorted(self.problem.outside - self.problem.exclusive):
            self.apart(i, j, 0.0, self.absent(i, j))


def _has_solution(status: Any) -> bool:
    return status in (mip.OptimizationStatus.FEASIBLE, mip.OptimizationStatus.OPTIMAL)


def _value(variable: Any) -> float:
    return variable if isinstance(variable, float) else variable.x


class Tasks(Protocol):
    """The parts of `CyclicMilp` that the capacity constraints use.

    Phases and lengths are shares of a period.
    """

    model: Any
    problem: Any  # `search.nanobatch.cyclic.CyclicProblem`
    tasks: range
    unit: float  # seconds, of which the rate is periods
    top: float  # the highest rate
    pick: list[list]  # 1 where a task takes an option
    rates: list[list]  # the rate where it does, else 0
    phase: list
    length: list

    def absent(self, *tasks: int) -> Any:
        """Return the number of these tasks that do not run."""
        ...

    def apart(self, i: int, j: int, length: Any, slack: Any) -> None:
        """Keep i and j apart, as `CyclicMilp.apart`, unless the slack is 1 or more."""
        ...


def share(m: Tasks, capacity: int) -> None:
    """Keep the sum of concurrent tasks' SMs within the capacity.

    Tasks that overlap pairwise have a common moment, unless three of them cover the full period. Pairs that
    overlap are therefore enough. Where three tasks may cover the period, or four exceed the capacity, the
    constraint counts the tasks that run at each task's start.
    """
    shares = [
        total(pick * option.share for pick, option in zip(picks, options, strict=True))
        for picks, options in zip(m.pick, m.problem.options, strict=True)
    ]
    work = (
        rate * (option.share * option.seconds / m.unit / capacity)
        for rates, options in zip(m.rates, m.problem.options, strict=True)
        for rate, option in zip(rates, options, strict=True)
    )
    m.model.add_constr(total(work) <= 1)
    most = [max(option.share for option in options) for options in m.problem.options]
    longest = [
        m.top / m.unit * max(option.seconds for option in options) for options in m.problem.options
    ]  # each task's part of a period
    never = m.problem.exclusive | {(j, i) for i, j in m.problem.exclusive}
    near = [{j for j in m.tasks if i != j and most[i] and most[j] and (i, j) not in never} for i in m.tasks]
    pairs = [(i, j) for i, j in itertools.combinations(m.tasks, 2) if j in near[i]]
    triples = [(i, j, k) for i, j in pairs for k in sorted(near[i] & near[j]) if j < k]
    crowds = [crowd for crowd in (*pairs, *triples) if sum(most[i] for i in crowd) > capacity]
    others = [(triple, set.intersection(*(near[i] for i in triple))) for triple in triples]
    four = any(more and sum(most[i] for i in (*triple, *more)) > capacity for triple, more in others)
    if four or any(len(crowd) == 3 and sum(longest[i] for i in crowd) > 1 for crowd in crowds):
        _at_starts(m, capacity, shares, most, pairs)
    else:
        _in_pairs(m, capacity, shares, most, crowds)


def _in_pairs(
    m: Tasks, capacity: int, shares: list[Any], most: list[int], crowds: list[tuple[int, ...]]
) -> None:
    """In each crowd that may exceed the capacity, keep two tasks apart or take less than `most`."""
    together: dict[tuple[int, ...], Any] = {}  # 1 where the two may overlap
    for i, j in sorted({pair for crowd in crowds for pair in itertools.combinations(crowd, 2)}):
        together[i, j] = m.model.add_var(f"together{i}.{j}", var_type=mip.BINARY)
        m.apart(i, j, m.length[j], m.absent(i, j) + together[i, j])
    for crowd in crowds:
        less = total(1 - together[pair] for pair in itertools.combinations(crowd, 2))
        over = sum(most[i] for i in crowd) - capacity
        m.model.add_constr(total(shares[i] for i in crowd) <= capacity + over * less)


def _at_starts(
    m: Tasks, capacity: int, shares: list[Any], most: list[int], pairs: list[tuple[int, int]]
) -> None:
    """Fit each task next to the tasks that run when it starts; some start has the largest sum."""
    others_at: dict[int, list] = collections.defaultdict(list)  # by task: SMs of each other task at its start
    later = {}  # 1 where j starts after i in the same period
    for i, j in pairs:
        later[i, j] = m.model.add_var(f"later{i}.{j}", var_type=mip.BINARY)
        after, slack = m.phase[j] - m.phase[i] + 1 - later[i, j], []
        for one, other in ((i, j), (j, i)):
            runs, share = (
                m.model.add_var(f"on{one}.{other}", var_type=mip.BINARY),
                m.model.add_var(f"share{one}.{other}", lb=0),
            )
            m.model.add_constr(share >= shares[other] - most[other] * (1 - runs))
            others_at[one].append(share)
            slack.append(runs + 2 * m.absent(i, j))
        for least, longest in ((0, 1), (m.length[i] - slack[1], 1 - m.length[j] + slack[0])):
            m.model.add_constr(after >= least)
            m.model.add_constr(after <= longest)
    for i, j, k in itertools.combinations(m.tasks, 3):
        if {
            (i, j),
            (i, k),
            (j, k),
        } <= later.keys():  # a total order, also of tasks that start at once: the last one counts all
            m.model.add_constr(later[i, k] <= later[i, j] + later[j, k])
            m.model.add_constr(later[i, k] >= later[i, j] + later[j, k] - 1)
    for i, others in others_at.items():
        m.model.add_constr(shares[i] + total(others) <= capacity)


def total(terms: Iterable[Any]) -> Any:
    """Return a linear expression; the library's types do not know its arithmetic."""
    return mip.xsum(terms)
