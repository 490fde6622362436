"""Scheduler with host and disk tiers, over a folder with damaged files."""

import dataclasses
import pathlib
import tempfile

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import config, prompt
from simulated_host import PAGE_BYTES, TieredWorld

from jaxflow.kv import prefix
from jaxflow.kv.tiers import policy as tier_policy
from jaxflow.kv.tiers.disk_store import DiskStore
from jaxflow.kv.tiers.disk_tier import DiskTier
from jaxflow.kv.tiers.page_file import HEADER_BYTES
from pallas_kernels.cards import default_card

LENGTH = 256  # bytes of a page's file, packed and padded


def to_bytes(content: dict) -> list[bytes]:
    packed = msgspec.msgpack.encode(list(content.items()))
    return [len(packed).to_bytes(4, "little") + packed, bytes(LENGTH - 4 - len(packed))]


def from_bytes(group: int, page: np.ndarray) -> dict:
    packed = page.tobytes()
    items = msgspec.msgpack.decode(packed[4 : 4 + int.from_bytes(packed[:4], "little")])
    return {offset: tuple(value) for offset, value in items}


@dataclasses.dataclass
class DiskWorld(TieredWorld):
    """A tiered world with a disk store in `folder`.

    Args:
      patience: share of the steps that wait for the disk.
    """

    folder: str | pathlib.Path = ""
    disk_pages: int = 50
    patience: float = 1.0

    def lower_tier(self) -> DiskTier:
        groups = len(self.config.windows)
        capacity = max(groups, self.disk_pages) * (LENGTH + HEADER_BYTES)
        self.disk = DiskStore(self.folder, capacity, b"", (LENGTH,) * groups, retry_s=0.0)
        self.disk_tier = DiskTier(self.disk, to_bytes, from_bytes)
        return self.disk_tier

    def receive(self) -> None:
        super().receive()
        if self.random.random() < self.patience:
            self.settle_disk()
        self.policy.store.take_read()

    def settle_disk(self) -> None:
        """Wait for the writes and reads under way."""
        self.disk._writer.submit(lambda: None).result(30)
        for future in list(self.disk._reading.values()):
            future.result(30)

    def check_idle(self) -> None:
        while self.disk_tier.pending:
            self.patience = 1.0
            self.receive()
        super().check_idle()

    def damage(self) -> None:
        """Change or truncate one file."""
        self.settle_disk()
        files = sorted(self.disk.folder.glob("*.kv"))
        if files:
            file = files[self.random.integers(len(files))]
            content = bytearray(file.read_bytes() or b"\0")
            place = int(self.random.integers(len(content)))
            content[place] ^= int(self.random.integers(1, 256))
            file.write_bytes(content[: place if self.random.random() < 0.3 else None])


@st.composite
def machines(draw):
    windows = draw(st.sampled_from([(None,), (None, 5), (6,)]))
    pages = tuple(draw(st.sampled_from([16, 20])) for _ in windows)
    return {
        "config": config(windows=windows, num_pages=pages, max_num_seqs=draw(st.sampled_from([2, 6]))),
        "lag": draw(st.integers(0, 2)),
        "hope": draw(st.sampled_from([2, 256])),
        "host_bytes": draw(st.sampled_from([4, 8, 16])) * sum(PAGE_BYTES[: len(windows)]),
        "slowness": draw(st.integers(0, 2)),
        "faults": draw(st.sampled_from([0.0, 0.0, 0.2])),
        "seed": draw(st.integers(0, 10**6)),
    }


def converse(world: DiskWorld, talks: list[list[int]], rounds: int, damage: float) -> None:
    """Run rounds of conversations in turn, so that each loses pages between its rounds."""
    for _ in range(rounds):
        for talk in talks:
            if len(talk) > 44:
                continue
            [seq] = world.add(list(talk), max_tokens=4, ignore_eos=True, seed=5)
            for _ in range(int(world.random.integers(1, 4))):
                world.step()
            if world.random.random() < damage:
                world.damage()
            while not seq.finished:
                world.step()
            talk += [*world.outputs[seq], 7]
    world.run()


