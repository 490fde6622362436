"""The problem of a plan search: a step of one shape, the device's SMs, and the clock that the device settles
at.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

from jaxflow.model.cost import Device
from jaxflow.model.energy import Power, bound
from jaxflow.model.graph import Graph, Work
from search.nanobatch.layer_tasks import (
    RESOURCES,
    Chain,
    StepShape,
    Task,
    chains,
    has_side_streams,
    make_task,
    repeated_layer,
)
from search.profile.clock import Governor, governor_of
from search.profile.share_times import ShareTimes


@dataclasses.dataclass(frozen=True)
class SearchDeadline:
    """The end of a search, by a clock in seconds."""

    stop: float
    clock: Callable[[], float]

    @property
    def passed(self) -> bool:
        return self.clock() > self.stop

    def part(self, share: float) -> "SearchDeadline":
        """Return the deadline of the first `share` of the time that is left."""
        now = self.clock()
        return SearchDeadline(now + max(0.0, self.stop - now) * share, self.clock)

    def most(self, seconds: float) -> float:
        """Return `seconds`, or less where less time is left; at least one second."""
        return max(1.0, min(seconds, self.stop - self.clock()))


@dataclasses.dataclass(frozen=True)
class SearchProblem:
    """The inputs of a plan search.

    overlap: the resources that may run concurrently with compute. split: refuse a plan of one nano-batch.
    """

    graph: Graph
    shares: ShareTimes
    load: StepShape
    device: Device | None = None
    power: Power | None = None
    overlap: tuple[str, ...] = RESOURCES
    nano_batches: int = 2
    split: bool = False
    quantized: bool = False
    # options of a task next to the full device while cuts are compared; the best cut gets twice as many
    most_shares: int = 3
    full_waves: bool = (
        False  # also offer SM counts that fill the waves of products, and the rest to other tasks
    )
    step: int | None = None  # cuts are its multiples; None: `TILE`, or an eighth of a small step
    places: tuple[int, ...] = ()  # the only cuts allowed, if given
    nano_ops: int = 1  # the most nano-ops of an op where ops are cut one by one; 1: all ops are cut alike
    objective: str = "time"  # the cost of a token, by which plans are compared (`search.nanobatch.objective`)

    @property
    def governor(self) -> Governor | None:
        """Return the model of the power governor, or None without the card's
        joules or the profile's clocks.
        """
        return (
            governor_of(self.device.name, self.shares.profile.dtype)
            if self.device is not None and self.shares.clocked
            else None
        )

    def edges(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """Return the token ranges between the cuts."""
        return list(itertools.pairwise((0, *cuts, self.load.tokens)))

    def work(self, parts: Iterable[tuple[int, int]]) -> Work:
        """Return the work of one layer, split into these token ranges."""
        steps = [self.load.part(*part) for part in parts]
        return sum((op.work(step) for op in repeated_layer(self.graph) for step in steps), Work())

    @property
    def capacity(self) -> int:
        """Return the SMs of a device."""
        return self.shares.profile.total_sms

    @functools.cached_property
    def chains(self) -> tuple[Chain, ...]:
        """Return the chains of a layer. With one stream, values of two arrays stay on the main stream."""
        side_streams = has_side_streams(self.overlap, self.graph.scattered)
        return chains(repeated_layer(self.graph), self.quantized and side_streams)

    def task(self, chain: Chain, start: int, stop: int) -> Task:
        """Return the task of a chain on tokens [start, stop)."""
        dtype, rates = self.shares.profile.dtype, None if self.device is None else self.device.rates
        if rates is not None and dtype not in rates.flops_per_s:
            rates = None
        moe = any(op.experts for op in self.graph.layers[-1])
        return make_task(chain, start, stop, self.load, rates, dtype, self.overlap, moe, self.graph.scattered)

    def work_of(self, tasks: Iterable[Task]) -> Work:
        """Return the work of these tasks of a layer."""
        parts = ((op, self.load.part(task.start, task.stop)) for task in tasks for op in task.chain.ops)
        return sum((op.work(step) for op, step in parts), Work())

    @property
    def whole(self) -> Work:
        """Return the work of one layer that is not split, the least of all splits."""
        return self.work(self.edges(()))

    def energy_s(self, work: Work) -> float:
        """Return the least time for the joules of a layer's work."""
        dtype = self.shares.profile.dtype
        if self.device is None or self.power is None or dtype not in self.power.flop:
            return 0.0
        return bound(work, self.device, self.power, dtype).energy_s

    def in_time(self, work: Work, period_s: float) -> tuple["SearchProblem", float]:
        """Return the problem at the highest clock at which the joules of a layer's work fit in a period, and
        that clock (Hz).

        A plan with a shorter period stays shorter at this clock. Without a governor the problem is returned
        unchanged.
        """
        if self.governor is None:
            return self, 0.0
        clock = self.governor.clock_for(work, period_s)
        return dataclasses.replace(self, shares=self.shares.at(clock)), clock

    def settled_s(self, work: Work, period_s: float, clock_hz: float) -> float:
        """Return the period, found at `clock_hz`, at the clock that the card settles at."""
        return period_s if self.governor is None else self.governor.settled_s(period_s, clock_hz, work)
