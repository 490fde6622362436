"""Cyclic scheduling: tasks that repeat for every layer, one layer a period, as a MILP.

A task of layer l starts at period · (l + stage + phase), the phase in [0, 1) and the stage a whole number:
layers overlap as in a software pipeline. Divided by the period, every constraint is linear in the phases, the
stages and the *rate* 1 / period, which is maximised: no bisection is needed. (In seconds they would hold
products of period and stage.)
"""

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import mip

from search.nanobatch.cyclic_shares import share, total

STAGES = 3  # layers that a task may be ahead of, or behind, the first task
_SAFE = 1e-7  # of a rate: what a solver calls feasible may be off by this
_TIDY_S = 2.0  # for the second question: it decides no period
_OPEN = (mip.OptimizationStatus.FEASIBLE, mip.OptimizationStatus.OPTIMAL)


class SearchError(ValueError):
    """A search without an answer; it names the constraint that leaves none."""


@dataclasses.dataclass(frozen=True)
class Option:
    """A way to run a task: on so many units of the device (SMs), for so long."""

    share: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Problem:
    """Tasks 0..n-1 of one layer.

    options: of each task; one is chosen.
    follows: (i, j, distance): task j of layer l + distance starts after task i of layer l ended.
    exclusive: (i, j) that never run at the same time, whatever their layers; a task never runs on two layers
    at once. outside: (i, j): j does not start while i runs. covers: groups of tasks of which exactly one is
    run; a task in no group always is. Constraints of tasks that are not
      run do not hold.
    capacity: shares of tasks that run at the same time add up to this at most; None: without bound.
    least_s: what a period takes at least. most_s: what it may take.
    """

    options: tuple[tuple[Option, ...], ...]
    follows: tuple[tuple[int, int, int], ...] = ()
    exclusive: frozenset[tuple[int, int]] = frozenset()
    outside: frozenset[tuple[int, int]] = frozenset()
    covers: tuple[tuple[int, ...], ...] = ()
    capacity: int | None = None
    least_s: float = 0.0
    most_s: float | None = None

    def longest_s(self) -> float:
        """One task after the other: no optimum is longer."""
        return max(self.least_s, sum(max(option.seconds for option in options) for options in self.options))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A solution: its period, and that below which none can be; of each task its phase and stage, and the
    option chosen (None for one that is not run).
    """

    period_s: float
    bound_s: float
    phases: tuple[float, ...]
    stages: tuple[int, ...]
    chosen: tuple[Option | None, ...]

    @property
    def gap(self) -> float:
        """How much shorter a period may yet be, as a share."""
        return max(0.0, 1 - self.bound_s / self.period_s) if self.period_s else 0.0


def solve(
    problem: Problem, time_limit_s: float = 60.0, clock: Callable[[], float] = time.monotonic
) -> Schedule:
    """The schedule of shortest period, and among such ones of fewest open layers; best so far when the time
    is over.

    clock: is read for the time, in seconds.

    Raises: SearchError naming the constraints that leave no schedule, as far as there is time to find them;
    or that none is of at
      most `most_s`; or that the time was too short for one.
    """
    stop_s = clock() + time_limit_s
    if problem.capacity is not None:
        for i, options in enumerate(problem.options):
            if min(option.share for option in options) > problem.capacity:
                raise SearchError(
                    f"no schedule: task {i} needs a share of more than {problem.capacity}, which is "
                    f"all there is"
                )
    milp = Milp(problem)
    found = milp.solve(max(0.0, stop_s - clock()))
    if isinstance(found, Schedule):
        return found
    if found == mip.OptimizationStatus.INFEASIBLE:
        if (
            problem.most_s is not None
        ):  # a search's usual answer, "nothing shorter": not worth another solution
            raise SearchError(f"no schedule has a period of at most {problem.most_s:g} s")
        raise SearchError(f"no schedule: {_culprit(problem, stop_s - clock())}")
    if problem.most_s is None:
        slow = one_by_one(problem)
        return dataclasses.replace(slow, bound_s=min(slow.period_s, max(slow.bound_s, milp.busiest_s())))
    raise SearchError(
        f"time_limit_s={time_limit_s:g} passed before a schedule was found of at most {problem.most_s:g} s"
    )


def one_by_one(problem: Problem) -> Schedule:
    """A schedule without overlap, each task at its fastest, of covers the tasks that fill one group: where
    time is too short for another.
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
    return Schedule(period_s, max(problem.least_s, 0.0), tuple(phases), (0,) * len(phases), tuple(fastest))


