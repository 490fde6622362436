"""The tensor-parallel mesh of this process's devices."""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxflow.config import ConfigError

TP = "tp"  # the mesh axis of tensor parallelism
NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")


def choose_platform() -> None:
    """Select the CPU if there is no GPU and the user has not chosen a platform. Call it before JAX's first
    use.

    JAX would otherwise query every installed plugin, and a plugin that is only for compilation logs long
    errors.
    """
    if not jax.config.jax_platforms and not any(os.path.exists(device) for device in NVIDIA_DEVICES):
        jax.config.update("jax_platforms", "cpu")


def on_gpu() -> bool:
    """Return True if JAX runs on GPUs by default."""
    return jax.default_backend() == "gpu"


def make_mesh(tensor_parallel_size: int) -> Mesh:
    """Return a mesh of the first `tensor_parallel_size` devices. Raises: ConfigError if there are fewer."""
    devices = jax.devices()
    if tensor_parallel_size > len(devices):
        raise ConfigError(
            "tensor_parallel_size", tensor_parallel_size, f"at most the {len(devices)} devices that are here"
        )
    return Mesh(np.array(devices[:tensor_parallel_size]), (TP,))


def axis_of(mesh: Mesh) -> str | None:
    """Return the axis that ops sum over, or None on one device."""
    return TP if mesh.shape[TP] > 1 else None


def sharded(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """Return the sharding of a spec on the mesh."""
    return NamedSharding(mesh, spec)


def over_shards(fn: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """Return `fn` as a function over the devices of a mesh, or `fn` itself on one device."""
    if axis_of(mesh) is None:
        return fn
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
