"""How an offloaded run's tensors are cut over the devices of its mesh.

Each device has its own heads of the KV, its own rows or columns of a matrix as in the engine, and its own
columns of what passes from layer to layer: the sum over devices at a layer's end leaves each its columns, and
the next layer begins by gathering them. So every tensor that travels does so in pieces, each over its own
device's link, and nothing lies on the host twice.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxflow.parallel.mesh import TP, axis_of

WHOLE = PartitionSpec()  # on every device
CUT = PartitionSpec(None, TP)  # KV and queries by heads, activations by columns
PINNED = "pinned_host"


def on_device(mesh: Mesh, spec: PartitionSpec = WHOLE) -> Sharding:
    """Where an array that is cut so lies on the devices."""
    return SingleDeviceSharding(mesh.devices.flat[0]) if axis_of(mesh) is None else NamedSharding(mesh, spec)


def home_of(sharding: Sharding) -> Sharding:
    """The same in pinned memory of the host, each piece in that of its device."""
    return sharding.with_memory_kind(PINNED)


def spec_of(a: Any) -> PartitionSpec:
    """How an array, or its shape, is cut; on a single device it is not."""
    return getattr(a.sharding, "spec", WHOLE)


def placed(mesh: Mesh, structs: Any, specs: Any) -> Any:
    """Shapes with their shardings. specs: a pytree like structs', or one spec for all of them."""
    if isinstance(specs, PartitionSpec):
        specs = jax.tree.map(lambda _: specs, structs)
    return jax.tree.map(
        lambda s, spec: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=on_device(mesh, spec)), structs, specs
    )


def array_bytes(a: Any) -> int:
    """Of an array or its shape: all pieces of one that is cut, one copy of one that is not."""
    return math.prod(a.shape) * jnp.dtype(a.dtype).itemsize


def tree_bytes(tree: Any) -> int:
    """Of all arrays of a pytree, or of their shapes."""
    return sum(array_bytes(a) for a in jax.tree.leaves(tree))


def device_bytes(tree: Any) -> int:
    """What one device has of all arrays of a pytree, or of their shapes."""
    return sum(
        math.prod(a.sharding.shard_shape(a.shape)) * jnp.dtype(a.dtype).itemsize
        for a in jax.tree.leaves(tree)
    )
