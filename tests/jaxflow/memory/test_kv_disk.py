"""The disk tier keeps what it was given, whole, or keeps nothing: through bad files, bad disks, kills and crowds."""

import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxflow.config import ConfigError
from jaxflow.memory import disk_file
from jaxflow.memory.disk_file import HEADER_BYTES
from jaxflow.memory.disk_folder import FOLDER, find_pages
from jaxflow.memory.disk_tier import READERS, DiskCounters, DiskTier

PAGE = (512, 96)  # bytes of a page of each group
FILE = PAGE[0] + HEADER_BYTES
MODEL = b"a model"


def key(i: int, group: int = 0) -> bytes:
    return bytes([group]) + i.to_bytes(16, "big")


def page(i: int, group: int = 0) -> np.ndarray:
    return np.random.default_rng([i, group]).integers(0, 256, PAGE[group], dtype=np.uint8)


def parts(i: int, group: int = 0) -> Callable[[], list[np.ndarray]]:
    """A page as two shards hold it."""
    return lambda: np.split(page(i, group).view(np.uint32), 2)


def put(tier: DiskTier, *numbers: int) -> None:
    """Puts pages one after the other, each written before the next."""
    for i in numbers:
        assert tier.put(key(i), parts(i))
        settled(tier)


def settled(tier: DiskTier) -> None:
    """Waits for the writer."""
    tier._writer.submit(lambda: None).result(30)


def fetched(tier: DiskTier, name: bytes) -> np.ndarray | None:
    future = tier.prefetch(name)
    return None if future is None else future.result(30)


def same(found: np.ndarray | None, i: int, group: int = 0) -> bool:
    return found is not None and np.array_equal(found, page(i, group))


def holds(tier: DiskTier, i: int) -> bool:
    found = tier.get(key(i))
    assert found is None or same(found, i)
    return found is not None


@pytest.fixture
def opened(tmp_path):
    """Opens tiers over one folder, the last one closed first."""
    tiers = []

    def make(pages: int = 100, fingerprint: bytes = MODEL, **settings) -> DiskTier:
        if tiers:
            tiers.pop().close()
        tiers.append(DiskTier(tmp_path, pages * FILE, fingerprint, PAGE, **settings))
        return tiers[-1]

    before = set(threading.enumerate())
    yield make
    for tier in tiers:
        tier.close()
    assert set(threading.enumerate()) <= before, "threads are left"
    assert not list(tmp_path.rglob("*.tmp")), "temporary files are left"


