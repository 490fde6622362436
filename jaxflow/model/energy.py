"""The fourth resource: on a card at its power cap a step cannot run faster than its joules allow.

NanoFlow's cost model knows compute, memory and network. A card that reaches its power cap lowers its clock
until the work fits, so time is also bound by energy: with E joules of work beside an idle power of P_idle, T
>= E / (P_cap - P_idle). A joule count is a function of the clock, since a lower clock goes with a lower
voltage: the same work spread over more time costs less. So the bound is the best clock's: fast clocks run out
of watts, slow ones of clock cycles.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from jaxflow.model.cost import Device
from jaxflow.model.graph import Work

SCHEMA_VERSION = 1
FOLDER = Path(__file__).parent / "power"
_CLOCKS = 200  # between the lowest and the highest, for the search of the best


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Joules of a unit of work as a function of the clock: `joules · (fixed + (1 - fixed) · (clock / highest
    clock)²)`.
    """

    joules: float  # at the highest clock
    fixed: float  # share that does not fall with the clock, 0..1

    def at(self, clock_share: np.ndarray | float) -> np.ndarray | float:
        """`clock_share`: of the highest clock."""
        return self.joules * (self.fixed + (1 - self.fixed) * clock_share**2)

    def times(self, factor: float) -> "Curve":
        return Curve(self.joules * factor, self.fixed)


class Power(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What work costs on one device. None of the sustained runs, nor of four profiles' entries, needed less
    than the constants say.

    A fifth profile and windows of a tenth of a second do not tell joules that well: a sensor's watts are up
    to a quarter apart for one product, and the counter tells a few steps of 0.4 s (docs/cost-model.md).
    """

    schema_version: int
    device: str  # as in `jaxflow.model.cost.DEVICES`
    cap_w: float
    idle_w: float
    highest_clock_hz: float
    lowest_clock_hz: float
    flops_per_cycle: Mapping[str, float]  # by dtype, what the tensor cores can do
    flop: Mapping[str, Curve]  # by dtype
    byte: Curve  # of device memory, read or written

    def dynamic_j(self, work: Work, dtype: str, clock_share: np.ndarray | float = 1.0) -> np.ndarray | float:
        """Joules above idle that the work takes. The network's are not known, and count as none."""
        return work.flops * self.flop[dtype].at(clock_share) + work.memory_bytes * self.byte.at(clock_share)


@dataclasses.dataclass(frozen=True)
class Bound:
    """Seconds below which no implementation of some work can fall, by resource. `clock_hz`: the best clock
    for its joules.
    """

    compute_s: float
    memory_s: float
    network_s: float
    energy_s: float
    clock_hz: float

    @property
    def longest_s(self) -> float:
        return max(self.compute_s, self.memory_s, self.network_s, self.energy_s)

    @property
    def binding(self) -> str:
        """The resource that decides: compute, memory, network or energy."""
        times = {
            "compute": self.compute_s,
            "memory": self.memory_s,
            "network": self.network_s,
            "energy": self.energy_s,
        }
        return max(times, key=times.__getitem__)


def bound(work: Work, device: Device, power: Power, dtype: str = "bfloat16") -> Bound:
    """The four times of some work on one device.

    Compute is at the tensor cores' peak and highest clock, memory and network at the datasheet's rates.
    Energy is at the best clock, where the time that the watts allow meets the time that the cycles take.
    """
    share = np.linspace(power.lowest_clock_hz / power.highest_clock_hz, 1.0, _CLOCKS)
    peak = power.flops_per_cycle[dtype] * power.highest_clock_hz
    watts_s = power.dynamic_j(work, dtype, share) / (power.cap_w - power.idle_w)
    cycles_s = work.flops / (peak * share)
    least = np.maximum(watts_s, cycles_s)
    best = int(np.argmin(least))
    return Bound(
        compute_s=work.flops / peak,
        memory_s=work.memory_bytes / device.datasheet.memory_bytes_per_s,
        network_s=work.network_bytes / device.datasheet.network_bytes_per_s,
        energy_s=float(least[best]),
        clock_hz=float(share[best] * power.highest_clock_hz),
    )


def load_power(path: str | Path) -> Power:
    """Reads a fit. Raises: ValueError naming the file and the field."""
    try:
        power = msgspec.json.decode(Path(path).read_bytes(), type=Power)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if power.schema_version != SCHEMA_VERSION:
        raise ValueError(
            f"{path}: schema_version={power.schema_version} is not supported: this release reads "
            f"{SCHEMA_VERSION}"
        )
    return power


def shipped_power(device: str) -> Power | None:
    """The fit that comes with this release for a device of `jaxflow.model.cost.DEVICES`, or None."""
    path = FOLDER / f"{device.lower()}.json"
    return load_power(path) if path.exists() else None
