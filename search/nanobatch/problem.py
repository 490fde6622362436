"""What is searched, and what the machine makes of it: a step of a load, the shares of the device, the clock
that it settles at.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from jaxflow.model.cost import Device
from jaxflow.model.energy import Power, bound
from jaxflow.model.graph import Graph, Work
from search.nanobatch.layer_tasks import RESOURCES, Load, repeated_layer
from search.profile.clock import Governor, governor_of
from search.profile.share_times import ShareTimes


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is searched. overlap: the resources that may run beside compute. split: one nano-batch is not
    enough.
    """

    graph: Graph
    shares: ShareTimes
    load: Load
    device: Device | None = None
    power: Power | None = None
    overlap: tuple[str, ...] = RESOURCES
    nano_batches: int = 2
    split: bool = False
    quantized: bool = False
    # of a task, beside the whole device, while cuts are compared; the best cut's plan gets twice as many
    most_shares: int = 3
    full_waves: bool = (
        False  # SMs are offered, too, that fill the waves of products; to others what these leave
    )
    step: int | None = None  # cuts are multiples of it; None: `TILE`, or an eighth of a small step
    places: tuple[int, ...] = ()  # where alone it may be cut, if given

    @property
    def governor(self) -> Governor | None:
        """What keeps the card at its cap; None where its joules, or the clocks of the profile, are not known."""
        return (
            governor_of(self.device.name, self.shares.profile.dtype)
            if self.device is not None and self.shares.clocked
            else None
        )

    def edges(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """The ranges of tokens between the cuts."""
        return list(itertools.pairwise((0, *cuts, self.load.tokens)))

    def work(self, parts: Iterable[tuple[int, int]]) -> Work:
        """A layer's, cut into these ranges of tokens."""
        steps = [self.load.part(*part) for part in parts]
        return sum((op.work(step) for op in repeated_layer(self.graph) for step in steps), Work())

    def energy_s(self, parts: Iterable[tuple[int, int]]) -> float:
        """What a layer takes at least for its joules, cut into these ranges of tokens."""
        dtype = self.shares.profile.dtype
        if self.device is None or self.power is None or dtype not in self.power.flop:
            return 0.0
        return bound(self.work(parts), self.device, self.power, dtype).energy_s

    def in_time(self, cuts: Sequence[int], period_s: float) -> tuple["Setting", float]:
        """The same at the highest clock (Hz) at which a layer's joules, cut like this, fit in a period: a
        plan of a shorter one is shorter at this clock, too. Without a governor as it is.
        """
        if self.governor is None:
            return self, 0.0
        clock = self.governor.clock_for(self.work(self.edges(cuts)), period_s)
        return dataclasses.replace(self, shares=self.shares.at(clock)), clock

    def settled_s(self, cuts: Sequence[int], period_s: float, clock_hz: float) -> float:
        """What a period found at a clock is at the clock that the card settles at with it."""
        return (
            period_s
            if self.governor is None
            else self.governor.settled_s(period_s, clock_hz, self.work(self.edges(cuts)))
        )