class TestWholePages:
    def test_what_is_put_is_there_now_and_after_a_restart(self, opened):
        tier = opened()
        for group in (0, 1):
            for i in range(5):
                assert not tier.contains(key(i, group))
                assert tier.put(key(i, group), parts(i, group))
                assert tier.contains(key(i, group)) and same(tier.get(key(i, group)), i, group)
        for restart in (False, True):
            tier = opened() if restart else tier
            for group in (0, 1):
                for i in range(5):
                    assert tier.contains(key(i, group)) and same(fetched(tier, key(i, group)), i, group)
            assert fetched(tier, key(77)) is tier.get(key(77)) is None
        counters = tier.counters()
        assert (counters.hits, counters.misses, counters.pages) == (10, 2, 10)
        assert counters.bytes == 5 * (FILE + PAGE[1] + HEADER_BYTES) and counters.bytes_read == 5 * sum(PAGE)

    def test_a_page_is_written_once(self, opened):
        tier = opened()
        put(tier, 1, 1, 1)
        assert tier.counters() == DiskCounters(written=1, bytes_written=PAGE[0], pages=1, bytes=FILE)

    def test_the_least_recently_used_goes_first_after_a_restart_too(self, opened):
        tier = opened(pages=4)
        put(tier, 1, 2, 3, 5)
        assert holds(tier, 1)
        tier.used([key(3), key(77), key(2)])
        put(tier, 4)
        assert [tier.contains(key(i)) for i in (1, 2, 3, 4, 5)] == [True, True, True, True, False]
        for pages, gone in ((3, 1), (2, 3)):
            tier = opened(pages=pages)
            assert not tier.contains(key(gone)) and tier.contains(key(4))
            assert len(list(tier.folder.glob("*.kv"))) == tier.counters().pages == pages

    def test_a_read_counts_as_use_though_the_process_is_killed(self, opened):
        tier = opened()
        put(tier, 1, 2)
        for i in (1, 2):
            os.utime(tier.folder / disk_file.name_of(key(i)), ns=(i, i))
        assert holds(tier, 1)
        assert [name for name, _ in find_pages(tier.folder)] == [key(2), key(1)]

    def test_names_are_hexadecimal_and_private(self, opened, tmp_path):
        tier = opened()
        hostile = b"\0../../../etc/pwd"
        assert tier.put(hostile, parts(0))
        settled(tier)
        assert same(tier.get(hostile), 0)
        [file] = tmp_path.rglob("*.kv")
        assert file.parent == tier.folder == tmp_path / FOLDER and file.stem == hostile.hex()
        assert stat.S_IMODE(tier.folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE((tier.folder / "lock").stat().st_mode) == 0o600

    def test_what_is_no_page_is_refused(self, opened):
        tier = opened()
        for bad in (b"", b"\0" * 34, key(0, 2)):
            with pytest.raises(ValueError, match=r"page|key"):
                tier.put(bad, parts(0))

    def test_a_fault_of_the_caller_is_told_and_leaves_nothing(self, opened, caplog):
        tier = opened()
        put(tier, 1)
        for bad in (parts(2, 1), lambda: 1 / 0):
            tier.put(key(2), bad)
            assert tier.get(key(2)) is None
            settled(tier)
            assert not tier.contains(key(2)) and tier._queued_bytes == 0
        assert "a page of 96 bytes" in caplog.text and "ZeroDivisionError" in caplog.text and holds(tier, 1)

    def test_what_else_is_in_the_folder_stays(self, opened):
        folder = opened().folder
        (folder / "README").write_text("mine")
        (folder / "00AB.kv").write_text("mine")
        (folder / "dead.kv").symlink_to("/etc/passwd")
        tier = opened(pages=2)
        assert tier.counters().pages == 0
        put(tier, 1, 2, 3)
        assert (folder / "README").exists() and (folder / "00AB.kv").exists() and tier.counters().pages == 2

    def test_its_threads_are_prepared(self, opened):
        names = []
        tier = opened(prepare=lambda: names.append(threading.current_thread().name))
        assert sorted(names) == [*(f"jaxflow-kv-read_{i}" for i in range(READERS)), "jaxflow-kv-write_0"], "at once"
        put(tier, 1)
        assert same(fetched(tier, key(1)), 1) and len(names) == READERS + 1


class TestBadFiles:
    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(flips=st.sets(st.integers(0, 8 * FILE - 1), min_size=1, max_size=20))
    def test_flipped_bits_are_never_served(self, opened, caplog, flips):
        caplog.clear()
        tier = opened()
        put(tier, 1)
        path = tier.folder / disk_file.name_of(key(1))
        content = bytearray(path.read_bytes())
        for bit in flips:
            content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        assert tier.get(key(1)) is None and not tier.contains(key(1)) and not path.exists()
        assert tier.counters().rejected == 1 and [r.levelname for r in caplog.records] == ["WARNING"]
        put(tier, 1)
        assert holds(tier, 1)

    @pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, FILE - 1, FILE + 1])
    @pytest.mark.parametrize("restart", [False, True])
    def test_nor_is_a_file_of_another_length(self, opened, caplog, size, restart):
        tier = opened()
        put(tier, 1, 2)
        path = tier.folder / disk_file.name_of(key(1))
        os.truncate(path, size)
        tier = opened() if restart else tier
        assert fetched(tier, key(1)) is None and not path.exists() and "bytes" in caplog.text
        assert holds(tier, 2) and tier.counters().pages == 1 and tier.counters().bytes == FILE

    def test_nor_one_that_shrinks_while_it_is_read(self, opened, monkeypatch):
        tier = opened()
        put(tier, 1)
        with faults(monkeypatch, readv=lambda fd, buffers: 0):
            assert tier.get(key(1)) is None
        assert tier.counters().rejected == 1

    def test_nor_another_models(self, opened, caplog):
        put(opened(), 1)
        tier = opened(fingerprint=b"another model")
        assert tier.contains(key(1)), "its bytes count until somebody looks"
        assert tier.get(key(1)) is None and "another model" in caplog.text and not tier.contains(key(1))

    def test_nor_another_pages(self, opened, caplog):
        tier = opened()
        put(tier, 1)
        (tier.folder / disk_file.name_of(key(1))).rename(tier.folder / disk_file.name_of(key(2)))
        tier = opened()
        assert tier.get(key(2)) is None and "another page" in caplog.text

    def test_nor_another_formats(self, opened, caplog, monkeypatch):
        monkeypatch.setattr(disk_file, "SCHEMA", 2)
        put(opened(), 1)
        monkeypatch.undo()
        assert opened().get(key(1)) is None and "of format 2" in caplog.text

    def test_nor_what_a_link_points_to(self, opened, tmp_path):
        tier = opened()
        put(tier, 1)
        path = tier.folder / disk_file.name_of(key(1))
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert tier.get(key(1)) is None and tier.counters().errors == 1
        assert not path.is_symlink() and (tmp_path / "elsewhere").exists()


