"""Copies of experts between the slots of devices, with a digest of each slot before and after.

A program makes the new arrays of a layer while the present ones stay, so steps go on until the new ones are
checked.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.stages import Wrapped
from jaxtyping import Array, Int, UInt

from jaxflow.parallel.mesh import expert_axis_of, of_several_processes, over_ranks, over_shards, sharded

REPLICATED = PartitionSpec()


def move_slots(mesh: Mesh, specs: Any) -> Wrapped:
    """Return (arrays, source [S]) -> (arrays with S slots, digests of the old
    slots, digests of the new slots).

    New slot s holds a copy of old slot source[s]. The first axis of each array counts slots, which are spread
    over the devices of the mesh. Device i has the i-th part of the old and of the new slots. Of several
    processes, every device has all digests, so that each process can compare them.

    specs: the `PartitionSpec` of each array.
    """
    axis, several = expert_axis_of(mesh), of_several_processes(mesh)

    def run(old: Any, source: Int[Array, " S"]) -> tuple[Any, Array, Array]:
        if axis is None:
            new = jax.tree.map(lambda array: array[source], old)
        else:
            new = _moved(old, source, axis)
        before, after = digests(old), digests(new)
        if several and axis is not None:
            before, after = (lax.all_gather(own, axis, tiled=True) for own in (before, after))
        return new, before, after

    digest = REPLICATED if several else PartitionSpec(axis)
    taken, out = (specs, REPLICATED), (specs, digest, digest)
    placed = jax.tree.map(functools.partial(sharded, mesh), out)
    over_tp = over_shards(run, mesh, taken, out)
    return jax.jit(over_ranks(over_tp, mesh, taken, out), out_shardings=placed)


def _moved(old: Any, source: Int[Array, " S"], axis: str | tuple[str, str]) -> Any:
    """Return this device's new slots. In each turn every device gets one slot, and sends what others get."""
    devices, me = lax.axis_size(axis), lax.axis_index(axis)
    held = jax.tree.leaves(old)[0].shape[0]
    wanted = source.reshape(devices, -1)

    def turn(at: Array) -> Any:
        here = wanted[:, at]  # [n]: the old slot that each device gets

        def send(array: Array) -> Array:
            arrived = lax.all_to_all(array[here % held], axis, split_axis=0, concat_axis=0, tiled=True)
            return arrived[here[me] // held]

        return jax.tree.map(send, old)

    return lax.map(turn, jnp.arange(wanted.shape[1]))


def digests(arrays: Any) -> UInt[Array, " s"]:
    """Return a digest of each slot: a sum of the words of all its arrays,
    each with the weight of its place.
    """
    total = None
    for number, array in enumerate(jax.tree.leaves(arrays)):
        bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
        words = lax.bitcast_convert_type(array, bits).astype(jnp.uint32).reshape(array.shape[0], -1)
        place = jnp.arange(words.shape[1], dtype=jnp.uint32) * jnp.uint32(2) + jnp.uint32(2 * number + 1)
        weight = (place * jnp.uint32(0x9E3779B1)) | jnp.uint32(1)  # odd: a change of one word changes the sum
        part = jnp.sum(words * weight, axis=1, dtype=jnp.uint32)
        total = part if total is None else total + part
    assert total is not None
    return total
