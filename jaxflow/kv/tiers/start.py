"""Start of the KV tiers: checks of the settings, reservation of host memory, and measurement of the costs."""

import dataclasses
import itertools
import logging
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.kv.device_cache import page_bytes, page_groups
from jaxflow.kv.page_tables import PageTables
from jaxflow.kv.tiers.disk_parts import ProcessPart
from jaxflow.kv.tiers.disk_store import READ_AHEAD, READERS, WRITE_QUEUE_BYTES, DiskStore
from jaxflow.kv.tiers.disk_tier import DiskTier
from jaxflow.kv.tiers.host_machine import bind, free_host_bytes, gpu_bus_ids, near_cpus, run_bound
from jaxflow.kv.tiers.host_store import HostStore, LowerTier
from jaxflow.kv.tiers.offload import CopyPages, KvOffload, PageCache, Transfers, in_calls
from jaxflow.kv.tiers.page import (
    HOST_MEMORY,
    PageShape,
    blank_page,
    copy_to,
    from_bytes,
    largest_shard,
    own_size,
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


def pinned_pool_gib(kv_offloading_size: float, devices: int = 1, staging_bytes: int = STAGING_BYTES) -> int:
    """Return the limit, in GiB, that XLA's pool of pinned host memory needs; XLA's default is 64.

    Each GPU has a pool of its own, which holds its part of the pages. devices: of the engine.
    """
    part = kv_offloading_size / devices
    return max(64, int(part * PINNED_SLACK + 2 * staging_bytes / 2**30 + 4))


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
    wanted, least = (
        config.kv_offloading_size * 2**30,
        sum(sizes) * config.tensor_parallel_size * config.data_parallel_size,
    )
    if wanted < least:
        accepted = f"0, or at least {least / 2**30:.6f} GiB, a page of each page group"
        if config.data_parallel_size > 1:
            accepted += " for each data-parallel rank"
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


def open_disk(
    config: EngineConfig, model: ModelConfig, fingerprint: bytes, part: ProcessPart | None = None
) -> DiskStore | None:
    """Open and lock the configured folder, before the model is loaded. Return None without a disk tier.

    Args:
      config: resolved.
      fingerprint: fingerprint of the model and its settings (`jaxflow.model.checkpoints.fingerprint`).
      part: the part of every page that this process has, and the share of `kv_disk_size`; None for all.

    Raises: ConfigError.
    """
    if config.kv_disk_path is None or config.kv_disk_size is None:
        return None
    whole = [size * config.tensor_parallel_size for size in _page_bytes(config, model)]
    folder, sizes, read_ahead = Path(config.kv_disk_path), whole, READ_AHEAD
    if part is not None:
        folder, sizes = _folder_of_part(folder, part), part.page_bytes
        stages = config.pipeline_parallel_size
        fingerprint += b", part %d of %d, %d stages" % (part.rank, part.count, stages)
        if part.rank:  # process 0 bounds the reads of all
            read_ahead = sys.maxsize
    cpus = near_cpus(gpu_bus_ids(config.parallel.devices)) if on_gpu() else None
    capacity = int(config.kv_disk_size * 2**30) * sum(sizes) // sum(whole)
    ranks = config.data_parallel_size  # each has a tier of its own above the disk
    disk = DiskStore(
        folder, capacity, fingerprint, sizes,
        tiers=ranks, read_ahead=read_ahead * ranks, prepare=lambda: bind(cpus),
    )  # fmt: skip
    try:
        _check_disk_size(config, disk)
    except BaseException:
        disk.close()
        raise
    return disk


def _folder_of_part(folder: Path, part: ProcessPart) -> Path:
    """Return the folder of a process: processes of one host, or with one network disk, share `folder`.

    Raises: ConfigError.
    """
    own = folder / f"process-{part.rank}-of-{part.count}"
    try:
        own.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        accepted = f"an existing folder with write permission ({error.strerror})"
        raise ConfigError("kv_disk_path", str(folder), accepted) from None
    return own


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
    share: Callable[[DiskTier], LowerTier] | None = None,
) -> HostTier:
    """Reserve the host memory, and measure the costs of a fetch.

    Args:
      config: resolved.
      pages: a page of each page group on the devices.
      seconds_per_token: measure the time of a token's prefill.
      costs: None to measure the costs.
      copy: starts the engine's copies, as `copy_to`.
      share: return the disk tier of all processes from the one of this process; None for one process.

    Raises: ConfigError for more memory than can be pinned.
    """
    cpus = near_cpus(gpu_bus_ids(config.parallel.devices)) if on_gpu() else None
    capacity = int(config.kv_offloading_size * 2**30)
    sizes = tuple(map(page_size, pages))
    begin = time.perf_counter()
    if on_gpu():  # on other platforms host memory is not pinned
        try:
            run_bound(cpus, lambda: reserve(pages, pinned_bytes(config, pages, disk)))
        except jax.errors.JaxRuntimeError as error:
            accepted = f"at most the host memory that can be pinned ({str(error).splitlines()[0]})"
            raise ConfigError("kv_offloading_size", config.kv_offloading_size, accepted) from None
    page = max(pages, key=own_size)
    costs = costs or FetchCosts(link_bytes_per_s(page), latency_s(page), seconds_per_token())
    log.info(
        "host tier: %.1f GiB of pages of %s bytes, reserved in %.1f s; %.1f GB/s to the device, "
        "%.2f us of prefill a token",
        config.kv_offloading_size,
        "/".join(map(str, sizes)),
        time.perf_counter() - begin,
        costs.bytes_per_s / 1e9,
        costs.seconds_per_token * 1e6,
    )
    lower: LowerTier | None = None
    if disk is not None:
        own = disk_tier(disk, pages)
        lower = own if share is None else share(own)
    store = HostStore(capacity, sizes, lower)
    return HostTier(store, costs, staging_limit(pages), Transfers(copy), cpus)


def start_rank_tiers(
    config: EngineConfig,
    pages: Sequence[Sequence[PageShape]],
    seconds_per_token: Callable[[], float],
    disk: DiskStore | None = None,
    *,
    costs: FetchCosts | None = None,
) -> list[HostTier]:
    """Return the host tier of each data-parallel rank. Each has an equal share of the host memory.

    The ranks share the disk: a page that one rank wrote, any rank reads.

    Args:
      pages: of each rank, a page of each page group. Others: see `start_host_tier`.
    """
    own = dataclasses.replace(config, kv_offloading_size=config.kv_offloading_size / len(pages))
    tiers: list[HostTier] = []
    for of_rank in pages:  # the first one measures the costs
        costs = tiers[0].costs if tiers else costs
        tiers.append(start_host_tier(own, of_rank, seconds_per_token, disk, costs=costs))
    return tiers


def pinned_bytes(config: EngineConfig, pages: Sequence[PageShape], disk: DiskStore | None) -> int:
    """Return the bytes of pages, over all processes, whose host memory is pinned at the start."""
    capacity, largest = int(config.kv_offloading_size * 2**30), max(pages, key=own_size)
    if disk is None:
        return capacity
    return capacity + disk_pinned_bytes(own_size(largest)) * page_size(largest) // own_size(largest)


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
    largest = max(pages, key=own_size)
    blank, count = blank_page(largest), -(-capacity_bytes // page_size(largest))
    kept = [copy_to(some, HOST_MEMORY) for some in itertools.batched([blank] * count, _BATCH)]
    jax.block_until_ready(kept)


def link_bytes_per_s(page: PageShape) -> float:
    """Measure the rate of pages to the devices, over all shards, with the
    engine's calls: the best of three.
    """
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