class faults:
    """Replaces functions of `os` as `disk_file` sees them."""

    def __init__(self, monkeypatch, **functions):
        self._patch, self._functions = monkeypatch, functions

    def __enter__(self):
        every = {name: getattr(os, name) for name in dir(os)} | self._functions
        self._patch.setattr(disk_file, "os", types.SimpleNamespace(**every))

    def __exit__(self, *_):
        self._patch.undo()


def fails(number):
    def raises(*_, **__):
        raise OSError(number, os.strerror(number))

    return raises


class TestBadDisks:
    @pytest.mark.parametrize("operation", ["open", "write", "rename"])
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES])
    def test_a_disk_that_cannot_be_written_is_no_cache(self, opened, monkeypatch, caplog, operation, number):
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

    def test_it_is_tried_again_and_warned_of_again_only_if_it_worked_meanwhile(self, opened, monkeypatch, caplog):
        tier = opened(retry_s=0.0)
        with faults(monkeypatch, write=fails(errno.ENOSPC)):
            put(tier, 1, 2, 3)
        assert tier.counters().errors == 3 and len(caplog.records) == 1
        put(tier, 4)
        assert holds(tier, 4)
        with faults(monkeypatch, write=fails(errno.ENOSPC)):
            put(tier, 5)
        assert len(caplog.records) == 2

    def test_what_was_queued_before_a_fault_is_not_tried(self, opened, monkeypatch):
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
        assert tier.counters().errors == 1 and not tier.contains(key(3)) and "make room" in caplog.text

    @pytest.mark.parametrize("operation", ["open", "readv", "fstat"])
    @pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
    def test_a_page_that_cannot_be_read_is_a_miss(self, opened, monkeypatch, caplog, operation, number):
        tier = opened()
        put(tier, 1, 2, 3)
        with faults(monkeypatch, **{operation: fails(number)}):
            assert fetched(tier, key(1)) is tier.get(key(2)) is None
        assert len(caplog.records) == 1 and not tier.contains(key(1)) and [*tier.folder.glob("*.kv")] == [tier._path(key(3))]
        assert (tier.counters().errors, tier.counters().misses) == (2, 2) and holds(tier, 3)

    def test_little_by_little_is_enough(self, opened, monkeypatch):
        tier = opened()
        few = {"write": lambda fd, data: os.write(fd, data[:7]), "readv": lambda fd, into: os.readv(fd, [into[0][:5]])}
        with faults(monkeypatch, **few):
            put(tier, 1)
            assert holds(tier, 1)
        assert holds(tier, 1)

    def test_a_file_that_somebody_removed_is_a_miss(self, opened, caplog):
        tier = opened()
        put(tier, 1)
        (tier.folder / disk_file.name_of(key(1))).unlink()
        assert fetched(tier, key(1)) is None and not tier.contains(key(1)) and not caplog.records
        assert (tier.counters().misses, tier.counters().bytes) == (1, 0)


