"""NanoFlow's two-stage search (§4.1): which nano-batches, in which order, with which share of the device.

Stage I takes one set of cuts of the step's tokens and finds which ops use them and in what order, each op at its speed
alone; only ops bound by different resources run together. Stage II keeps the nano-ops and gives each a share of the SMs,
and the times that go with it. Cuts are tried in the order of what stage I could reach with them at best; stage II's best
plan so far ends the search where no other cut can beat it. The best cut's plan is then offered more shares: more of those
that were timed, and those that fill the waves of its nano-batches' products.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence

from jaxflow.pipeline.plan import Plan, Target
from search.cyclic import Option, Problem, Schedule, SearchError, solve
from search.issue import to_plan
from search.setting import Setting
from search.structure import Chain, Task, apart, chains, follows, has_side_streams, make_task, repeated_layer, starts_outside

TILE = 128  # rows that a product computes at once: cuts are multiples of it
_ENOUGH = 0.005  # a plan is taken where no other can be so much shorter
_GAIN = 0.02  # of an op's time: what must be saved by cutting it less often
_STAGE_I_S = 8.0
_STAGE_II_S = 40.0


@dataclasses.dataclass(frozen=True)
class Found:
    """The best plan, its period, and that below which no plan of the structures tried, and no cut left out, can be."""

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


def cut_sets(setting: Setting) -> list[tuple[int, ...]]:
    """Where the step may be cut: at multiples of a tile, or where the setting says; the tile next to the last decode is among them."""
    if setting.split and setting.nano_batches < 2:
        raise SearchError(f"nano_batches={setting.nano_batches} leaves no plan that splits the step: 2 or more")
    tokens = setting.load.tokens
    step = setting.step or (TILE if tokens >= 4 * TILE else max(1, tokens // 8))
    places = setting.places or range(step, tokens, step)
    least = 1 if setting.split else 0
    sets = [cuts for count in range(least, setting.nano_batches) for cuts in itertools.combinations(places, count)]
    if not sets:
        raise SearchError(f"tokens={tokens} has no cut at a multiple of {step}: fewer nano-batches, or more tokens")
    return sets


def make_tasks(setting: Setting, cuts: Sequence[int]) -> tuple[list[Task], list[tuple[int, ...]]]:
    """All tasks that a layer could be made of, and groups of which one is run: each piece of tokens in one task of a chain.

    A chain may leave out cuts. A longer task that saves next to nothing of its parts' time is left out.
    """
    load, rates = setting.load, None if setting.device is None else setting.device.rates
    dtype, full = setting.shares.profile.dtype, setting.shares.profile.total_sms
    if rates is not None and dtype not in rates.flops_per_s:
        rates = None
    edges, moe = (0, *cuts, load.tokens), any(op.experts for op in setting.graph.layers[-1])
    aside = has_side_streams(setting.overlap, setting.graph.scattered)
    tasks, covers = [], []
    for chain in chains(repeated_layer(setting.graph), setting.quantized and aside):  # on one stream no value of two arrays leaves it
        first, own = len(tasks), []
        alone = {}
        for count in range(1, len(edges)):
            for a in range(len(edges) - count):
                b = a + count
                start, stop = edges[a], edges[b]
                alone[a, b] = setting.shares.chain(chain, load.part(start, stop), full, aside)
                parts = min((alone[a, c] + alone[c, b] for c in range(a + 1, b)), default=float("inf"))
                uncut = count > 1 and chain.is_network and setting.graph.scattered  # scattered rows are cut alike everywhere
                if alone[a, b] < parts * (1 - _GAIN) and not uncut:
                    own.append((a, b))
                    tasks.append(make_task(chain, start, stop, load, rates, dtype, setting.overlap, moe, setting.graph.scattered))
                else:
                    alone[a, b] = parts
        if len(own) > len(edges) - 1:
            covers += [tuple(first + at for at, (a, b) in enumerate(own) if a <= piece < b) for piece in range(len(edges) - 1)]
    return tasks, covers


def make_problem(tasks: Sequence[Task], options: Sequence[tuple[Option, ...]], **rest) -> Problem:
    """The problem of these tasks; those that take no time exclude nobody."""
    timed = [max(option.seconds for option in own) > 0 for own in options]
    same = {
        (i, j) for i, j in itertools.combinations(range(len(tasks)), 2) if tasks[i].chain is tasks[j].chain and tasks[i].meets(tasks[j])
    }
    pairs = [(i, j) for i, j in itertools.permutations(range(len(tasks)), 2) if timed[i] and timed[j] and not {(i, j), (j, i)} & same]
    exclusive = frozenset((i, j) for i, j in pairs if i < j and apart(tasks[i], tasks[j]))
    outside = frozenset((i, j) for i, j in pairs if starts_outside(tasks[i], tasks[j]) and not {(i, j), (j, i)} & exclusive)
    return Problem(tuple(options), follows(tasks), exclusive, outside, **rest)


def stage_one(setting: Setting, cuts: Sequence[int], time_limit_s: float) -> tuple[list[Task], Schedule]:
    """The tasks of the best structure with these cuts, and its schedule at the ops' own speeds."""
    tasks, covers = make_tasks(setting, cuts)
    full = setting.shares.profile.total_sms
    options = [(Option(0, setting.shares.task(task, setting.load.part(task.start, task.stop), full)),) for task in tasks]
    least = setting.energy_s([(0, setting.load.tokens)])
    found = solve(make_problem(tasks, options, covers=tuple(covers), least_s=least), time_limit_s)
    return [task for task, option in zip(tasks, found.chosen, strict=True) if option is not None], found


