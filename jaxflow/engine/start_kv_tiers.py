"""From settings to a host tier: how much goes where, what is reserved at start, and what the link and a step
are measured to cost.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.engine.executor import Executor
from jaxflow.engine.kv_offload import Offload
from jaxflow.engine.step_plans import on_gpu
from jaxflow.kv.device_cache import page_bytes
from jaxflow.kv.tiers.disk_store import READERS, WRITE_QUEUE_BYTES
from jaxflow.kv.tiers.host_memory import free_host_bytes
from jaxflow.kv.tiers.host_store import HostStore
from jaxflow.kv.tiers.numa import gpu_bus_ids, near_cpus, run_bound
from jaxflow.kv.tiers.page_copies import MOST_BYTES, SIZES, PageCopies, sizes_of
from jaxflow.kv.tiers.transfers import Transfers, in_calls
from jaxflow.scheduler.fetch_cost import LoadCosts
from jaxflow.scheduler.tier_policy import HostTier

log = logging.getLogger(__name__)

STAGING_BYTES = (
    1 << 30
)  # of a device, for copies under way, of each direction: what crosses in a step at most
PINNED_SLACK = (
    1.25  # XLA's pool of pinned memory may grow beyond what is kept, by what is under way and between pages
)
_BATCH = 16  # pages copied at once when memory is reserved


def pinned_pool_gib(kv_offloading_size: float, staging_bytes: int = STAGING_BYTES) -> int:
    """What XLA's pool of pinned host memory must be allowed to hold; its own limit is 64."""
    return max(64, int(kv_offloading_size * PINNED_SLACK + 2 * staging_bytes / 2**30 + 4))


