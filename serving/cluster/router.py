"""The router: the choice of a replica for a request.

`choose` is a pure function of the replicas' outstanding tokens and of the prompt tokens that each one holds.
`Router` keeps the books that feed it: the last report of each replica, the requests sent since that report,
and an estimate of the pages in each replica's prefix cache.
"""

import dataclasses
import hashlib
import math
import random
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from jaxflow.config import ConfigError

NO_LOAD = math.inf  # the load of a replica that takes no request
# Tokens of load that a cached prompt token is worth. The replica does not compute the token, and
# finds it again for later requests. A smaller worth gives fewer prefix hits. A larger worth gives
# less even loads (`bench router`).
HIT_WORTH = 3


class NoReplica(RuntimeError):
    """No replica takes requests."""


def choose(
    outstanding: Sequence[float],
    hit_tokens: Sequence[int],
    order: Sequence[int],
    request_tokens: float,
    *,
    home: int | None = None,
    candidates: int | None = 2,
) -> int:
    """Return the replica for a request: the one with the least load after its cached tokens are taken off.

    Each cached prompt token takes off `HIT_WORTH` tokens. So a replica with a part of the prompt wins until
    its load exceeds that of the others by the worth of the part.

    Args:
      outstanding: load, the tokens that each replica still has to compute; `NO_LOAD`
          for one that takes no request.
      hit_tokens: leading prompt tokens in each replica's prefix cache.
      order: all replicas in random order, which breaks ties.
      request_tokens: prompt tokens and expected output tokens of the request.
      home: the replica of the request's session. It counts as a replica with the whole request in its cache.
      candidates: how many replicas without a part of the prompt are compared, the first ones of `order`. Two
        random ones keep several routers with old reports from choosing the same replica. None for all
        replicas, which spreads the load best where the replicas have one router.

    Raises:
      NoReplica: no replica accepts requests.
    """
    accepting = [i for i in order if outstanding[i] < NO_LOAD]
    if not accepting:
        raise NoReplica("no replica takes requests")
    found = [request_tokens if i == home else hit for i, hit in enumerate(hit_tokens)]
    compared = accepting[:candidates] + [i for i in accepting if found[i]]
    return min(compared, key=lambda i: (outstanding[i] - HIT_WORTH * found[i], i != home, outstanding[i]))


class PrefixEstimate:
    """The pages that a replica probably holds: the ones of the latest requests, as many as its cache has.

    Args:
      num_pages: pages of the replica's cache.
    """

    def __init__(self, num_pages: int):
        self._num_pages = num_pages
        self._names: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def leading(self, names: Sequence[bytes]) -> int:
        """Return how many of the leading pages the replica probably holds."""
        return next((i for i, name in enumerate(names) if name not in self._names), len(names))

    def use(self, names: Sequence[bytes]) -> None:
        """Note that the replica computes or reads these pages.

        The first pages of a prompt stay the longest.
        """
        for name in reversed(names):
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._num_pages:
            self._names.popitem(last=False)

    def clear(self) -> None:
        """Forget all pages, as a restarted replica does."""
        self._names.clear()


@dataclasses.dataclass(slots=True)
class _Replica:
    """The router's books of one replica. sent: (number of the request, tokens), oldest first."""

    pages: PrefixEstimate
    reported: float = NO_LOAD
    num_sent: int = 0
    sent: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @property
    def outstanding(self) -> float:
        return self.reported + sum(tokens for _, tokens in self.sent)


@dataclasses.dataclass(frozen=True)
class Route:
    """The router's answer.

    replica: the chosen one. number: how many requests it has now got from this router.
    """

    replica: int
    number: int
    expected_hit_tokens: int


