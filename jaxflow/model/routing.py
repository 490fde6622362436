"""The values of a mixture of experts that are not one row a token: the routing,
and rows in the experts' order.

A layer sorts its (token, expert) pairs once. Between the two grouped products the rows stay in the experts'
order. A plan that cuts the ops of a mixture at different tokens reads these values in the tokens' order.
"""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from jaxflow.parallel.ragged import RaggedPieces
from pallas_kernels.gemm.grouped.groups import Groups
from pallas_kernels.pointwise.norm.weighted_rows import WeightedRows
from pallas_kernels.quantized import Quantized


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The experts that each token goes to, and their weights.

    groups: the pairs sorted by expert where data-parallel ranks exchange them; else None.
    logical: where experts have copies, the chosen experts; `experts` then holds the slots of the copies.
    is_token: False for padding; None without padding.
    sorted_rows: the groups of this device's experts, and their rows in the form of the weight, where the
      router's kernel sorted them.
    """

    experts: Int[Array, "t e"]
    weights: Float[Array, "t e"]
    groups: Groups | None = None
    logical: Int[Array, "t e"] | None = None
    is_token: Bool[Array, " t"] | None = None
    sorted_rows: tuple[Groups, Float[Array, "M D"] | Quantized] | None = None

    @property
    def chosen(self) -> Int[Array, "t e"]:
        """Return the experts that the router chose, whatever copy computes them."""
        return self.experts if self.logical is None else self.logical


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """A row of each (token, expert) pair, in the order of `groups`. Unused rows are undefined.

    back: where data-parallel ranks sent the pairs to this one, the pieces that bring rows back.
    weights: where data-parallel ranks gathered their tokens, the experts' weights of all ranks' tokens.
    pending: the rows are the inputs of the first product, [M, D], and `expert_down` computes both products.
    """

    rows: Float[Array, "M F"] | Quantized
    groups: Groups
    back: RaggedPieces | None = None
    weights: Float[Array, "n*t e"] | None = None
    pending: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UnsortedTokens:
    """The rows of all tokens, where `expert_down` computes both products of their experts.

    used: the number of tokens before the padding; None without padding.
    """

    rows: Float[Array, "t D"]
    used: Int[Array, ""] | None


def by_token(value: Any) -> Any:
    """Return a value whose arrays have one row a token, in the tokens' order.

    Other values stay as they are.
    """
    if isinstance(value, ExpertRows):
        assert not value.pending and not isinstance(value.rows, Quantized)  # a plan of one token range
        return value.rows[value.groups.places]
    plain = {"groups": None, "sorted_rows": None}
    return dataclasses.replace(value, **plain) if isinstance(value, Routing) else value


def weighted_sum(y: Float[Array, "M D"], groups: Groups, weights: Float[Array, "t e"]) -> Float[Array, "t D"]:
    """Return the sum of each token's rows of y with its weights, in float32,
    from the first choice to the last. A pair of partial groups without a row adds nothing.
    """
    return WeightedRows(y, groups.places, weights, groups.partial).total()
