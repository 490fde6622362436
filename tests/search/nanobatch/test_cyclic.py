"""The scheduler's optimum equals that of brute force on small problems."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.nanobatch.cyclic import STAGES, CyclicMilp, CyclicProblem, Option, SearchError, one_by_one, solve

LIMIT = 60.0


@functools.cache
def orders(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return every order of starts and ends of n tasks around a period. Task 0 starts first.

    Events 0 to n-1 are starts, and events n to 2n-1 are ends. Returns (events [orders, 2n], running tasks
    between an event and the next [orders, n, 2n], tasks that end in the next period [orders, n], periods that
    j must come after i to start after its end [orders, i, j]).
    """
    events = np.array([(0, *rest) for rest in itertools.permutations(range(1, 2 * n))])
    at, now = np.argsort(events, 1), np.arange(2 * n)
    starts, ends = at[:, :n], at[:, n:]
    wraps = ends < starts
    runs = (starts[..., None] <= now) ^ (ends[..., None] <= now) ^ wraps[..., None]
    return events, runs, wraps, wraps[..., None].astype(int) + (ends[:, :, None] > starts[:, None, :])


def no_gain(w: np.ndarray) -> np.ndarray:
    """Return True for each system x_j - x_i >= w[:, i, j] that has a solution.

    A system has one if it has no positive cycle (Floyd and Warshall).
    """
    for k in range(w.shape[1]):
        w = np.maximum(w, w[:, :, k : k + 1] + w[:, k : k + 1, :])
    return np.trace(w, axis1=1, axis2=2) <= 1e-9


def allowed(problem: CyclicProblem, tasks: tuple[int, ...], shares: list[int]) -> np.ndarray:
    """Return True for each order of these tasks that keeps all constraints, for any times."""
    n, of = len(tasks), {task: at for at, task in enumerate(tasks)}
    events, runs, _, later = orders(n)
    good = np.full(len(events), True)
    if problem.capacity is not None:
        good &= (np.array(shares) @ runs).max(-1) <= problem.capacity
    for i, j in problem.exclusive:
        if {i, j} <= of.keys():
            good &= ~(runs[:, of[i]] & runs[:, of[j]]).any(-1)
    for i, j in problem.outside:
        if {i, j} <= of.keys():
            good &= ~(runs[:, of[i]] & (events == of[j])).any(-1)
    stages = np.full((len(events), n, n), -np.inf)
    stages[:, range(n), range(n)] = 0
    stages[:, 0, :] = stages[:, :, 0] = -STAGES
    stages[:, 0, 0] = 0
    for i, j, distance in problem.follows:
        if {i, j} <= of.keys():
            stages[:, of[i], of[j]] = np.maximum(stages[:, of[i], of[j]], later[:, of[i], of[j]] - distance)
    return good & no_gain(stages)


def possible(rate: float, seconds: np.ndarray, good: np.ndarray) -> bool:
    """Return True if an allowed order fits into a period of 1 / rate. seconds: one value a task."""
    n = len(seconds)
    events, _, wraps, _ = (one[good] for one in orders(n))
    w, row = np.full((len(events), n, n), -np.inf), np.arange(len(events))
    w[:, range(n), range(n)] = 0
    after = np.concatenate(
        [np.zeros((len(events), n)), seconds * rate - wraps], 1
    )  # each event, after its task's start
    for one, other in itertools.pairwise((*range(2 * n), 0)):
        u, v = events[:, one], events[:, other]
        w[row, u % n, v % n] = np.maximum(w[row, u % n, v % n], after[row, u] - after[row, v] - (other == 0))
    return bool(no_gain(w).any())


