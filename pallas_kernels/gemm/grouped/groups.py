"""The order of a mixture's rows: the (token, expert) pairs of a step, sorted by expert, and their tiles."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

_COUNTED = 128  # pairs in a block of the count
_COMPARED = 2048  # at most so many pairs are sorted by comparing each with each


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """The rows of the (token, choice) pairs of a routing, sorted by expert, and the tiles of these rows.

    Each expert starts at a multiple of the alignment. A tile holds rows of one expert. The groups of a device
    that holds some of the experts have no rows of the other experts, and E is the number of its own experts.

    Attributes:
      places: [T, e] int32: the row of each pair; M or more for a pair without a row.
      pairs: [M] int32: the pair, token · e + choice, of each row; 0 for unused rows.
      experts: [tiles] int32: the expert of each tile.
      starts: [tiles] int32: the first row of each tile.
      ends: [tiles] int32: the row after the last row of each tile, padding to the alignment included.
      count: [1] int32: the number of used tiles.
      sizes: [E] int32: rows of each expert, padding included.
      rows: the largest number of rows in a tile.
      align: the rows at whose multiples experts start.
      partial: whether there can be pairs without a row.
      arrived: [tiles] int32 zeros, of which a kernel makes counters; None where no kernel sorted.
    """

    places: Int[Array, "T e"]
    pairs: Int[Array, " M"]
    experts: Int[Array, " tiles"]
    starts: Int[Array, " tiles"]
    ends: Int[Array, " tiles"]
    count: Int[Array, " 1"]
    sizes: Int[Array, " E"]
    rows: int = dataclasses.field(metadata={"static": True})
    align: int = dataclasses.field(metadata={"static": True})
    partial: bool = dataclasses.field(default=False, metadata={"static": True})
    arrived: Int[Array, " tiles"] | None = None


@dataclasses.dataclass(frozen=True)
class HeldExperts:
    """The experts that one device holds, which follow each other.

    first: int32, the first of them. count: their number.
    """

    first: Int[Array, ""]
    count: int


def list_groups(
    experts: Int[Array, "T e"],
    num_experts: int,
    rows: int = 1,
    align: int = 1,
    held: HeldExperts | None = None,
    used: Int[Array, ""] | None = None,
) -> Groups:
    """Sort pairs by expert into tiles of at most `rows` rows.

    M, the upper bound of rows, is static; the rows of each expert are data. The rows of a full tile exist
    from any start. A pair's row is its expert's first row plus the number of earlier pairs of this expert.
    XLA's sort would be several kernels, and returns the inverse permutation.

    Args:
      experts: the chosen experts of each token, all different. rows: a multiple of `align`. align: the rows
        at whose multiples experts start. held: the experts that get rows; None: all.
      used: the number of tokens that get rows, from the first one; None: all.
    """
    experts, partial = experts.astype(jnp.int32), held is not None or used is not None
    if used is not None:
        is_used = jnp.arange(experts.shape[0], dtype=jnp.int32) < used
        experts = jnp.where(is_used[:, None], experts, num_experts)
    if held is not None:
        own, num_experts = experts - held.first, held.count
        experts = jnp.where(
            (own >= 0) & (own < num_experts), own, num_experts
        )  # the others belong to no expert
    if experts.shape[0] == 1:
        return _list_one_token(experts[0], num_experts, rows, align, partial=partial)
    flat = experts.reshape(-1)
    length, tiles = most_rows_and_tiles(experts.shape[0], experts.shape[1], num_experts, rows, align)
    counts, earlier = _count(flat, num_experts)
    sizes = (counts + align - 1) // align * align
    of_expert = (sizes + rows - 1) // rows
    # XLA runs each sum over experts as a kernel. So one sum has the rows and the tiles before each expert,
    # and the next one has all values of the tiles.
    expert, tile = jnp.arange(num_experts, dtype=jnp.int32), jnp.arange(tiles, dtype=jnp.int32)
    before = expert[None, :] < expert[:, None]
    first_row, first_tile = jnp.sum(jnp.where(before, jnp.stack([sizes, of_expert])[:, None, :], 0), axis=2)
    places = (jnp.take(first_row, flat, mode="clip") + earlier).astype(jnp.int32)
    if partial:
        places = _beyond(length, places, flat < num_experts)
    holds = (first_tile[None, :] <= tile[:, None]) & (tile[:, None] < (first_tile + of_expert)[None, :])
    start = first_row[None, :] + (tile[:, None] - first_tile[None, :]) * rows

    def of_tile(values: Array) -> Array:
        return jnp.sum(jnp.where(holds, values, 0), axis=1)

    return Groups(
        places=places.reshape(experts.shape),
        pairs=_inverse(places, length),
        experts=of_tile(expert[None, :]),
        starts=of_tile(start),
        ends=of_tile(jnp.minimum(start + rows, (first_row + sizes)[None, :])),
        count=jnp.sum(of_expert, keepdims=True),
        sizes=sizes,
        rows=rows,
        align=align,
        partial=partial,
    )


def most_rows_and_tiles(tokens: int, chosen: int, num_experts: int, rows: int, align: int) -> tuple[int, int]:
    """Return the upper bounds of the rows and of the tiles of `tokens` tokens.

    rows, align: as for `list_groups`. num_experts: the experts that get rows.
    """
    n = tokens * min(chosen, num_experts)  # pairs that can have a row
    touched = min(n, num_experts)
    length = (n + (align - 1) * touched) // align * align + rows - align
    # An expert has one incomplete tile, and no tile is empty.
    tiles = min(n, (n + (rows - 1) * touched) // rows)
    return length, tiles


def _beyond(length: int, places: Int[Array, " n"], has_row: Bool[Array, " n"]) -> Int[Array, " n"]:
    """Return the places, and a place of its own from `length` on for each pair without a row."""
    return jnp.where(has_row, places, length + jnp.arange(places.shape[0], dtype=jnp.int32))


def _list_one_token(
    experts: Int[Array, " e"], num_experts: int, rows: int, align: int, *, partial: bool
) -> Groups:
    """Return the groups of one token: one tile of one pair for each of its experts.

    partial: experts of `num_experts` or more get no tile.
    """
    chosen = min(experts.shape[0], num_experts)
    length, _ = most_rows_and_tiles(1, chosen, num_experts, rows, align)
    tile = jnp.arange(chosen, dtype=jnp.int32)
    place = jnp.sum((experts[None, :] < experts[:, None]).astype(jnp.int32), axis=1)
    places, count = place * align, jnp.full(1, chosen, jnp.int32)
    if partial:
        has_row = experts < num_experts
        places, count = _beyond(length, places, has_row), jnp.sum(has_row, keepdims=True, dtype=jnp.int32)
    here = places[None, :] == tile[:, None] * align
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    return Groups(
        places=places[None, :],
        pairs=_inverse(places, length),
        experts=jnp.sum(jnp.where(here, experts[None, :], 0), axis=1),
        starts=tile * align,
        ends=(tile + 1) * align,
        count=count,
        sizes=jnp.sum(jnp.where(experts[None, :] == expert[:, None], align, 0), axis=1),
        rows=rows,
        align=align,
        partial=partial,
    )


def _count(flat: Int[Array, " n"], num_experts: int) -> tuple[Int[Array, " E"], Int[Array, " n"]]:
    """Return the pairs of each expert, and for each pair the number of earlier pairs of its expert."""
    n, expert = flat.shape[0], jnp.arange(num_experts, dtype=jnp.int32)
    if n <= _COMPARED:  # one sum: the earlier pairs of each pair's expert, then all pairs of each expert
        at = jnp.arange(n, dtype=jnp.int32)
        ends = jnp.concatenate([at, jnp.full(num_experts, n, jnp.int32)])
        same = jnp.concatenate([flat, expert])[:, None] == flat[None, :]
        found = jnp.sum((same & (at[None, :] < ends[:, None])).astype(jnp.int32), axis=1)
        return found[n:], found[:n]
    # The padding belongs to no expert.
    blocks = jnp.pad(flat, (0, -n % _COUNTED), constant_values=num_experts).reshape(-1, _COUNTED)
    lane, block = (jnp.arange(size, dtype=jnp.int32) for size in (_COUNTED, blocks.shape[0]))
    same = (blocks[:, :, None] == blocks[:, None, :]) & (lane[:, None] > lane[None, :])
    within = jnp.sum(same.astype(jnp.int32), axis=2)
    counts = jnp.sum((blocks[:, :, None] == expert).astype(jnp.int32), axis=1)
    before = jnp.sum(jnp.where((block[:, None] > block[None, :])[:, :, None], counts[None], 0), axis=1)
    first = jnp.take_along_axis(before, jnp.minimum(blocks, num_experts - 1), axis=1)
    return jnp.sum(counts, axis=0), (first + within).reshape(-1)[:n]


def _inverse(places: Int[Array, " n"], length: int) -> Int[Array, " M"]:
    """Return the pair of each of `length` rows, and 0 for rows without a pair."""
    n = places.shape[0]
    pair = jnp.arange(n, dtype=jnp.int32)
    if n <= _COMPARED:  # one kernel, where a scatter is two
        here = places[None, :] == jnp.arange(length, dtype=jnp.int32)[:, None]
        return jnp.sum(jnp.where(here, pair[None, :], 0), axis=1)
    return jnp.zeros(length, jnp.int32).at[places].set(pair, unique_indices=True)
