"""Where a step may be cut: the sets of cuts, the tasks that each could make of a layer, a guess at its period
and a bound on it.
"""

import collections
import itertools
import math
from collections.abc import Sequence

from search.nanobatch.cyclic import SearchError
from search.nanobatch.layer_tasks import Chain, Task, chains, has_side_streams, make_task, repeated_layer
from search.nanobatch.options import chain_s, task_options
from search.nanobatch.problem import Setting
from search.time_budget import Limit

TILE = 128  # rows that a product computes at once: cuts are multiples of it
_GAIN = 0.02  # of an op's time: what must be saved by cutting it less often


def cut_sets(setting: Setting) -> list[tuple[int, ...]]:
    """Where the step may be cut: at multiples of a tile, or where the setting says; the tile next to the last
    decode is among them.

    Scattered rows divide among the devices. Raises: SearchError for a step, or one that is to be cut, that
    leaves none.
    """
    if setting.split and setting.nano_batches < 2:
        raise SearchError(
            f"nano_batches={setting.nano_batches} leaves no plan that splits the step: 2 or more"
        )
    tokens, rows = (
        setting.load.tokens,
        setting.shares.profile.tensor_parallel_size if setting.graph.scattered else 1,
    )
    if tokens % rows:
        raise SearchError(f"tokens={tokens} cannot be scattered: only multiples of the {rows} devices")
    step = setting.step or (TILE if tokens >= 4 * TILE else -(-max(1, tokens // 8) // rows) * rows)
    places = [place for place in setting.places or range(step, tokens, step) if not place % rows]
    least = 1 if setting.split else 0
    sets = [
        cuts for count in range(least, setting.nano_batches) for cuts in itertools.combinations(places, count)
    ]
    if not sets:
        where = f"{', '.join(map(str, setting.places))}" if setting.places else f"a multiple of {step}"
        among = f" that divides among {rows} devices" if rows > 1 else ""
        raise SearchError(f"tokens={tokens} has no cut at {where}{among}: fewer nano-batches, or more tokens")
    return sets


def make_tasks(setting: Setting, cuts: Sequence[int]) -> tuple[list[Task], list[tuple[int, ...]]]:
    """All tasks that a layer could be made of, and groups of which one is run: each piece of tokens in one
    task of a chain.

    A chain may leave out cuts. A longer task that saves next to nothing of its parts' time is left out.
    """
    load, rates = setting.load, None if setting.device is None else setting.device.rates
    dtype, full = setting.shares.profile.dtype, setting.shares.profile.total_sms
    if rates is not None and dtype not in rates.flops_per_s:
        rates = None
    edges, moe = (0, *cuts, load.tokens), any(op.experts for op in setting.graph.layers[-1])
    aside = has_side_streams(setting.overlap, setting.graph.scattered)
    tasks, covers = [], []
    for chain in chains(
        repeated_layer(setting.graph), setting.quantized and aside
    ):  # on one stream no value of two arrays leaves it
        first, own = len(tasks), []
        alone = {}
        for count in range(1, len(edges)):
            for a in range(len(edges) - count):
                b = a + count
                start, stop = edges[a], edges[b]
                alone[a, b] = chain_s(setting.shares, chain, load.part(start, stop), full, aside)
                parts = min((alone[a, c] + alone[c, b] for c in range(a + 1, b)), default=float("inf"))
                uncut = (
                    count > 1 and chain.is_network and setting.graph.scattered
                )  # scattered rows are cut alike everywhere
                if alone[a, b] < parts * (1 - _GAIN) and not uncut:
                    own.append((a, b))
                    tasks.append(
                        make_task(
                            chain,
                            start,
                            stop,
                            load,
                            rates,
                            dtype,
                            setting.overlap,
                            moe,
                            setting.graph.scattered,
                        )
                    )
                else:
                    alone[a, b] = parts
        if len(own) > len(edges) - 1:
            covers += [
                tuple(first + at for at, (a, b) in enumerate(own) if a <= piece < b)
                for piece in range(len(edges) - 1)
            ]
    return tasks, covers


def most_promising(setting: Setting, sequential_s: float, limit: Limit) -> list[tuple[int, ...]]:
    """Sets of cuts, first those with which a guess at the period is shortest, then those for which no time is
    left to guess.
    """
    around, _ = setting.in_time((), sequential_s)
    return sorted(
        filter(None, cut_sets(setting)),
        key=lambda cuts: (math.inf if limit.passed else estimate_s(around, cuts), cuts),
    )


def least_s(setting: Setting, cuts: Sequence[int]) -> float:
    """A bound on every period with these cuts: the busiest resource's ops at their own speeds, or the joules."""
    tasks, covers = make_tasks(setting, cuts)
    optional = {at for group in covers for at in group}
    busy: dict[str, float] = collections.defaultdict(float)
    chosen: dict[Chain, list[Task]] = collections.defaultdict(list)
    for at, task in enumerate(tasks):
        if at in optional:
            chosen[task.chain].append(task)
        else:
            busy[task.resource] += _alone_s(setting, task.chain, task.start, task.stop)
    for own in chosen.values():
        resources = {task.resource for task in own}
        if len(resources) == 1:
            busy[resources.pop()] += _shortest_s(setting, own)
    return max(*busy.values(), setting.energy_s([(0, setting.load.tokens)]))


def estimate_s(setting: Setting, cuts: Sequence[int]) -> float:
    """A guess at the period, by which cuts are tried: each nano-batch's memory-bound ops beside the next
    one's others.
    """
    tasks, full = (
        [task for task in make_tasks(setting, cuts)[0] if task.resource != "network"],
        setting.shares.profile.total_sms,
    )
    edges = setting.edges(cuts)

    def busy(memory: bool, part: tuple[int, int], sms: int) -> float:
        step = setting.load.part(*part)
        own = [
            task
            for task in tasks
            if (task.start, task.stop) == part and (task.resource == "memory") == memory
        ]
        ways = [
            [(o.share > sms, o.seconds) for o in task_options(setting.shares, task, step, 99)] for task in own
        ]
        return sum(
            min(one)[1] for one in ways
        )  # on the whole device what was timed on no such part, as chunk attention

    guesses = []
    for few in (sms for sms in setting.shares.offered_sms() if 2 * sms <= full):
        guess = 0.0
        for part, other in zip(edges, edges[1:] + edges[:1], strict=True):
            stream, beside, alone = (
                busy(True, part, few),
                busy(False, other, full - few),
                busy(False, other, full),
            )
            guess += stream if stream >= beside else stream + (beside - stream) * alone / beside
        guesses.append(guess)
    return min(guesses, default=0.0)


def _shortest_s(setting: Setting, tasks: Sequence[Task]) -> float:
    """Of the ways to run a chain on all tokens, each in some of these tasks; that uncut is none of them where
    it takes longer.
    """
    until = {0: 0.0}
    for task in sorted(tasks, key=lambda task: task.start):
        took = until[task.start] + _alone_s(setting, task.chain, task.start, task.stop)
        until[task.stop] = min(took, until.get(task.stop, math.inf))
    return until[setting.load.tokens]


def _alone_s(setting: Setting, chain: Chain, start: int, stop: int) -> float:
    return chain_s(setting.shares, chain, setting.load.part(start, stop), setting.shares.profile.total_sms)