def _culprit(problem: Problem, time_limit_s: float) -> str:
    """What leaves no schedule of any period. Shares and what must not run at the same time do not: of each
    schedule that breaks them there is one that keeps them, its tasks one after the other as they start. So it
    is the order, or the covers.
    """
    alone = dataclasses.replace(
        problem, follows=(), exclusive=frozenset(), outside=frozenset(), capacity=None
    )
    found = Milp(alone).solve(time_limit_s) if time_limit_s > 0 else None
    if isinstance(found, Schedule):
        return "what must follow what leaves none"
    if found == mip.OptimizationStatus.INFEASIBLE:
        return "its covers leave none: no tasks are one of each group"
    return "the time is over before it is known which constraint leaves none"


class Milp:
    """Variables and constraints of a problem; seconds are in units of its longest period."""

    def __init__(self, problem: Problem):
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
        ] = []  # the rate where an option is chosen, else 0: its product with a binary, linear
        for i in self.tasks:
            self._choose(i)
        self.length = [
            total(rate * (option.seconds / self.unit) for rate, option in zip(rates, options, strict=True))
            for rates, options in zip(self.rates, problem.options, strict=True)
        ]  # of a period
        self._shift()
        self._order()
        self._exclude()
        if problem.capacity is not None:
            share(self, problem.capacity)

    def solve(self, time_limit_s: float) -> Schedule | mip.OptimizationStatus:
        stop = time.monotonic() + time_limit_s
        self.model.objective = self.rate
        status = self.model.optimize(max_seconds=time_limit_s)
        if status not in _OPEN:
            return status
        rate, bound = self.rate.x, max(self.rate.x, min(self.top, self.model.objective_bound))
        found = self._schedule(rate, bound)
        if stop - time.monotonic() < 0.2:
            return found
        # Of the schedules with this period, that which leaves the fewest layers open at once.
        span = self.model.add_var("span", lb=0)
        for i, j in itertools.permutations(self.tasks, 2):
            self.model.add_constr(span >= self.stage[j] - self.stage[i])
        self.model.add_constr(self.rate >= rate * (1 - _SAFE))
        self.model.sense = mip.MINIMIZE
        self.model.objective = span + total(0.01 * (self.stage[i] + self.phase[i]) for i in self.tasks)
        status = self.model.optimize(max_seconds=min(_TIDY_S, stop - time.monotonic()))
        return self._schedule(self.rate.x, bound) if status in _OPEN else found

    def _schedule(self, rate: float, bound: float) -> Schedule:
        chosen = tuple(
            next((option for pick, option in zip(picks, options, strict=True) if _value(pick) > 0.5), None)
            for picks, options in zip(self.pick, self.problem.options, strict=True)
        )
        phases, stages = [phase.x for phase in self.phase], [round(stage.x) for stage in self.stage]
        return Schedule(self.unit / rate, self.unit / bound, tuple(phases), tuple(stages), chosen)

    def busiest_s(self) -> float:
        """The longest time of tasks that exclude each other and are all run: a bound on the period."""
        best = [
            0.0 if i in self.grouped else min(option.seconds for option in options)
            for i, options in enumerate(self.problem.options)
        ]
        return max((sum(best[i] for i in clique) for clique in self._cliques()), default=0.0)

    def _cliques(self) -> list[tuple[int, ...]]:
        """Sets of tasks that exclude each other: one grown from each task."""
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
        """How many of these tasks are not run."""
        optional = [i for i in tasks if i in self.grouped]
        return len(optional) - total(self.runs[i] for i in optional)

    def _shift(self) -> None:
        """A schedule that is shifted in time is the same: the first task that is always run begins it."""
        always = next((i for i in self.tasks if i not in self.grouped), None)
        if always is not None:
            self.model.add_constr(self.phase[always] == 0)
            self.model.add_constr(self.stage[always] == 0)

    def _order(self) -> None:
        slack = 2 * STAGES + 3
        for i, j, distance in self.problem.follows:
            absent, later = slack * self.absent(i, j), self.stage[j] + distance - self.stage[i]
            self.model.add_constr(self.phase[j] + later >= self.phase[i] + self.length[i] - absent)
            self.model.add_constr(later >= -1 * absent)

    def apart(self, i: int, j: int, length: Any, slack: Any) -> None:
        """Task i ends before j starts, and j, `length` long, ends before i's next start; or the other way
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


def _value(variable: Any) -> float:
    return variable if isinstance(variable, float) else variable.x
