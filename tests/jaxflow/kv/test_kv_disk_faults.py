"""Disk store on failing disks, and its limits: an error is a miss, and no caller waits."""

import errno
import logging
import os
import threading
import time

import numpy as np
import pytest
from disk_pages import FILE, PAGE, fails, faults, fetched, holds, key, page, parts, put, same, settled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxflow.kv.tiers import page_file


class TestBadDisks:
    @pytest.mark.parametrize("operation", ["open", "write", "rename"])
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES])
    def test_pages_are_dropped_on_an_unwritable_disk(self, opened, monkeypatch, caplog, operation, number):
        tier = opened()
        put(tier, 1)
        with faults(monkeypatch, **{operation: fails(number)}):
            assert tier.put(key(2), parts(2))
            settled(tier)
            assert not any(tier.put(key(i), parts(i)) for i in range(3, 9)), "it is left alone for a while"
        assert not tier.contains(key(2)) and not list(tier.folder.glob("*.tmp"))
        assert len(caplog.records) == 1 and os.strerror(number) in caplog.text
        counters = tier.counters()
        assert (counters.errors, counters.dropped, counters.written) == (1, 6, 1)
        assert holds(tier, 1), "what was there is there"

    def test_writes_resume_later_and_the_warning_repeats_only_after_a_success(
        self, opened, monkeypatch, caplog
    ):
        tier = opened(retry_s=0.0)
        with faults(monkeypatch, write=fails(errno.ENOSPC)):
            put(tier, 1, 2, 3)
        assert tier.counters().errors == 3 and len(caplog.records) == 1
        put(tier, 4)
        assert holds(tier, 4)
        with faults(monkeypatch, write=fails(errno.ENOSPC)):
            put(tier, 5)
        assert len(caplog.records) == 2

    def test_pages_queued_before_an_error_are_dropped(self, opened, monkeypatch):
        tier, go = opened(), threading.Event()

        def slow(*_):
            go.wait(30)
            raise OSError(errno.EIO, "an error")

        with faults(monkeypatch, write=slow):
            assert all(tier.put(key(i), parts(i)) for i in range(5))
            go.set()
            settled(tier)
        assert (tier.counters().errors, tier.counters().dropped, tier._queued_bytes) == (1, 4, 0)

    def test_files_that_cannot_be_removed_stop_the_writing(self, opened, monkeypatch, caplog):
        tier = opened(pages=2)
        put(tier, 1, 2)
        with faults(monkeypatch, unlink=fails(errno.EROFS)):
            put(tier, 3)
        assert (
            tier.counters().errors == 1 and not tier.contains(key(3)) and "cannot be removed" in caplog.text
        )

    @pytest.mark.parametrize("operation", ["open", "readv", "fstat"])
    @pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
    def test_a_page_that_cannot_be_read_is_a_miss(self, opened, monkeypatch, caplog, operation, number):
        tier = opened()
        put(tier, 1, 2, 3)
        with faults(monkeypatch, **{operation: fails(number)}):
            assert fetched(tier, key(1)) is tier.get(key(2)) is None
        assert (
            len(caplog.records) == 1
            and not tier.contains(key(1))
            and [*tier.folder.glob("*.kv")] == [tier._path(key(3))]
        )
        assert (tier.counters().errors, tier.counters().misses) == (2, 2) and holds(tier, 3)

    def test_partial_writes_and_reads_are_continued(self, opened, monkeypatch):
        tier = opened()
        few = {
            "write": lambda fd, data: os.write(fd, data[:7]),
            "readv": lambda fd, into: os.readv(fd, [into[0][:5]]),
        }
        with faults(monkeypatch, **few):
            put(tier, 1)
            assert holds(tier, 1)
        assert holds(tier, 1)

    def test_a_removed_file_is_a_miss(self, opened, caplog):
        tier = opened()
        put(tier, 1)
        (tier.folder / page_file.name_of(key(1))).unlink()
        assert fetched(tier, key(1)) is None and not tier.contains(key(1)) and not caplog.records
        assert (tier.counters().misses, tier.counters().bytes) == (1, 0)


