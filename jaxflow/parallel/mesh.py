"""Devices -> a tensor-parallel mesh, and what runs on it."""

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
    """The CPU where there is no GPU and JAX was not told what to use; to be called before its first use.

    Left to itself, JAX asks every plugin that is installed, and one that is there only to compile complains
    at length.
    """
    if not jax.config.jax_platforms and not any(os.path.exists(device) for device in NVIDIA_DEVICES):
        jax.config.update("jax_platforms", "cpu")


def on_gpu() -> bool:
    """Return True if JAX runs on GPUs by default."""
    return jax.default_backend() == "gpu"


def make_mesh(tensor_parallel_size: int) -> Mesh:
    """The first `tensor_parallel_size` devices in a row. Raises: ConfigError when there are fewer."""
    devices = jax.devices()
    if tensor_parallel_size > len(devices):
        raise ConfigError(
            "tensor_parallel_size", tensor_parallel_size, f"at most the {len(devices)} devices that are here"
        )
    return Mesh(np.array(devices[:tensor_parallel_size]), (TP,))


def axis_of(mesh: Mesh) -> str | None:
    """The axis that ops sum over, or None on a single device, where there is nothing to sum."""
    return TP if mesh.shape[TP] > 1 else None


def sharded(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(mesh, spec)


def over_shards(fn: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`fn` as it runs on each device of the mesh; `fn` itself where there is one device."""
    if axis_of(mesh) is None:
        return fn
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
