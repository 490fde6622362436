"""Products of rows that lie in groups, each with a weight of its own: a mixture's experts (the twin of `pallas_kernels.grouped_gemm`)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.reference.gemm import finish


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """Where the (token, choice) pairs of a routing lie, sorted by expert, each expert's from a whole tile of rows on.

    places [T, e] int32: the row of each pair. pairs [M] int32: the pair, token · e + choice, whose row it is; 0 for rows of none.
    experts [M / rows] int32: the expert of each tile of rows. count [1] int32: the tiles that hold rows. sizes [E] int32: rows of each
    expert, whole tiles.
    """

    places: Int[Array, "T e"]
    pairs: Int[Array, " M"]
    experts: Int[Array, " tiles"]
    count: Int[Array, " 1"]
    sizes: Int[Array, " E"]


def list_groups(experts: Int[Array, "T e"], num_experts: int, rows: int = 1) -> Groups:
    """Sorts pairs by expert. M, what tiles of `rows` may take at most, is static; how many there are of each expert is data."""
    flat = experts.reshape(-1).astype(jnp.int32)
    n, index = flat.shape[0], jnp.arange(flat.shape[0], dtype=jnp.int32)
    tiles = min(n, n // rows + num_experts)  # an expert's last tile may be part-filled, and none has less than a pair
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    counts = jnp.sum((flat[None, :] == expert[:, None]).astype(jnp.int32), axis=1)
    of_expert = (counts + rows - 1) // rows
    before = expert[None, :] < expert[:, None]
    first_tile, first_pair = (jnp.sum(jnp.where(before, x[None, :], 0), axis=1) for x in (of_expert, counts))
    sorted_experts = flat[order]
    row = (first_tile * rows - first_pair)[sorted_experts] + index
    tile = jnp.arange(tiles, dtype=jnp.int32)
    holder = jnp.sum((first_tile[None, :] + of_expert[None, :] <= tile[:, None]).astype(jnp.int32), axis=1)
    return Groups(
        places=jnp.zeros(n, jnp.int32).at[order].set(row, unique_indices=True).reshape(experts.shape),
        pairs=jnp.zeros(tiles * rows, jnp.int32).at[row].set(order, unique_indices=True),
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
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
    y = finish(lax.ragged_dot_general(x, w, groups.sizes, numbers), dtype=x.dtype, activation=activation, gate_block=gate_block)
    assert isinstance(y, jax.Array)  # nothing was to be quantised
    return y
