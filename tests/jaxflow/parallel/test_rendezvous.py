"""All processes meet before any goes on, whoever comes first, and the missing ones are named."""

import concurrent.futures
import socket
import time

import pytest

from jaxflow.config import ConfigError
from jaxflow.parallel.launch import Launch
from jaxflow.parallel.rendezvous import MissingProcesses, meet


def launch(count: int, rank: int, port: int) -> Launch:
    return Launch(f"127.0.0.1:{port}", count, rank)


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_in_any_order(order, port):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        some = [pool.submit(meet, launch(3, rank, port), 30.0) for rank in order[:2]]
        time.sleep(0.3)
        assert not any(one.done() for one in some)
        last = pool.submit(meet, launch(3, order[2], port), 30.0)
        for one in (*some, last):
            one.result()


def test_strangers_and_quitters_do_not_count(port):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(meet, launch(3, 0, port), 30.0)
        for hello in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"JAXFLOW1\0\0\0\x09",
            b"JAXFLOW1\0\0\0\x01",
        ):  # the last one leaves
            while True:
                try:
                    link = socket.create_connection(("127.0.0.1", port), timeout=5)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.02)
            with link:
                link.sendall(hello)
        time.sleep(0.5)  # process 0 reads the end of each connection
        second = pool.submit(meet, launch(3, 2, port), 30.0)
        time.sleep(0.5)
        assert not first.done() and not second.done()
        meet(launch(3, 1, port), 30.0)
        first.result()
        second.result()


def test_missing_processes_are_named(port):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(meet, launch(4, 0, port), 1.0)
        other = pool.submit(meet, launch(4, 2, port), 3.0)
        with pytest.raises(MissingProcesses, match=r"1, 3 did not come"):
            first.result()
        with pytest.raises(MissingProcesses, match="process 2"):
            other.result()


def test_a_taken_port():
    with socket.create_server(("", 0)) as taken, pytest.raises(ConfigError) as refused:
        meet(launch(2, 0, taken.getsockname()[1]), 5.0)
    assert refused.value.field == "coordinator"
