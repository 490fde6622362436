"""The scheduler's optimum is the one that brute force finds, on every small problem."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.cyclic import Option, Problem, SearchError, one_by_one, solve

LIMIT = 60.0


def brute_force(problem: Problem) -> float:
    """The shortest period over all choices: options, stages, and who goes first of each two that must not run together.

    What remains are differences of phases: x_j - x_i >= a * rate - b. A rate is possible if no cycle of them is positive,
    which Floyd and Warshall find for all choices at once; the highest is found by bisection.
    """
    n = len(problem.options)
    best = 0.0
    for chosen in itertools.product(*problem.options):
        d = [option.seconds for option in chosen]
        beyond = {(i, j) for i, j in itertools.combinations(range(n), 2) if chosen[i].share + chosen[j].share > (problem.capacity or 1e9)}
        pairs = sorted({(min(pair), max(pair)) for pair in problem.exclusive | beyond})
        stages = np.array(list(itertools.product(*([(0,)] + [(-2, -1, 0, 1, 2)] * (n - 1)))))
        for i, j, distance in problem.follows:
            stages = stages[stages[:, j] + distance - stages[:, i] >= 0]
        first = np.array(list(itertools.product((0, 1), repeat=len(pairs)))).reshape(2 ** len(pairs), len(pairs))
        stages, first = np.repeat(stages, len(first), 0), np.tile(first, (len(stages), 1))
        edges = []  # (i, j, seconds, periods of each choice)
        edges += [(i, j, 0.0, np.ones(len(stages))) for i, j in itertools.permutations(range(n), 2)]
        edges += [(i, j, d[i], stages[:, j] + k - stages[:, i]) for i, j, k in problem.follows]
        for at, (i, j) in enumerate(pairs):
            edges += [(i, j, d[i], first[:, at]), (j, i, d[j], 1 - first[:, at])]
        low, high = best, 1 / max(problem.least_s, *d)
        while high - low > 1e-4 * high:
            rate = (low + high) / 2
            w = np.full((len(stages), n, n), -np.inf)
            w[:, range(n), range(n)] = 0.0
            for i, j, seconds, periods in edges:
                w[:, i, j] = np.maximum(w[:, i, j], seconds * rate - periods)
            for k in range(n):
                w = np.maximum(w, w[:, :, k : k + 1] + w[:, k : k + 1, :])
            possible = (np.trace(w, axis1=1, axis2=2) <= 1e-9).any()
            low, high = (rate, high) if possible else (low, rate)
        best = low
    return 1 / best


@st.composite
def problems(draw, shares: bool):
    n = draw(st.integers(2, 4))
    option = st.builds(Option, st.integers(1, 4) if shares else st.just(0), st.integers(1, 6).map(float))
    options = tuple(tuple(draw(st.lists(option, min_size=1, max_size=2 if shares else 1))) for _ in range(n))
    follows = {(i, j, 0) for i, j in itertools.combinations(range(n), 2) if draw(st.booleans())}
    follows |= {(j, i, draw(st.integers(1, 2))) for i, j in itertools.combinations(range(n), 2) if draw(st.integers(0, 2)) == 0}
    exclusive = {(i, j) for i, j in itertools.combinations(range(n), 2) if draw(st.integers(0, 2)) == 0}
    return Problem(
        options, tuple(sorted(follows)), frozenset(exclusive), capacity=4 if shares else None, least_s=draw(st.sampled_from((1.0, 8.0)))
    )


def holds(problem: Problem, found) -> None:
    """The solution satisfies the problem, at every moment of a period."""
    d = [option.seconds / found.period_s for option in found.chosen]
    for i, j, distance in problem.follows:
        assert found.phases[j] + found.stages[j] + distance >= found.phases[i] + found.stages[i] + d[i] - 1e-5
    for now in {*found.phases, *((phase + length) % 1 for phase, length in zip(found.phases, d, strict=True))}:
        running = [i for i in range(len(d)) if 1e-5 < (now + 1e-4 - found.phases[i]) % 1 < d[i] - 1e-4]
        assert not any(set(pair) <= set(running) for pair in problem.exclusive)
        assert problem.capacity is None or sum(found.chosen[i].share for i in running) <= problem.capacity


@pytest.mark.parametrize("shares", [False, True])
def test_the_optimum_is_that_of_brute_force(shares):
    @settings(max_examples=20, deadline=None)
    @given(problems(shares))
    def law(problem):
        found, slow = solve(problem, LIMIT), one_by_one(problem)
        holds(problem, found)
        holds(problem, slow)
        assert found.period_s <= slow.period_s * (1 + 1e-6)
        want = max(brute_force(problem), problem.least_s)
        assert found.bound_s == pytest.approx(found.period_s, rel=1e-4)
        # Three that overlap in pairs only, never all at once, are not let overlap: brute force knows pairs alone.
        assert found.period_s >= want * (1 - 1e-3)
        if not shares or len(problem.options) < 3:
            assert found.period_s == pytest.approx(want, rel=1e-3)

    law()


def test_where_time_is_too_short_the_best_so_far_comes_with_its_gap():
    """Twelve tasks of two kinds, any of which may overlap: no solver proves that in a hundredth of a second."""
    n = 12
    options = tuple((Option(2, 1.0 + i / n), Option(4, 0.6 + i / n)) for i in range(n))
    follows = tuple((i, i + 1, 0) for i in range(n - 1))
    problem = Problem(options, follows, frozenset((i, i + 6) for i in range(6)), capacity=4)
    quick, slow = solve(problem, 0.01), one_by_one(problem)
    holds(problem, quick)
    assert quick.bound_s <= quick.period_s <= slow.period_s * (1 + 1e-6)
    assert 0 <= quick.gap < 0.95


def chain(*seconds: float, **rest) -> Problem:
    """Each follows the one before it, and the next layer's first the last."""
    n = len(seconds)
    follows = (*((i, i + 1, 0) for i in range(n - 1)), (n - 1, 0, 1))
    return Problem(tuple((Option(1, s),) for s in seconds), follows, **rest)


