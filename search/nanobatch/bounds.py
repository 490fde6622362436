"""A lower bound of the period of a layer, for all cuts of each op and all orders.

Tasks of one resource never overlap, and concurrent tasks fit on the SMs. So a period is a sequence of sets of
tasks that may run together. The bound gives each second of a task a price, by its resource and its SMs, so
that no such set costs more than 1 a second. Then a period has at least as many seconds as its tasks cost. A
linear program finds the prices with the largest bound (the dual of the relaxation with preemption).
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from search.nanobatch.cyclic import Option, check_solver, mip, total
from search.nanobatch.layer_tasks import Task
from search.nanobatch.options import task_options, wave_filling_sms
from search.nanobatch.problem import SearchProblem

Span = tuple[int, int]
Prices = Mapping[tuple[str, int], float]  # of a second, by resource and SMs
_UNIT = 1e-3  # seconds: keeps the coefficients of the program near 1


class Piece(NamedTuple):
    """A chain on a range of tokens, with all options that stage II may offer."""

    task: Task
    options: tuple[Option, ...]


def pieces(setting: SearchProblem, cuts: Sequence[int]) -> list[dict[Span, Piece]]:
    """Return the pieces of each chain between any two of these cuts."""
    load, shares, full = setting.load, setting.shares, setting.capacity
    spans = list(itertools.combinations((0, *cuts, load.tokens), 2))
    tasks = [{span: setting.task(chain, *span) for span in spans} for chain in setting.chains]
    beside = "memory" in setting.overlap  # products give SMs to attention
    known: dict[tuple, tuple[int, ...]] = {}

    def kind(task: Task) -> tuple:
        """Return what a task's time depends on."""
        tokens = load.part(task.start, task.stop) if task.chain.is_attention else task.stop - task.start
        return task.chain.names, task.resource, tokens

    for task in (task for own in tasks for task in own.values()):
        if beside and kind(task) not in known:
            known[kind(task)] = wave_filling_sms(shares, task, load.part(task.start, task.stop))
    left = {full - sms for own in known.values() for sms in own}
    options: dict[tuple, tuple[Option, ...]] = {}

    def offered(task: Task) -> tuple[Option, ...]:
        if kind(task) not in options:
            extra = known.get(kind(task), ()) if task.resource == "compute" else left
            step = load.part(task.start, task.stop)
            options[kind(task)] = task_options(shares, task, step, full, extra)
        return options[kind(task)]

    return [{span: Piece(task, offered(task)) for span, task in own.items()} for own in tasks]


def prices(found: Sequence[Mapping[Span, Piece]], capacity: int) -> Prices:
    """Return the prices with the largest bound for these pieces.

    A price does not fall with more SMs, so a set of tasks is only tested with the most SMs that fit.
    """
    check_solver()
    levels: dict[str, set[int]] = {}
    for piece in (piece for own in found for piece in own.values()):
        levels.setdefault(piece.task.resource, {0}).update(option.share for option in piece.options)
    model: Any = mip.Model(sense=mip.MAXIMIZE, solver_name=mip.HIGHS)
    model.verbose, model.threads = 0, 1
    price = {(name, sms): model.add_var(lb=0) for name, own in levels.items() for sms in sorted(own)}
    for name, own in levels.items():
        for fewer, more in itertools.pairwise(sorted(own)):
            model.add_constr(price[name, fewer] <= price[name, more])
    first, *others = sorted(levels, key=lambda name: -len(levels[name]))
    for shares in itertools.product(*(sorted(levels[name]) for name in others)):
        if sum(shares) <= capacity:
            most = max(sms for sms in levels[first] if sms + sum(shares) <= capacity)
            together = ((first, most), *zip(others, shares, strict=True))
            model.add_constr(total(price[one] for one in together) <= 1)
    ends = []
    for own in found:
        at = {place: model.add_var(lb=0) for place in sorted({place for span in own for place in span})}
        model.add_constr(at[min(at)] == 0)
        for (start, stop), piece in own.items():
            for option in piece.options:
                cost = price[piece.task.resource, option.share] * (option.seconds / _UNIT)
                model.add_constr(at[stop] - at[start] <= cost)
        ends.append(at[max(at)])
    model.objective = total(ends)
    model.optimize()
    return {one: max(0.0, variable.x) for one, variable in price.items()}


def cost_s(piece: Piece, given: Prices) -> float:
    """Return the least cost of a piece; SMs without a price have that of the next fewer."""
    name = piece.task.resource
    levels = sorted(sms for own, sms in given if own == name)
    return min(
        option.seconds * given[name, max((sms for sms in levels if sms <= option.share), default=0)]
        if levels
        else 0.0
        for option in piece.options
    )


def bound_s(found: Sequence[Mapping[Span, Piece]], given: Prices) -> float:
    """Return the bound by these prices: each chain in its cheapest cut."""
    costs: dict[tuple[str, tuple[Option, ...]], float] = {}
    whole = 0.0
    for own in found:
        until = {0: 0.0}
        for (start, stop), piece in sorted(own.items(), key=lambda item: item[0][1]):
            key = piece.task.resource, piece.options
            if key not in costs:
                costs[key] = cost_s(piece, given)
            took = until[start] + costs[key]
            until[stop] = min(took, until.get(stop, took))
        whole += until[max(until)]
    return whole
