"""Samples of power, SM clock, temperature and energy of the cards in use, read through NVML while work
runs.
"""

import contextlib
import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pynvml

from pallas_kernels.nvml import engine_handles


@dataclasses.dataclass
class CardReadings:
    """Samples of one card.

    watts: power at each sample. clock_mhz: SM clock. temperature_c: GPU temperature. energy: (seconds,
    joules) at each observed step of the energy counter.
    """

    watts: list[float] = dataclasses.field(default_factory=list)
    clock_mhz: list[float] = dataclasses.field(default_factory=list)
    temperature_c: list[float] = dataclasses.field(default_factory=list)
    energy: list[tuple[float, float]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Readings:
    """Samples of the cards in use; `cards` is empty without an NVIDIA driver."""

    cards: list[CardReadings] = dataclasses.field(default_factory=list)

    @property
    def watts_by_card(self) -> list[float]:
        """The mean power of each card, or an empty list without samples."""
        known = bool(self.cards) and all(card.watts for card in self.cards)
        return [statistics.fmean(card.watts) for card in self.cards] if known else []

    @property
    def watts(self) -> float | None:
        """The mean power of all cards together, or None without samples."""
        return sum(self.watts_by_card) if self.watts_by_card else None

    @property
    def clock_mhz(self) -> float | None:
        """The mean SM clock over the cards, or None without samples."""
        clocks = [statistics.fmean(card.clock_mhz) for card in self.cards if card.clock_mhz]
        return statistics.fmean(clocks) if clocks else None

    @property
    def clock_mhz_by_card(self) -> list[float]:
        """The median SM clock of each card, or an empty list without samples."""
        known = bool(self.cards) and all(card.clock_mhz for card in self.cards)
        return [float(statistics.median(card.clock_mhz)) for card in self.cards] if known else []

    @property
    def watts_by_counter(self) -> float | None:
        """The mean power of all cards by their energy counters, or None if a counter shows no two steps."""
        powers = [power_by_counter(card.energy)[0] for card in self.cards]
        known = [power for power in powers if power is not None]
        return sum(known) if known and len(known) == len(powers) else None


@contextlib.contextmanager
def sample(cards: int | None = 1, every_s: float = 0.02, counter_reads: int = 0) -> Iterator[Readings]:
    """Sample the first `cards` cards of the engine, or all for None, in a thread while the block runs.

    every_s: seconds between samples of power, clock and temperature. counter_reads: reads of the energy
    counter between two of these samples; 0: never. The counter advances in steps of tens of milliseconds.
    """
    readings = Readings()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield readings
        return
    try:
        handles = engine_handles(cards)
    except pynvml.NVMLError:
        pynvml.nvmlShutdown()
        yield readings
        return
    readings.cards = [CardReadings() for _ in handles]
    stop = threading.Event()
    reads = max(1, counter_reads)

    def watch() -> None:
        last = [_joules(handle) if counter_reads else None for handle in handles]
        for tick in itertools.count():
            if stop.wait(every_s / reads):
                return
            for i, (handle, card) in enumerate(zip(handles, readings.cards, strict=True)):
                now = _joules(handle) if counter_reads else None
                if now is not None and now != last[i]:
                    card.energy.append((time.perf_counter(), now))
                    last[i] = now
                if tick % reads == 0:
                    card.watts.append(_instant_watts(handle))
                    card.clock_mhz.append(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
                    card.temperature_c.append(
                        pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
                    )

    thread = threading.Thread(target=watch, name="nvml", daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        stop.set()
        thread.join()
        pynvml.nvmlShutdown()


def power_by_counter(energy: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """Return (mean watts, median seconds between steps) from (seconds, joules) at steps of an energy
    counter.

    Both are None for fewer than two steps. The first and the last observed step bound the span, so the
    error is at most the time between two reads of the counter at either end, however long a step is.
    """
    if len(energy) < 2:
        return None, None
    (first_s, first_j), (last_s, last_j) = energy[0], energy[-1]
    step_s = statistics.median(b - a for (a, _), (b, _) in itertools.pairwise(energy))
    return (last_j - first_j) / (last_s - first_s), step_s


def _joules(handle: Any) -> float | None:
    """Return the card's energy counter, or None for a card without a counter."""
    try:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
    except pynvml.NVMLError:
        return None


def _instant_watts(handle: Any) -> float:
    """Return the power now. Cards before Hopper report only the mean of the last second."""
    (instant,) = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])
    if instant.nvmlReturn == pynvml.NVML_SUCCESS:
        return instant.value.uiVal / 1e3
    return pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3
