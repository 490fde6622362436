"""Products of rows that lie in groups, each with a weight of its own: a mixture's experts (the twin of
`pallas_kernels.gemm.grouped.api`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.gemm.reference import finish

_COUNTED = 128  # pairs of a block that are counted together


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """Where the (token, choice) pairs of a routing lie, sorted by expert, each expert's from a whole tile of
    rows on.

    places [T, e] int32: the row of each pair. pairs [M] int32: the pair, token · e + choice, whose row it is;
    0 for rows of none. experts [M / rows] int32: the expert of each tile of rows. count [1] int32: the tiles
    that hold rows. sizes [E] int32: rows of each expert, whole tiles.
    """

    places: Int[Array, "T e"]
    pairs: Int[Array, " M"]
    experts: Int[Array, " tiles"]
    count: Int[Array, " 1"]
    sizes: Int[Array, " E"]


def list_groups(experts: Int[Array, "T e"], num_experts: int, rows: int = 1) -> Groups:
    """Sorts pairs by expert. M, what tiles of `rows` may take at most, is static; how many there are of each
    expert is data.

    By counting: a pair's place is that of its expert's first, and how many of its expert come before it, in
    blocks before its own and in its own. XLA's sort is several kernels of its own, and what it gives is the
    other way round.
    """
    flat = experts.reshape(-1).astype(jnp.int32)
    n = flat.shape[0]
    tiles = min(
        n, n // rows + num_experts
    )  # an expert's last tile may be part-filled, and none has less than a pair
    blocks = jnp.pad(flat, (0, -n % _COUNTED), constant_values=num_experts).reshape(
        -1, _COUNTED
    )  # what fills up is of nobody
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
    """act(x @ w[expert of the row].T), summed in float32; rows behind the last group are of no meaning.

    Args:
      groups: of `list_groups`. activation, gate_block: as `gemm`'s. sms: how many SMs a kernel may occupy.
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
    assert isinstance(y, jax.Array)  # nothing was to be quantised
    return y