class TestBounds:
    def test_the_queue_of_writes_is_bounded(self, opened, monkeypatch):
        tier, go = opened(write_queue_bytes=3 * PAGE[0]), threading.Event()
        with faults(monkeypatch, write=lambda fd, data: go.wait(30) and os.write(fd, data)):
            assert [tier.put(key(i), parts(i)) for i in range(5)] == [True] * 3 + [False] * 2
            assert holds(tier, 1), "what is queued is there already"
            go.set()
            settled(tier)
        assert tier.counters().dropped == 2 and tier.counters().written == 3 and tier._queued_bytes == 0

    def test_half_of_it_is_for_what_has_time(self, opened, monkeypatch):
        tier, go = opened(write_queue_bytes=4 * PAGE[0]), threading.Event()
        with faults(monkeypatch, write=lambda fd, data: go.wait(30) and os.write(fd, data)):
            assert [tier.put(key(i), parts(i), at_leisure=True) for i in range(4)] == [True] * 2 + [False] * 2
            assert tier.put(key(2), parts(2)) and tier.counters().dropped == 0
            go.set()
            settled(tier)
        assert tier.counters().written == 3

    def test_so_is_the_read_ahead(self, opened, monkeypatch):
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

    def test_closing_writes_what_is_queued(self, opened):
        tier = opened()
        for i in range(40):
            tier.put(key(i), parts(i))
        tier.close()
        tier.close()
        assert not tier.put(key(50), parts(50)) and tier.prefetch(key(1)) is tier.get(key(1)) is None
        again = opened()
        assert all(holds(again, i) for i in range(40))

    def test_but_not_for_ever(self, opened, monkeypatch):
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
    def test_a_crowd_sees_whole_pages_within_the_capacity(self, opened, seed, pages):
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
        assert counters.bytes == sum(file.stat().st_size for file in files) <= capacity and counters.pages == len(files)


class TestStart:
    def test_two_servers_do_not_share_a_folder(self, opened, tmp_path):
        tier = opened()
        with pytest.raises(ConfigError, match=r"kv_disk_path.*no other server"):
            DiskTier(tmp_path, 10 * FILE, MODEL, PAGE)
        put(tier, 1)
        assert holds(opened(), 1)

    def test_a_capacity_below_a_page_names_what_would_do(self, tmp_path):
        least = sum(PAGE) + 2 * HEADER_BYTES
        with pytest.raises(ConfigError, match=f"kv_disk_size.*at least {least / 2**30:.6f} GiB"):
            DiskTier(tmp_path, least - 1, MODEL, PAGE)
        DiskTier(tmp_path, least, MODEL, PAGE).close()

    def test_folders_that_cannot_be_used(self, tmp_path):
        (tmp_path / "file").write_text("")
        (tmp_path / "linked").mkdir()
        (tmp_path / "linked" / FOLDER).symlink_to(tmp_path)
        for folder in (tmp_path / "missing", tmp_path / "file", tmp_path / "linked", "/proc"):
            with pytest.raises(ConfigError, match="kv_disk_path"):
                DiskTier(folder, 10 * FILE, MODEL, PAGE)

    def test_a_killed_server_leaves_only_whole_pages(self, tmp_path):
        """Killed again and again while it writes; what it said it had written is there, and nothing else looks like a page."""
        program = (
            "import sys\n"
            "import numpy as np\n"
            "from jaxflow.memory.disk_tier import DiskTier\n"
            f"tier = DiskTier(sys.argv[1], 1 << 30, {MODEL!r}, (1 << 20,))\n"
            "tier._went = lambda *_: print(tier.counters().written, flush=True)\n"
            "for i in range(10_000):\n"
            "    while not tier.put(b'\\0' + i.to_bytes(16, 'big'), lambda i=i: [np.full(1 << 20, i % 251, np.uint8)]):\n"
            "        pass\n"
        )
        for wanted in (3, 60):
            with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                while int(process.stdout.readline()) < wanted:
                    pass
                process.send_signal(signal.SIGKILL)
        folder = tmp_path / FOLDER
        (folder / (key(5).hex() + ".tmp")).write_bytes(b"half a page")
        tier = DiskTier(tmp_path, 1 << 30, MODEL, (1 << 20,))
        assert not list(folder.glob("*.tmp")) and tier.counters().pages >= 60
        for file in folder.glob("*.kv"):
            i = int(file.stem, 16)
            found = tier.get(key(i))
            assert found is not None and (found == i % 251).all()
        tier.close()
        assert not tier.counters().rejected


def test_warnings_name_the_module(opened, caplog, monkeypatch):
    with caplog.at_level(logging.WARNING), faults(monkeypatch, write=fails(errno.ENOSPC)):
        put(opened(), 1)
    assert [record.name for record in caplog.records] == ["jaxflow.memory.disk_tier"]
