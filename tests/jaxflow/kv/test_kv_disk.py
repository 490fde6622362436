"""Disk store: complete pages or none, with damaged files, killed processes and other servers."""

import os
import signal
import stat
import subprocess
import sys
import threading

import pytest
from disk_pages import FILE, MODEL, PAGE, faults, fetched, holds, key, parts, put, same, settled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxflow.config import ConfigError
from jaxflow.kv.tiers import page_file
from jaxflow.kv.tiers.disk_store import READERS, DiskCounters, DiskStore
from jaxflow.kv.tiers.page_file import FOLDER, HEADER_BYTES, find_pages


class TestCompletePages:
    def test_pages_are_found_now_and_after_a_restart(self, opened):
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

    def test_the_least_recently_used_is_evicted_first_also_after_a_restart(self, opened):
        tier = opened(pages=4)
        put(tier, 1, 2, 3, 5)
        assert holds(tier, 1)
        tier.touch([key(3), key(77), key(2)])
        put(tier, 4)
        assert [tier.contains(key(i)) for i in (1, 2, 3, 4, 5)] == [True, True, True, True, False]
        for pages, gone in ((3, 1), (2, 3)):
            tier = opened(pages=pages)
            assert not tier.contains(key(gone)) and tier.contains(key(4))
            assert len(list(tier.folder.glob("*.kv"))) == tier.counters().pages == pages

    def test_a_read_counts_as_use_after_a_kill(self, opened):
        tier = opened()
        put(tier, 1, 2)
        for i in (1, 2):
            os.utime(tier.folder / page_file.name_of(key(i)), ns=(i, i))
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
        assert (
            stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE((tier.folder / "lock").stat().st_mode) == 0o600
        )

    def test_invalid_pages_are_refused(self, opened):
        tier = opened()
        for bad in (b"", b"\0" * 34, key(0, 2)):
            with pytest.raises(ValueError, match=r"page|key"):
                tier.put(bad, parts(0))

    def test_an_error_of_the_caller_is_logged_and_leaves_nothing(self, opened, caplog):
        tier = opened()
        put(tier, 1)
        for bad in (parts(2, 1), lambda: 1 / 0):
            tier.put(key(2), bad)
            assert tier.get(key(2)) is None
            settled(tier)
            assert not tier.contains(key(2)) and tier._queued_bytes == 0
        assert "a page of 96 bytes" in caplog.text and "ZeroDivisionError" in caplog.text and holds(tier, 1)

    def test_other_files_in_the_folder_stay(self, opened):
        folder = opened().folder
        (folder / "README").write_text("mine")
        (folder / "00AB.kv").write_text("mine")
        (folder / "dead.kv").symlink_to("/etc/passwd")
        tier = opened(pages=2)
        assert tier.counters().pages == 0
        put(tier, 1, 2, 3)
        assert (folder / "README").exists() and (folder / "00AB.kv").exists() and tier.counters().pages == 2

    def test_threads_run_prepare_first(self, opened):
        names = []
        tier = opened(prepare=lambda: names.append(threading.current_thread().name))
        assert sorted(names) == [*(f"jaxflow-kv-read_{i}" for i in range(READERS)), "jaxflow-kv-write_0"], (
            "at once"
        )
        put(tier, 1)
        assert same(fetched(tier, key(1)), 1) and len(names) == READERS + 1