def brute_force(problem: CyclicProblem) -> float:
    """Return the shortest period over all choices of tasks, options and orders, by bisection of the rate."""
    best = 0.0
    for run in itertools.product((False, True), repeat=len(problem.options)):
        tasks = tuple(i for i, one in enumerate(run) if one)
        if any(sum(run[i] for i in group) != 1 for group in problem.covers) or not all(
            one or any(i in group for group in problem.covers) for i, one in enumerate(run)
        ):
            continue
        for chosen in itertools.product(*(problem.options[i] for i in tasks)):
            seconds = np.array([option.seconds for option in chosen])
            good = allowed(problem, tasks, [option.share for option in chosen])
            low, high = best * (1 + 1e-4), 1 / max(problem.least_s, *seconds)
            if low > high or (low and not possible(low, seconds, good)):
                continue
            if possible(high, seconds, good):
                low = high
            while high - low > 1e-4 * high:
                rate = (low + high) / 2
                low, high = (rate, high) if possible(rate, seconds, good) else (low, rate)
            best = low
    return 1 / best


@st.composite
def problems(draw, shares: bool):
    n = draw(st.integers(2, 4))
    pairs = list(itertools.combinations(range(n), 2))
    option = st.builds(Option, st.integers(1, 4) if shares else st.just(0), st.integers(1, 6).map(float))
    options = tuple(tuple(draw(st.lists(option, min_size=1, max_size=2 if shares else 1))) for _ in range(n))
    follows = {(i, j, 0) for i, j in pairs if draw(st.booleans())}
    follows |= {(j, i, draw(st.integers(1, 2))) for i, j in pairs if draw(st.integers(0, 2)) == 0}
    exclusive = {(i, j) for i, j in pairs if draw(st.integers(0, 2)) == 0}
    # One direction for all pairs, since tasks that start at once may not lie inside each other.
    back = draw(st.booleans())
    outside = {
        pair[::-1] if back else pair
        for pair in pairs
        if pair not in exclusive and draw(st.integers(0, 2)) == 0
    }
    covers = (
        ((n - 3, n - 2), (n - 3, n - 1)) if n > 2 and draw(st.integers(0, 2)) == 0 else ()
    )  # a whole task, or its two parts
    return CyclicProblem(
        options,
        tuple(sorted(follows)),
        frozenset(exclusive),
        frozenset(outside),
        covers,
        capacity=4 if shares else None,
        least_s=draw(st.sampled_from((1.0, 8.0))),
    )


def holds(problem: CyclicProblem, found) -> None:
    """Check that the solution satisfies the problem at every moment of a period."""
    run = {i for i, option in enumerate(found.chosen) if option is not None}
    assert all(len(run & {*group}) == 1 for group in problem.covers)
    assert {*range(len(problem.options))} - run <= {i for group in problem.covers for i in group}
    d = [option.seconds / found.period_s if option else 0.0 for option in found.chosen]
    for i, j, distance in problem.follows:
        assert (
            not {i, j} <= run
            or found.phases[j] + found.stages[j] + distance >= found.phases[i] + found.stages[i] + d[i] - 1e-5
        )

    def running(now):
        return [i for i in run if 1e-5 < (now - found.phases[i]) % 1 < d[i] - 1e-4]

    for now in {
        *found.phases,
        *((phase + length) % 1 for phase, length in zip(found.phases, d, strict=True)),
    }:
        together = running(now + 1e-4)
        assert not any(set(pair) <= set(together) for pair in problem.exclusive)
        assert problem.capacity is None or sum(found.chosen[i].share for i in together) <= problem.capacity
    for i, j in problem.outside:
        assert j not in run or i not in running(found.phases[j])


WIDE_OR_LONG = (Option(2, 1.0), Option(1, 4.0))


def crowd(*shares: int | tuple[Option, ...], **rest) -> CyclicProblem:
    """Return tasks that only their shares keep apart. A bare share stands for an option of one second."""
    return CyclicProblem(
        tuple((Option(share, 1.0),) if isinstance(share, int) else share for share in shares), **rest
    )


@pytest.mark.parametrize("shares", [False, True])
def test_the_optimum_is_that_of_brute_force(shares):
    @settings(max_examples=20, deadline=None)
    @given(problems(shares))
    def law(problem):
        check(problem)

    law()


