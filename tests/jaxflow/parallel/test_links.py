"""Calls reach every follower in their order, and an engine ends in order.
`test_processes` injects the faults.
"""

import concurrent.futures
import socket
import threading
import time
import types
from typing import Any

import pytest

from jaxflow.parallel.launch import Launch
from jaxflow.parallel.links import SILENCE_S, START_SILENCE_S, Followers, Leader
from jaxflow.parallel.processes import ProcessesError

COUNT = 3


class Store:
    """The processes of an engine, as threads of this one."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def of(self, rank: int) -> Any:
        launch = Launch("127.0.0.1:1", COUNT, rank)
        return types.SimpleNamespace(
            rank=rank, count=COUNT, launch=launch, publish=self._publish, read=self._read
        )

    def _publish(self, name: str, value: str) -> None:
        with self._changed:
            self._values[name] = value
            self._changed.notify_all()

    def _read(self, name: str) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: name in self._values, 30)
            return self._values[name]


@pytest.fixture
def team():
    store, left = Store(), []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(Followers, store.of(0), 60.0, left.append)
        others = [pool.submit(Leader, store.of(rank)) for rank in range(1, COUNT)]
        yield first.result(30), [other.result(30) for other in others], left


def test_every_follower_gets_every_call_in_order(team):
    followers, leaders, _ = team
    calls = [bytes([i % 256]) * (i * 37 % 5000) for i in range(300)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = [pool.submit(lambda leader: list(leader.calls()), leader) for leader in leaders]
        for call in calls:
            followers.send(call)
        followers.stop()
        assert [one.result(30) for one in found] == [calls] * len(leaders)
    assert [leader.replayed for leader in leaders] == [len(calls)] * len(leaders)


def test_a_follower_that_is_asked_to_stop_tells_process_0(team):
    followers, leaders, left = team
    leaders[1].ask_to_stop()
    until = time.monotonic() + 20
    while not left and time.monotonic() < until:
        time.sleep(0.02)
    followers.stop()
    assert left == [2]


def test_followers_have_the_limit_of_silence_of_process_0(team):
    followers, leaders, _ = team
    assert {leader._silence_s for leader in leaders} == {START_SILENCE_S}
    followers.watch_closely()
    until = time.monotonic() + 20
    while {leader._silence_s for leader in leaders} != {SILENCE_S} and time.monotonic() < until:
        time.sleep(0.02)
    followers.stop()
    assert {leader._silence_s for leader in leaders} == {SILENCE_S}


def test_a_process_0_that_left_is_an_error():
    store = Store()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    store.of(0).publish("calls", f"{port} {bytes(32).hex()}")
    with pytest.raises(ProcessesError):
        Leader(store.of(1))
