"""Start of the KV tiers: checks of the settings, reservation of host memory, and measurement of the costs."""

import dataclasses
import itertools
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.kv.device_cache import page_bytes, page_groups
from jaxflow.kv.page_tables import PageTables
from jaxflow.kv.tiers.disk_store import READERS, WRITE_QUEUE_BYTES, DiskStore
from jaxflow.kv.tiers.disk_tier import DiskTier
from jaxflow.kv.tiers.host_machine import bind, free_host_bytes, gpu_bus_ids, near_cpus, run_bound
from jaxflow.kv.tiers.host_store import HostStore
from jaxflow.kv.tiers.offload import CopyPages, KvOffload, PageCache, Transfers, in_calls
from jaxflow.kv.tiers.page import (
    HOST_MEMORY,
    PageShape,
    blank_page,
    copy_to,
    from_bytes,
    largest_shard,
    page_size,
    to_bytes,
)
from jaxflow.kv.tiers.page_copies import MOST_BYTES, sizes_of
from jaxflow.kv.tiers.policy import FetchCosts, TierPolicy
from jaxflow.parallel.mesh import on_gpu

log = logging.getLogger(__name__)

STAGING_BYTES = 1 << 30  # limit of the copies under way on a device, in each direction
# XLA's pool of pinned memory grows beyond the stored pages, by pages under way and by fragmentation.
PINNED_SLACK = 1.25
_BATCH = 16  # pages in a call that reserves memory


# ---- sizes


def pinned_pool_gib(kv_offloading_size: float, staging_bytes: int = STAGING_BYTES) -> int:
    """Return the limit, in GiB, that XLA's pool of pinned host memory needs; XLA's default is 64."""
    return max(64, int(kv_offloading_size * PINNED_SLACK + 2 * staging_bytes / 2**30 + 4))


