"""Between host and disk: what one loses the other has, and nothing waits."""

import threading

import numpy as np
import pytest

from jaxflow.kv.tiers import disk_link
from jaxflow.kv.tiers.disk_link import DiskLink
from jaxflow.kv.tiers.disk_store import DiskTier
from jaxflow.kv.tiers.host_store import HostStore

PAGE = 64


def key(i):
    return b"\0" + i.to_bytes(16, "big")


def page(i):
    return np.full(PAGE // 4, i, np.uint32)


@pytest.fixture
def link(tmp_path):
    """A host of eight pages over a disk of a hundred."""
    store = HostStore(8 * PAGE, (PAGE,))
    disk = DiskTier(tmp_path, 100 * (PAGE + 200), b"model", (PAGE,))
    made = DiskLink(disk, store, lambda data: [data], lambda key, content: content.view(np.uint32))
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("jaxflow-kv")]


def store_of(link):
    return link._store


def keep(link, *numbers):
    """Pages come from the device."""
    for i in numbers:
        assert store_of(link).reserve(key(i))
        store_of(link).put(key(i), page(i))


def arrive(link, expected):
    """Takes in what is read, as the engine's steps do."""
    found = []
    for _ in range(10_000):
        found += link.arrived()
        if len(found) == expected:
            break
        threading.Event().wait(0.001)
    for name, data in found:
        store_of(link).drop(name) if data is None else store_of(link).put(name, data)
    return dict(found)


def test_what_leaves_the_host_comes_back_when_it_is_needed(link):
    keep(link, *range(20))
    assert len(store_of(link)) == 8 and all(link.disk.contains(key(i)) for i in range(12))
    link.read_ahead([key(i) for i in (3, 4, 15, 99, 5)])
    assert all(store_of(link).contains(key(i)) and not store_of(link).ready(key(i)) for i in (3, 4, 5)), (
        "on their way"
    )
    assert link.pending == 3 and set(arrive(link, 3)) == {key(3), key(4), key(5)} and link.pending == 0
    for i in (3, 4, 5):
        assert np.array_equal(store_of(link).get(key(i)), page(i))


def test_what_the_host_has_is_on_the_disk_too_when_that_has_time(link):
    keep(link, 1, 2)
    assert link.disk.contains(key(1)) and link.disk.contains(key(2)) and len(store_of(link)) == 2


def test_a_page_filled_in_part_never_gets_there(link):
    """Nobody asks the disk for it: not when it arrives, nor when it leaves the host, nor at the end."""
    parts = [key(100), key(101)]
    for part in parts:
        assert store_of(link).reserve(part, part=True)
        store_of(link).put(part, page(1))
    store_of(link).discard(parts[:1])
    keep(link, *range(8))
    assert not store_of(link).contains(parts[1]), "evicted"
    assert store_of(link).reserve(parts[0], part=True)
    store_of(link).put(parts[0], page(1))
    link.close()
    assert [i for i in range(8) if link.disk.contains(key(i))] == [*range(8)]
    assert not any(link.disk.contains(part) for part in parts) and link.disk.counters().pages == 8


def test_at_the_end_all_of_the_host_is_on_the_disk_the_last_used_first(link, tmp_path):
    link.disk._write_queue_bytes = 0  # one at a time: none while another is being written
    keep(link, *range(8))
    store_of(link).touch([key(5)])
    link.close()
    again = DiskTier(tmp_path, 100 * (PAGE + 200), b"model", (PAGE,))
    assert [again.get(key(i)).tolist() for i in range(8)] == [
        page(i).view(np.uint8).tolist() for i in range(8)
    ]  # pyright: ignore[reportOptionalMemberAccess]
    again.close()
    assert store_of(link).newest_first()[0][0] == key(5)


def test_a_small_disk_ends_with_what_was_used_last(link, tmp_path):
    link.disk.capacity_bytes = 3 * link.disk.file_bytes(key(0))
    keep(link, *range(8))
    store_of(link).touch([key(5), key(2)])
    link.close()
    assert {i for i in range(8) if link.disk.contains(key(i))} == {7, 5, 2}
    again = DiskTier(tmp_path, 2 * link.disk.file_bytes(key(0)), b"model", (PAGE,))
    assert {i for i in range(8) if again.contains(key(i))} == {5, 2}, "its files tell the order of use"
    again.close()


def test_the_end_does_not_wait_for_a_disk_that_fails(link, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(link.disk, "_make_room", full)
    keep(link, *range(8))
    link.close(flush_s=600.0)
    assert link.disk.counters().errors == 1


def test_a_page_is_asked_for_once(link):
    keep(link, *range(10))
    for _ in range(3):
        link.read_ahead([key(0), key(1)])
    assert len(arrive(link, 2)) == 2 and link.arrived() == []


def test_half_of_the_host_is_read_ahead_and_then_the_rest(link):
    keep(link, *range(20))
    link.read_ahead([key(i) for i in range(8)])
    assert link.pending == 4 and not store_of(link).contains(key(4))
    arrive(link, 4)
    link.read_ahead([key(i) for i in range(8)])
    assert set(arrive(link, 4)) == {key(i) for i in range(4, 8)}


def test_few_are_asked_of_the_disk_at_once(link, monkeypatch):
    monkeypatch.setattr(disk_link, "READ_AHEAD", 1)
    keep(link, *range(20))
    link.read_ahead([key(i) for i in range(4)])
    assert link._reading == 1 and len(link._wanted) == 3
    assert len(arrive(link, 4)) == 4


def test_a_page_that_cannot_be_had_is_let_go(link, monkeypatch):
    keep(link, *range(12))
    link.disk._writer.submit(lambda: None).result(30)
    for file in link.disk.folder.glob("*.kv"):
        file.write_bytes(b"damaged")
    link.read_ahead([key(0), key(1)])
    assert arrive(link, 2) == {key(0): None, key(1): None}
    assert not store_of(link).contains(key(0)) and not link.disk.contains(key(0))
    link._from_bytes = lambda key, content: 1 / 0
    keep(link, *range(20, 30))
    link.disk._writer.submit(lambda: None).result(30)
    link.read_ahead([key(20)])
    assert arrive(link, 1) == {key(20): None}


def test_a_closed_disk_gives_nothing(link):
    keep(link, *range(12))
    link.close()
    link.read_ahead([key(0)])
    assert set(arrive(link, link.pending).values()) <= {None}
    keep(link, *range(30, 40))


def test_the_rate_is_what_was_seen_lately(link):
    assert link.seconds(1000) == 0.0
    for rate in (100.0, 10.0):
        for _ in range(100):
            link._reading, link._coming_bytes, link._begun_s = 1, PAGE, 5.0
            link._read.put((key(0), None, 5.0 + PAGE / rate))
            assert link.arrived() == [(key(0), None)]
        assert link.seconds(1000) == pytest.approx(1000 / rate, rel=1e-3)
    link._coming_bytes = 500
    assert link.seconds(500) == pytest.approx(100, rel=1e-3)
    link._coming_bytes = 0
