"""The values of a mixture of experts that are not one row a token: the routing, and rows in the experts' order.

A layer sorts its (token, expert) pairs once. Between the two grouped products the rows stay in the experts'
order. A plan that cuts the ops of a mixture at different tokens reads these values in the tokens' order.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxflow.parallel.ragged import Pieces
from pallas_kernels.gemm.grouped.groups import Groups


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The experts that each token goes to, and their weights.

    groups: the pairs sorted by expert; None for tokens that were not routed together.
    logical: where experts have copies, the chosen experts; `experts` then holds the slots of the copies.
    """

    experts: Int[Array, "t e"]
    weights: Float[Array, "t e"]
    groups: Groups | None = None
    logical: Int[Array, "t e"] | None = None

    @property
    def chosen(self) -> Int[Array, "t e"]:
        """Return the experts that the router chose, whatever copy computes them."""
        return self.experts if self.logical is None else self.logical


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """A row of each (token, expert) pair, in the order of `groups`. Unused rows are undefined.

    back: where data-parallel ranks sent the pairs to this one, the pieces that bring rows back.
    """

    rows: Float[Array, "M F"]
    groups: Groups
    back: Pieces | None = None


def by_token(value: Any) -> Any:
    """Return a value whose arrays have one row a token, in the tokens' order. Other values stay as they are."""
    if isinstance(value, ExpertRows):
        return value.rows[value.groups.places]
    return dataclasses.replace(value, groups=None) if isinstance(value, Routing) else value


def weighted_sum(y: Float[Array, "M D"], groups: Groups, weights: Float[Array, "t e"]) -> Float[Array, "t D"]:
    """Return the sum of each token's rows with these weights, in float32. A pair without a row adds nothing.

    The sum is written out for each of the e rows, which XLA makes one kernel that reads a row once.
    """
    places = groups.places
    total = jnp.zeros((places.shape[0], y.shape[1]), jnp.float32)
    for choice in range(places.shape[1]):
        place = places[:, choice, None]
        row = y[place[:, 0]].astype(jnp.float32) * weights[:, choice, None]
        total += jnp.where(place < y.shape[0], row, 0) if groups.partial else row
    return total.astype(y.dtype)


_RANKED_BY_COMPARISON = 32  # at most so many experts are ranked by comparing each with each


def likeliest(scores: Float[Array, "t E"], chosen: int) -> tuple[Float[Array, "t e"], Int[Array, "t e"]]:
    """Return `lax.top_k(scores, chosen)`.

    A small number of scores is ranked by comparing each with each. XLA would sort, in several kernels.
    """
    number = scores.shape[1]
    if number > _RANKED_BY_COMPARISON:
        return lax.top_k(scores, chosen)
    at = jnp.arange(number, dtype=jnp.int32)
    # NaN compares as neither larger nor smaller, and would give every score the first rank.
    ranked = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    one, other = ranked[:, :, None], ranked[:, None, :]
    rank = jnp.sum(((other > one) | ((other == one) & (at[None, :] < at[:, None]))).astype(jnp.int32), axis=2)
    here = (
        rank[:, None, :] == at[:chosen, None]
    )  # [t, e, E]: whether an expert is a token's first, second, ...
    return jnp.sum(jnp.where(here, scores[:, None, :], 0.0), axis=2), jnp.sum(jnp.where(here, at, 0), axis=2)
