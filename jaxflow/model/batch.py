"""The tokens of one step as the device sees them: fixed shapes, counts as data.

Decode tokens come first (token i is row i), prefill chunks follow, padding is last. A row is one sequence of
the step.
"""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Int


@flax.struct.dataclass
class Batch:
    """T tokens of R rows (sequences), C prefill chunks, G layer groups, MP pages a sequence at most."""

    token_ids: Int[Array, " T"]
    positions: Int[Array, " T"]
    slots: Int[
        Array, "G T"
    ]  # flat place of the token in its group's pages: page · S + place; outside for padding
    page_table: Int[Array, "G R MP"]
    lengths: Int[Array, " R"]  # keys of the row once this step's are appended; 0 for rows that are not there
    num_decodes: Int[Array, ""]
    chunks: Int[Array, "C 4"]  # first token, tokens, row, position of the first token; 0 tokens: not there
    sample_tokens: Int[Array, " R"]  # the token whose hidden state row r's next token is drawn from

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.lengths.shape[0]

    def decode_rows(self, start: int, stop: int) -> tuple[slice, Int[Array, " B"]]:
        """The rows whose decode token lies in [start, stop), and their key counts (0: no decode there)."""
        rows = slice(min(start, self.num_rows), min(stop, self.num_rows))
        index = jnp.arange(rows.start, rows.stop)
        return rows, jnp.where(index < self.num_decodes, self.lengths[rows], 0)

    def chunks_in(self, start: int, stop: int) -> Int[Array, "C 4"]:
        """The chunks within [start, stop), counted from `start`. No chunk crosses a border that a plan cuts
        at.
        """
        first, tokens = self.chunks[:, 0], self.chunks[:, 1]
        inside = (first >= start) & (first < stop)
        return self.chunks.at[:, 0].add(-start).at[:, 1].set(jnp.where(inside, tokens, 0)) * inside[:, None]

    def is_decode(self, start: int, stop: int) -> Int[Array, " t"]:
        """For the tokens of [start, stop): whether it is a decode."""
        return jnp.arange(start, stop) < self.num_decodes


def cache_slots(
    page_table: Int[Array, "G R MP"], rows: Int[Array, " T"], positions: Int[Array, " T"], page_size: int
) -> Int[Array, "G T"]:
    """Flat place of each token in the pages; tokens of row -1 (padding) get a place outside any cache."""
    safe = jnp.maximum(rows, 0)
    pages = page_table[:, safe, positions // page_size]
    return jnp.where(rows >= 0, pages * page_size + positions % page_size, jnp.iinfo(jnp.int32).max)
