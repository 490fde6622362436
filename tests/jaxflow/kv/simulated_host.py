"""KV tiers for the simulated device: copies take a random number of steps, and some copies fail."""

import dataclasses

import numpy as np
from simulated_device import World

from jaxflow.kv.tiers.host_store import HostStore, LowerTier, PageState
from jaxflow.kv.tiers.policy import FetchCosts, TierPolicy
from jaxflow.scheduler.running import make_page_tables
from jaxflow.scheduler.scheduler import Scheduler, StepWork

ALWAYS = FetchCosts(bytes_per_s=1e12, latency_s=0.0, seconds_per_token=1.0)  # every fetch pays
PAGE_BYTES = (2, 3, 5)


@dataclasses.dataclass
class TieredWorld(World):
    """A world with a host store of `host_bytes`.

    Args:
      slowness: maximum number of steps of a copy.
      faults: share of the copies that fail.
    """

    host_bytes: int = 10**6
    staging_bytes: int = 10**6
    slowness: int = 2
    faults: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        store = HostStore(self.host_bytes, PAGE_BYTES[: len(self.config.windows)], self.lower_tier())
        tables = make_page_tables(self.config, record_named=True)
        self.policy = TierPolicy(tables, store, ALWAYS, self.staging_bytes)
        lengths, self.scheduler = self.scheduler.lengths, Scheduler(self.config, self.policy)
        self.scheduler.lengths = lengths
        self.copies: list[tuple[int, object]] = []  # (steps to go, what to do then)
        self.random = np.random.default_rng(self.seed)

    def lower_tier(self) -> LowerTier | None:
        """Return the tier below the host."""
        return None

    def step(self) -> StepWork | None:
        self.receive()
        return super().step()

    def receive(self) -> None:
        """Report the copies that ended."""
        self.copies = [(left - 1, done) for left, done in self.copies]
        for _, done in [copy for copy in self.copies if copy[0] < 0]:
            done()
        self.copies = [copy for copy in self.copies if copy[0] >= 0]

    def before_step(self) -> None:
        """Scatter the arrived pages, gather the named pages and start copies, in the device's order."""
        policy = self.policy
        scatters = policy.take_scatters()
        places = [(page.group, page.page) for page, _ in scatters]
        assert len(set(places)) == len(places)
        for page, content in scatters:
            self.device.write_page(page.group, page.page, content)
        for group, page, key in policy.take_stores():
            content = self.device.page(group, page)
            assert content
            self.copy(
                lambda failed, key=key, content=content: policy.stored(key, None if failed else content)
            )
        for fetch, page, content in policy.take_loads():
            assert content is not None
            self.copy(
                lambda failed, it=(fetch, page), content=content: policy.loaded(
                    *it, None if failed else content
                )
            )
        assert 0 <= policy._storing_bytes <= policy.staging_bytes
        assert 0 <= policy._loading_bytes <= policy.staging_bytes

    def copy(self, done) -> None:
        """Start a copy that ends after a random number of steps; `done` gets whether the copy failed."""
        failed = self.random.random() < self.faults
        self.copies.append((int(self.random.integers(0, self.slowness + 1)), lambda: done(failed)))

    def check_idle(self) -> None:
        """Check that no page, fetch, copy or pin is left, after the last copies."""
        policy = self.policy
        for _ in range(10_000):
            self.receive()
            policy.take_retries()
            self.before_step()
            if not (self.copies or policy.busy or policy.copying):
                break
        assert not self.copies
        assert not policy.busy
        assert policy._storing_bytes == policy._loading_bytes == 0
        entries = policy.store._entries
        assert all(entry.pins == 0 and entry.state is PageState.STORED for entry in entries.values())
        assert not any(len(key) == 17 and seq.swapped for seq in self.sequences for key in entries)
        super().check_idle()