class Router:
    """The books of one router over `num_replicas` replicas.

    A replica takes requests from its first report on. Its report names the tokens that it still has to
    compute, and the last request that these tokens include. Requests sent later are added, so an old report
    does not make a replica look idle.

    Args:
      num_pages: pages of each replica's prefix cache.
      page_tokens: tokens of a page.
      seed: of the random order of replicas.
      candidates: see `choose`.
    """

    def __init__(
        self,
        num_replicas: int,
        num_pages: int,
        page_tokens: int,
        *,
        seed: int = 0,
        candidates: int | None = 2,
    ):
        for field, value in (("num_replicas", num_replicas), ("num_pages", num_pages)):
            if value < 1:
                raise ConfigError(field, value, "a positive number")
        self._replicas = [_Replica(PrefixEstimate(num_pages)) for _ in range(num_replicas)]
        self._num_pages, self._page_tokens = num_pages, page_tokens
        self._random = random.Random(seed)
        self._candidates = candidates

    @property
    def num_replicas(self) -> int:
        """The replicas that have a number."""
        return len(self._replicas)

    def add(self) -> int:
        """Return the number of a further replica."""
        self._replicas.append(_Replica(PrefixEstimate(self._num_pages)))
        return len(self._replicas) - 1

    def report(self, replica: int, outstanding_tokens: float, last_request: int) -> None:
        """Take a replica's report.

        Args:
          outstanding_tokens: prompt and output tokens to compute, of running and waiting requests.
          last_request: the `Route.number` of the latest request that the replica has counted.
        """
        one = self._replicas[replica]
        one.reported = outstanding_tokens
        one.sent = [entry for entry in one.sent if entry[0] > last_request]

    def lost(self, replica: int, *, restarted: bool = False) -> None:
        """Send no more requests to a replica until its next report. restarted: its cache is empty."""
        one = self._replicas[replica]
        one.reported = NO_LOAD
        if restarted:
            one.pages.clear()
            one.num_sent, one.sent = 0, []

    def longest_hit(self, names: Sequence[bytes]) -> int:
        """Return how many leading pages some replica that takes requests probably holds."""
        return max((o.pages.leading(names) for o in self._replicas if o.reported < NO_LOAD), default=0)

    def route(
        self,
        names: Sequence[bytes],
        prompt_tokens: int,
        output_tokens: float,
        *,
        session: Hashable | None = None,
        excluded: int | None = None,
    ) -> Route:
        """Choose the replica of a request, and enter the request into the books.

        Args:
          names: the content names of the prompt's full pages (`jaxflow.kv.prefix`).
          output_tokens: expected tokens of the answer.
          session: a key whose requests have a home replica.
          excluded: a replica that gets the request only if no other one takes requests.

        Raises:
          NoReplica: no replica takes requests.
        """
        hits = [self._page_tokens * one.pages.leading(names) for one in self._replicas]
        order = self._random.sample(range(len(self._replicas)), len(self._replicas))
        outstanding = [one.outstanding for one in self._replicas]
        if excluded is not None and any(
            load < NO_LOAD for i, load in enumerate(outstanding) if i != excluded
        ):
            outstanding[excluded] = NO_LOAD
        home = None if session is None else home_of(session, [load < NO_LOAD for load in outstanding])
        tokens = prompt_tokens + output_tokens
        replica = choose(outstanding, hits, order, tokens, home=home, candidates=self._candidates)
        one, hit = self._replicas[replica], min(hits[replica], prompt_tokens)
        one.num_sent += 1
        one.sent.append((one.num_sent, prompt_tokens - hit + output_tokens))
        one.pages.use(names)
        return Route(replica, one.num_sent, hit)


def home_of(session: Hashable, accepting: Sequence[bool]) -> int | None:
    """Return the home of a session among the accepting replicas, by rendezvous
    hashing; None if there is none.

    Only the sessions of a lost replica get another home, and every router finds the same one.
    """

    def weight(replica: int) -> bytes:
        return hashlib.blake2b(f"{replica}:{session}".encode(), digest_size=8).digest()

    return max((i for i, ok in enumerate(accepting) if ok), key=weight, default=None)
