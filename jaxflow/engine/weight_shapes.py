"""The shapes of an engine's weights as JSON values, for processes that lower programs without the weights."""

from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from jax.sharding import Mesh, PartitionSpec

from jaxflow.parallel.mesh import sharded
from pallas_kernels.quantized import FORMATS

_TUPLES = {kind.__name__: kind for kind in FORMATS}


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """An array. spec: the mesh axes of each dimension."""

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[str | tuple[str, ...] | None, ...]


def to_values(tree: Any) -> Any:
    """Return a tree of dicts, lists, `FORMATS` and arrays as JSON values.

    The leaves are arrays on a mesh, or objects with their shape, dtype and sharding.
    """
    if isinstance(tree, dict):
        return {"dict": {name: to_values(value) for name, value in tree.items()}}
    if type(tree).__name__ in _TUPLES:
        return {type(tree).__name__: [to_values(value) for value in tree]}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [to_values(value) for value in tree]}
    if tree is None:
        return None
    spec = tuple(tuple(axes) if isinstance(axes, list | tuple) else axes for axes in tree.sharding.spec)
    return msgspec.to_builtins(Leaf(tuple(tree.shape), jnp.dtype(tree.dtype).name, spec))


def from_values(values: Any, mesh: Mesh) -> Any:
    """Return the tree of `to_values`, with shapes on a mesh as its leaves."""
    if values is None:
        return None
    if isinstance(values, dict):
        ((kind, content),) = values.items()
        if kind == "dict":
            return {name: from_values(value, mesh) for name, value in content.items()}
        several = [from_values(value, mesh) for value in content]
        if kind in _TUPLES:
            return _TUPLES[kind](*several)
        return several if kind == "list" else tuple(several)
    leaf = msgspec.convert(values, Leaf)
    spec = PartitionSpec(*leaf.spec)
    return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype), sharding=sharded(mesh, spec))