def stage_two(setting: Setting, tasks: Sequence[Task], most_s: float | None, time_limit_s: float) -> tuple[Problem, Schedule]:
    """Shares for the tasks of a structure. Raises: SearchError if no period is at most `most_s`."""
    full = setting.shares.profile.total_sms
    alone = len({task.resource for task in tasks}) == 1  # nothing to share the device with
    steps, most = [setting.load.part(task.start, task.stop) for task in tasks], 0 if alone else setting.most_shares
    filling = [
        () if alone or not setting.full_waves else setting.shares.filling(task, step) for task, step in zip(tasks, steps, strict=True)
    ]
    left = {full - sms for own in filling for sms in own}  # beside products whose waves are full
    options = [
        setting.shares.options(task, step, most, own if task.resource == "compute" else left)
        for task, step, own in zip(tasks, steps, filling, strict=True)
    ]
    parts = sorted({(task.start, task.stop) for task in tasks if "qkv" in task.chain.names})
    problem = make_problem(tasks, options, capacity=full, least_s=setting.energy_s(parts), most_s=most_s)
    return problem, solve(problem, time_limit_s)


def least_s(setting: Setting, cuts: Sequence[int]) -> float:
    """A bound on every period with these cuts: the busiest resource's ops at their own speeds, or the joules."""
    tasks, covers = make_tasks(setting, cuts)
    optional = {at for group in covers for at in group}
    busy: dict[str, float] = collections.defaultdict(float)
    chosen = collections.defaultdict(set)
    for at, task in enumerate(tasks):
        if at in optional:
            chosen[task.chain].add(task.resource)
        else:
            busy[task.resource] += _alone_s(setting, task.chain, task.start, task.stop)
    for chain, resources in chosen.items():
        if len(resources) == 1:  # uncut is the shortest way
            busy[resources.pop()] += _alone_s(setting, chain, 0, setting.load.tokens)
    return max(*busy.values(), setting.energy_s([(0, setting.load.tokens)]))


def estimate_s(setting: Setting, cuts: Sequence[int]) -> float:
    """A guess at the period, by which cuts are tried: each nano-batch's memory-bound ops beside the next one's others."""
    tasks, full = [task for task in make_tasks(setting, cuts)[0] if task.resource != "network"], setting.shares.profile.total_sms
    edges = setting.edges(cuts)

    def busy(memory: bool, part: tuple[int, int], sms: int) -> float:
        step = setting.load.part(*part)
        own = [task for task in tasks if (task.start, task.stop) == part and (task.resource == "memory") == memory]
        ways = [[(o.share > sms, o.seconds) for o in setting.shares.options(task, step, 99)] for task in own]
        return sum(min(one)[1] for one in ways)  # on the whole device what was timed on no such part, as chunk attention

    guesses = []
    for few in (sms for sms in setting.shares.sizes() if 2 * sms <= full):
        guess = 0.0
        for part, other in zip(edges, edges[1:] + edges[:1], strict=True):
            stream, beside, alone = busy(True, part, few), busy(False, other, full - few), busy(False, other, full)
            guess += stream if stream >= beside else stream + (beside - stream) * alone / beside
        guesses.append(guess)
    return min(guesses, default=0.0)


def _alone_s(setting: Setting, chain: Chain, start: int, stop: int) -> float:
    return setting.shares.chain(chain, setting.load.part(start, stop), setting.shares.profile.total_sms)


