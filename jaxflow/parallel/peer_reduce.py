"""Sums over two devices without a kernel: each sends the other all of its part, and what reads the sum adds
them.

Of two devices each sends as many bytes so as in an all-reduce. Four do it twice: pairs add theirs, and then
each device sends its pair's sum to one of the other pair, a third more bytes than in an all-reduce. XLA can
leave the sending to the copy engines (`jaxflow.pipeline.streams.COPIES`), which take no SMs from the products
beside it, as NCCL's kernels do.
"""

from typing import Any, NamedTuple

from jax import lax
from jaxtyping import Array, Float


class Halves(NamedTuple):
    """A sum over two devices, or pairs, that nobody added yet; all devices make the same of it, rounded as a
    sum of two is.
    """

    own: Float[Array, "t D"]
    other: Float[Array, "t D"]


Sum = Float[Array, "t D"] | Halves  # over devices: whoever reads it adds what is in two parts


def exchanged(c: Any, y: Float[Array, "t D"], distance: int = 1) -> Halves:
    """The sum over pairs of tensor-parallel shards: those whose numbers differ by the bit `distance`."""
    pairs = [(i, i ^ distance) for i in range(lax.axis_size(c.axis))]
    return Halves(y, lax.ppermute(y, c.axis, pairs))


def added(y: Sum) -> Float[Array, "t D"]:
    """A sum in one array; what is one already as it is."""
    return y.own + y.other if isinstance(y, Halves) else y
