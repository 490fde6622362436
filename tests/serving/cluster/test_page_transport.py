"""Pages between two processes by JAX's transfer server, and what it does when one of them dies or stops."""

import asyncio
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from serving.cluster.page_transport import JaxTransport, TransferFailed

PAGE = 1 << 20


def pages_of(number: int, count: int, length: int = PAGE) -> list[np.ndarray]:
    return [np.random.default_rng(number + i).integers(0, 256, length, np.uint8) for i in range(count)]


def fetch(transport, address, number, count, timeout_s=20.0, length=PAGE):
    return asyncio.run(transport.fetch(address, number, [length] * count, timeout_s))


@pytest.fixture(scope="module")
def here():
    return JaxTransport("127.0.0.1")


def test_pages_arrive_once(here):
    here.offer(1, pages_of(1, 3), 20.0)
    for found, sent in zip(fetch(here, here.address, 1, 3), pages_of(1, 3), strict=True):
        assert found.dtype == np.uint8 and np.array_equal(found, sent)
    with pytest.raises(TransferFailed):
        fetch(here, here.address, 1, 3, timeout_s=0.2)
    here.offer(2, pages_of(2, 1), 20.0)  # a fetch that failed disturbs no other
    assert np.array_equal(fetch(here, here.address, 2, 1)[0], pages_of(2, 1)[0])


def test_an_address_without_a_process(here):
    with pytest.raises(TransferFailed):
        fetch(here, "127.0.0.1:9", 3, 1, timeout_s=0.2)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sender(pipe) -> None:
    transport = JaxTransport("127.0.0.1")
    pipe.send(transport.address)
    while True:
        number, count, length, keep_s = pipe.recv()
        transport.offer(number, pages_of(number, count, length), keep_s)
        pipe.send(resident_bytes())


def receiver(pipe) -> None:
    transport = JaxTransport("127.0.0.1")
    pipe.send("ready")
    while True:
        address, number, count, length = pipe.recv()
        found = fetch(transport, address, number, count, length=length)
        pipe.send(all(map(np.array_equal, found, pages_of(number, count, length))))


class Process:
    def __init__(self, run):
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=run, args=(end,), daemon=True)
        self.process.start()
        self.first = self.pipe.recv()

    def ask(self, *message):
        self.pipe.send(message)
        return self.pipe.recv()

    def signal(self, number) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.mark.slow  # four processes import JAX
class TestTwoProcesses:
    @pytest.fixture
    def other(self):
        process = Process(sender)
        yield process
        process.kill()

    def test_a_sender_that_dies_while_it_sends(self, here, other):
        """Every fetch ends in the pages or in an error, and the next sender is not affected."""
        length, count = 64 << 20, 4
        other.ask(5, count, length, 60.0)

        async def run():
            fetching = asyncio.ensure_future(here.fetch(other.first, 5, [length] * count, 20.0))
            await asyncio.sleep(0.03)
            other.kill()
            return await fetching

        try:
            found = asyncio.run(run())
        except TransferFailed:
            found = None
        assert found is None or all(map(np.array_equal, found, pages_of(5, count, length)))
        with pytest.raises(TransferFailed):
            fetch(here, other.first, 5, count, timeout_s=1.0, length=length)
        another = Process(sender)
        another.ask(6, 2, PAGE, 60.0)
        assert all(map(np.array_equal, fetch(here, another.first, 6, 2), pages_of(6, 2)))
        another.kill()

    def test_a_sender_that_stops(self, here, other):
        other.ask(7, 2, 16 << 20, 60.0)
        other.signal(signal.SIGSTOP)
        with pytest.raises(TransferFailed, match="within"):
            fetch(here, other.first, 7, 2, timeout_s=1.0, length=16 << 20)
        other.signal(signal.SIGCONT)
        time.sleep(1.0)  # the pull that was given up goes on, into memory that nobody reads
        other.ask(8, 2, PAGE, 60.0)
        assert all(map(np.array_equal, fetch(here, other.first, 8, 2), pages_of(8, 2)))

    def test_receivers_that_die_cost_the_sender_no_memory(self, other):
        """A receiver dies before its pull, during the pull, or after.

        An offer that was not pulled yet ends later.
        """
        length, count = 32 << 20, 2
        living, *dying = (Process(receiver) for _ in range(7))
        other.ask(9, count, length, 60.0)
        assert living.ask(other.first, 9, count, length)
        before = other.ask(10, 1, PAGE, 0.1)
        for i, to in enumerate(dying):
            other.ask(100 * (i + 1), count, length, 1.0)
            to.pipe.send((other.first, 100 * (i + 1), count, length))
            time.sleep(0.03 * i)
            to.kill()
        time.sleep(2.0)
        other.ask(11, 1, PAGE, 0.1)  # this call frees the offers that ended
        after = other.ask(12, 1, PAGE, 0.1)
        assert after < before + 2 * count * length
        other.ask(13, 2, PAGE, 60.0)
        assert living.ask(other.first, 13, 2, PAGE)
        living.kill()

    def test_offers_that_nobody_fetches_end(self, other):
        length, count = 16 << 20, 2
        first = other.ask(20, count, length, 0.2)
        for i in range(12):
            time.sleep(0.3)
            last = other.ask(1000 * (i + 1), count, length, 0.2)
        assert last < first + 4 * count * length
