"""The life of a replica's processes: how long the router waits before it starts a lost one again."""

import asyncio
import dataclasses

import pytest

from serving.cluster import member
from serving.cluster.link import LinkLost, StartFailed


@dataclasses.dataclass
class Report:
    longest_step_s: float


class Owner:
    """A driver that takes every call."""

    def joined(self, *_): ...

    def heard(self, *_): ...

    def lost(self, *_): ...


class Link:
    """A process that does not start, or is lost before its first step, or after it."""

    def __init__(self, end: str):
        self.end, self.reports = end, [Report(0.01)] if end == "works" else []

    async def describe(self):
        if self.end == "does not start":
            raise StartFailed("no memory")

    async def poll(self, wait_s: float) -> Report:
        if not self.reports:
            raise LinkLost("killed")
        return self.reports.pop()

    def kill(self): ...


@pytest.mark.parametrize(
    ("ends", "failures"),
    [
        (["does not start", "does not start", "is idle", "is idle"], [0, 1, 2, 3]),
        (["works"] * 5, [0] * 5),
        (["does not start", "is idle", "works", "does not start", "works"], [0, 1, 0, 1, 0]),
    ],
)
def test_the_wait_grows_only_for_processes_that_run_no_step(monkeypatch, ends, failures):
    told, left = [], list(ends)

    def launch(config, index) -> Link:
        return Link(left.pop(0))

    def wait_s(failed: int) -> float:
        told.append(failed)
        if not left:
            one.leave(for_good=True)
        return 0.0

    monkeypatch.setattr(member, "restart_wait_s", wait_s)
    one = member.Member(0, None, "v", launch=launch, owner=Owner(), stall_s=5.0, start_s=5.0)
    asyncio.run(asyncio.wait_for(one.run(lambda error: None), 20))
    assert told == failures and one.restarts == len(ends) and one.phase is member.Phase.STOPPED


def test_waits_grow_to_the_longest():
    waits = [member.restart_wait_s(failures) for failures in range(1000)]
    assert waits[0] == member.FIRST_WAIT_S and waits[-1] == member.LONGEST_WAIT_S
    assert waits == sorted(waits) and waits[3] == pytest.approx(64 * member.FIRST_WAIT_S)
