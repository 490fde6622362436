"""The reference implementation of grouped products: rows in groups, with one weight a group (a mixture's
experts).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.gemm.reference import finish

_COUNTED = 128  # pairs in a block of the count


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """The rows of the (token, choice) pairs of a routing, sorted by expert. Each expert starts at a full
    tile of rows.

    Attributes:
      places: [T, e] int32: the row of each pair.
      pairs: [M] int32: the pair, token · e + choice, of each row; 0 for unused rows.
      experts: [M / rows] int32: the expert of each tile of rows.
      count: [1] int32: the number of used tiles.
      sizes: [E] int32: rows of each expert, in full tiles.
    """

    places: Int[Array, "T e"]
    pairs: Int[Array, " M"]
    experts: Int[Array, " tiles"]
    count: Int[Array, " 1"]
    sizes: Int[Array, " E"]


def list_groups(experts: Int[Array, "T e"], num_experts: int, rows: int = 1) -> Groups:
    """Sort pairs by expert into tiles of `rows` rows. M, the upper bound of rows, is static; the rows of
    each expert are data.

    The sort counts: a pair's row is its expert's first row plus the number of earlier pairs of this expert,
    in earlier blocks and in its own block. XLA's sort would be several kernels, and returns the inverse
    permutation.
    """
    flat = experts.reshape(-1).astype(jnp.int32)
    n = flat.shape[0]
    tiles = min(n, n // rows + num_experts)  # each expert can have one incomplete tile; no tile is empty
    # The padding belongs to no expert.
    blocks = jnp.pad(flat, (0, -n % _COUNTED), constant_values=num_experts).reshape(-1, _COUNTED)
    expert, lane, block = (
        jnp.arange(size, dtype=jnp.int32) for size in (num_experts, _COUNTED, blocks.shape[0])
    )
    earlier = (blocks[:, :, None] == blocks[:, None, :]) & (lane[:, None] > lane[None, :])
    within = jnp.sum(earlier.astype(jnp.int32), axis=2)
    counts = jnp.sum((blocks[:, :, None] == expert).astype(jnp.int32), axis=1)
    before = jnp.sum(jnp.where((block[:, None] > block[None, :])[:, :, None], counts[None], 0), axis=1)
    of_expert = (jnp.sum(counts, axis=0) + rows - 1) // rows
    first_tile = jnp.sum(jnp.where(expert[None, :] < expert[:, None], of_expert[None, :], 0), axis=1)
    first = jnp.take_along_axis(first_tile * rows + before, jnp.minimum(blocks, num_experts - 1), axis=1)
    places = (first + within).reshape(-1)[:n]
    tile = jnp.arange(tiles, dtype=jnp.int32)
    holder = jnp.sum((first_tile[None, :] + of_expert[None, :] <= tile[:, None]).astype(jnp.int32), axis=1)
    return Groups(
        places=places.reshape(experts.shape),
        pairs=jnp.zeros(tiles * rows, jnp.int32)
        .at[places]
        .set(jnp.arange(n, dtype=jnp.int32), unique_indices=True),
        experts=jnp.minimum(holder, num_experts - 1),
        count=jnp.sum(of_expert, keepdims=True),
        sizes=of_expert * rows,
    )


def grouped_gemm(
    x: Float[Array, "M K"],
    w: Float[Array, "E N K"],
    groups: Groups,
    *,
    activation: str | None = None,
    gate_block: int | None = None,
    sms: int | None = None,
) -> Float[Array, "M N2"]:
    """Return act(x @ w[expert of the row].T), summed in float32. Rows after the last group are undefined.

    Args:
      groups: from `list_groups`. activation, gate_block: as for `gemm`. sms: number of SMs that a kernel
        may occupy.
    """
    del sms
    numbers = lax.RaggedDotDimensionNumbers(
        (((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    y = finish(
        lax.ragged_dot_general(x, w, groups.sizes, numbers),
        dtype=x.dtype,
        activation=activation,
        gate_block=gate_block,
    )
    assert isinstance(y, jax.Array)  # `finish` was not asked to quantize
    return y
