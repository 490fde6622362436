"""Sums over devices without a kernel: devices send each other their parts, and what reads the sum adds them.

Of two devices each sends the other all of its part, as many bytes as in an all-reduce. Of more, each sends every other that one's own
rows alone, as in a reduce-scatter (`jaxflow.model.scattered`). XLA can leave the sending to the copy engines
(`jaxflow.pipeline.streams.COPIES`), which take no SMs from the products beside it, as NCCL's kernels do.
"""

from typing import Any, NamedTuple

from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.reference.norm import sum_of_parts


class Halves(NamedTuple):
    """A sum over two devices that nobody added yet; both devices make the same of it, rounded as a sum of two is."""

    own: Float[Array, "t D"]
    other: Float[Array, "t D"]


class Parts(NamedTuple):
    """A sum over n devices of a device's own rows that nobody added yet: what each device has of them, in the devices' order."""

    parts: Float[Array, "n t D"]


Sum = Float[Array, "t D"] | Halves | Parts  # over devices: whoever reads it adds what is in parts


def exchanged(c: Any, y: Float[Array, "t D"], distance: int = 1) -> Halves:
    """The sum over pairs of tensor-parallel shards: those whose numbers differ by the bit `distance`."""
    pairs = [(i, i ^ distance) for i in range(lax.axis_size(c.axis))]
    return Halves(y, lax.ppermute(y, c.axis, pairs))


def own_parts(c: Any, y: Float[Array, "n*t D"]) -> Parts:
    """The sum over all tensor-parallel shards, of the device's own rows."""
    sent = lax.all_to_all(y, c.axis, split_axis=0, concat_axis=0, tiled=True)
    return Parts(sent.reshape(lax.axis_size(c.axis), -1, *y.shape[1:]))


def everywhere(c: Any, own: Float[Array, "n*t *D"]) -> Float[Array, "n*t *D"]:
    """All devices' rows, of each device's own rows n times over: one for every device."""
    return lax.all_to_all(own, c.axis, split_axis=0, concat_axis=0, tiled=True)


def added(y: Sum) -> Float[Array, "t D"]:
    """A sum in one array; what is one already as it is."""
    if isinstance(y, Parts):
        return sum_of_parts(y.parts)
    return y.own + y.other if isinstance(y, Halves) else y
