"""What a measured run ran on: the head of a report, and watts and clocks of every card.

    python -m benchmarks.cards --output_json report.json [--commit COMMIT] -- COMMAND...

runs a command that writes the report, and gives the report this head. The head is of the whole command, its
start included.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pynvml

from pallas_kernels.nvml import handle, visible

EVERY_S = 0.1  # between two readings of all cards
PACKAGES = ("jaxflow", "jax", "jaxlib", "jax-cuda13-plugin", "nvidia-nccl-cu13", "numpy")

Reading = tuple[float, tuple[float, ...], tuple[float, ...]]  # seconds, watts and SM MHz of each card


class Cards:
    """Readings of all visible cards; empty where there is no driver."""

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self.driver: str | None = None
        self.names: tuple[str, ...] = ()

    def between(self, start: float, stop: float) -> dict[str, list[float]]:
        """Return the mean watts and the median SM clock of each card over a span of `time.perf_counter`."""
        return means([reading for reading in self.readings if start <= reading[0] <= stop])


def means(readings: Sequence[Reading]) -> dict[str, list[float]]:
    """Return the mean watts and the median SM clock (MHz) of each card; empty lists without readings."""
    if not readings:
        return {"watts": [], "clock_mhz": []}
    watts, clocks = (np.array([reading[i] for reading in readings]) for i in (1, 2))
    return {"watts": watts.mean(0).round(1).tolist(), "clock_mhz": np.median(clocks, axis=0).tolist()}


@contextlib.contextmanager
def watched() -> Iterator[Cards]:
    """Read all visible cards while the block runs."""
    cards = Cards()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver: nothing to read
        yield cards
        return
    handles = [handle(name) for name in visible() or map(str, range(pynvml.nvmlDeviceGetCount()))]
    cards.driver = pynvml.nvmlSystemGetDriverVersion()
    cards.names = tuple(pynvml.nvmlDeviceGetName(one) for one in handles)
    done = threading.Event()

    def read() -> None:
        while not done.wait(EVERY_S):
            watts = tuple(_watts(one) for one in handles)
            clocks = tuple(float(pynvml.nvmlDeviceGetClockInfo(one, pynvml.NVML_CLOCK_SM)) for one in handles)
            cards.readings.append((time.perf_counter(), watts, clocks))

    thread = threading.Thread(target=read, name="cards", daemon=True)
    thread.start()
    try:
        yield cards
    finally:
        done.set()
        thread.join()
        pynvml.nvmlShutdown()


def _watts(card: Any) -> float:
    """Return the power of a card now; older cards report only the mean of the last second."""
    (now,) = pynvml.nvmlDeviceGetFieldValues(card, [pynvml.NVML_FI_DEV_POWER_INSTANT])
    known = now.nvmlReturn == pynvml.NVML_SUCCESS
    return (now.value.uiVal if known else pynvml.nvmlDeviceGetPowerUsage(card)) / 1000


def commit(given: str | None = None) -> str | None:
    """Return the commit that was named, or the checkout's; None outside a checkout."""
    if given:
        return given
    try:
        found = subprocess.run(("git", "rev-parse", "HEAD"), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def head(command: Sequence[str], cards: Cards, named: str | None = None) -> dict[str, Any]:
    """Return the head of a report: command, commit, versions, driver, device, clocks, watts and date.

    named: the commit, for a copy of the sources without a checkout. watts, clock_mhz: of each card, over the
    whole block of `watched`.
    """
    return {
        "command": shlex.join(command),
        "commit": commit(named),
        "versions": {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "driver": cards.driver,
        "device": cards.names[0] if cards.names else "cpu",
        "num_devices": len(cards.names),
        "cpu_cores": os.cpu_count(),
        **means(cards.readings),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(arguments: Sequence[str]) -> int:
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_json", required=True, help="the report that the command writes")
    parser.add_argument("--commit", help="of sources outside a checkout")
    given, command = parser.parse_args(own), list(arguments[len(own) + 1 :])
    if not command:
        parser.error("COMMAND: a command behind -- is accepted")
    with watched() as cards:
        status = subprocess.run(command).returncode
    report = Path(given.output_json)
    if report.exists():
        body = json.loads(report.read_text("utf-8"))
        report.write_text(
            json.dumps(head(command, cards, given.commit) | _without_head(body), indent=1) + "\n"
        )
    return status


def _without_head(body: dict[str, Any]) -> dict[str, Any]:
    """Return a report without what the head says better."""
    return {name: value for name, value in body.items() if name not in ("command", "versions", "device")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
