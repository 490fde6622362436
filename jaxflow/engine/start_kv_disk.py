"""From settings to a disk tier below the host's."""

import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.engine.kv_offload import Offload
from jaxflow.engine.step_plans import on_gpu
from jaxflow.kv.device_cache import page_bytes
from jaxflow.kv.tiers.disk_link import DiskLink
from jaxflow.kv.tiers.disk_store import DiskTier
from jaxflow.kv.tiers.numa import bind, gpu_bus_ids, near_cpus

log = logging.getLogger(__name__)


def open_disk(config: EngineConfig, model: ModelConfig, fingerprint: bytes) -> DiskTier | None:
    """The tier that the settings ask for, its folder locked: before a model is loaded for nothing.

    config: resolved. fingerprint: of the model and its settings (`jaxflow.model.checkpoints.fingerprint`).

    Raises: ConfigError.
    """
    if config.kv_disk_path is None or config.kv_disk_size is None:
        return None
    tp = config.tensor_parallel_size
    sizes = page_bytes(model, config.block_size, jnp.dtype(config.kv_cache_dtype), tp)
    cpus = near_cpus(gpu_bus_ids(tp)) if on_gpu() else None
    capacity, sizes = int(config.kv_disk_size * 2**30), [size * tp for size in sizes]
    disk = DiskTier(config.kv_disk_path, capacity, fingerprint, sizes, prepare=lambda: bind(cpus))
    try:
        _check_room(config, disk)
    except BaseException:
        disk.close()
        raise
    return disk


def _check_room(config: EngineConfig, disk: DiskTier) -> None:
    """Refuses more than the disk is large, and says where it has less room now. Raises: ConfigError."""
    path, size, capacity = config.kv_disk_path, config.kv_disk_size, disk.capacity_bytes
    try:
        usage = shutil.disk_usage(disk.folder)
    except OSError as error:
        raise ConfigError(
            "kv_disk_path", path, f"a folder whose disk says how large it is ({error.strerror})"
        ) from None
    if capacity > usage.total:
        raise ConfigError(
            "kv_disk_size", size, f"at most {usage.total / 2**30:.2f} GiB, the size of {path}'s disk"
        )
    if capacity > (
        room := usage.free + disk.counters().bytes
    ):  # which others may give back: a disk that is full is gone without
        log.warning("kv_disk_size=%s: %s has room for %.2f GiB now", size, path, room / 2**30)


def put_below(offload: Offload, disk: DiskTier) -> None:
    """Makes a disk the tier below an offload's host; the offload closes it."""
    sharding = offload.transfers.to_host.sharding
    offload.link = offload.tier.below = DiskLink(
        disk, offload.tier.store, to_bytes, lambda _, page: from_bytes(page, sharding)
    )


def from_bytes(page: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """uint8 [length] as a page of `jaxflow.kv.tiers.page_copies`, uint32 [tp, W], in the host memory of its
    shards' devices.
    """
    return jax.block_until_ready(
        jax.device_put(page.view(np.uint32).reshape(sharding.mesh.size, -1), sharding)
    )


def to_bytes(page: jax.Array) -> list[np.ndarray]:
    """What each shard has of such a page, in their order: numpy's views or copies of the host's memory."""
    shards = sorted(page.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return [np.asarray(shard.data) for shard in shards]
