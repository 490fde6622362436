"""What no kernel can take less time than: a clock that says otherwise is wrong, and its figures must not
become a table.
"""

import dataclasses
import re

BYTES_PER_S = {"H100": 3.35e12, "H200": 4.8e12}  # datasheets, of the fastest card of the name
FLOPS_PER_S = {"bfloat16": 989e12, "float8_e4m3fn": 1979e12}  # of either, dense
SLACK = 1.2  # what a time may lie below: some of the bytes can be in the L2


class ImpossibleTime(ValueError):
    """A measured time that the card's memory or its tensor cores could not have met."""


@dataclasses.dataclass(frozen=True)
class Least:
    """What a call must do at least: bytes moved between memory and chip, and FLOP of products of `dtype`."""

    moved: float = 0.0
    flop: float = 0.0
    dtype: str = "bfloat16"

    def us(self, device: str) -> float:
        """Microseconds below which a time of it is impossible on a device, JAX's `device_kind`; 0 of one that
        is not known.
        """
        name = next((name for name in BYTES_PER_S if name in re.split(r"\W+", device)), None)
        if name is None:
            return 0.0
        return 1e6 * max(self.moved / BYTES_PER_S[name], self.flop / FLOPS_PER_S[self.dtype]) / SLACK


def refuse_impossible(case: str, us: float, least: Least, device: str) -> None:
    """Raises: ImpossibleTime, naming the case, for a time (us) that would need more than `SLACK` times the
    device's peaks.
    """
    if us < least.us(device):
        raise ImpossibleTime(
            f"{case}: {us:.2f} us for {least.moved / 1e6:.1f} MB and {least.flop / 1e9:.1f} GFLOP of {least.dtype} on {device},"
            f" which takes {least.us(device):.2f} us at {SLACK:g} times its peaks"
        )
