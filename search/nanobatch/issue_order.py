"""A schedule as a plan: the order in which nano-ops are issued, their layers, and their waits.

Nano-ops of one stream run in order, and data orders most of the others. The remaining pairs that must not
overlap, by resource or by their SMs, get waits. A wait that follows from other orders is left out. At most
three nano-ops run at once, one of each resource.
"""

import itertools
import math
from collections.abc import Sequence

from jaxflow.pipeline.plan import NanoOp, Plan, Target
from search.nanobatch.cyclic import CyclicProblem, CyclicSchedule, Option
from search.nanobatch.layer_tasks import MEMORY_STREAM, Task

Pair = tuple[int, int]  # (i, j): j starts after the end of the last i issued before j
Edges = dict[tuple[int, int], int]  # (i, j) -> rounds r: j of round n + r starts after i of round n has ended


def to_plan(
    name: str,
    tasks: Sequence[Task],
    problem: CyclicProblem,
    found: CyclicSchedule,
    total_sms: int,
    target: Target | None = None,
) -> Plan:
    """Return the plan of a schedule that runs every task."""
    chosen = [option for option in found.chosen if option is not None]
    assert len(chosen) == len(tasks)
    order = issue_order(tasks, problem, found)
    waits = joins(tasks, problem, found, order)
    first = min(found.stages)
    ids = _ids(tasks)
    nano_ops = []
    for at in order:
        task, share = tasks[at], chosen[at].share
        last = tuple(ids[other, tasks[other].chain.ops[-1].name] for other in waits[at])
        for op in task.chain.ops:
            nano_ops.append(
                NanoOp(
                    ids[at, op.name], op.name, task.start, task.stop,
                    stream=task.stream,
                    sms=share if 0 < share < total_sms else None,
                    ahead=first - found.stages[at],
                    waits=last if op is task.chain.ops[0] else (),
                )
            )  # fmt: skip
    return Plan(name, max(task.stop for task in tasks), tuple(nano_ops), target)


def _ids(tasks: Sequence[Task]) -> dict[tuple[int, str], str]:
    pieces = {
        task.chain: sorted(other.start for other in tasks if other.chain is task.chain) for task in tasks
    }
    return {
        (at, op.name): op.name
        if len(pieces[task.chain]) == 1
        else f"{op.name}.{pieces[task.chain].index(task.start)}"
        for at, task in enumerate(tasks)
        for op in task.chain.ops
    }


def issue_order(tasks: Sequence[Task], problem: CyclicProblem, found: CyclicSchedule) -> list[int]:
    """Return the tasks by phase.

    At equal phases the order is: tasks that others depend on; tasks without time, for which the solver keeps
    no stream free; collectives, which wait for earlier work of their stream; attention, which XLA should
    issue early.
    """
    before = {j: set() for j in range(len(tasks))}
    for i, j, distance in problem.follows:
        if found.stages[j] + distance == found.stages[i]:
            before[j].add(i)
    cut = any(task.start for task in tasks)  # an unsplit step keeps the layer's order
    idle = {i for i, option in enumerate(found.chosen) if cut and (option is None or not option.seconds)}
    left, order = set(before), []

    def place(i: int) -> tuple:
        return (
            round(found.phases[i], 6),
            i not in idle,
            not tasks[i].chain.is_network,
            tasks[i].stream != MEMORY_STREAM,
            i,
        )

    while left:
        one = min((i for i in left if not before[i] & left), key=place)
        left.remove(one)
        order.append(one)
    return order


def joins(
    tasks: Sequence[Task], problem: CyclicProblem, found: CyclicSchedule, order: Sequence[int]
) -> list[list[int]]:
    """Return for each task the tasks that it waits for beyond data and stream order."""
    place = {task: at for at, task in enumerate(order)}
    paths = _shortest(_given(tasks, problem, found, order), len(tasks))
    waits: list[list[int]] = [[] for _ in tasks]

    def missing(i: int, j: int) -> bool:
        return paths[i][j] > (place[i] > place[j])

    def wait(i: int, j: int) -> None:
        waits[j].append(i)
        for a, b in itertools.product(range(len(tasks)), repeat=2):
            paths[a][b] = min(paths[a][b], paths[a][i] + (place[i] > place[j]) + paths[j][b])

    def away(i: int, j: int) -> int:
        return (place[j] - place[i]) % len(order)

    def cost(way: Sequence[Pair]) -> tuple:
        """Rank by schedule change, then the fewest waits, then the nearest."""
        late = max((_left(found, i, j, place[i] > place[j]) for i, j in way), default=0.0)
        return late, len(way), sum(away(*pair) for pair in way)

    for i, j in sorted(itertools.permutations(order, 2), key=lambda pair: (away(*pair), pair)):
        if _too_many(problem, found.chosen, (i, j)) and missing(i, j):
            wait(i, j)
    for crowd in itertools.combinations(order, 3):  # keeping two of them apart is enough
        if _too_many(problem, found.chosen, crowd):
            ways = (
                [one for one in ((i, j), (j, i)) if missing(*one)]
                for i, j in itertools.combinations(crowd, 2)
            )
            for i, j in min(ways, key=cost):
                wait(i, j)
    return waits


def _too_many(problem: CyclicProblem, chosen: Sequence[Option | None], crowd: tuple[int, ...]) -> bool:
    """Return whether these tasks never all run at the same time."""
    options = [option for option in (chosen[i] for i in crowd) if option is not None and option.seconds]
    if len(options) < len(crowd):
        return False
    beyond = problem.capacity is not None and sum(option.share for option in options) > problem.capacity
    return beyond or not problem.exclusive.isdisjoint(itertools.permutations(crowd, 2))


def _left(found: CyclicSchedule, i: int, j: int, rounds: int) -> float:
    """Return the share of a period that is left of i when j starts; the solver's tolerance counts as 0."""
    option = found.chosen[i]
    assert option is not None
    return max(0.0, round(found.phases[i] + option.seconds / found.period_s - found.phases[j] - rounds, 4))


def _given(
    tasks: Sequence[Task], problem: CyclicProblem, found: CyclicSchedule, order: Sequence[int]
) -> Edges:
    """Return the orders without waits: data, the cache's readers and appends, and each stream."""
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
    lanes += [
        [i for i in order if tasks[i].stream == stream and tasks[i].chain.computes] for stream in range(3)
    ]
    for lane in lanes:
        for i, j in itertools.permutations(
            lane, 2
        ):  # a chain of collectives begins with a norm, or ends with a collective, in the other lane
            if (
                tasks[j].chain.ops[0].kind == "network"
                if lane is lanes[0]
                else tasks[i].chain.ops[-1].kind != "network"
            ):
                add(i, j, int(place[i] > place[j]))
    for i in lanes[0]:  # a collective follows the earlier work of its stream
        own = [j for j in order if tasks[j].stream == tasks[i].stream and not tasks[j].chain.is_network]
        if own:
            before = [j for j in own if place[j] < place[i]]
            add(before[-1] if before else own[-1], i, int(not before))
    return edges


def _shortest(edges: Edges, count: int) -> list[list[float]]:
    """Return the rounds along the shortest path between any two tasks."""
    paths = [
        [float(edges.get((i, j), math.inf)) if i != j else 0.0 for j in range(count)] for i in range(count)
    ]
    for k, i, j in itertools.product(range(count), repeat=3):
        paths[i][j] = min(paths[i][j], paths[i][k] + paths[k][j])
    return paths