def staging_bytes(sizes: tuple[int, ...], free_bytes: int | None = None) -> int:
    """Return the staging space of one device in each direction.

    The space is at most a fiftieth of the free memory, and at least four of the largest pages.

    Args:
      sizes: bytes of a page of each page group.
      free_bytes: free memory of the device; None for no limit.
    """
    most = STAGING_BYTES if free_bytes is None else min(STAGING_BYTES, free_bytes // 50)
    return max(most, 4 * max(sizes))


def staging_limit(pages: Sequence[PageShape]) -> int:
    """Return the staging space over all devices, so that no device has more than `staging_bytes` under way.

    pages: a page of each page group.
    """
    each = staging_bytes(tuple(map(largest_shard, pages)))
    return min(each * page_size(page) // largest_shard(page) for page in pages)


def device_bytes(sizes: tuple[int, ...], free_bytes: int) -> int:
    """Return the device memory that offloading needs: staging space, and the temporary space of a gather."""
    call = max(sizes_of(size)[-1] * size for size in sizes)
    return 2 * staging_bytes(sizes, free_bytes) + 2 * min(call, MOST_BYTES)


def check_host(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError for a host tier without room for a page, or larger than the free memory."""
    sizes = _page_bytes(config, model)
    wanted, least = config.kv_offloading_size * 2**30, sum(sizes) * config.tensor_parallel_size
    if wanted < least:
        accepted = f"0, or at least {least / 2**30:.6f} GiB, a page of each page group"
        raise ConfigError("kv_offloading_size", config.kv_offloading_size, accepted)
    free = free_host_bytes()
    if wanted > free:
        accepted = f"at most the {free / 2**30:.1f} GiB of free host memory"
        raise ConfigError("kv_offloading_size", config.kv_offloading_size, accepted)
    if not config.enable_prefix_caching:
        accepted = "0 without enable_prefix_caching, because pages are found by their names"
        raise ConfigError("kv_offloading_size", config.kv_offloading_size, accepted)


def _page_bytes(config: EngineConfig, model: ModelConfig) -> tuple[int, ...]:
    """Return the bytes of a page of each page group on one device."""
    tp = config.tensor_parallel_size
    return page_bytes(page_groups(model, config.kv_cache_dtype, tp), config.block_size, tp)


# ---- disk


def open_disk(config: EngineConfig, model: ModelConfig, fingerprint: bytes) -> DiskStore | None:
    """Open and lock the configured folder, before the model is loaded. Return None without a disk tier.

    Args:
      config: resolved.
      fingerprint: fingerprint of the model and its settings (`jaxflow.model.checkpoints.fingerprint`).

    Raises: ConfigError.
    """
    if config.kv_disk_path is None or config.kv_disk_size is None:
        return None
    tp = config.tensor_parallel_size
    cpus = near_cpus(gpu_bus_ids(config.parallel.devices)) if on_gpu() else None
    capacity, sizes = int(config.kv_disk_size * 2**30), [size * tp for size in _page_bytes(config, model)]
    disk = DiskStore(config.kv_disk_path, capacity, fingerprint, sizes, prepare=lambda: bind(cpus))
    try:
        _check_disk_size(config, disk)
    except BaseException:
        disk.close()
        raise
    return disk


def _check_disk_size(config: EngineConfig, disk: DiskStore) -> None:
    """Log a warning for a capacity above the free space. Raise ConfigError above the size of the disk."""
    path, size, capacity = config.kv_disk_path, config.kv_disk_size, disk.capacity_bytes
    try:
        usage = shutil.disk_usage(disk.folder)
    except OSError as error:
        accepted = f"a folder on a disk of known size ({error.strerror})"
        raise ConfigError("kv_disk_path", path, accepted) from None
    if capacity > usage.total:
        accepted = f"at most {usage.total / 2**30:.2f} GiB, the size of {path}'s disk"
        raise ConfigError("kv_disk_size", size, accepted)
    room = usage.free + disk.counters().bytes
    if capacity > room:  # no error: other users may free space, and a full disk stops the tier only
        log.warning("kv_disk_size=%s: %s has room for %.2f GiB now", size, path, room / 2**30)


def disk_tier(disk: DiskStore, pages: Sequence[PageShape]) -> DiskTier:
    """Return the tier that writes and reads the host's pages. pages: a page of each page group."""
    return DiskTier(disk, to_bytes, lambda group, payload: from_bytes(payload, pages[group]))


# ---- host


@dataclasses.dataclass(frozen=True)
class HostTier:
    """A started host tier, with the disk below it, before it has a scheduler and a cache."""

    store: HostStore
    costs: FetchCosts
    staging_bytes: int  # over all devices
    transfers: Transfers
    cpus: set[int] | None  # the CPUs near the devices

    def offload(self, tables: PageTables, cache: PageCache) -> KvOffload:
        """Return the offloading between a scheduler's pages and an executor's cache."""
        policy = TierPolicy(tables, self.store, self.costs, self.staging_bytes)
        return KvOffload(policy, cache, self.transfers, self.cpus)


def start_host_tier(
    config: EngineConfig,
    pages: Sequence[PageShape],
    seconds_per_token: Callable[[], float],
    disk: DiskStore | None = None,
    *,
    costs: FetchCosts | None = None,
    copy: CopyPages = copy_to,
) -> HostTier:
    """Reserve the host memory, and measure the costs of a fetch.

    Args:
      config: resolved.
      pages: a page of each page group on the devices.
      seconds_per_token: measure the time of a token's prefill.
      costs: None to measure the costs.
      copy: starts the engine's copies, as `copy_to`.

    Raises: ConfigError for more memory than can be pinned.
    """
    cpus = near_cpus(gpu_bus_ids(config.parallel.devices)) if on_gpu() else None
    capacity = int(config.kv_offloading_size * 2**30)
    sizes = tuple(map(page_size, pages))
    begin = time.perf_counter()
    if on_gpu():  # on other platforms host memory is not pinned
        reserved = capacity + (0 if disk is None else disk_pinned_bytes(max(sizes)))
        try:
            run_bound(cpus, lambda: reserve(pages, reserved))
        except jax.errors.JaxRuntimeError as error:
            accepted = f"at most the host memory that can be pinned ({str(error).splitlines()[0]})"
            raise ConfigError("kv_offloading_size", config.kv_offloading_size, accepted) from None
    costs = costs or FetchCosts(link_bytes_per_s(pages[0]), latency_s(pages[0]), seconds_per_token())
    log.info(
        "host tier: %.1f GiB of pages of %s bytes, reserved in %.1f s; %.1f GB/s to the device, "
        "%.2f us of prefill a token",
        config.kv_offloading_size,
        "/".join(map(str, sizes)),
        time.perf_counter() - begin,
        costs.bytes_per_s / 1e9,
        costs.seconds_per_token * 1e6,
    )
    store = HostStore(capacity, sizes, None if disk is None else disk_tier(disk, pages))
    return HostTier(store, costs, staging_limit(pages), Transfers(copy), cpus)


def disk_pinned_bytes(page_bytes: int) -> int:
    """Return the pinned bytes of pages that left the host for the write queue, or that readers bring.

    Without a reservation XLA's pool would request these gigabytes from the driver when the host is full, and
    the engine's thread would wait.
    """
    return WRITE_QUEUE_BYTES + 2 * READERS * page_bytes


def reserve(pages: Sequence[PageShape], capacity_bytes: int) -> None:
    """Fill the host memory with pages once, so that XLA's pool holds pinned memory of this size.

    Without the reservation the first copy of each page waits for the allocation: 2 to 25 GB/s instead of 50.
    """
    largest = max(pages, key=page_size)
    blank, count = blank_page(largest), -(-capacity_bytes // page_size(largest))
    kept = [copy_to(some, HOST_MEMORY) for some in itertools.batched([blank] * count, _BATCH)]
    jax.block_until_ready(kept)


def link_bytes_per_s(page: PageShape) -> float:
    """Measure the rate of pages to the devices, over all shards, with the engine's calls: the best of three."""
    held = copy_to([blank_page(page)] * _BATCH, HOST_MEMORY)
    return _BATCH * page_size(page) / best_seconds(lambda: jax.block_until_ready(in_calls(held, None)))


def latency_s(page: PageShape) -> float:
    """Measure the time of a copy of one page to the devices: the best of three."""
    held = copy_to([blank_page(page)], HOST_MEMORY)
    return best_seconds(lambda: jax.block_until_ready(copy_to(held, None)))


def best_seconds(run: Callable[[], Any], times: int = 3) -> float:
    """Return the shortest time of a few runs, in seconds."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return float(np.min(seconds))
