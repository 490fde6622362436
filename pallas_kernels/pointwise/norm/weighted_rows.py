"""A sum that a norm computes while it reads: of each token's rows of a mixture's experts, with weights."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedRows:
    """The terms of a weighted sum for each token.

    rows: in the experts' order. places: the row of each term; M or more for a term that adds nothing.
    partial: whether there can be such terms.
    """

    rows: Float[Array, "M D"]
    places: Int[Array, "T e"]
    weights: Float[Array, "T e"]
    partial: bool = dataclasses.field(default=False, metadata={"static": True})

    def total(self) -> Float[Array, "T D"]:
        """Return the sum of each token in float32, from the first term to the last, in the dtype of the rows.

        One gather reads all rows, and XLA makes one kernel of the gather and the sum. The terms are added one
        by one, because XLA's own sum on a CPU has an order that depends on T.
        """
        rows = self.rows.at[self.places].get(mode="clip").astype(jnp.float32) * self.weights[:, :, None]
        if self.partial:
            rows = jnp.where((self.places < self.rows.shape[0])[:, :, None], rows, 0.0)
        total = rows[:, 0]
        for choice in range(1, self.weights.shape[1]):
            total = total + rows[:, choice]
        return total.astype(self.rows.dtype)