def check(problem: CyclicProblem) -> None:
    found, slow = solve(problem, LIMIT), one_by_one(problem)
    holds(problem, found)
    holds(problem, slow)
    assert found.period_s <= slow.period_s * (1 + 1e-6)
    assert found.bound_s == pytest.approx(found.period_s, rel=1e-4)
    assert found.period_s == pytest.approx(max(brute_force(problem), problem.least_s), rel=1e-3)


@pytest.mark.parametrize(
    ("problem", "period_s"),
    [
        (crowd(2, 2, 2, capacity=4), 1.5),  # any two may overlap, but not all three
        (crowd(2, 2, 1, capacity=4), 1.5),
        (crowd(3, 1, 1, capacity=4), 1.5),
        (crowd(60, 60, 24, capacity=132), 1.5),
        (crowd(2, 2, 2, 2, capacity=6), 4 / 3),  # three fit, four do not
        (crowd(2, 2, 2, least_s=4.0, capacity=4), 4.0),  # too short for three to cover a period
        (crowd(2, 2, 2, follows=((0, 1, 0), (1, 2, 0), (2, 0, 1)), capacity=4), 3.0),
        (
            crowd(*(WIDE_OR_LONG,) * 3, follows=((0, 1, 0), (1, 2, 0), (2, 0, 1)), capacity=4),
            3.0,
        ),  # one after the other: wide is best
    ],
)
def test_what_fits_in_pairs_may_yet_be_too_many(problem, period_s):
    check(problem)
    assert solve(problem).period_s == pytest.approx(period_s, rel=1e-5)


def test_where_time_is_too_short_the_best_so_far_comes_with_its_gap():
    """Twelve tasks with free overlaps: no solver proves an optimum in 0.01 s."""
    n = 12
    options = tuple((Option(2, 1.0 + i / n), Option(4, 0.6 + i / n)) for i in range(n))
    follows = tuple((i, i + 1, 0) for i in range(n - 1))
    problem = CyclicProblem(options, follows, frozenset((i, i + 6) for i in range(6)), capacity=4)
    quick, slow = solve(problem, 0.01), one_by_one(problem)
    holds(problem, quick)
    assert quick.bound_s <= quick.period_s <= slow.period_s * (1 + 1e-6)
    assert 0 <= quick.gap < 0.95


def chain(*seconds: float, **rest) -> CyclicProblem:
    """Return a chain of tasks that closes across layers: task 0 of the next layer follows the last task."""
    n = len(seconds)
    follows = (*((i, i + 1, 0) for i in range(n - 1)), (n - 1, 0, 1))
    return CyclicProblem(tuple((Option(1, s),) for s in seconds), follows, **rest)


def test_a_layer_alone_cannot_overlap_with_itself():
    assert solve(chain(1.0, 2.0, 3.0)).period_s == pytest.approx(6.0)


@pytest.mark.parametrize(("layers", "period_s"), [(None, 1.0), (2, 1.0), (1, 1.5), (0, 3.0)])
def test_tasks_are_no_further_apart_than_the_layers_of_the_model(layers, period_s):
    """Four tasks in a row. The last one starts 3 s after the first one, in the last of these layers."""
    follows = ((0, 1, 0), (1, 2, 0), (2, 3, 0))
    found = solve(CyclicProblem(((Option(0, 1.0),),) * 4, follows, least_s=1.0, layers=layers))
    assert found.period_s == pytest.approx(period_s)
    assert layers is None or max(found.stages) - min(found.stages) <= layers


def test_two_nano_batches_hide_what_is_bound_by_another_resource():
    """Two nano-batches of compute 3 and memory 2: the period is the compute of both."""
    options = ((Option(0, 3.0),), (Option(0, 2.0),)) * 2
    follows = ((0, 1, 0), (1, 0, 1), (2, 3, 0), (3, 2, 1))
    assert solve(CyclicProblem(options, follows, frozenset({(0, 2), (1, 3)}))).period_s == pytest.approx(6.0)


