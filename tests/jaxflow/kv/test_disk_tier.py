"""Disk tier below a host store: evicted pages go to the disk, and requested pages come back."""

import threading

import numpy as np
import pytest

from jaxflow.kv.tiers import disk_tier
from jaxflow.kv.tiers.disk_store import DiskStore
from jaxflow.kv.tiers.disk_tier import DiskTier
from jaxflow.kv.tiers.host_store import HostStore

PAGE = 64


def key(i):
    return b"\0" + i.to_bytes(16, "big")


def page(i):
    return np.full(PAGE // 4, i, np.uint32)


@pytest.fixture
def host(tmp_path):
    """Return a host store of eight pages above a disk of a hundred."""
    disk = DiskStore(tmp_path, 100 * (PAGE + 200), b"model", (PAGE,))
    made = HostStore(
        8 * PAGE, (PAGE,), DiskTier(disk, lambda data: [data], lambda group, payload: payload.view(np.uint32))
    )
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("jaxflow-kv")]


@pytest.fixture
def tier(host):
    return host.lower


def keep(host, *numbers):
    """Store pages that come from the device."""
    for i in numbers:
        assert host.reserve(key(i))
        host.arrive(key(i), page(i))


def arrive(host, expected):
    """Take the pages that were read, as the engine does before each step. Return them by key."""
    found = []
    for _ in range(10_000):
        for name, data in host.lower.take_read():
            host.arrive(name, data)
            found.append((name, data))
        if len(found) == expected:
            break
        threading.Event().wait(0.001)
    return dict(found)


def test_evicted_pages_are_read_back(host, tier):
    keep(host, *range(20))
    assert len(host) == 8 and all(tier.disk.contains(key(i)) for i in range(12))
    host.read_ahead([key(i) for i in (3, 4, 15, 99, 5)])
    assert all(host.contains(key(i)) and not host.is_stored(key(i)) for i in (3, 4, 5)), "on their way"
    assert tier.pending == 3 and set(arrive(host, 3)) == {key(3), key(4), key(5)} and tier.pending == 0
    for i in (3, 4, 5):
        assert np.array_equal(host.get(key(i)), page(i))


def test_stored_pages_are_written_to_an_idle_disk(host, tier):
    keep(host, 1, 2)
    assert tier.disk.contains(key(1)) and tier.disk.contains(key(2)) and len(host) == 2


def test_partial_pages_are_never_written(host, tier):
    """A partial page is not written at its arrival, its eviction or the end."""
    parts = [key(100), key(101)]
    for part in parts:
        assert host.reserve(part, partial=True)
        host.arrive(part, page(1))
    host.discard(parts[:1])
    keep(host, *range(8))
    assert not host.contains(parts[1]), "evicted"
    assert host.reserve(parts[0], partial=True)
    host.arrive(parts[0], page(1))
    host.close()
    assert [i for i in range(8) if tier.disk.contains(key(i))] == [*range(8)]
    assert not any(tier.disk.contains(part) for part in parts) and tier.disk.counters().pages == 8


def test_close_writes_all_pages_of_the_host(host, tier, tmp_path):
    tier.disk._write_queue_bytes = 0  # no page while another page is being written
    keep(host, *range(8))
    host.touch([key(5)])
    assert host.newest_first()[0][0] == key(5)
    host.close()
    again = DiskStore(tmp_path, 100 * (PAGE + 200), b"model", (PAGE,))
    assert [again.get(key(i)).tolist() for i in range(8)] == [
        page(i).view(np.uint8).tolist() for i in range(8)
    ]  # pyright: ignore[reportOptionalMemberAccess]
    again.close()


def test_close_writes_the_most_recent_pages_to_a_small_disk(host, tier, tmp_path):
    tier.disk.capacity_bytes = 3 * tier.disk.file_bytes(key(0))
    keep(host, *range(8))
    host.touch([key(5), key(2)])
    host.close()
    assert {i for i in range(8) if tier.disk.contains(key(i))} == {7, 5, 2}
    again = DiskStore(tmp_path, 2 * tier.disk.file_bytes(key(0)), b"model", (PAGE,))
    assert {i for i in range(8) if again.contains(key(i))} == {5, 2}, "the file times hold the order of use"
    again.close()


def test_close_does_not_wait_for_a_failing_disk(host, tier, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tier.disk, "_make_room", full)
    keep(host, *range(8))
    tier.close(host.newest_first(), flush_s=600.0)
    assert tier.disk.counters().errors == 1


def test_a_page_is_requested_once(host, tier):
    keep(host, *range(10))
    for _ in range(3):
        host.read_ahead([key(0), key(1)])
    assert len(arrive(host, 2)) == 2 and tier.take_read() == []


def test_read_ahead_takes_half_of_the_host_at_a_time(host, tier):
    keep(host, *range(20))
    host.read_ahead([key(i) for i in range(8)])
    assert tier.pending == 4 and not host.contains(key(4))
    arrive(host, 4)
    host.read_ahead([key(i) for i in range(8)])
    assert set(arrive(host, 4)) == {key(i) for i in range(4, 8)}


def test_the_disk_store_gets_few_requests_at_once(host, tier, monkeypatch):
    monkeypatch.setattr(disk_tier, "READ_AHEAD", 1)
    keep(host, *range(20))
    host.read_ahead([key(i) for i in range(4)])
    assert tier._num_reading == 1 and len(tier._requested) == 3
    assert len(arrive(host, 4)) == 4


def test_unreadable_pages_leave_the_host(host, tier):
    keep(host, *range(12))
    tier.disk._writer.submit(lambda: None).result(30)
    for file in tier.disk.folder.glob("*.kv"):
        file.write_bytes(b"damaged")
    host.read_ahead([key(0), key(1)])
    assert arrive(host, 2) == {key(0): None, key(1): None}
    assert not host.contains(key(0)) and not tier.disk.contains(key(0))
    tier._from_bytes = lambda group, payload: 1 / 0
    keep(host, *range(20, 30))
    tier.disk._writer.submit(lambda: None).result(30)
    host.read_ahead([key(20)])
    assert arrive(host, 1) == {key(20): None}


def test_a_closed_disk_returns_no_page(host, tier):
    keep(host, *range(12))
    host.close()
    host.read_ahead([key(0)])
    assert set(arrive(host, tier.pending).values()) <= {None}
    keep(host, *range(30, 40))


def test_read_seconds_follow_the_recent_rate(tier):
    assert tier.read_seconds(1000) == 0.0
    for rate in (100.0, 10.0):
        for _ in range(100):
            tier._num_reading, tier._pending_bytes, tier._begin_s = 1, PAGE, 5.0
            tier._read_pages.put((key(0), None, 5.0 + PAGE / rate))
            assert tier.take_read() == [(key(0), None)]
        assert tier.read_seconds(1000) == pytest.approx(1000 / rate, rel=1e-3)
    tier._pending_bytes = 500
    assert tier.read_seconds(500) == pytest.approx(100, rel=1e-3)
    tier._pending_bytes = 0