@settings(max_examples=12)
@given(
    machines(),
    st.integers(1, 5),
    st.integers(3, 60),
    st.sampled_from([0.2, 1.0]),
    st.sampled_from([0.0, 0.5]),
)
def test_tokens_equal_an_isolated_run_through_all_tiers_and_a_restart(
    machine, number, disk_pages, patience, damage
):
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(machine["seed"])
        talks = [prompt(rng, 9, shared=8) for _ in range(number)]
        for _ in range(2):  # two engines over one folder, one after another
            world = DiskWorld(**machine, folder=folder, disk_pages=disk_pages, patience=patience)
            converse(world, talks, 3, damage)
            world.policy.store.close()
            assert world.disk.counters().bytes <= world.disk.capacity_bytes
            assert not world.disk.counters().errors


def test_a_later_engine_finds_all_complete_pages():
    machine = {"config": config(num_pages=(16,)), "host_bytes": 8 * PAGE_BYTES[0]}
    with tempfile.TemporaryDirectory() as folder:
        talk = prompt(np.random.default_rng(0), 16)
        converse(world := DiskWorld(**machine, folder=folder), [talk], 1, 0.0)
        world.policy.store.close()
        world = DiskWorld(**machine, folder=folder)
        [seq] = world.add(list(talk), max_tokens=4, ignore_eos=True, seed=5)
        world.run()
        # Four pages of four: the last of the 20 tokens of the earlier round was sampled, and never computed.
        assert (
            seq.cached_tokens
            == world.policy.counters.disk_hit_tokens
            == world.policy.counters.host_hit_tokens
            == 16
        )
        assert world.disk.counters().hits == 4
        assert seq.chain is not None and [key[1:] for key in world.disk._index][1:5] == seq.chain[4:0:-1], (
            "the first page is the last to leave"
        )
        world.policy.store.close()


@pytest.mark.parametrize("host_pages", [6, 10**6])
def test_partial_pages_of_preempted_sequences_are_never_on_the_disk(monkeypatch, host_pages):
    """Outputs longer than the forecast pre-empt sequences; a small host loses partial pages."""
    parts: set[bytes] = set()

    def part_name(*given):
        parts.add(name := prefix.part_name(*given))
        return name

    monkeypatch.setattr(tier_policy, "part_name", part_name)
    machine = {
        "config": config(num_pages=(16,), max_num_seqs=8),
        "hope": 2,
        "host_bytes": host_pages * PAGE_BYTES[0],
    }
    with tempfile.TemporaryDirectory() as folder:
        world = DiskWorld(**machine, folder=folder, disk_pages=1000)
        for i in range(24):
            world.add(prompt(world.random, 5 + i % 8), max_tokens=30, seed=i)
        world.run()
        world.policy.store.close()
        assert world.policy.counters.swapped_in > 4 and (world.policy.store.counters.evicted > 100) == (
            host_pages == 6
        )
        assert len(world.disk._index) > 100
        assert len(parts) > 4 and not parts & {key[1:] for key in world.disk._index}


def test_pages_that_are_computed_much_sooner_are_not_read(monkeypatch):
    machine = {"config": config(num_pages=(16,)), "host_bytes": 8 * PAGE_BYTES[0]}
    with tempfile.TemporaryDirectory() as folder:
        talk = prompt(np.random.default_rng(0), 16)
        converse(world := DiskWorld(**machine, folder=folder), [talk], 1, 0.0)
        world.policy.store.close()
        for seconds_a_page, reads in (
            (default_card().disk_patience * 4 * 1.01, False),
            (default_card().disk_patience * 4 * 0.99, True),
        ):  # a token takes a second to compute
            world = DiskWorld(**machine, folder=folder)
            monkeypatch.setattr(
                world.disk_tier,
                "read_seconds",
                lambda bytes, each=seconds_a_page: each * bytes / PAGE_BYTES[0],
            )
            world.add(list(talk), max_tokens=4, ignore_eos=True, seed=5)
            world.run()
            assert bool(world.disk.counters().hits) == reads
            world.policy.store.close()