@dataclasses.dataclass(frozen=True)
class _Limit:
    """When a search is to end, by a clock in seconds."""

    stop: float
    clock: Callable[[], float]

    @property
    def passed(self) -> bool:
        return self.clock() > self.stop

    def most(self, seconds: float) -> float:
        """So long, or what is left; a second for what is begun all the same."""
        return max(1.0, min(seconds, self.stop - self.clock()))


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

    When the time is over, nothing is begun but what the first answer needs. clock: is read for the time, in seconds.

    Raises: SearchError naming what leaves no plan.
    """
    limit = _Limit(clock() + time_limit_s, clock)
    sequential = _sequential(setting, target, limit)
    best = None if setting.split else sequential
    sets = [cuts for cuts in cut_sets(setting) if cuts]
    around, _ = setting.in_time((), sequential.period_s)
    sets.sort(key=lambda cuts: (math.inf if limit.passed else estimate_s(around, cuts), cuts))
    left, tried = [sequential.bound_s] if not setting.split else [], 0
    for cuts in sets:
        most_s = best and best.period_s * (1 - _ENOUGH)
        if most_s is not None and ((least := least_s(setting.in_time(cuts, most_s)[0], cuts)) >= most_s or limit.passed):
            left.append(least)
            continue
        tried += 1
        try:
            found = _solve(setting, cuts, name, target, most_s, sequential.period_s, limit)
            left.append(found.bound_s)
            best = found
            say(f"cuts {cuts}: {1e6 * found.period_s:.1f} us a layer, at most {100 * found.gap:.1f} % above the best of this structure")
        except SearchError as error:
            if best is None:
                raise
            unknown = "time_limit" in str(error)
            left.append(least_s(setting.in_time(cuts, best.period_s)[0], cuts) if unknown else best.period_s * (1 - _ENOUGH))
            say(f"cuts {cuts}: nothing shorter")
    assert best is not None
    finer = dataclasses.replace(setting, most_shares=2 * setting.most_shares)
    wider = [("finer shares", finer)] if len(setting.shares.sizes()) > 2 * setting.most_shares + 1 else []
    waves = setting.shares.knows_waves and "memory" in setting.overlap
    wider += [("full waves", dataclasses.replace(finer, full_waves=True))] if waves else []
    for what, offered in wider:
        if not best.cuts or limit.passed:
            break
        with contextlib.suppress(SearchError):
            found = _solve(offered, best.cuts, name, target, best.period_s, sequential.period_s, limit)
            left.append(found.bound_s)
            if found.period_s < best.period_s:  # the solver was held to it at another clock than that which it settles at
                best = found
                say(f"{what}: {1e6 * best.period_s:.1f} us a layer")
    return dataclasses.replace(best, bound_s=min(best.period_s, *left), sequential_s=sequential.period_s, tried=tried, cut_sets=len(sets))


def _sequential(setting: Setting, target: Target | None, limit: _Limit) -> Found:
    """Every op on all tokens, one after the other."""
    whole, (part, governor) = dataclasses.replace(setting, overlap=(), nano_batches=1, split=False), (setting.edges(()), setting.governor)
    if governor is not None:
        full, step, ops = setting.shares.profile.total_sms, setting.load.part(*part[0]), repeated_layer(setting.graph)
        clock = governor.settle(lambda hz: sum(setting.shares.at(hz).seconds(op, step, full) for op in ops), setting.work(part))
        whole = dataclasses.replace(whole, shares=setting.shares.at(clock))
    return _stages(whole, (), "sequential", target, None, limit)


def _solve(
    setting: Setting, cuts: tuple[int, ...], name: str, target: Target | None, most_s: float | None, sequential_s: float, limit: _Limit
) -> Found:
    """Both stages for one set of cuts, at the clock at which its joules fit in what is to be beaten; then at that which it settles at."""
    setting, clock = setting.in_time(cuts, most_s or sequential_s)
    found = _stages(setting, cuts, name, target, most_s, limit)
    settled = setting.settled_s(cuts, found.period_s, clock) / found.period_s
    return dataclasses.replace(
        found, period_s=found.period_s * settled, bound_s=found.bound_s * settled, stage_one_s=found.stage_one_s * settled
    )


def _stages(setting: Setting, cuts: tuple[int, ...], name: str, target: Target | None, most_s: float | None, limit: _Limit) -> Found:
    tasks, one = stage_one(setting, cuts, limit.most(_STAGE_I_S))
    if most_s is not None and limit.passed:
        raise SearchError(f"the time_limit passed between the stages of cuts {cuts}")
    problem, two = stage_two(setting, tasks, most_s, limit.most(_STAGE_II_S))
    plan = to_plan(name, tasks, problem, two, setting.shares.profile.total_sms, target)
    return Found(plan, two.period_s, two.bound_s, one.period_s, two.period_s, cuts)
