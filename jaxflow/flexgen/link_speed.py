"""How fast bytes cross between pinned host memory and the device, measured, so that a run can say how much of
that it used.
"""

import dataclasses
import time

import jax
import numpy as np

from jaxflow.flexgen.shards import home_of

_REPEATS, _TRAIN = 5, 4


@dataclasses.dataclass(frozen=True)
class Link:
    """Bytes per second to the device and from it, each direction alone."""

    down_bytes_per_s: float
    up_bytes_per_s: float


def measure_link(device: jax.Device, megabytes: int = 256) -> Link:  # type: ignore[valid-type]
    """The best of a few trains of transfers each way, one transfer behind the other as a run has them, after
    one that warms up.
    """
    size = megabytes << 20
    here = jax.sharding.SingleDeviceSharding(device)
    host = jax.device_put(np.zeros(size, np.uint8), home_of(here))
    there = jax.device_put(host, here)
    return Link(size / _best(host, here), size / _best(there, home_of(here)))


def _best(array: jax.Array, target: jax.sharding.Sharding) -> float:
    found = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        jax.block_until_ready([jax.device_put(array, target) for _ in range(_TRAIN)])
        found.append((time.perf_counter() - started) / _TRAIN)
    return min(found[1:])
