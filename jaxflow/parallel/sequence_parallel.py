"""The collectives of the scattered form of tensor parallelism: each device keeps its own rows of what lies
between two blocks.

Of t rows device i has rows [i · t / tp, (i + 1) · t / tp). Everything between a scatter and the next gather
works on rows alone, so it is done once, not once a device. (Korthikanti et al. 2023; NanoFlow §4.1.2 calls
such rewrites operation transformations.)
"""

from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float


def attn_scatter(c: Any, y: Float[Array, "t D"]) -> Float[Array, "t/tp D"]:
    """The sum over tensor-parallel shards, of the device's own rows. t is a multiple of tp."""
    return lax.psum_scatter(y, c.axis, scatter_dimension=0, tiled=True)


mlp_scatter = attn_scatter


def attn_gather(c: Any, own: Any) -> Any:
    """All rows, from the devices that have them; of values with scales (`Quantized`) both."""
    return jax.tree.map(lambda a: lax.all_gather(a, c.axis, axis=0, tiled=True), own)


mlp_gather = attn_gather


def own_rows(c: Any, x: Float[Array, "t D"]) -> Float[Array, "t/tp D"]:
    """The device's own of rows that all devices have."""
    size = x.shape[0] // lax.axis_size(c.axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(c.axis) * size, size)
