"""The usable part of a memory limit on a machine with a GPU, whose allocators lose a share to gaps.

XLA keeps a pool of the GPU's memory, and a pool of pinned host memory of whole GiB. Neither moves an array,
so a share is lost between arrays.
"""

import math

# Lost shares. Of a pool of 100.9 GB on an H200's host one policy could use 98.3 GB, and two others could not
# use 98.4 and 99.2 GB (benchmarks/h200/opt-30b/pinned-memory-exhausted.json).
_DEVICE_GAPS, _HOST_GAPS = 0.06, 0.04


def usable_bytes(tier: str, limit: int) -> int:
    """Return the bytes of arrays that a tier of so many bytes holds."""
    if tier == "device":
        return int(limit * (1 - _DEVICE_GAPS))
    if tier == "host":
        return min(limit, int(host_pool_gib(limit) * 2**30 * (1 - _HOST_GAPS)))
    return limit


def least_limit(tier: str, needed: int) -> int:
    """Return the smallest limit whose usable part is at least `needed` bytes."""
    if tier == "device":
        return math.ceil(needed / (1 - _DEVICE_GAPS))
    if tier == "host":
        pool_gib = math.ceil(needed / (2**30 * (1 - _HOST_GAPS)))
        return max(needed, (pool_gib - 1) * 2**30 + 1)
    return needed


def host_pool_gib(limit: float) -> int:
    """Return the limit in GiB of XLA's pool of pinned memory, for a limit in bytes; XLA's default is 64."""
    return max(1, math.ceil(limit / 2**30))
