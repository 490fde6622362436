"""The clock that a card at its power cap settles at, and what work takes there: how ops slow each other down
on such a card.

Under load the governor lowers the clock until the mean power is the cap's. A step that keeps all resources
busy at once does its work in less time, so it runs at a lower clock than the same ops one after the other,
and what counts cycles (products; a stream that the SMs' own intake limits) takes longer there. On an H200
this, and the SMs that are divided between the two, is all the interference there is between products and
attention (`docs/overlap.md` holds it against the measurements).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from jaxflow.model.energy import Power, shipped_power
from jaxflow.model.graph import Work

SCHEMA_VERSION = 3
FOLDER = Path(__file__).parent / "cards"


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What kernels reach on a device, in cycles, and what they cost; `method`: where the numbers come from."""

    schema_version: int
    device: str  # as in `jaxflow.model.cost.DEVICES`
    tensor_share: Mapping[
        str, float
    ]  # by the products' dtype: of the tensor cores' FLOP a cycle, in waves that are full
    attention_share: float  # the same of attention's products
    attention_bytes_per_s: Mapping[
        str, float
    ]  # by the cache's dtype: that decode attention reads on the whole device
    sm_bytes_per_cycle: Mapping[str, float]  # by the cache's dtype: that an SM takes in
    kernel_s: float  # that a kernel's start and end take
    collective_s: float  # the same of a sum over devices
    joules_factor: Mapping[
        str, float
    ]  # by dtype of FLOPs, and "byte": joules of ordinary kernels over the least (`jaxflow.model.energy`)
    beside: float  # how many times as long ops take beside others as alone on the same SMs at the same clock
    # joules of an engine's steps, sustained for seconds, over those of kernels in windows of half a second
    hot_factor: float
    nano_s: float  # that a chain of ops costs beyond their times, in a layer with side streams
    step_s: float  # that a step costs beyond its ops' times
    method: str
    exchange_s: float | None = None  # that a sum over two devices by the copy engines takes beside its bytes
    exchange_bytes_per_s: float | None = None  # that each of the two then sends
    memory_bytes: float | None = (
        None  # that a driver gives out in all: more than a datasheet's GB, which are nearly GiB
    )


@functools.cache
def shipped_card(device: str) -> Card | None:
    """What comes with this release for a device of `jaxflow.model.cost.DEVICES`, or None. Raises: ValueError
    for another schema.
    """
    path = FOLDER / f"{device.lower()}.json"
    if not path.exists():
        return None
    card = msgspec.json.decode(path.read_bytes(), type=Card)
    if card.schema_version != SCHEMA_VERSION:
        raise ValueError(
            f"{path}: schema_version={card.schema_version} is not supported: this release reads "
            f"{SCHEMA_VERSION}"
        )
    return card


def of_kernels(power: Power, card: Card) -> Power:
    """What work costs in ordinary kernels, where `power` is what it costs at least."""
    flop = {dtype: curve.times(card.joules_factor[dtype]) for dtype, curve in power.flop.items()}
    return msgspec.structs.replace(power, flop=flop, byte=power.byte.times(card.joules_factor["byte"]))


@dataclasses.dataclass(frozen=True)
class Governor:
    """Keeps a card's mean power at its cap. power: of its kernels (`of_kernels`), dtype: that of the
    products.
    """

    power: Power
    dtype: str
    hot_factor: float = 1.0

    @property
    def lowest_hz(self) -> float:
        return self.power.lowest_clock_hz

    @property
    def highest_hz(self) -> float:
        return self.power.highest_clock_hz

    def joules(self, work: Work, clock_hz: float) -> float:
        """Above idle."""
        return self.hot_factor * float(self.power.dynamic_j(work, self.dtype, clock_hz / self.highest_hz))

    def watts(self, work: Work, clock_hz: float, seconds: float) -> float:
        return self.power.idle_w + self.joules(work, clock_hz) / seconds

    def least_s(self, work: Work, clock_hz: float) -> float:
        """What the work takes at least at this clock: its joules at the cap."""
        return self.joules(work, clock_hz) / (self.power.cap_w - self.power.idle_w)

    def clock_for(self, work: Work, seconds: float) -> float:
        """The highest clock at which the work's joules fit in so many seconds."""
        at_rest, rising = self.least_s(work, 0.0), self.least_s(work, self.highest_hz)
        if rising <= seconds:
            return self.highest_hz
        share = math.sqrt(max(0.0, (seconds - at_rest) / (rising - at_rest)))
        return max(self.lowest_hz, self.highest_hz * share)

    def settle(self, seconds_at: Callable[[float], float], work: Work) -> float:
        """The clock (Hz) of work that takes `seconds_at(clock)`, which does not grow with the clock, over and
        over.
        """
        low, high = self.lowest_hz, self.highest_hz
        if self.least_s(work, high) <= seconds_at(high):
            return high
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.least_s(work, middle) <= seconds_at(middle) else (low, middle)
        return low

    def settled_s(self, seconds: float, clock_hz: float, work: Work) -> float:
        """Of work that takes `seconds` at a clock, if all of it counts cycles: what it takes where the card
        settles.
        """
        clock = self.settle(lambda hz: seconds * clock_hz / hz, work)
        return seconds * clock_hz / clock


@functools.cache
def governor_of(device: str, dtype: str) -> Governor | None:
    """Of a device whose joules and kernels are known, as hot as an engine's steps keep it; or None."""
    power, card = shipped_power(device), shipped_card(device)
    if power is None or card is None or dtype not in power.flop:
        return None
    return Governor(of_kernels(power, card), dtype, card.hot_factor)