def staging_bytes(sizes: tuple[int, ...], free_bytes: int | None = None) -> int:
    """Of one device, for copies of each direction: a fiftieth of what is free at most, but four of the
    largest pages.

    sizes: bytes of a page of each layer group. free_bytes: None where that is of no concern.
    """
    most = STAGING_BYTES if free_bytes is None else min(STAGING_BYTES, free_bytes // 50)
    return max(most, 4 * max(sizes))


def device_bytes(sizes: tuple[int, ...], free_bytes: int) -> int:
    """What offloading needs of one device beside the cache: copies under way of both directions, and a
    gather's own space.
    """
    call = max(sizes_of(size)[-1] * size for size in sizes)
    return 2 * staging_bytes(sizes, free_bytes) + 2 * min(call, MOST_BYTES)


def page_copies(
    config: EngineConfig, model: ModelConfig, executor: Executor, sizes: tuple[int, ...] = SIZES
) -> PageCopies:
    """The programs, to be compiled with the executor's. config: resolved."""
    dtype = jnp.dtype(config.kv_cache_dtype)
    return PageCopies(model, executor.num_pages, config.block_size, dtype, executor.programs.mesh, sizes)


def check_host(config: EngineConfig, model: ModelConfig) -> None:
    """Refuses a host tier that could not hold anything, or that this machine has no memory for. Raises:
    ConfigError.
    """
    sizes = page_bytes(
        model, config.block_size, jnp.dtype(config.kv_cache_dtype), config.tensor_parallel_size
    )
    wanted, least = config.kv_offloading_size * 2**30, sum(sizes) * config.tensor_parallel_size
    if wanted < least:
        accepted = f"0, or at least {least / 2**30:.6f} GiB, a page of each layer group"
        raise ConfigError("kv_offloading_size", config.kv_offloading_size, accepted)
    there = free_host_bytes()
    if wanted > there:
        raise ConfigError(
            "kv_offloading_size",
            config.kv_offloading_size,
            f"at most the {there / 2**30:.1f} GiB of memory that are free",
        )
    if not config.enable_prefix_caching:
        raise ConfigError(
            "kv_offloading_size",
            config.kv_offloading_size,
            "0 without enable_prefix_caching: pages are found by their names",
        )


def start_offload(config: EngineConfig, executor: Executor, *, costs: LoadCosts | None = None) -> Offload:
    """A host tier over a warm executor that has `copies`.

    config: resolved. costs: None to measure them. Raises: ConfigError for more memory than can be pinned.
    """
    copies = executor.copies
    assert copies is not None
    mesh = executor.programs.mesh
    cpus = near_cpus(gpu_bus_ids(mesh.size)) if on_gpu() else None
    transfers = Transfers(mesh, copies.groups[0].spec)
    capacity = int(config.kv_offloading_size * 2**30)
    begin = time.perf_counter()
    if on_gpu():  # elsewhere host memory is not pinned, and nothing to be kept warm
        try:
            run_bound(
                cpus,
                lambda: reserve(
                    copies, transfers, capacity + beside_disk(config, max(copies.page_bytes) * mesh.size)
                ),
            )
        except jax.errors.JaxRuntimeError as error:
            accepted = f"what can be pinned of the host's memory ({str(error).splitlines()[0]})"
            raise ConfigError("kv_offloading_size", config.kv_offloading_size, accepted) from None
    costs = costs or LoadCosts(
        link_bytes_per_s(copies, transfers), latency_s(copies, transfers), seconds_a_token(executor)
    )
    sizes = tuple(size * mesh.size for size in copies.page_bytes)
    log.info(
        (
            "host tier: %.1f GiB of pages of %s bytes, reserved in %.1f s; %.1f GB/s to the device, %.2f "
            "us a token to compute"
        ),
        config.kv_offloading_size,
        "/".join(map(str, sizes)),
        time.perf_counter() - begin,
        costs.bytes_per_s / 1e9,
        costs.seconds_a_token * 1e6,
    )
    tier = HostTier(HostStore(capacity, sizes), costs, staging_bytes(copies.page_bytes) * mesh.size)
    return Offload(tier, transfers, cpus)


def beside_disk(config: EngineConfig, page_bytes: int) -> int:
    """Pinned bytes beyond the host's capacity: of pages that have left it and wait for the disk, and of those
    that its readers bring.

    XLA's pool would get them from the driver at the moment when the host is full, gigabytes at once, and the
    engine's thread would wait.
    """
    return 0 if config.kv_disk_path is None else WRITE_QUEUE_BYTES + 2 * READERS * page_bytes


def reserve(copies: PageCopies, transfers: Transfers, capacity_bytes: int) -> None:
    """Fills the host's memory with pages once, so that XLA's pool has it from the driver, pinned, and keeps
    it.

    Without that each page's first copy would wait for its memory: 2 to 25 GB/s where a used one runs at 50.
    """
    kept: list[Any] = []
    size = max(copies.page_bytes) * transfers.to_host.sharding.mesh.size
    blank = copies.blank(copies.page_bytes.index(max(copies.page_bytes)))
    for begin in range(0, -(-capacity_bytes // size), _BATCH):
        kept += jax.device_put(
            [blank] * min(_BATCH, -(-capacity_bytes // size) - begin), transfers.to_host.sharding
        )
    jax.block_until_ready(kept)


def link_bytes_per_s(copies: PageCopies, transfers: Transfers) -> float:
    """To the device, all shards together, of pages begun as the engine begins them: the best of three."""
    pages = jax.device_put([copies.blank(0)] * _BATCH, transfers.to_host.sharding)
    seconds = _best(lambda: jax.block_until_ready(in_calls(pages, transfers.to_device.sharding)))
    return sum(page.nbytes for page in pages) / seconds


def latency_s(copies: PageCopies, transfers: Transfers) -> float:
    """Of a single page, begin to end."""
    page = jax.device_put(copies.blank(0), transfers.to_host.sharding)
    return _best(lambda: jax.block_until_ready(jax.device_put(page, transfers.to_device.sharding)))


def seconds_a_token(executor: Executor) -> float:
    """Of prefill, in the largest step, attention left out."""
    layout = executor.layouts[max(executor.layouts)][0]
    return _best(lambda: executor.rehearse(layout)) / 2 / layout.tokens


def _best(run: Callable[[], Any], times: int = 3) -> float:
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return float(np.min(seconds))
