"""Lower bounds of a kernel's time. A measured time below the bound is wrong and must not enter a table."""

import dataclasses
import math

from pallas_kernels.cards import card_of

SLACK = 1.2  # tolerance, because some bytes can be in the L2


class ImpossibleTime(ValueError):
    """A measured time that is impossible for the card's memory or its tensor cores."""


@dataclasses.dataclass(frozen=True)
class Least:
    """The minimum work of a call: bytes moved between memory and chip, and FLOP of products of `dtype`."""

    moved: float = 0.0
    flop: float = 0.0
    dtype: str = "bfloat16"

    def us(self, device: str) -> float:
        """Return the minimum time in microseconds on a device, or 0 for an unknown device.

        device: JAX's `device_kind`.
        """
        hardware = card_of(device).hardware
        if hardware is None:
            return 0.0
        peaks = hardware["datasheet"]
        flops_per_s = peaks["flops_per_s"].get(self.dtype, math.inf)
        return 1e6 * max(self.moved / peaks["memory_bytes_per_s"], self.flop / flops_per_s) / SLACK


def refuse_impossible(case: str, us: float, least: Least, device: str) -> None:
    """Check a time in microseconds against `SLACK` times the device's peaks.

    Raises: ImpossibleTime, naming the case, for a time below the minimum.
    """
    if us < least.us(device):
        raise ImpossibleTime(
            f"{case}: {us:.2f} us for {least.moved / 1e6:.1f} MB and {least.flop / 1e9:.1f} GFLOP of "
            f"{least.dtype} on {device}, where at least {least.us(device):.2f} us are needed at {SLACK:g} "
            "times the peaks"
        )
