"""The meshes of this process's devices: tensor parallelism, and data-parallel ranks."""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxflow.config import ConfigError
from pallas_kernels.this_device import described_device

TP = "tp"  # the mesh axis of tensor parallelism
DP = "dp"  # the mesh axis of data-parallel ranks, which a mesh of one rank lacks
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
    """Return True if the programs of this process run on GPUs."""
    described = described_device()
    return (jax.default_backend() if described is None else described.platform) == "gpu"


def make_mesh(tensor_parallel_size: int) -> Mesh:
    """Return a mesh of the first `tensor_parallel_size` devices. Raises: ConfigError if there are fewer."""
    (mesh,) = stage_meshes(tensor_parallel_size, 1)
    return mesh


def stage_meshes(tensor_parallel_size: int, pipeline_parallel_size: int) -> tuple[Mesh, ...]:
    """Return a mesh of `tensor_parallel_size` devices for each pipeline stage, first stage first.

    Of several processes, process 0 has the last stage, because it reads the tokens.

    Raises:
      ConfigError: there are fewer devices.
    """
    devices, tp = jax.devices(), tensor_parallel_size
    if tp > len(devices):
        raise ConfigError("tensor_parallel_size", tp, f"at most the {len(devices)} devices that are here")
    if tp * pipeline_parallel_size > len(devices):
        accepted = (
            f"at most {len(devices) // tp}: each stage takes tensor_parallel_size={tp} of the {len(devices)} "
            f"devices that are here"
        )
        raise ConfigError("pipeline_parallel_size", pipeline_parallel_size, accepted)
    meshes = [
        Mesh(np.array(devices[stage * tp : (stage + 1) * tp]), (TP,))
        for stage in range(pipeline_parallel_size)
    ]
    return tuple(meshes if jax.process_count() == 1 else reversed(meshes))


def make_rank_mesh(data_parallel_size: int, tensor_parallel_size: int = 1) -> Mesh:
    """Return a mesh of `tensor_parallel_size` devices for each of several data-parallel ranks.

    Raises:
      ConfigError: there are fewer devices.
    """
    devices, ranks, tp = jax.devices(), data_parallel_size, tensor_parallel_size
    if ranks * tp > len(devices):
        here = f"the {len(devices)} devices that are here"
        accepted = f"at most {here}"
        if tp > 1:
            accepted = f"at most {len(devices) // tp}: each rank takes tensor_parallel_size={tp} of {here}"
        raise ConfigError("data_parallel_size", ranks, accepted)
    return Mesh(np.array(devices[: ranks * tp]).reshape(ranks, tp), (DP, TP))


def ranks_of(mesh: Mesh) -> int:
    """Return the number of data-parallel ranks of a mesh."""
    return mesh.shape.get(DP, 1)


def by_rank(mesh: Mesh) -> PartitionSpec:
    """Return the partition of an array that holds the arrays of all ranks, one after another on axis 0."""
    return PartitionSpec(DP) if DP in mesh.shape else PartitionSpec()


def of_several_processes(mesh: Mesh) -> bool:
    """Return True if the devices of a mesh are of several processes."""
    return len({device.process_index for device in mesh.devices.flat}) > 1


def ranks_have_processes(mesh: Mesh) -> bool:
    """Return True if the data-parallel ranks of a mesh have devices of several processes."""
    return DP in mesh.shape and of_several_processes(mesh)


def is_here(mesh: Mesh) -> bool:
    """Return True if this process has a device of the mesh."""
    return any(device.process_index == jax.process_index() for device in mesh.devices.flat)


def axis_of(mesh: Mesh) -> str | None:
    """Return the axis that ops sum over, or None on one device."""
    return TP if mesh.shape[TP] > 1 else None


def expert_axis_of(mesh: Mesh) -> str | tuple[str, str] | None:
    """Return the axes that experts are spread over whole: all that have several devices.

    None on one device.
    """
    if ranks_of(mesh) == 1:
        return axis_of(mesh)
    return DP if axis_of(mesh) is None else (DP, TP)


def place(array: np.ndarray | np.generic, sharding: NamedSharding) -> jax.Array:
    """Return a host array on the devices of a sharding. Of several processes, each has
    the array and copies its part.

    `device_put` would send the array to all processes, to check that it is the same everywhere.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def sharded(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """Return the sharding of a spec on the mesh."""
    return NamedSharding(mesh, spec)


def over_shards(fn: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """Return `fn` as a function over the tensor-parallel devices of a mesh, or `fn` itself on one device.

    Of several ranks, `fn` itself: `over_ranks` makes a function over all devices.
    """
    if axis_of(mesh) is None or DP in mesh.shape:
        return fn
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def over_ranks(fn: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """Return `fn` as a function over the devices of all data-parallel ranks, or `fn` itself for one rank."""
    if DP not in mesh.shape:
        return fn
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
