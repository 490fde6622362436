"""Reference implementation of the sort of a mixture's rows by expert."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gemm.grouped.groups import Groups, HeldExperts, list_groups
from pallas_kernels.pointwise.quantize.reference import quantize_blocks, quantize_rows
from pallas_kernels.quantized import Quantized


def sort_rows(
    x: Float[Array, "T D"],
    experts: Int[Array, "T e"],
    num_experts: int,
    *,
    quantize: bool = False,
    blocks: bool = False,
    held: HeldExperts | None = None,
    used: Int[Array, ""] | None = None,
    sms: int | None = None,
) -> tuple[Groups, Float[Array, "M D"] | Quantized]:
    """Return the groups of a routing, and the row of x for each row of the groups.

    Unused rows are undefined.

    Args:
      experts: the chosen experts of each token, all different. num_experts: of the model.
      quantize: return the rows in e4m3 with a scale [M] for each row.
      blocks: return the rows in e4m3 with a scale [M, D / 128] for each 128 columns; not with `quantize`.
      held: the experts that get rows; None: all.
      used: the number of tokens that get rows, from the first one; None: all. The rest is padding.
      sms: number of SMs that a kernel may occupy; the result does not depend on it.
    """
    del sms
    groups = list_groups(experts, num_experts, held=held, used=used)
    return groups, gather(quantize_rows(x) if quantize else quantize_blocks(x) if blocks else x, groups)


def gather(x: Float[Array, "T D"] | Quantized, groups: Groups) -> Float[Array, "M D"] | Quantized:
    """Return the token's row of x for each row of the groups."""
    tokens = groups.pairs // groups.places.shape[1]
    return jax.tree.map(lambda rows: jnp.asarray(rows)[tokens], x)
