"""The split points of a step: sets of cuts, the tasks of each set, and an estimate and a bound of its
period.
"""

import itertools
import math
from collections.abc import Sequence

from search.nanobatch.bounds import bound_s, pieces, prices
from search.nanobatch.cyclic import SearchError
from search.nanobatch.layer_tasks import Task, has_side_streams
from search.nanobatch.options import chain_s, task_options
from search.nanobatch.problem import SearchDeadline, SearchProblem

TILE = 128  # rows of a product's tile: cuts are its multiples
_PLACES = 32  # parts of a step between which it may be cut
_GAIN = 0.02  # share of an op's time that an unsplit task must save


def cut_sets(setting: SearchProblem) -> list[tuple[int, ...]]:
    """Return the sets of cuts: at multiples of a tile, or at the places that the problem gives.

    Scattered rows divide among the devices. Raises: SearchError where no set is left.
    """
    if setting.split and setting.nano_batches < 2:
        raise SearchError(
            f"nano_batches={setting.nano_batches} leaves no plan that splits the step: 2 or more"
        )
    tokens, rows = setting.load.tokens, _rows(setting)
    if tokens % rows:
        raise SearchError(f"tokens={tokens} cannot be scattered: only multiples of the {rows} devices")
    places = cut_places(setting)
    least = 1 if setting.split else 0
    sets = [
        cuts for count in range(least, setting.nano_batches) for cuts in itertools.combinations(places, count)
    ]
    if not sets:
        where = (
            f"{', '.join(map(str, setting.places))}" if setting.places else f"a multiple of {_step(setting)}"
        )
        among = f" that divides among {rows} devices" if rows > 1 else ""
        raise SearchError(f"tokens={tokens} has no cut at {where}{among}: fewer nano-batches, or more tokens")
    return sets


def cut_places(setting: SearchProblem) -> list[int]:
    """Return the token counts at which the step may be cut."""
    tokens, rows = setting.load.tokens, _rows(setting)
    step = _step(setting)
    return [place for place in setting.places or range(step, tokens, step) if not place % rows]


def _rows(setting: SearchProblem) -> int:
    """Return the number of devices that rows are scattered over."""
    return setting.shares.profile.tensor_parallel_size if setting.graph.scattered else 1


def _step(setting: SearchProblem) -> int:
    """Return the distance of cuts: tiles, more of them in a large step, and an eighth of a small step."""
    tokens, rows = setting.load.tokens, _rows(setting)
    few = -(-max(1, tokens // 8) // rows) * rows
    return setting.step or (TILE * max(1, tokens // (_PLACES * TILE)) if tokens >= 4 * TILE else few)


def make_tasks(setting: SearchProblem, cuts: Sequence[int]) -> tuple[list[Task], list[tuple[int, ...]]]:
    """Return all tasks that a layer could consist of, and groups of alternative tasks: exactly one of a group
    runs.

    Each range of tokens is in one running task of a chain. A chain may skip cuts. A longer task is left out
    where it saves next to none of the time of its parts.
    """
    load, full, edges = setting.load, setting.capacity, (0, *cuts, setting.load.tokens)
    side_streams = has_side_streams(setting.overlap, setting.graph.scattered)
    tasks, covers = [], []
    for chain in setting.chains:
        first, own = len(tasks), []
        alone = {}
        for count in range(1, len(edges)):
            for a in range(len(edges) - count):
                b = a + count
                start, stop = edges[a], edges[b]
                alone[a, b] = chain_s(setting.shares, chain, load.part(start, stop), full, side_streams)
                parts = min((alone[a, c] + alone[c, b] for c in range(a + 1, b)), default=float("inf"))
                uncut = (
                    count > 1 and chain.is_network and setting.graph.scattered
                )  # all chains cut scattered rows alike
                if alone[a, b] < parts * (1 - _GAIN) and not uncut:
                    own.append((a, b))
                    tasks.append(setting.task(chain, start, stop))
                else:
                    alone[a, b] = parts
        if len(own) > len(edges) - 1:
            covers += [
                tuple(first + at for at, (a, b) in enumerate(own) if a <= piece < b)
                for piece in range(len(edges) - 1)
            ]
    return tasks, covers


def most_promising(
    setting: SearchProblem, sequential_s: float, limit: SearchDeadline
) -> list[tuple[int, ...]]:
    """Return the sets of cuts by estimated period; sets after the time limit
    come last, without an estimate.
    """
    around, _ = setting.in_time(setting.whole, sequential_s)
    return sorted(
        filter(None, cut_sets(setting)),
        key=lambda cuts: (math.inf if limit.passed else estimate_s(around, cuts), cuts),
    )


def least_s(setting: SearchProblem, cuts: Sequence[int]) -> float:
    """Return a lower bound of the period with some of these cuts for each op: by prices, or the joules."""
    found = pieces(setting, cuts)
    return max(bound_s(found, prices(found, setting.capacity)), setting.energy_s(setting.whole))


def estimate_s(setting: SearchProblem, cuts: Sequence[int]) -> float:
    """Return an estimate of the period: memory-bound ops of each nano-batch overlapped with the next one's
    others.
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
        )  # ops without a time on this part, such as chunk attention, take the full device

    guesses = []
    for part_sms in (sms for sms in setting.shares.offered_sms() if 2 * sms <= full):
        guess = 0.0
        for part, other in zip(edges, edges[1:] + edges[:1], strict=True):
            stream, other_stream, main = (
                busy(True, part, part_sms),
                busy(False, other, full - part_sms),
                busy(False, other, full),
            )
            guess += (
                stream if stream >= other_stream else stream + (other_stream - stream) * main / other_stream
            )
        guesses.append(guess)
    return min(guesses, default=0.0)