class TestBounds:
    def test_the_write_queue_is_bounded(self, opened, monkeypatch):
        tier, go = opened(write_queue_bytes=3 * PAGE[0]), threading.Event()
        with faults(monkeypatch, write=lambda fd, data: go.wait(30) and os.write(fd, data)):
            assert [tier.put(key(i), parts(i)) for i in range(5)] == [True] * 3 + [False] * 2
            assert holds(tier, 1), "what is queued is there already"
            go.set()
            settled(tier)
        assert tier.counters().dropped == 2 and tier.counters().written == 3 and tier._queued_bytes == 0

    def test_opportunistic_writes_use_half_of_the_queue(self, opened, monkeypatch):
        tier, go = opened(write_queue_bytes=4 * PAGE[0]), threading.Event()
        with faults(monkeypatch, write=lambda fd, data: go.wait(30) and os.write(fd, data)):
            assert [tier.put(key(i), parts(i), opportunistic=True) for i in range(4)] == [True] * 2 + [
                False
            ] * 2
            assert tier.put(key(2), parts(2)) and tier.counters().dropped == 0
            go.set()
            settled(tier)
        assert tier.counters().written == 3

    def test_the_read_ahead_is_bounded(self, opened, monkeypatch):
        tier, go = opened(read_ahead=2), threading.Event()
        put(tier, 1, 2, 3)
        with faults(monkeypatch, readv=lambda fd, into: go.wait(30) and os.readv(fd, into)):
            one, two = tier.prefetch(key(1)), tier.prefetch(key(2))
            assert one is not None and two is not None
            assert tier.prefetch(key(3)) is None and tier.prefetch(key(1)) is one
            go.set()
            assert same(one.result(30), 1) and same(two.result(30), 2)
        assert same(fetched(tier, key(3)), 3)

    def test_a_page_longer_than_the_queue_is_still_written(self, opened):
        tier = opened(write_queue_bytes=1)
        put(tier, 1)
        assert holds(tier, 1)

    def test_close_writes_the_queued_pages(self, opened):
        tier = opened()
        for i in range(40):
            tier.put(key(i), parts(i))
        tier.close()
        tier.close()
        assert not tier.put(key(50), parts(50)) and tier.prefetch(key(1)) is tier.get(key(1)) is None
        again = opened()
        assert all(holds(again, i) for i in range(40))

    def test_close_has_a_time_limit(self, opened, monkeypatch):
        tier, writing, go = opened(), threading.Event(), threading.Event()

        def stuck(fd, data):
            writing.set()
            go.wait(30)
            return os.write(fd, data)

        with faults(monkeypatch, write=stuck):
            for i in range(10):
                tier.put(key(i), parts(i))
            assert writing.wait(30)
            closing = threading.Thread(target=tier.close, args=(0.01,))
            closing.start()
            while tier._writes_resume_s == 0.0:  # until it gives up waiting
                time.sleep(0.001)
            go.set()
            closing.join()
        assert tier.counters().dropped >= 8, "only the one under way was waited for"

    @settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(seed=st.integers(0, 2**32), pages=st.integers(1, 12))
    def test_concurrent_threads_see_complete_pages_within_the_capacity(self, opened, seed, pages):
        tier, wrong, capacity = opened(pages=pages + 1), [], (pages + 1) * FILE

        def user(number):
            draw = np.random.default_rng([seed, number])
            for _ in range(40):
                i, what = int(draw.integers(20)), draw.integers(3)
                if what == 0:
                    tier.put(key(i), parts(i))
                found = fetched(tier, key(i)) if what == 1 else tier.get(key(i)) if what == 2 else None
                if found is not None and not np.array_equal(found, page(i)):
                    wrong.append(i)

        users = [threading.Thread(target=user, args=(n,)) for n in range(4)]
        for one in users:
            one.start()
        for one in users:
            one.join()
        settled(tier)
        counters = tier.counters()
        assert not wrong and not counters.errors and not counters.rejected
        files = list(tier.folder.glob("*.kv"))
        assert counters.bytes == sum(
            file.stat().st_size for file in files
        ) <= capacity and counters.pages == len(files)


def test_warnings_name_the_module(opened, caplog, monkeypatch):
    with caplog.at_level(logging.WARNING), faults(monkeypatch, write=fails(errno.ENOSPC)):
        put(opened(), 1)
    assert [record.name for record in caplog.records] == ["jaxflow.kv.tiers.disk_store"]
