"""The tokens of one step on the device: fixed shapes, counts as data.

Decode tokens come first (token i is row i), then prefill chunks, then padding. A row is one sequence of the
step.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

NO_SLOT = jnp.iinfo(jnp.int32).max  # the slot of padding, outside any cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """T tokens of R rows (sequences), with C prefill chunks, G layer groups and at most MP pages per
    sequence.

    hidden: the residual stream that the pipeline stage before returned; None at the model's first layer.
    """

    token_ids: Int[Array, " T"]
    positions: Int[Array, " T"]
    slots: Int[Array, "G T"]  # the token's flat slot in its group's pages: page · S + offset
    page_table: Int[Array, "G R MP"]
    lengths: Int[Array, " R"]  # keys of the row after this step's append; 0 for empty rows
    num_decodes: Int[Array, ""]
    chunks: Int[Array, "C 4"]  # first token, tokens, row, position of the first token; 0 tokens: empty
    sample_tokens: Int[Array, " R"]  # the token that gives the hidden state for row r's next token
    hidden: Float[Array, "T D"] | None = None

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return self.token_ids.shape[0]

    @property
    def is_token(self) -> Bool[Array, " T"]:
        """Return False for padding."""
        return self.slots[0] != NO_SLOT

    @property
    def num_rows(self) -> int:
        """Return R."""
        return self.lengths.shape[0]

    def decode_rows(self, start: int, stop: int) -> tuple[slice, Int[Array, " B"]]:
        """Return the rows with a decode token in [start, stop), and their key counts (0 without a decode)."""
        rows = slice(min(start, self.num_rows), min(stop, self.num_rows))
        index = jnp.arange(rows.start, rows.stop)
        return rows, jnp.where(index < self.num_decodes, self.lengths[rows], 0)

    def chunks_in(self, start: int, stop: int) -> Int[Array, "C 4"]:
        """Return the chunks within [start, stop), with positions relative to `start`.

        No chunk crosses one of a plan's borders.
        """
        first, tokens = self.chunks[:, 0], self.chunks[:, 1]
        inside = (first >= start) & (first < stop)
        return self.chunks.at[:, 0].add(-start).at[:, 1].set(jnp.where(inside, tokens, 0)) * inside[:, None]

    def is_decode(self, start: int, stop: int) -> Int[Array, " t"]:
        """Return, for each token of [start, stop), whether it is a decode."""
        return jnp.arange(start, stop) < self.num_decodes


def cache_slots(
    page_table: Int[Array, "G R MP"], rows: Int[Array, " T"], positions: Int[Array, " T"], page_size: int
) -> Int[Array, "G T"]:
    """Return the flat slot of each token in the pages. Tokens of row -1 (padding) get a slot outside any
    cache."""
    safe = jnp.maximum(rows, 0)
    pages = page_table[:, safe, positions // page_size]
    return jnp.where(rows >= 0, pages * page_size + positions % page_size, NO_SLOT)
