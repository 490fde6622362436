"""The usable part of a memory limit on a machine with a GPU, whose allocators lose a share to gaps.

XLA keeps for each GPU a pool of the GPU's memory, and a pool of pinned host memory of whole GiB. Neither
moves an array, so a share is lost between arrays. A pinned pool takes regions of 2, 4, 8 MiB and so on from
the system, each twice as large as the last, up to the pool's limit. So a pool takes up to twice what its
arrays need, and only the limit bounds the pools of several GPUs.
"""

import math

# Lost shares. Of a pool of 100.9 GB on an H200's host one policy could use 98.3 GB, and two others could not
# use 98.4 and 99.2 GB (benchmarks/h200/opt-30b/pinned-memory-exhausted.json).
_DEVICE_GAPS, _HOST_GAPS = 0.06, 0.04
# Of the free host memory; the rest is for the compiler, the CUDA contexts and checkpoints that are read.
_POOLS_SHARE = 0.9


def usable_bytes(tier: str, limit: int, pools: int = 1) -> int:
    """Return the bytes of arrays that a tier of so many bytes holds.

    `pools`: pinned pools of equal size, one a GPU, that share the limit of the host.
    """
    if tier == "device":
        return int(limit * (1 - _DEVICE_GAPS))
    if tier == "host":
        return min(limit, int(pools * host_pool_gib(limit, pools) * 2**30 * (1 - _HOST_GAPS)))
    return limit


def least_limit(tier: str, needed: int, pools: int = 1) -> int:
    """Return the smallest limit whose usable part is at least `needed` bytes."""
    if tier == "device":
        return math.ceil(needed / (1 - _DEVICE_GAPS))
    if tier == "host":
        pool_gib = math.ceil(needed / (pools * 2**30 * (1 - _HOST_GAPS)))
        return max(needed, pools * (pool_gib - 1) * 2**30 + 1)
    return needed


def host_pool_gib(limit: float, pools: int = 1) -> int:
    """Return the limit in GiB of each of XLA's pinned pools, for a limit of all pools in bytes.

    XLA's default is 64.
    """
    return max(1, math.ceil(limit / (pools * 2**30)))


def grown_bytes(needed: int) -> int:
    """Return the bytes that pinned pools take for arrays of `needed` bytes, gaps included."""
    return math.ceil(needed / (1 - _HOST_GAPS))


def pools_room(free: int) -> int:
    """Return the bytes of free host memory that pinned pools may take. A process that takes all is killed."""
    return int(free * _POOLS_SHARE)
