"""The shares of a device that the tasks of a cyclic schedule take: together at most its capacity, ΣR ≤ 1
(NanoFlow's stage II).
"""

import collections
import itertools
from collections.abc import Iterable
from typing import Any, Protocol

import mip


class Tasks(Protocol):
    """What of a schedule's program (`search.nanobatch.cyclic.Milp`) the shares are about. Phases and lengths are parts
    of a period.
    """

    model: Any
    problem: Any  # `search.nanobatch.cyclic.Problem`
    tasks: range
    unit: float  # seconds, of which the rate is periods
    top: float  # the highest rate
    pick: list[list]  # whether a task takes an option
    rates: list[list]  # the rate where it does, else 0
    phase: list
    length: list

    def absent(self, *tasks: int) -> Any:
        """How many of these tasks are not run."""
        ...

    def apart(self, i: int, j: int, length: Any, slack: Any) -> None:
        """Task i ends before j starts, and j, `length` long, ends before i's next start, unless the slack is
        1 or more.
        """
        ...


def share(m: Tasks, capacity: int) -> None:
    """Shares of what runs at the same time add up to the capacity.

    Tasks of which each two overlap have a moment in common, unless three of them cover the whole period: it
    is enough to know of pairs who overlaps. Where three may cover it, or four be too many, it is asked what
    runs when a task starts.
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
    ]  # of a period
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
    """Of each crowd, tasks that may be too many together, two do not overlap, or less is taken than the
    `most`.
    """
    beside: dict[tuple[int, ...], Any] = {}  # whether the two may overlap
    for i, j in sorted({pair for crowd in crowds for pair in itertools.combinations(crowd, 2)}):
        beside[i, j] = m.model.add_var(f"beside{i}.{j}", var_type=mip.BINARY)
        m.apart(i, j, m.length[j], m.absent(i, j) + beside[i, j])
    for crowd in crowds:
        less = total(1 - beside[pair] for pair in itertools.combinations(crowd, 2))
        over = sum(most[i] for i in crowd) - capacity
        m.model.add_constr(total(shares[i] for i in crowd) <= capacity + over * less)


def _at_starts(
    m: Tasks, capacity: int, shares: list[Any], most: list[int], pairs: list[tuple[int, int]]
) -> None:
    """What a task takes fits beside what others do that run when it starts: the most is taken at some start."""
    beside: dict[int, list] = collections.defaultdict(
        list
    )  # of a task: what each other one takes when it starts
    later = {}  # whether j starts after i in the same period, not the next
    for i, j in pairs:
        later[i, j] = m.model.add_var(f"later{i}.{j}", var_type=mip.BINARY)
        after, slack = m.phase[j] - m.phase[i] + 1 - later[i, j], []
        for one, other in ((i, j), (j, i)):
            runs, share = (
                m.model.add_var(f"on{one}.{other}", var_type=mip.BINARY),
                m.model.add_var(f"share{one}.{other}", lb=0),
            )
            m.model.add_constr(share >= shares[other] - most[other] * (1 - runs))
            beside[one].append(share)
            slack.append(runs + 2 * m.absent(i, j))
        for least, longest in ((0, 1), (m.length[i] - slack[1], 1 - m.length[j] + slack[0])):
            m.model.add_constr(after >= least)
            m.model.add_constr(after <= longest)
    for i, j, k in itertools.combinations(m.tasks, 3):
        if {
            (i, j),
            (i, k),
            (j, k),
        } <= later.keys():  # an order, also of tasks that start at once: the last of them counts all
            m.model.add_constr(later[i, k] <= later[i, j] + later[j, k])
            m.model.add_constr(later[i, k] >= later[i, j] + later[j, k] - 1)
    for i, others in beside.items():
        m.model.add_constr(shares[i] + total(others) <= capacity)


def total(terms: Iterable[Any]) -> Any:
    """A linear expression; the library's types do not know its arithmetic."""
    return mip.xsum(terms)
