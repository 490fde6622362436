"""A block: sequences that pass the model together, the order of its steps, and their inputs.

Three orders exist. "zigzag" passes all batches of a block through a layer, all at the same token (FlexGen
Algorithm 1). "diagonal" passes as many batches through a layer, each at its own token (Appendix A.2.1): a
batch starts when an earlier one ends, so prompts and decodes share the fetch of a layer, and one transfers
while the other computes. A diagonal block has all batches of a run, and `num_gpu_batches` of them are under
way. "row" runs a batch to its end before the next one, as other systems do.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxflow.engine.live_request import needs_full_sampler, slot_settings
from jaxflow.flexgen.config import Schedule
from jaxflow.flexgen.geometry import Geometry, device_sharding
from jaxflow.flexgen.programs import Compiled
from jaxflow.model.slot_params import IN_PROMPT, SlotParams, slot_values
from jaxflow.scheduler.state import Sequence as Seq


class BlockStep(NamedTuple):
    """A step of the block schedule: one batch, layer and token (FlexGen Figure 2). Token 0 is the prompt."""

    token: int
    layer: int
    batch: int


@dataclasses.dataclass(frozen=True)
class BlockOrder:
    """The steps of a block in order, in groups that use one fetch of a layer.

    Attributes:
      first, end: for each step, the index of its group's first step, and that of the next group's.
    """

    steps: tuple[BlockStep, ...]
    first: tuple[int, ...]
    end: tuple[int, ...]

    @classmethod
    def of(cls, groups: Iterable[Sequence[BlockStep]]) -> "BlockOrder":
        """Return the order of these groups."""
        kept = [tuple(group) for group in groups if group]
        ends = list(itertools.accumulate(map(len, kept)))
        first = (end - len(group) for group, end in zip(kept, ends, strict=True) for _ in group)
        end = (end for group, end in zip(kept, ends, strict=True) for _ in group)
        return cls(tuple(itertools.chain(*kept)), tuple(first), tuple(end))

    def rest(self, start: int, without: Iterable[int]) -> "BlockOrder":
        """Return the steps from `start`, a group's first step, on, without those of some batches."""
        left, dropped = [], frozenset(without)
        while start < len(self.steps):
            group = self.steps[start : self.end[start]]
            left.append([step for step in group if step.batch not in dropped])
            start = self.end[start]
        return BlockOrder.of(left)


def block_order(
    batches: int, layers: int, tokens: int, schedule: Schedule = "zigzag", under_way: int | None = None
) -> BlockOrder:
    """Return the order of a block's steps. `under_way`: batches of a diagonal block that have KV at once."""
    if schedule == "diagonal":
        starts = diagonal_starts(batches, tokens, under_way or batches)
        sweeps = [
            [(sweep - start, batch) for batch, start in enumerate(starts) if 0 <= sweep - start < tokens]
            for sweep in range(starts[-1] + tokens if batches else 0)
        ]
    else:
        width = batches if schedule == "zigzag" else 1
        sweeps = [
            [(token, batch) for batch in range(first, first + width)]
            for first in range(0, batches, max(1, width))
            for token in range(tokens)
        ]
    return BlockOrder.of(
        [BlockStep(token, layer, batch) for token, batch in sweep]
        for sweep in sweeps
        for layer in range(layers)
    )


def pipeline_order(batches: int, layers: int, tokens: int, width: int) -> BlockOrder:
    """Return the steps of a pipeline's stage: for each token, micro-batches of `width` batches in turn."""
    firsts = range(0, batches, width)
    return BlockOrder.of(
        [BlockStep(token, layer, batch) for batch in range(first, min(first + width, batches))]
        for token in range(tokens)
        for first in firsts
        for layer in range(layers)
    )


