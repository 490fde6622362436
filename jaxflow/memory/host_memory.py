"""How much memory the host has, and how much of it is free."""

import contextlib
import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")


def host_memory_bytes() -> int:
    """What the host has, in use or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_host_bytes() -> int:
    """What the host can still give. The cache of files counts as free: the system gives it up when it is asked.

    Without Linux's meminfo it is what no one uses, and where the system does not say that either (macOS) all there is.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(ValueError, OSError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return host_memory_bytes()