def test_a_task_may_be_kept_from_starting_inside_another():
    """Two tasks exclude each other. The third overlaps the first of them only."""
    free = CyclicProblem(
        ((Option(0, 3.0),), (Option(0, 2.0),), (Option(0, 2.0),)), exclusive=frozenset({(1, 2)})
    )
    kept = dataclasses.replace(free, outside=frozenset({(0, 1), (0, 2)}))
    for problem, period_s in ((free, 4.0), (kept, 5.0)):
        check(problem)
        assert solve(problem).period_s == pytest.approx(period_s)


def test_one_task_of_a_cover_is_run():
    """The task runs whole, or as two parts of 2 s that overlap the other chain's parts."""
    whole = CyclicProblem(
        ((Option(0, 3.0),), (Option(0, 2.0),), (Option(0, 2.0),)),
        exclusive=frozenset({(1, 2)}),
        covers=((0, 1), (0, 2)),
    )
    found = solve(whole)
    assert found.period_s == pytest.approx(3.0) and [option is None for option in found.chosen] == [
        False,
        True,
        True,
    ]


def test_a_slow_way_to_run_a_task_bounds_no_period():
    check(CyclicProblem(((Option(1, 1.0),), (Option(1, 1.0), Option(1, 6.0))), exclusive=frozenset({(0, 1)})))
    check(CyclicProblem(((Option(0, 6.0),), (Option(0, 1.0),), (Option(0, 1.0),)), covers=((0, 1), (0, 2))))


def test_the_least_period_is_kept():
    found = solve(chain(1.0, 1.0, least_s=5.0))
    assert found.period_s == pytest.approx(5.0) == found.bound_s


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"most_s": 5.0}, "period of at most 5"),
        ({"follows": ((0, 1, 0), (1, 0, 0))}, "what must follow what leaves none"),
        (
            {"follows": ((0, 1, 0), (1, 0, 0)), "exclusive": frozenset({(0, 2)}), "capacity": 1},
            "what must follow what leaves none",
        ),
        ({"covers": ((0, 1), (0,), (1,))}, "its covers leave none"),
        ({"options": ((Option(5, 1.0),),) * 3, "capacity": 4}, "share of more than 4"),
    ],
)
def test_an_infeasible_problem_names_its_constraint(change, word):
    with pytest.raises(SearchError, match=word):
        solve(dataclasses.replace(chain(1.0, 2.0, 3.0), **change))


@dataclasses.dataclass
class Clock:
    """A clock that each solution moves on by `seconds`. given: the time limits that solutions received."""

    seconds: float = 0.0
    now: float = 100.0
    given: list[float] = dataclasses.field(default_factory=list)

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock, solve_program = Clock(), CyclicMilp.solve

    def timed(milp: CyclicMilp, time_limit_s: float):
        clock.given.append(time_limit_s)
        clock.now += clock.seconds
        return solve_program(milp, time_limit_s)

    monkeypatch.setattr(CyclicMilp, "solve", timed)
    return clock


CONTRARY = CyclicProblem(((Option(1, 1.0),),) * 3, ((0, 1, 0), (1, 0, 0)), frozenset({(0, 2)}), capacity=1)


def test_where_nothing_is_shorter_no_second_program_is_solved(clock):
    """Most solutions end so: the search needs no reason for a refusal."""
    for problem in (chain(1.0, 2.0, 3.0, most_s=5.0), dataclasses.replace(CONTRARY, most_s=5.0)):
        clock.given.clear()
        with pytest.raises(SearchError, match="no schedule has a period of at most 5 s"):
            solve(problem, 60.0, clock)
        assert clock.given == [60.0]


@pytest.mark.parametrize(
    ("seconds", "given", "said"),
    [
        (13.0, [60.0, 47.0], "what must follow what leaves none"),
        (60.0, [60.0], "the time is over before it is known which constraint leaves none"),
    ],
)
def test_the_reason_is_looked_for_in_what_is_left_of_the_time(clock, seconds, given, said):
    clock.seconds = seconds
    with pytest.raises(SearchError, match=said):
        solve(CONTRARY, 60.0, clock)
    assert clock.given == given