def diagonal_starts(batches: int, tokens: int, under_way: int) -> list[int]:
    """Return the pass over the layers in which each batch of a diagonal block starts.

    The starts are spread evenly. Batch b starts when batch b - `under_way` has ended.
    """
    return [batch * tokens // under_way for batch in range(batches)]


@dataclasses.dataclass(frozen=True)
class Block:
    """Sequences by batch and row. None is an empty row, with an output that is never read.

    Attributes:
      token_ids: [batches, b, s] int32, padded.
      lengths: [batches, b] int32, 0 for empty rows.
      temperature: [batches, b] float32.
      seeds: [batches, b, 2] uint32.
    """

    sequences: tuple[tuple[Seq | None, ...], ...]
    token_ids: np.ndarray
    lengths: np.ndarray
    temperature: np.ndarray
    seeds: np.ndarray

    @property
    def batches(self) -> int:
        """The number of batches with a sequence; these batches come first."""
        return sum(any(seq is not None for seq in batch) for batch in self.sequences)

    def live(self, batch: int) -> np.ndarray:
        """Return the rows with a sequence, bool [b]."""
        return self.lengths[batch] > 0

    def asked(self, batch: int) -> np.ndarray:
        """Return the rows that ask for log-probabilities, bool [b]."""
        return np.array(
            [seq is not None and seq.request.sampling.logprobs is not None for seq in self.sequences[batch]]
        )

    def needs_full(self, batch: int) -> bool:
        """Return True if a row of the batch needs the full sampler."""
        return any(
            seq is not None and needs_full_sampler(seq.request.sampling) for seq in self.sequences[batch]
        )


def make_block(g: Geometry, sequences: Sequence[Seq]) -> Block:
    """Return a block of sequences, in as few batches as possible."""
    b = g.batch
    batches = -(-len(sequences) // b)
    ids, lengths = np.zeros((batches, b, g.prompt), np.int32), np.zeros((batches, b), np.int32)
    temperature, seeds = np.zeros((batches, b), np.float32), np.zeros((batches, b, 2), np.uint32)
    grid: list[list[Seq | None]] = [[None] * b for _ in range(batches)]
    for i, seq in enumerate(sequences):
        at = divmod(i, b)
        prompt = np.asarray(seq.request.prompt_token_ids, np.int32)
        ids[at][: len(prompt)], lengths[at] = prompt, len(prompt)
        temperature[at] = seq.request.sampling.temperature
        seeds[at] = (seq.seed >> 32) & 0xFFFFFFFF, seq.seed & 0xFFFFFFFF
        grid[at[0]][at[1]] = seq
    return Block(tuple(map(tuple, grid)), ids, lengths, temperature, seeds)


def slots_of(
    g: Geometry, block: Block, batch: int, vocabulary: int, eos: frozenset[int]
) -> tuple[np.ndarray, SlotParams, np.ndarray]:
    """Return the full sampler's slots [b], settings [b] and token counts [b, V'] of a batch.

    A row without special settings gets slot b, which draws like the plain sampler.
    """
    b = g.batch
    slots, counts = np.full(b, b, np.int32), np.zeros((b, vocabulary), np.uint16)
    values = []
    for row, seq in enumerate(block.sequences[batch]):
        if seq is None or not needs_full_sampler(seq.request.sampling):
            values.append(slot_values())
            continue
        one, known, prompt = slot_settings(seq, eos)
        values.append(one)
        slots[row] = row
        assert len(known) <= prompt
        if len(known):
            counts[row, known] = IN_PROMPT  # no output token is known yet
    stacked: Any = [
        np.stack([getattr(one, field.name) for one in values]) for field in dataclasses.fields(SlotParams)
    ]
    return slots, SlotParams(*stacked), counts


@dataclasses.dataclass(frozen=True)
class DrawnTokens:
    """A token of each row of a batch, number `token` of the output. A read waits for the device."""

    token: int
    batch: int
    tokens: jax.Array  # [b] int32
    logprobs: Any = None  # `LogprobsOut` of the full sampler


@dataclasses.dataclass
class BatchInputs:
    """Inputs of a batch that are the same for every token. `counts`: tokens seen by the full sampler."""

    lengths: jax.Array
    last: jax.Array  # index of each prompt's last token in the batch
    rows: jax.Array
    live: jax.Array
    temperature: jax.Array
    seeds: jax.Array
    slots: Any = None
    params: Any = None
    counts: Any = None
    asked: Any = None  # [b] bool, rows that ask for log-probabilities


class BlockInputs:
    """BlockInputs of the steps of one block, made on demand. DrawnTokens tokens stay on the device."""

    def __init__(self, geometry: Geometry, block: Block, vocabulary: int, eos: frozenset[int]):
        self._g, self._block, self._everywhere = geometry, block, device_sharding(geometry.mesh)
        self._vocabulary, self._eos = vocabulary, eos
        self._rows: dict[int, BatchInputs] = {}
        self._tokens: dict[int, jax.Array] = {}  # the last drawn tokens
        self._positions: dict[int, tuple[int, jax.Array]] = {}

    def rows(self, batch: int) -> BatchInputs:
        """Return the inputs of a batch, until its last token is drawn."""
        if batch not in self._rows:
            self._rows[batch] = self._make_rows(batch)
        return self._rows[batch]

    def tokens(self, one: BlockStep) -> tuple[jax.Array, jax.Array]:
        """Return the token ids and positions for the embedding: padded prompts, or the last drawn tokens."""
        if one.token > 0:
            return self._tokens[one.batch], self.positions(one)[0]
        ids = self._block.token_ids[one.batch].reshape(-1)
        return self._put(ids), self._put(np.tile(np.arange(self._g.prompt, dtype=np.int32), self._g.batch))

    def receive(self, batch: int, tokens: jax.Array) -> None:
        """Take a batch's last drawn tokens, which another stage has drawn."""
        self._tokens[batch] = tokens

    def positions(self, one: BlockStep) -> tuple[jax.Array, jax.Array]:
        """Return the position of each row's token in a decode, and the rows with a sequence."""
        token, positions = self._positions.get(one.batch, (0, None))
        if positions is None or token != one.token:
            lengths = self._block.lengths[one.batch]
            positions = self._put(np.where(lengths > 0, lengths + (one.token - 1), 0).astype(np.int32))
            self._positions[one.batch] = one.token, positions
        return positions, self.rows(one.batch).live

    def draw(self, compiled: Compiled, ends: dict[str, Any], one: BlockStep, x: tuple) -> DrawnTokens:
        """Draw a batch's next tokens from the output of the last layer."""
        rows, prompt = self.rows(one.batch), one.token == 0
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
                *arguments, rows.slots, rows.params, rows.counts, rows.asked
            )
        self._tokens[one.batch] = tokens
        if one.token == self._g.policy.output_tokens - 1:
            for held in (self._rows, self._tokens, self._positions):
                held.pop(one.batch, None)
        for array in jax.tree.leaves((tokens, found)):
            array.copy_to_host_async()
        return DrawnTokens(one.token, one.batch, tokens, found)

    def _make_rows(self, batch: int) -> BatchInputs:
        block, put = self._block, self._put
        lengths, rows = block.lengths[batch], np.arange(self._g.batch, dtype=np.int32)
        made = BatchInputs(
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
            made.asked = put(block.asked(batch))
        return made

    def _put(self, x: np.ndarray) -> jax.Array:
        return jax.device_put(np.array(x), self._everywhere)
