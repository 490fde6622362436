"""The energy bound: on a card at its power cap, a step's joules limit its speed.

NanoFlow's cost model has compute, memory and network. A card at its power cap lowers its clock until the
power fits, so energy bounds time too: with E joules of work and an idle power of P_idle, T >= E / (P_cap -
P_idle). The joules depend on the clock, because a lower clock needs a lower voltage. The bound is the time at
the best clock: faster clocks exceed the power, slower clocks need more time for their cycles.
"""

import dataclasses
from collections.abc import Mapping

import msgspec
import numpy as np

from jaxflow.model.cost import Device
from jaxflow.model.graph import Work
from pallas_kernels.cards import card_of

SCHEMA_VERSION = 1
_CLOCKS = 200  # between the lowest and the highest, for the search of the best


class JoulesCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Joules of a unit of work by clock: `joules · (fixed + (1 - fixed) · (clock / highest clock)²)`."""

    joules: float  # at the highest clock
    fixed: float  # the share that does not fall with the clock, 0 to 1

    def at(self, clock_share: np.ndarray | float) -> np.ndarray | float:
        """Return the joules at a clock, given as a share of the highest clock."""
        return self.joules * (self.fixed + (1 - self.fixed) * clock_share**2)

    def times(self, factor: float) -> "JoulesCurve":
        """Return the curve of `factor` units of work."""
        return JoulesCurve(self.joules * factor, self.fixed)


class Power(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The power constants of one device, as joules of its work.

    The constants are a lower bound: no sustained run, and no entry of four profiles, needed less. A fifth
    profile and windows of a tenth of a second are less exact. A sensor's watts differ by up to a quarter for
    one GEMM, and the energy counter resolves only steps of 0.4 s (docs/cost-model.md).
    """

    schema_version: int
    device: str  # as in `jaxflow.model.cost.DEVICES`
    cap_w: float
    idle_w: float
    highest_clock_hz: float
    lowest_clock_hz: float
    flops_per_cycle: Mapping[str, float]  # the tensor cores' peak, by dtype
    flop: Mapping[str, JoulesCurve]  # by dtype
    byte: JoulesCurve  # of device memory, read or written

    def dynamic_j(self, work: Work, dtype: str, clock_share: np.ndarray | float = 1.0) -> np.ndarray | float:
        """Return the joules above idle that the work takes. The network's are unknown and count as 0."""
        return work.flops * self.flop[dtype].at(clock_share) + work.memory_bytes * self.byte.at(clock_share)


@dataclasses.dataclass(frozen=True)
class Bound:
    """The least seconds of some work, by resource. clock_hz: the best clock for its joules."""

    compute_s: float
    memory_s: float
    network_s: float
    energy_s: float
    clock_hz: float

    @property
    def longest_s(self) -> float:
        """Return the least seconds over all resources."""
        return max(self.compute_s, self.memory_s, self.network_s, self.energy_s)

    @property
    def binding(self) -> str:
        """Return the resource with the longest time: compute, memory, network or energy."""
        times = {
            "compute": self.compute_s,
            "memory": self.memory_s,
            "network": self.network_s,
            "energy": self.energy_s,
        }
        return max(times, key=times.__getitem__)


@dataclasses.dataclass(frozen=True)
class PeakRate:
    """The peak rate of dense products on one device, and the source of the rate."""

    flops_per_s: float
    source: str


def bound(work: Work, device: Device, power: Power, dtype: str = "bfloat16") -> Bound:
    """Return the four least times of some work on one device.

    Compute is at the tensor cores' peak and the highest clock, memory and network at the datasheet's rates.
    Energy is at the clock where the time that the power allows equals the time that the cycles take.
    """
    energy_s, clock_hz = _least_energy_time(work, power, dtype)
    return Bound(
        compute_s=work.flops / (power.flops_per_cycle[dtype] * power.highest_clock_hz),
        memory_s=work.memory_bytes / device.datasheet.memory_bytes_per_s,
        network_s=work.network_bytes / device.datasheet.network_bytes_per_s,
        energy_s=energy_s,
        clock_hz=clock_hz,
    )


def product_rate(power: Power, dtype: str) -> float:
    """Return the FLOP/s of GEMMs that move no bytes, by the energy bound.

    It is the Compute of NanoFlow's Eq. 5.
    """
    seconds, _ = _least_energy_time(Work(flops=1.0), power, dtype)
    return 1.0 / seconds


def _least_energy_time(work: Work, power: Power, dtype: str) -> tuple[float, float]:
    """Return the least seconds that the power allows for some work, and the clock of that time in Hz."""
    share = np.linspace(power.lowest_clock_hz / power.highest_clock_hz, 1.0, _CLOCKS)
    watts_s = power.dynamic_j(work, dtype, share) / (power.cap_w - power.idle_w)
    cycles_s = work.flops / (power.flops_per_cycle[dtype] * power.highest_clock_hz * share)
    least = np.maximum(watts_s, cycles_s)
    best = int(np.argmin(least))
    return float(least[best]), float(share[best] * power.highest_clock_hz)


def shipped_power(device: str) -> Power | None:
    """Return the fit in the card of a device of `jaxflow.model.cost.DEVICES`, or None."""
    found = card_of(device).power
    return None if found is None else msgspec.convert(found, Power)


def known_rate(device: Device, dtype: str) -> PeakRate | None:
    """Return a device's peak rate of dense products; None for a dtype that the cost model lacks."""
    power = shipped_power(device.name)
    if power is not None and dtype in power.flop:
        return PeakRate(product_rate(power, dtype), f"{device.name} {dtype}, at the power cap")
    for rates, source in ((device.measured, "measured, sustained"), (device.datasheet, "datasheet")):
        if rates and dtype in rates.flops_per_s:
            return PeakRate(rates.flops_per_s[dtype], f"{device.name} {dtype}, {source}")
    return None
