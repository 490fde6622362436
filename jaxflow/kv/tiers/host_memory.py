"""How much memory the host has, and how much of it is free."""

import contextlib
import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # within a container its own
# Of each version of cgroups: what a container may take, what it takes, and what of that, by its memory.stat,
# is the cache of files.
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", ("active_file", "inactive_file")),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        ("total_active_file", "total_inactive_file"),
    ),
)


def host_memory_bytes() -> int:
    """What the host has, in use or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_host_bytes() -> int:
    """What the host can still give, of a container's share what is left. The cache of files counts as free:
    the system gives it up.

    Without Linux's meminfo it is what no one uses, and where the system does not say that either (macOS) all
    there is.
    """
    free, left = _free_of_the_machine(), _left_to_the_container()
    return free if left is None else min(free, left)


def _free_of_the_machine() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(ValueError, OSError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return host_memory_bytes()


def _left_to_the_container() -> int | None:
    """None where nothing limits it, or where that is not said."""
    for most, used, stat, cache in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            left = int((CGROUP / most).read_text()) - int((CGROUP / used).read_text())
            told = (CGROUP / stat).read_text() if (CGROUP / stat).exists() else ""
            named = dict(line.split() for line in told.splitlines())
            return max(0, left + sum(int(named.get(name, 0)) for name in cache))
    return None