def test_a_layer_alone_cannot_overlap_with_itself():
    assert solve(chain(1.0, 2.0, 3.0)).period_s == pytest.approx(6.0)


def test_two_nano_batches_hide_what_is_bound_by_another_resource():
    """Compute 3, memory 2, twice: the compute of both is all that a layer takes."""
    options = ((Option(0, 3.0),), (Option(0, 2.0),)) * 2
    follows = ((0, 1, 0), (1, 0, 1), (2, 3, 0), (3, 2, 1))
    assert solve(Problem(options, follows, frozenset({(0, 2), (1, 3)}))).period_s == pytest.approx(6.0)


def test_one_task_of_a_cover_is_run():
    """Whole, or in two parts of 2 each that can overlap with the other chain's parts."""
    whole = Problem(((Option(0, 3.0),), (Option(0, 2.0),), (Option(0, 2.0),)), exclusive=frozenset({(1, 2)}), covers=((0, 1), (0, 2)))
    found = solve(whole)
    assert found.period_s == pytest.approx(3.0) and [option is None for option in found.chosen] == [False, True, True]


def test_the_least_period_is_kept():
    found = solve(chain(1.0, 1.0, least_s=5.0))
    assert found.period_s == pytest.approx(5.0) == found.bound_s


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"most_s": 5.0}, "period of at most 5"),
        ({"follows": ((0, 1, 0), (1, 0, 0))}, "follow"),
        ({"options": ((Option(5, 1.0),),) * 3, "capacity": 4}, "share of more than 4"),
    ],
)
def test_an_infeasible_problem_names_its_constraint(change, word):
    with pytest.raises(SearchError, match=word):
        solve(dataclasses.replace(chain(1.0, 2.0, 3.0), **change))
