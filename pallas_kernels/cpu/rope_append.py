"""The rotation and the append of new tokens, with each cosine computed once."""

from typing import Any

from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.pointwise.rope_append import reference


def rope_append(
    fused: Float[Array, "T A"],
    k_pages: reference.Pages,
    v_pages: reference.Pages,
    positions: Int[Array, " T"],
    slots: Int[Array, " T"],
    **settings: Any,
) -> tuple[Float[Array, "T N H"], reference.Pages, reference.Pages]:
    """Rotate queries and keys, and write keys and values to their pages.

    The reference implementation is `pallas_kernels.pointwise.rope_append.reference.rope_append`, which
    describes the arguments.
    """
    return reference.rope_append(
        fused, k_pages, v_pages, positions, slots, **settings, cos_and_sin=_cos_and_sin
    )


def _cos_and_sin(positions: Array, inv_freq: Array) -> tuple[Array, Array]:
    """Return `reference.cos_and_sin`, computed before the rotation.

    In one loop with the rotation, XLA computes both anew for every head, which takes most of its time.
    """
    return lax.optimization_barrier(reference.cos_and_sin(positions, inv_freq))
