"""A schedule as a plan: the order in which nano-ops are issued, their layers, and the joins that the schedule needs.

Nano-ops of one stream run in order, and data orders most of the others. What else must not run together, since it shares
a resource or would need more SMs than there are, is ordered by waits; those that follow from other orders are left out.
"""

import itertools
import math
from collections.abc import Sequence

from jaxflow.pipeline.plan import NanoOp, Plan, Target
from search.cyclic import Option, Problem, Schedule
from search.structure import MEMORY_STREAM, Task

Edges = dict[tuple[int, int], int]  # (i, j) -> rounds r: j of round n + r starts after i of round n has ended


def to_plan(name: str, tasks: Sequence[Task], problem: Problem, found: Schedule, total_sms: int, target: Target | None = None) -> Plan:
    """The plan of a schedule in which every task is run."""
    chosen = [option for option in found.chosen if option is not None]
    assert len(chosen) == len(tasks)
    order = issue_order(tasks, problem, found)
    waits = joins(tasks, problem, found, order)
    first = min(found.stages)
    ids = _ids(tasks)
    nano_ops = []
    for at in order:
        task, share = tasks[at], chosen[at].share
        for op in task.chain.ops:
            nano_ops.append(
                NanoOp(
                    ids[at, op.name], op.name, task.start, task.stop,
                    stream=task.stream,
                    sms=share if 0 < share < total_sms else None,
                    ahead=first - found.stages[at],
                    waits=tuple(ids[other, tasks[other].chain.ops[-1].name] for other in waits[at]) if op is task.chain.ops[0] else (),
                )
            )  # fmt: skip
    return Plan(name, max(task.stop for task in tasks), tuple(nano_ops), target)


def _ids(tasks: Sequence[Task]) -> dict[tuple[int, str], str]:
    pieces = {task.chain: sorted(other.start for other in tasks if other.chain is task.chain) for task in tasks}
    return {
        (at, op.name): op.name if len(pieces[task.chain]) == 1 else f"{op.name}.{pieces[task.chain].index(task.start)}"
        for at, task in enumerate(tasks)
        for op in task.chain.ops
    }


def issue_order(tasks: Sequence[Task], problem: Problem, found: Schedule) -> list[int]:
    """Tasks by phase. Of equal phases: what others depend on; sums over devices, which would wait for what is issued before
    them on their stream; attention, which XLA should issue early."""
    before = {j: set() for j in range(len(tasks))}
    for i, j, distance in problem.follows:
        if found.stages[j] + distance == found.stages[i]:
            before[j].add(i)
    left, order = set(before), []
    while left:
        ready = [i for i in left if not before[i] & left]
        one = min(ready, key=lambda i: (round(found.phases[i], 6), not tasks[i].chain.is_network, tasks[i].stream != MEMORY_STREAM, i))
        left.remove(one)
        order.append(one)
    return order


def joins(tasks: Sequence[Task], problem: Problem, found: Schedule, order: Sequence[int]) -> list[list[int]]:
    """For each task, the tasks it waits for beyond what data and streams order."""
    place = {task: at for at, task in enumerate(order)}
    paths = _shortest(_given(tasks, problem, found, order), len(tasks))
    waits: list[list[int]] = [[] for _ in tasks]
    wanted = []
    for i, j in itertools.permutations(order, 2):
        if _must_be_apart(problem, found.chosen, i, j):
            rounds = int(place[i] > place[j])
            wanted.append(((place[j] - place[i]) % len(order), i, j, rounds))
    for _, i, j, rounds in sorted(wanted):
        if paths[i][j] > rounds:
            waits[j].append(i)
            for a, b in itertools.product(range(len(tasks)), repeat=2):
                paths[a][b] = min(paths[a][b], paths[a][i] + rounds + paths[j][b])
    return waits


def _must_be_apart(problem: Problem, chosen: Sequence[Option | None], i: int, j: int) -> bool:
    one, other = chosen[i], chosen[j]
    if one is None or other is None or not one.seconds or not other.seconds:
        return False
    beyond = problem.capacity is not None and one.share + other.share > problem.capacity
    return beyond or bool({(i, j), (j, i)} & problem.exclusive)


def _given(tasks: Sequence[Task], problem: Problem, found: Schedule, order: Sequence[int]) -> Edges:
    """What the executor orders without waits: data, a cache's readers and appends, and each stream."""
    edges: Edges = {}

    def add(i: int, j: int, rounds: int) -> None:
        edges[i, j] = min(rounds, edges.get((i, j), rounds))

    for i, j, distance in problem.follows:
        add(i, j, found.stages[j] + distance - found.stages[i])
    place = {task: at for at, task in enumerate(order)}
    for i, j in itertools.permutations(range(len(tasks)), 2):
        if tasks[i].chain.is_append and tasks[j].chain.is_attention:
            later = found.stages[j] - found.stages[i]
            if (later, place[j]) > (0, place[i]):
                add(i, j, later)
            else:
                add(j, i, -later)
    lanes = [[i for i in order if tasks[i].chain.is_network]]
    lanes += [[i for i in order if tasks[i].stream == stream and tasks[i].chain.computes] for stream in range(3)]
    for lane in lanes:
        for at, i in enumerate(lane):
            add(i, lane[(at + 1) % len(lane)], int(at + 1 == len(lane)))
    for i in lanes[0]:  # a sum over devices follows what was issued on its stream before it
        own = [j for j in order if tasks[j].stream == tasks[i].stream and not tasks[j].chain.is_network]
        if own:
            before = [j for j in own if place[j] < place[i]]
            add(before[-1] if before else own[-1], i, int(not before))
    return edges


def _shortest(edges: Edges, count: int) -> list[list[float]]:
    """Rounds along the shortest path between any two tasks."""
    paths = [[float(edges.get((i, j), math.inf)) if i != j else 0.0 for j in range(count)] for i in range(count)]
    for k, i, j in itertools.product(range(count), repeat=3):
        paths[i][j] = min(paths[i][j], paths[i][k] + paths[k][j])
    return paths
