"""Decode attention with products that XLA runs fast on a CPU."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.attention.decode import reference

_MOST_QUERIES = 4  # of a KV head; more queries are faster together


def decode_attention(
    q: Float[Array, "T N H"],
    k_pages: Shaped[Array, "P K S H"],
    v_pages: Shaped[Array, "P K _ _"],
    page_table: Int[Array, "... B MP"],
    lengths: Int[Array, " B"],
    **settings: Any,
) -> Float[Array, "T N H"]:
    """Return the attention of one new token a sequence over its pages.

    The reference implementation is `pallas_kernels.attention.decode.reference.decode_attention`,
    which describes the arguments. A step of the loop over the keys of one sequence reads one page, which
    XLA multiplies where it lies. More pages it first copies into one array.
    """
    if lengths.shape[0] == 1:
        settings["keys_per_block"] = k_pages.shape[2]
    return reference.decode_attention(
        q, k_pages, v_pages, page_table, lengths, **settings, einsum=einsum_by_query
    )


def einsum_by_query(form: str, x: Array, y: Array, **settings: Any) -> Array:
    """Return `jnp.einsum(form, x, y, **settings)`, one row of the axis `g` after the other.

    g is the last axis but one of x and of the result. XLA's product of a few rows and a block
    of keys arranges the block anew, which takes longer than the product itself. A product of
    one row reads the block as it is.
    """
    if x.shape[-2] > _MOST_QUERIES:
        return jnp.einsum(form, x, y, **settings)
    of_one = form.replace("g", "")
    rows = [jnp.einsum(of_one, x[..., row, :], y, **settings) for row in range(x.shape[-2])]
    return jnp.stack(rows, axis=-2)
