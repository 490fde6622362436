"""Chunk attention with tiles whose products XLA runs fast on a CPU."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.attention.chunk import reference
from pallas_kernels.attention.reference import KEYS_PER_BLOCK

WIDE = 256, 512  # query tokens of a tile and keys of a block for long chunks
FROM = 512  # the position from which long chunks run wide; before it half of a block is masked


def chunk_attention(
    q: Float[Array, "T N H"],
    k_pages: Shaped[Array, "P K S H"],
    v_pages: Shaped[Array, "P K _ _"],
    page_table: Int[Array, "... R MP"],
    chunks: Int[Array, "C 4"],
    **settings: Any,
) -> Float[Array, "T N H"]:
    """Return the causal attention of prefill chunks over their sequences' pages.

    The reference implementation is `pallas_kernels.attention.chunk.reference.chunk_attention`, which
    describes the arguments. A wide tile needs fewer and larger products for a long chunk. A short chunk would
    fill little of it. So each chunk runs in one of two passes, and a pass skips the chunks of the other.
    """

    def attend(some: Array, rows: int = reference.ROWS_PER_TILE, keys: int = KEYS_PER_BLOCK) -> Array:
        own = chunks.at[:, 1].set(jnp.where(some, chunks[:, 1], 0))
        sizes = {"rows_per_tile": rows, "keys_per_block": keys, "skip_masks": True}
        return reference.chunk_attention(q, k_pages, v_pages, page_table, own, **settings | sizes)

    long = (chunks[:, 1] > reference.ROWS_PER_TILE) & (chunks[:, 3] >= FROM)
    if q.shape[0] <= reference.ROWS_PER_TILE:
        return attend(~long)
    return attend(long, *WIDE) + attend(~long)  # each is 0 at the tokens of the other
