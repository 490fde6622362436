"""Which CPUs are near the GPUs: host buffers and the threads that fill them belong on their NUMA node
(NanoFlow §4.2.2).

Memory lies where the thread runs that first touches it, and across sockets a copy has half of PCIe's
bandwidth or less.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pynvml

from pallas_kernels import nvml as card

log = logging.getLogger(__name__)

SYS = Path("/sys")


def near_cpus(bus_ids: Iterable[str], root: Path = SYS) -> set[int] | None:
    """The CPUs of the nodes that these PCI devices are on; None where there is one node, or it is not known.

    bus_ids: such as NVML's 00000000:65:00.0. root: what is elsewhere /sys.
    """
    nodes = sorted((root / "devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return None
    cpus: set[int] = set()
    for bus_id in bus_ids:
        domain, _, rest = bus_id.lower().partition(":")
        try:
            node = int((root / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
            if node < 0:  # the firmware does not say
                return None
            cpus |= parse_cpus((root / f"devices/system/node/node{node}/cpulist").read_text())
        except (OSError, ValueError):
            return None
    return cpus or None


def parse_cpus(text: str) -> set[int]:
    """The kernel's way to write sets: 0-3,8. Raises: ValueError."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def gpu_bus_ids(count: int) -> list[str]:
    """PCI addresses of the first `count` GPUs that this process sees; none without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        names = card.visible()[:count] or [str(i) for i in range(count)]
        return [str(pynvml.nvmlDeviceGetPciInfo(card.handle(name)).busId) for name in names]
    except pynvml.NVMLError as error:
        log.warning("the NUMA node of the GPUs is not known: %s", error)
        return []
    finally:
        pynvml.nvmlShutdown()


def bind(cpus: set[int] | None) -> None:
    """Keeps the calling thread on those of these CPUs that it may use, if any."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return
    allowed = cpus & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)  # of this thread alone


@contextlib.contextmanager
def bound(cpus: set[int] | None) -> Iterator[None]:
    """Keeps the calling thread there meanwhile, and those that it starts for as long as they live: threads
    begin where their maker is.
    """
    before = os.sched_getaffinity(0) if cpus and hasattr(os, "sched_setaffinity") else None
    bind(cpus)
    try:
        yield
    finally:
        if before is not None:
            os.sched_setaffinity(0, before)


def run_bound(cpus: set[int] | None, work: Callable[[], None]) -> None:
    """Runs `work` on a thread that is bound, so that the memory it touches first is near; returns when it is
    done.
    """
    faults: list[BaseException] = []

    def run() -> None:
        try:
            bind(cpus)
            work()
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=run, name="jaxflow-reserve")
    thread.start()
    thread.join()
    if faults:
        raise faults[0]
