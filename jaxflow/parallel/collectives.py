"""Collectives over a mesh axis, inside `shard_map`.

A tensor-parallel sum has three forms. An all-reduce gives every device all rows of the sum. A reduce-scatter
gives each device the sum of its local rows; an all-gather later gives all rows to all devices (Korthikanti et
al. 2023; NanoFlow §4.1.2 calls such rewrites operation transformations). A peer exchange leaves the sum in
two parts, and the op that reads the sum adds them.

Two devices send as many bytes in a peer exchange as in an all-reduce. Four devices exchange twice: first
within pairs, then between pairs. They send a third more bytes than in an all-reduce. XLA can leave a peer
exchange to the copy engines (`jaxflow.pipeline.streams.COPIES`). The copy engines take no SMs from the GEMMs
that run at the same time; NCCL's kernels do.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.pointwise.norm.weighted_rows import WeightedRows


class UnaddedSum(NamedTuple):
    """A sum over two devices, or two pairs of devices, in two parts that nobody has added.

    All devices compute the same sum, because a sum of two terms rounds alike in either order.
    """

    local: Float[Array, "t D"]
    received: Float[Array, "t D"]


# A sum over devices, or of a token's rows of experts. Its reader adds the parts.
Sum = Float[Array, "t D"] | UnaddedSum | WeightedRows


def exchange(y: Float[Array, "t D"], axis: str, distance: int = 1) -> UnaddedSum:
    """Return the sum over pairs of devices. The indices of a pair differ by the bit `distance`."""
    pairs = [(i, i ^ distance) for i in range(lax.axis_size(axis))]
    return UnaddedSum(y, lax.ppermute(y, axis, pairs))


def added(y: Sum) -> Float[Array, "t D"]:
    """Return a sum as one array."""
    if isinstance(y, WeightedRows):
        return y.total()
    return y.local + y.received if isinstance(y, UnaddedSum) else y


def scatter_rows(y: Float[Array, "t D"], axis: str) -> Float[Array, "t/tp D"]:
    """Return the sum over devices of this device's local rows. t is a multiple of the axis size."""
    return lax.psum_scatter(y, axis, scatter_dimension=0, tiled=True)


def gather_rows(local: Any, axis: str) -> Any:
    """Return all rows of each array of a tree, from the devices that hold them."""
    return jax.tree.map(lambda a: lax.all_gather(a, axis, axis=0, tiled=True), local)


def local_rows(x: Float[Array, "t D"], axis: str) -> Float[Array, "t/tp D"]:
    """Return this device's rows of an array that all devices hold.

    Device i of tp devices holds rows [i · t / tp, (i + 1) · t / tp).
    """
    size = x.shape[0] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size)
