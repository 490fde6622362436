"""A list schedule of a layer's tasks: a quick estimate of the period of a structure, before the MILP.

Tasks start as soon as they may, in the order of a priority. Several layers run, as in a software pipeline,
and the last layers give the period. The rank of a task is its layer plus a random number, drawn a few times.
"""

import heapq
import random

from search.nanobatch.cyclic import CyclicProblem

LAYERS, MEASURED = 14, 6
_SPREADS = (0.0, 0.3, 0.6, 1.0, 1.0, 1.0)  # of the random numbers, in layers


def list_period_s(problem: CyclicProblem, first: frozenset[int] = frozenset()) -> float:
    """Return the shortest period of a few list schedules, with each task at its fastest option.

    first: the tasks that start before others that are ready at the same time.
    """
    drawn, count = random.Random(0), len(problem.options)
    ranks = ([spread * drawn.random() for _ in range(count)] for spread in _SPREADS)
    return max(problem.least_s, min(_period_s(problem, first, rank) for rank in ranks))


def _period_s(problem: CyclicProblem, first: frozenset[int], rank: list[float]) -> float:
    seconds = [min(option.seconds for option in own) for own in problem.options]
    tasks = range(len(seconds))
    never = {(i, j) for i, j in problem.exclusive} | {(j, i) for i, j in problem.exclusive}
    blocked = [{i for i in tasks if i == j or (i, j) in never | problem.outside} for j in tasks]
    after: list[list[tuple[int, int]]] = [[] for _ in tasks]
    for i, j, distance in problem.follows:
        after[i].append((j, distance))
    open_ = {
        (layer, j): sum(j == to and distance <= layer for _, to, distance in problem.follows)
        for layer in range(LAYERS)
        for j in tasks
    }
    ready = {run for run, number in open_.items() if not number}
    running: list[tuple[float, int, int]] = []
    now, left, ends = 0.0, len(open_), [0.0] * LAYERS
    while left:
        busy = {task for _, _, task in running}
        for layer, task in sorted(
            ready, key=lambda run: (run[1] not in first, run[0] + rank[run[1]], run[1])
        ):
            if not blocked[task] & busy:
                heapq.heappush(running, (now + seconds[task], layer, task))
                busy.add(task)
                ready.remove((layer, task))
        now, layer, task = heapq.heappop(running)
        left, ends[layer] = left - 1, max(ends[layer], now)
        for other, distance in after[task]:
            run = layer + distance, other
            if run in open_:
                open_[run] -= 1
                if not open_[run]:
                    ready.add(run)
    return (ends[-1] - ends[-1 - MEASURED]) / MEASURED
