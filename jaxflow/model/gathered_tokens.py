"""The gather of tokens by data-parallel ranks, whose devices hold some of a layer's experts each.

Every device gathers the tokens of all ranks, and computes the pairs of its own experts. It adds its outputs
up for each token, and a reduce-scatter brings each rank the sums of its own tokens over the devices.

Of n devices, each sends a row of each token to n - 1 devices. The exchange of
`jaxflow.model.exchanged_experts` sends a row of each of the k experts of a token, of which k (n - 1) / n go
to other devices on average. So with n up to k the gather sends no more rows. The gather and the
reduce-scatter are NCCL's, which fill the links between GPUs. XLA's exchange on one host is a kernel of few
threads, which reached 2 % of the links of eight B200s (openxla/xla#33386).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxflow.model.op_registry import Context
from jaxflow.model.routing import Routing
from jaxflow.parallel.collectives import gather_rows, scatter_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatheredTokens:
    """The tokens of all n ranks, those of the first rank first, with their experts and the experts' weights.

    Padding has an expert that no device holds.
    """

    h: Float[Array, "n*t D"]
    experts: Int[Array, "n*t e"]
    weights: Float[Array, "n*t e"]


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


def gather_tokens(c: Context, h: Float[Array, "t D"], routing: Routing, number: int) -> GatheredTokens:
    """Return the tokens of all ranks.

    number: of all experts, or of slots where experts have copies. Padding gets this number as its expert.
    """
    assert c.rank_axis is not None
    experts = routing.experts
    if routing.is_token is not None:
        experts = jnp.where(routing.is_token[:, None], experts, number)
    words = lax.bitcast_convert_type(routing.weights, jnp.int32)  # one gather for both
    h, pairs = gather_rows((h, jnp.concatenate([experts, words], axis=1)), c.rank_axis)
    experts, words = jnp.split(pairs, 2, axis=1)
    return GatheredTokens(h, experts, lax.bitcast_convert_type(words, routing.weights.dtype))


def scatter_sums(c: Context, sums: Float[Array, "n*t D"]) -> Float[Array, "t D"]:
    """Return the sum over the ranks of the outputs of this rank's tokens; a partial sum over its devices.

    sums: this device's part of the outputs of all ranks' tokens.
    """
    assert c.rank_axis is not None
    return scatter_rows(sums, c.rank_axis)