class TestBadFiles:
    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(flips=st.sets(st.integers(0, 8 * FILE - 1), min_size=1, max_size=20))
    def test_flipped_bits_are_never_served(self, opened, caplog, flips):
        caplog.clear()
        tier = opened()
        put(tier, 1)
        path = tier.folder / page_file.name_of(key(1))
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
    def test_files_of_another_length_are_never_served(self, opened, caplog, size, restart):
        tier = opened()
        put(tier, 1, 2)
        path = tier.folder / page_file.name_of(key(1))
        os.truncate(path, size)
        tier = opened() if restart else tier
        assert fetched(tier, key(1)) is None and not path.exists() and "bytes" in caplog.text
        assert holds(tier, 2) and tier.counters().pages == 1 and tier.counters().bytes == FILE

    def test_files_that_shrink_during_a_read_are_never_served(self, opened, monkeypatch):
        tier = opened()
        put(tier, 1)
        with faults(monkeypatch, readv=lambda fd, buffers: 0):
            assert tier.get(key(1)) is None
        assert tier.counters().rejected == 1

    def test_files_of_another_model_are_never_served(self, opened, caplog):
        put(opened(), 1)
        tier = opened(fingerprint=b"another model")
        assert tier.contains(key(1)), "its bytes count until somebody looks"
        assert tier.get(key(1)) is None and "another model" in caplog.text and not tier.contains(key(1))

    def test_files_of_another_page_are_never_served(self, opened, caplog):
        tier = opened()
        put(tier, 1)
        (tier.folder / page_file.name_of(key(1))).rename(tier.folder / page_file.name_of(key(2)))
        tier = opened()
        assert tier.get(key(2)) is None and "another page" in caplog.text

    def test_files_of_another_format_are_never_served(self, opened, caplog, monkeypatch):
        monkeypatch.setattr(page_file, "SCHEMA", 2)
        put(opened(), 1)
        monkeypatch.undo()
        assert opened().get(key(1)) is None and "has format 2" in caplog.text

    def test_symbolic_links_are_never_followed(self, opened, tmp_path):
        tier = opened()
        put(tier, 1)
        path = tier.folder / page_file.name_of(key(1))
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert tier.get(key(1)) is None and tier.counters().errors == 1
        assert not path.is_symlink() and (tmp_path / "elsewhere").exists()


class TestStart:
    def test_two_servers_do_not_share_a_folder(self, opened, tmp_path):
        tier = opened()
        with pytest.raises(ConfigError, match=r"kv_disk_path.*no other server"):
            DiskStore(tmp_path, 10 * FILE, MODEL, PAGE)
        put(tier, 1)
        assert holds(opened(), 1)

    def test_a_capacity_below_a_page_names_the_accepted_one(self, tmp_path):
        least = sum(PAGE) + 2 * HEADER_BYTES
        with pytest.raises(ConfigError, match=f"kv_disk_size.*at least {least / 2**30:.6f} GiB"):
            DiskStore(tmp_path, least - 1, MODEL, PAGE)
        DiskStore(tmp_path, least, MODEL, PAGE).close()

    def test_unusable_folders_are_refused(self, tmp_path):
        (tmp_path / "file").write_text("")
        (tmp_path / "linked").mkdir()
        (tmp_path / "linked" / FOLDER).symlink_to(tmp_path)
        for folder in (tmp_path / "missing", tmp_path / "file", tmp_path / "linked", "/proc"):
            with pytest.raises(ConfigError, match="kv_disk_path"):
                DiskStore(folder, 10 * FILE, MODEL, PAGE)

    def test_a_killed_server_leaves_only_complete_pages(self, tmp_path):
        """The process is killed repeatedly during writes; reported pages are there, and no other file looks
        like a page.
        """
        program = (
            "import sys\n"
            "import numpy as np\n"
            "from jaxflow.kv.tiers.disk_store import DiskStore\n"
            f"tier = DiskStore(sys.argv[1], 1 << 30, {MODEL!r}, (1 << 20,))\n"
            "tier._record_outcome = lambda *_: print(tier.counters().written, flush=True)\n"
            "for i in range(10_000):\n"
            "    while not tier.put(b'\\0' + i.to_bytes(16, 'big'), lambda i=i: [np.full(1 << 20, i % 251, "
            "np.uint8)]):\n        pass\n"
        )
        for wanted in (3, 60):
            with subprocess.Popen(
                [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
            ) as process:
                assert process.stdout is not None
                while int(process.stdout.readline()) < wanted:
                    pass
                process.send_signal(signal.SIGKILL)
        folder = tmp_path / FOLDER
        (folder / (key(5).hex() + ".tmp")).write_bytes(b"half a page")
        tier = DiskStore(tmp_path, 1 << 30, MODEL, (1 << 20,))
        assert not list(folder.glob("*.tmp")) and tier.counters().pages >= 60
        for file in folder.glob("*.kv"):
            i = int(file.stem, 16)
            found = tier.get(key(i))
            assert found is not None and (found == i % 251).all()
        tier.close()
        assert not tier.counters().rejected
