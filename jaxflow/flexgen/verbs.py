"""The verbs of a square as they are issued: beside each other, or each to its end before the next begins,
which shows what each takes.
"""

import collections
import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxflow.flexgen.traffic import Traffic

_IN_FLIGHT = 2  # stores that may be under way when the next is issued


class Verbs:
    """Issues what a block does, in order, by one thread. Without overlap the traffic has each verb's seconds."""

    def __init__(self, overlap: bool, traffic: Traffic):
        self._overlap, self._traffic = overlap, traffic
        self._stores: collections.deque[concurrent.futures.Future] = collections.deque()

    def do(self, verb: str, issue: Callable[[], Any]) -> Any:
        """What `issue` returns: arrays that are on their way, or, without overlap, there."""
        if self._overlap:
            return issue()
        started = time.perf_counter()
        made = jax.block_until_ready(issue())
        self._traffic.add(verb, seconds=time.perf_counter() - started)
        return made

    def store(self, verb: str, issue: Callable[[], Sequence[Any]]) -> None:
        """Issues what takes something home: arrays that are on their way, and what threads do, which is all
        that is bounded.
        """
        started = time.perf_counter()
        made = issue()
        futures = [one for one in made if isinstance(one, concurrent.futures.Future)]
        if self._overlap:
            self._stores.extend(futures)
        elif made:
            for future in futures:
                future.result()
            jax.block_until_ready([one for one in made if not isinstance(one, concurrent.futures.Future)])
            self._traffic.add(verb, seconds=time.perf_counter() - started)

    def bound_stores(self, most: int = _IN_FLIGHT) -> None:
        """Waits until at most so many stores are under way. Raises: what a store raised."""
        while len(self._stores) > most:
            self._stores.popleft().result()

    def rest(self) -> None:
        """Waits until no store is under way, whatever came of it."""
        wait_for(self._stores)


def wait_for(futures: Iterable[concurrent.futures.Future]) -> None:
    """Waits until none is under way, whatever came of it. `concurrent.futures.wait` is never told of those
    that a pool's end cancelled.
    """
    for future in futures:
        with contextlib.suppress(concurrent.futures.CancelledError):
            future.exception()
