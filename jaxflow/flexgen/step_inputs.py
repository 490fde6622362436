"""What a block's squares are told beside their tensors: token ids, positions, how rows draw; and the draw
itself.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxflow.flexgen.block import Block, slots_of
from jaxflow.flexgen.compiled import Compiled
from jaxflow.flexgen.geometry import Geometry
from jaxflow.flexgen.schedule import Square
from jaxflow.flexgen.shards import on_device


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A token of each row of a batch: number `token` of its output. Reading an array waits for it."""

    token: int
    batch: int
    tokens: jax.Array  # [b] int32
    logprobs: Any = None  # `LogprobsOut` of the full sampler


@dataclasses.dataclass
class Rows:
    """A batch's inputs that do not change from token to token, on the device; counts: what the full sampler
    saw so far.
    """

    lengths: jax.Array
    last: jax.Array  # where each prompt's last token is among the batch's
    rows: jax.Array
    live: jax.Array
    temperature: jax.Array
    seeds: jax.Array
    slots: Any = None
    params: Any = None
    counts: Any = None


class Inputs:
    """Of one block, made as they are asked for. Tokens that were drawn stay on the device."""

    def __init__(self, geometry: Geometry, block: Block, vocabulary: int, eos: frozenset[int]):
        self._g, self._block, self._everywhere = geometry, block, on_device(geometry.mesh)
        self._vocabulary, self._eos = vocabulary, eos
        self.rows = [self._make_rows(batch) for batch in range(block.batches)]
        self._tokens: dict[int, jax.Array] = {}  # last drawn
        self._positions: dict[int, tuple[int, jax.Array]] = {}

    def tokens(self, one: Square) -> tuple[jax.Array, jax.Array]:
        """Token ids and positions that a square of the first layer embeds: whole prompts, padded, or the
        tokens drawn last.
        """
        if one.token > 0:
            return self._tokens[one.batch], self.positions(one)[0]
        ids = self._block.token_ids[one.batch].reshape(-1)
        return self._put(ids), self._put(np.tile(np.arange(self._g.prompt, dtype=np.int32), self._g.batch))

    def positions(self, one: Square) -> tuple[jax.Array, jax.Array]:
        """Of the token that a decode reads in each row, and which rows have a sequence."""
        token, positions = self._positions.get(one.batch, (0, None))
        if positions is None or token != one.token:
            lengths = self._block.lengths[one.batch]
            positions = self._put(np.where(lengths > 0, lengths + (one.token - 1), 0).astype(np.int32))
            self._positions[one.batch] = one.token, positions
        return positions, self.rows[one.batch].live

    def draw(self, compiled: Compiled, ends: dict[str, Any], one: Square, x: tuple) -> Drawn:
        """A batch's next tokens, of what its last layer made."""
        rows, prompt = self.rows[one.batch], one.token == 0
        hidden, found = compiled.hidden[prompt](ends, x, rows.last if prompt else rows.rows), None
        arguments = (
            ends,
            hidden,
            rows.temperature,
            rows.seeds,
            self._put((self._block.lengths[one.batch] + one.token).astype(np.int32)),
        )
        if rows.slots is None:
            tokens = compiled.sample(*arguments)
        else:
            tokens, rows.counts, found = compiled.sample_full(
                *arguments, rows.slots, rows.params, rows.counts
            )
        self._tokens[one.batch] = tokens
        for array in jax.tree.leaves((tokens, found)):
            array.copy_to_host_async()
        return Drawn(one.token, one.batch, tokens, found)

    def _make_rows(self, batch: int) -> Rows:
        block, put = self._block, self._put
        lengths, rows = block.lengths[batch], np.arange(self._g.batch, dtype=np.int32)
        made = Rows(
            lengths=put(lengths),
            last=put(rows * self._g.prompt + np.maximum(lengths, 1) - 1),
            rows=put(rows),
            live=put(block.live(batch)),
            temperature=put(block.temperature[batch]),
            seeds=put(block.seeds[batch]),
        )
        if block.needs_full(batch):
            made.slots, made.params, made.counts = jax.tree.map(
                put, slots_of(self._g, block, batch, self._vocabulary, self._eos)
            )
        return made

    def _put(self, x: np.ndarray) -> jax.Array:
        return jax.device_put(np.array(x), self._everywhere)
