"""A host tier for the simulated device: copies take a random number of steps, and some fail."""

import dataclasses

import numpy as np
from simulated_device import World

from jaxflow.kv.tiers.host_store import HostStore
from jaxflow.scheduler.fetch_cost import LoadCosts
from jaxflow.scheduler.scheduler import Scheduler, StepWork
from jaxflow.scheduler.tier_policy import HostTier

ALWAYS = LoadCosts(bytes_per_s=1e12, latency_s=0.0, seconds_a_token=1.0)  # the host is worth asking
PAGE_BYTES = (2, 3, 5)


@dataclasses.dataclass
class TieredWorld(World):
    """A world with a host of `host_bytes` below it.

    `slowness`: steps that a copy takes at most; `faults`: the share of copies that fail.
    """

    host_bytes: int = 10**6
    staging_bytes: int = 10**6
    slowness: int = 2
    faults: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        store = HostStore(self.host_bytes, PAGE_BYTES[: len(self.config.windows)])
        self.tier = HostTier(store, ALWAYS, self.staging_bytes)
        lengths, self.scheduler = self.scheduler.lengths, Scheduler(self.config, self.tier)
        self.scheduler.lengths = lengths
        self.copies: list[tuple[int, object]] = []  # (steps to go, what to do then)
        self.random = np.random.default_rng(self.seed)

    def step(self) -> StepWork | None:
        self.land()
        return super().step()

    def land(self) -> None:
        """Copies that are done are told."""
        self.copies = [(left - 1, done) for left, done in self.copies]
        for _, done in [copy for copy in self.copies if copy[0] < 0]:
            done()
        self.copies = [copy for copy in self.copies if copy[0] >= 0]

    def before_step(self) -> None:
        """Copies in the order of the device's stream: what has come is scattered, what is named is gathered."""
        tier = self.tier
        scatters = tier.take_scatters()
        places = [(piece.group, piece.page) for piece, _ in scatters]
        assert len(set(places)) == len(places)
        for piece, content in scatters:
            self.device.write_page(piece.group, piece.page, content)
        for group, page, key in tier.take_stores():
            content = self.device.page(group, page)
            self.fly(lambda failed, key=key, content=content: tier.stored(key, None if failed else content))
        for load, piece, content in tier.take_fetches():
            assert content is not None
            self.fly(
                lambda failed, it=(load, piece), content=content: tier.fetched(
                    *it, None if failed else content
                )
            )
        assert 0 <= tier._storing_bytes <= tier.staging_bytes
        assert 0 <= tier._fetching_bytes <= tier.staging_bytes

    def fly(self, done) -> None:
        failed = self.random.random() < self.faults
        self.copies.append((int(self.random.integers(0, self.slowness + 1)), lambda: done(failed)))

    def check_idle(self) -> None:
        """Nothing is left: no page, no load, no copy, no pin."""
        for _ in range(self.slowness + 6):
            self.land()
            self.tier.settle()
            self.before_step()
        tier = self.tier
        assert not self.copies
        assert not tier.busy
        assert tier._storing_bytes == tier._fetching_bytes == 0
        assert all(entry.pins == 0 and entry.data is not None for entry in tier.store._entries.values())
        assert not any(
            len(key) == 17 and seq.swapped for seq in self.sequences for key in tier.store._entries
        )
        super().check_idle()
