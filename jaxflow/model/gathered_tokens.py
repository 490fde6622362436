"""The gather of tokens by data-parallel ranks, whose devices hold some of a layer's experts each.

Every device gathers the tokens of all ranks, and computes the pairs of its own experts. It adds its outputs
up for each token, and a reduce-scatter brings each rank the sums of its own tokens over the devices.

Of n devices, each sends a row of each token to n - 1 devices. The exchange of
`jaxflow.model.exchanged_experts` sends a row of each of the k experts of a token, of which k (n - 1) / n go
to other devices on average. So with n up to k the gather sends no more rows. The gather and the
reduce-scatter are NCCL's, which fill the links between GPUs. XLA's exchange on one host is a kernel of few
threads, which reached 2 % of the links of eight B200s (openxla/xla#33386).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxflow.model.op_registry import Context, op_scope
from jaxflow.parallel.collectives import gather_rows, scatter_rows


def gathers(c: Context) -> bool:
    """Return whether ranks gather their tokens. False: they exchange pairs, or there is one rank."""
    if c.rank_axis is None:
        return False
    of_rank = 1 if c.axis is None else lax.axis_size(c.axis)
    return ranks_gather(lax.axis_size(c.rank_axis), of_rank, c.config.experts_per_token)


def ranks_gather(ranks: int, devices_of_rank: int, chosen: int) -> bool:
    """Return whether so many ranks gather their tokens. Ranks of several devices always gather.

    chosen: the experts of a token.
    """
    return devices_of_rank > 1 or ranks <= chosen


def gather_tokens(
    c: Context,
    h: Float[Array, "t D"],
    experts: Int[Array, "t e"],
    weights: Float[Array, "t e"],
    is_token: Bool[Array, " t"] | None,
    number: int,
) -> tuple[Float[Array, "n*t D"], Int[Array, "n*t e"], Float[Array, "n*t e"]]:
    """Return the tokens of all ranks, their experts and the experts' weights.

    Padding gets expert `number`, which no device holds.

    Args:
      is_token: False for padding; None without padding.
      number: of all experts, or of slots where experts have copies.
    """
    assert c.rank_axis is not None
    if is_token is not None:
        experts = jnp.where(is_token[:, None], experts, number)
    with op_scope("expert_dispatch_gather"):
        words = lax.bitcast_convert_type(weights, jnp.int32)  # one gather for both
        h, pairs = gather_rows((h, jnp.concatenate([experts, words], axis=1)), c.rank_axis)
    experts, words = jnp.split(pairs, 2, axis=1)
    return h, experts, lax.bitcast_convert_type(words, weights.dtype)


def scatter_sums(c: Context, sums: Float[Array, "n*t D"]) -> Float[Array, "t D"]:
    """Return the sum over the ranks of the outputs of this rank's tokens; a partial sum over its devices.

    sums: this device's part of the outputs of all ranks' tokens.
    """
    assert c.rank_axis is not None
    with op_scope("expert_combine_scatter"):
        return scatter_rows(sums, c.rank_axis)
