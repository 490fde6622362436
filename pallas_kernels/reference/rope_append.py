"""Rotation of queries and keys, and the write of keys and values to their pages."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.reference.norm import rms_norm


def rope(x: Float[Array, "T N H"], positions: Int[Array, " T"], inv_freq: Float[Array, " H2"]) -> Float[Array, "T N H"]:
    """Rotates the halves (x[..., :H/2], x[..., H/2:]) by position · inv_freq radians."""
    angle = positions.astype(jnp.float32)[:, None, None] * inv_freq
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def append(pages: Float[Array, "P K S H"], new: Float[Array, "T K H"], slots: Int[Array, " T"]) -> Float[Array, "P K S H"]:
    """Writes token t's heads at flat slot `slots[t]` (page · S + place in it); slots outside the cache are dropped."""
    p, k, s, h = pages.shape
    # One row of H an index, over a flat view: a scatter that indexes the two outer axes only would make XLA transpose the cache.
    page, place = slots // s, slots % s
    rows = (page[:, None] * k + jnp.arange(k)) * s + place[:, None]
    rows = jnp.where((slots < 0)[:, None] | (slots >= p * s)[:, None], p * k * s, rows)
    flat = pages.reshape(p * k * s, h)
    flat = flat.at[rows.reshape(-1)].set(
        new.reshape(-1, h).astype(pages.dtype), mode="drop", unique_indices=False, wrap_negative_indices=False
    )
    return flat.reshape(p, k, s, h)


def rope_append(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    positions: Int[Array, " T"],
    slots: Int[Array, " T"],
    *,
    inv_freq: Float[Array, " H2"] | None,
    q_norm: Float[Array, " H"] | None = None,
    k_norm: Float[Array, " H"] | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> tuple[Float[Array, "T N H"], Float[Array, "P K S H"], Float[Array, "P K S H"]]:
    """Norms (if any) and rotates queries and keys, and writes keys and values to their pages.

    Args:
      slots: flat place of each token in the pages, page · S + place; anything outside is not written (padding).
      inv_freq: radians a position of each of the H/2 planes; None: no rotation.
    Returns:
      the queries for attention, and both page arrays (aliasing the inputs where those are donated).
    """
    if q_norm is not None and k_norm is not None:
        q = rms_norm(q, q_norm, eps=eps, offset=norm_offset)
        k = rms_norm(k, k_norm, eps=eps, offset=norm_offset)
    if inv_freq is not None:
        q, k = rope(q, positions, inv_freq), rope(k, positions, inv_freq)
    return q, append(k_pages, k, slots), append(v_pages, v, slots)
