"""The router's choice: properties of the pure function, and of the books that feed it."""

import collections
import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.config import ConfigError
from serving.cluster.router import HIT_WORTH, NO_LOAD, NoReplica, PrefixEstimate, Router, choose, home_of

PAGE = 64
loads = st.one_of(st.integers(0, 100_000).map(float), st.just(NO_LOAD))


@dataclasses.dataclass(frozen=True)
class Question:
    """Arguments of `choose`, with at least one replica that accepts."""

    outstanding: list[float]
    hits: list[int]
    order: list[int]
    tokens: float
    home: int | None

    def ask(self, **changes) -> int:
        q = dataclasses.replace(self, **changes)
        return choose(q.outstanding, q.hits, q.order, q.tokens, home=q.home)

    @property
    def accepting(self) -> list[int]:
        return [i for i in self.order if self.outstanding[i] < NO_LOAD]

    def cost(self, i: int) -> float:
        return self.outstanding[i] - HIT_WORTH * (self.tokens if i == self.home else self.hits[i])

    @property
    def compared(self) -> list[int]:
        return [i for i in self.accepting if i in self.accepting[:2] or self.hits[i] or i == self.home]


@st.composite
def questions(draw):
    n = draw(st.integers(1, 8))
    return Question(
        draw(st.lists(loads, min_size=n, max_size=n).filter(lambda found: min(found) < NO_LOAD)),
        draw(st.lists(st.sampled_from([0, 0, PAGE, 50 * PAGE]), min_size=n, max_size=n)),
        draw(st.permutations(range(n))),
        draw(st.integers(1, 100_000)),
        draw(st.one_of(st.none(), st.integers(0, n - 1))),
    )


@given(questions())
def test_the_choice_accepts_and_costs_least_of_the_holders_and_the_first_two(question):
    chosen = question.ask()
    assert chosen in question.compared
    assert question.cost(chosen) == min(question.cost(i) for i in question.compared)


@given(questions())
def test_a_replica_without_a_part_of_the_prompt_wins_only_by_its_load(question):
    chosen = question.ask(home=None)
    holders = [i for i in question.accepting if question.hits[i]]
    if not question.hits[chosen]:
        for i in holders:
            assert question.outstanding[i] - question.outstanding[chosen] >= HIT_WORTH * question.hits[i]
    elif len({question.outstanding[i] for i in question.accepting}) == 1:
        assert question.hits[chosen] == max(question.hits[i] for i in holders)


@given(questions())
def test_the_home_of_a_session_wins_while_its_load_is_that_of_the_others(question):
    if question.home in question.accepting and question.tokens >= max(question.hits):
        even = [500.0 if load < NO_LOAD else NO_LOAD for load in question.outstanding]
        assert question.ask(outstanding=even) == question.home


@given(questions(), st.integers(1, 10_000))
def test_more_load_on_others_never_repels_and_a_longer_hit_never_does(question, more):
    chosen = question.ask()
    loaded = [load + more * (i != chosen) for i, load in enumerate(question.outstanding)]
    assert question.ask(outstanding=loaded) == chosen
    longer = [hit + more * (i == chosen) for i, hit in enumerate(question.hits)]
    assert question.ask(hits=longer) == chosen


@given(questions(), st.randoms(use_true_random=False))
def test_the_names_of_replicas_do_not_matter(question, rng):
    names = list(range(len(question.hits)))
    rng.shuffle(names)  # replica i is called names[i]

    def renamed(values):
        found = [None] * len(values)
        for i, value in enumerate(values):
            found[names[i]] = value
        return found

    other = question.ask(
        outstanding=renamed(question.outstanding),
        hits=renamed(question.hits),
        order=[names[i] for i in question.order],
        home=None if question.home is None else names[question.home],
    )
    assert other == names[question.ask()]


def test_without_a_replica_there_is_an_error():
    with pytest.raises(NoReplica):
        choose([NO_LOAD, NO_LOAD], [0, 64], [1, 0], 10)
    with pytest.raises(NoReplica):
        Router(3, 100, PAGE).route([], 10, 10)
    with pytest.raises(ConfigError, match="num_replicas"):
        Router(0, 100, PAGE)


def opened(n: int = 8, **settings) -> Router:
    router = Router(n, settings.pop("num_pages", 1000), PAGE, **settings)
    for i in range(n):
        router.report(i, 0, 0)
    return router


def test_requests_between_two_reports_do_not_herd():
    router, tokens = opened(), collections.Counter()
    rng = random.Random(0)
    for _ in range(2000):
        prompt = rng.randrange(1, 2000)
        tokens[router.route([], prompt, 100).replica] += prompt + 100
    assert max(tokens.values()) <= 1.02 * sum(tokens.values()) / 8


