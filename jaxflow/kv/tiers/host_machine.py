"""The host machine: its free memory, and the CPUs near the GPUs (NanoFlow §4.2.2).

Memory lies on the NUMA node of the thread that touches the memory first. Across nodes a copy reaches half of
PCIe's bandwidth or less, so the host buffers and the threads that fill them belong on the GPUs' node.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pynvml

from pallas_kernels import nvml

log = logging.getLogger(__name__)

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # in a container, the container's group
# For each version of cgroups: files of the limit, the use and the statistics, and entries of the file cache.
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", ("active_file", "inactive_file")),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        ("total_active_file", "total_inactive_file"),
    ),
)
SYS = Path("/sys")


def host_memory_bytes() -> int:
    """Return the bytes of the host's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_host_bytes() -> int:
    """Return the bytes of free memory of the machine or of the container, the smaller one.

    The file cache counts as free, because the system gives it up. On systems without Linux's meminfo the file
    cache counts as used; on systems without a count of free memory (macOS) all memory counts as free.
    """
    free, left = _machine_free_bytes(), _container_free_bytes()
    return free if left is None else min(free, left)


def _machine_free_bytes() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(ValueError, OSError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return host_memory_bytes()


def _container_free_bytes() -> int | None:
    """Return the free bytes of the container, or None without a known limit."""
    for most, used, stat, cache in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            left = int((CGROUP / most).read_text()) - int((CGROUP / used).read_text())
            text = (CGROUP / stat).read_text() if (CGROUP / stat).exists() else ""
            statistics = dict(line.split() for line in text.splitlines())
            return max(0, left + sum(int(statistics.get(name, 0)) for name in cache))
    return None


def near_cpus(bus_ids: Iterable[str], root: Path = SYS) -> set[int] | None:
    """Return the CPUs of the NUMA nodes of PCI devices; None for a single node or an unknown node.

    bus_ids: addresses as of NVML, 00000000:65:00.0. root: the folder to read instead of /sys.
    """
    nodes = sorted((root / "devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return None
    cpus: set[int] = set()
    for bus_id in bus_ids:
        domain, _, rest = bus_id.lower().partition(":")
        try:
            node = int((root / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
            if node < 0:  # unknown to the firmware
                return None
            cpus |= parse_cpus((root / f"devices/system/node/node{node}/cpulist").read_text())
        except (OSError, ValueError):
            return None
    return cpus or None


def parse_cpus(text: str) -> set[int]:
    """Return the CPUs of a list in the kernel's format, such as 0-3,8. Raises: ValueError."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def gpu_bus_ids(count: int) -> list[str]:
    """Return the PCI addresses of the first `count` visible GPUs; none without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        names = nvml.visible()[:count] or [str(i) for i in range(count)]
        return [str(pynvml.nvmlDeviceGetPciInfo(nvml.handle(name)).busId) for name in names]
    except pynvml.NVMLError as error:
        log.warning("the NUMA node of the GPUs is unknown: %s", error)
        return []
    finally:
        pynvml.nvmlShutdown()


def bind(cpus: set[int] | None) -> None:
    """Bind the calling thread to the allowed ones of these CPUs, if there are any."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return
    allowed = cpus & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)  # affects this thread only


@contextlib.contextmanager
def bound(cpus: set[int] | None) -> Iterator[None]:
    """Bind the calling thread to these CPUs for a `with` block. Threads started in the block stay bound."""
    before = os.sched_getaffinity(0) if cpus and hasattr(os, "sched_setaffinity") else None
    bind(cpus)
    try:
        yield
    finally:
        if before is not None:
            os.sched_setaffinity(0, before)


def run_bound(cpus: set[int] | None, work: Callable[[], None]) -> None:
    """Run `work` on a bound thread and wait, so that new memory is on the CPUs' node."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            bind(cpus)
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="jaxflow-reserve")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
