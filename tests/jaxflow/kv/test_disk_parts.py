"""Several processes keep their parts of a page on their disks: a page comes back
with all parts, or not at all.
"""

import collections
import contextlib
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflow.engine.recorded_calls import CallRecorder, replay
from jaxflow.kv.tiers.disk_parts import FollowerDisk, SharedDiskTier
from jaxflow.kv.tiers.disk_store import DiskStore
from jaxflow.kv.tiers.disk_tier import DiskTier
from jaxflow.kv.tiers.host_store import HostStore

PAGE = 64
RANKS = range(3)
NOTHING: Any = types.SimpleNamespace(layouts={}, decode_layouts={})


def key(i: int) -> bytes:
    return b"\0" + i.to_bytes(16, "big")


class Words:
    """The part of a page that a process has."""

    def __init__(self, words: np.ndarray):
        self.words = words

    @classmethod
    def of(cls, i: int, rank: int) -> "Words":
        return cls(np.full(PAGE // 4, 100 * i + rank, np.uint32))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Words) and np.array_equal(self.words, other.words)

    __hash__ = object.__hash__


class Team:
    """A host store of process 0 above the disks of three processes, which are threads of this one."""

    def __init__(self, folder: Path, host_pages: int):
        self.folder = folder
        self.disks = [DiskStore(self.of(rank), 100 * (PAGE + 200), b"model", (PAGE,)) for rank in RANKS]
        tiers = [
            DiskTier(disk, lambda page: [page.words], lambda group, payload: Words(payload.view(np.uint32)))
            for disk in self.disks
        ]
        self.pages: list[dict[int, Any]] = [{} for _ in RANKS]
        self.recorder = CallRecorder(NOTHING, types.SimpleNamespace(send=self._send))  # type: ignore[arg-type]
        self.shared = SharedDiskTier(tiers[0], self.recorder, len(RANKS) - 1)
        self.followers = [
            FollowerDisk(
                tiers[rank], self.pages[rank], lambda payload, rank=rank: self.shared.answer(rank, payload)
            )
            for rank in RANKS[1:]
        ]
        self.host = HostStore(host_pages * PAGE, (PAGE,), self.shared)

    def of(self, rank: int) -> Path:
        own = self.folder / str(rank)
        own.mkdir(exist_ok=True)
        return own

    def _send(self, call: bytes) -> None:
        for rank, follower in enumerate(self.followers, start=1):
            replay(NOTHING, [], self.pages[rank], call, follower)

    def keep(self, *numbers: int) -> None:
        """Store pages that come from the device: a copy names them."""
        for i in numbers:
            if self.host.contains(key(i)) or not self.host.reserve(key(i)):
                continue
            own = Words.of(i, 0)
            name = self.recorder._name([own])
            for rank in RANKS[1:]:
                self.pages[rank][name] = Words.of(i, rank)
            self.host.arrive(key(i), own)

    def fetch(self, *numbers: int) -> None:
        """Read pages ahead, and wait for them."""
        self.host.read_ahead([key(i) for i in numbers])
        for _ in range(20_000):
            self.host.take_read()
            if not self.shared.pending:
                return
            threading.Event().wait(0.001)
        raise AssertionError("a read did not end")

    def settle(self) -> None:
        for disk in self.disks:
            disk.flush(30)

    def check(self) -> None:
        """Every page of the host has its own words, in all processes."""
        for name, page in self.host.newest_first():
            i = int.from_bytes(name[1:], "big")
            assert page == Words.of(i, 0)
            at = self.recorder._names[id(page)]
            assert [self.pages[rank][at] for rank in RANKS[1:]] == [Words.of(i, rank) for rank in RANKS[1:]]

    def damage(self, rank: int, i: int, how: str) -> bool:
        """Damage a file. Return False if there is none."""
        path = self.of(rank) / "jaxflow-kv" / f"{key(i).hex()}.kv"
        if not path.exists():
            return False
        if how == "missing":
            path.unlink()
        else:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content if how == "flipped" else content[:-9])
        return True


@contextlib.contextmanager
def running(folder: Path, host_pages: int = 4):
    team = Team(folder, host_pages)
    try:
        yield team
    finally:
        team.host.close()


def test_pages_come_back_with_all_parts_also_after_a_restart(tmp_path):
    with running(tmp_path) as team:
        team.keep(*range(10))
        team.fetch(0, 1)
        assert team.host.is_stored(key(0)) and team.host.is_stored(key(1))
        team.check()
    with running(tmp_path) as team:
        team.fetch(2, 9)
        assert team.host.is_stored(key(2)) and team.host.is_stored(key(9))
        team.check()


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("how", ["missing", "flipped", "short"])
def test_a_page_without_a_part_is_lost_for_all(tmp_path, caplog, rank, how):
    with running(tmp_path) as team:
        team.keep(*range(10))
    with running(tmp_path) as team:
        assert team.damage(rank, 3, how)
        team.fetch(3, 4)
        assert not team.host.contains(key(3)) and team.host.is_stored(key(4))
        (line,) = [
            record.getMessage() for record in caplog.records if "computed again" in record.getMessage()
        ]
        assert key(3).hex() in line and line.endswith(f"process {rank}")
        team.settle()
        assert not any(disk.contains(key(3)) for disk in team.disks)
        team.keep(3)
        team.host.discard([key(3)])
        team.fetch(3)
        assert team.host.is_stored(key(3))
        team.check()


@settings(max_examples=20)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("keep"), st.integers(0, 9)),
            st.tuples(st.just("fetch"), st.integers(0, 9)),
            st.tuples(st.just("drop"), st.integers(0, 9)),
            st.tuples(
                st.sampled_from(["missing", "flipped", "short"]), st.integers(0, 9), st.sampled_from(RANKS)
            ),
        ),
        max_size=25,
    )
)
def test_a_fetched_page_is_whole_or_absent(tmp_path_factory, moves):
    damaged = collections.defaultdict(set)  # the ranks whose file of a page was damaged
    with running(tmp_path_factory.mktemp("disks"), host_pages=3) as team:
        for kind, i, *ranks in moves:
            if kind == "keep":
                team.keep(i)
                team.settle()
            elif kind == "drop":
                team.host.discard([key(i)])
            elif kind == "fetch":
                known, was_here = team.shared.contains(key(i)), team.host.contains(key(i))
                team.fetch(i)
                assert team.host.is_stored(key(i)) == (was_here or (known and not damaged[i]))
                if not was_here:
                    damaged[i].clear()
                team.settle()
            elif team.damage(ranks[0], i, kind):
                damaged[i].add(ranks[0])
            team.check()