def test_several_routers_with_old_reports_do_not_herd():
    routers, tokens = [opened(seed=i) for i in range(4)], collections.Counter()
    for router in routers:
        for i in range(8):
            router.report(i, 0 if i == 3 else 500, 0)  # all see the same idle replica
    for turn in range(40):
        tokens[routers[turn % 4].route([], 10, 0).replica] += 1
    assert 0 < tokens[3] <= 20  # the first choice of every router and request if all replicas were candidates


def test_equal_replicas_are_chosen_equally_often():
    found = collections.Counter(opened(4, seed=i).route([], 10, 10).replica for i in range(4000))
    assert sum((count - 1000) ** 2 / 1000 for count in found.values()) < 16.3  # chi-square, 3 degrees, 0.1 %


def test_a_report_replaces_only_the_requests_that_it_includes():
    router = opened(2, seed=1)
    first = router.route([], 1000, 0)
    second = router.route([], 1000, 0)
    assert {first.replica, second.replica} == {0, 1}
    router.report(first.replica, 5000, last_request=0)  # written before the request arrived
    assert router.route([], 10, 0).replica == second.replica
    router.report(first.replica, 0, last_request=first.number)
    assert router.route([], 10, 0).replica == first.replica


def test_a_known_prefix_attracts_until_the_bound():
    router, names = opened(), [bytes([i]) for i in range(32)]
    first = router.route(names, 32 * PAGE, 100)
    router.report(first.replica, 0, first.number)
    again = router.route(names[:16], 16 * PAGE, 0)
    assert (again.replica, again.expected_hit_tokens) == (first.replica, 16 * PAGE)
    router.report(first.replica, 100 * PAGE, again.number)
    assert router.route(names, 32 * PAGE, 0).replica != first.replica


def test_a_lost_replica_gets_nothing_and_its_pages_are_gone_after_a_restart():
    router, names = opened(3), [b"a", b"b"]
    home = router.route(names, 2 * PAGE, 0).replica
    router.lost(home)
    assert all(router.route(names, 2 * PAGE, 0).replica != home for _ in range(20))
    router.lost(home, restarted=True)
    for other in {0, 1, 2} - {home}:
        router.lost(other)
    router.report(home, 0, 0)
    assert router.route([b"a"], PAGE, 0).expected_hit_tokens == 0
    assert router.route([b"a"], PAGE, 0).expected_hit_tokens == PAGE
    assert PrefixEstimate(2).leading(names) == 0


@given(st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=30), st.integers(1, 20))
def test_the_estimate_holds_the_pages_of_the_latest_requests(requests, size):
    estimate = PrefixEstimate(size)
    for request in requests:
        names = [bytes(request[: i + 1]) for i in range(len(request))]
        estimate.use(names)
        assert estimate.leading(names) == min(len(names), size)


@given(st.integers(), st.lists(st.booleans(), min_size=1, max_size=8))
def test_a_session_keeps_its_home_unless_that_replica_is_lost(session, accepting):
    home = home_of(session, accepting)
    assert (home is None) == (not any(accepting))
    for i in range(len(accepting)):
        if home is not None and i != home:
            fewer = [ok and j != i for j, ok in enumerate(accepting)]
            assert home_of(session, fewer) == home


def test_sessions_go_home_and_leave_an_overloaded_home():
    router, names = opened(), [b"x", b"y"]
    home = home_of("s", [True] * 8)
    assert home is not None
    for _ in range(3):
        router.route(names, 2 * PAGE, 500)  # other replicas hold the prompt
    for i in range(8):
        router.report(i, 0, 100)
    assert router.route(names, 2 * PAGE, 0, session="s").replica == home
    router.report(home, 100_000, 100)
    assert router.route(names, 2 * PAGE, 0, session="s").replica != home


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_of_all_candidates_the_least_loaded_wins(loads, rng):
    order = rng.sample(range(len(loads)), len(loads))
    chosen = choose(loads, [0] * len(loads), order, 1.0, candidates=None)
    assert loads[chosen] == min(loads)


def test_an_excluded_replica_gets_a_request_only_where_it_is_alone():
    router = Router(2, num_pages=10, page_tokens=PAGE)
    router.report(0, 0.0, 0)
    router.report(1, 1e6, 0)
    assert router.route([], 5, 5.0, excluded=0).replica == 1
    router.lost(1)
    assert router.route([], 5, 5.0, excluded=0).replica == 0
