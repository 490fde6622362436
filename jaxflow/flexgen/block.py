"""A block: the prompts that go through the model together, and how their tokens are drawn."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxflow.engine.live_request import needs_full_sampler, slot_settings
from jaxflow.flexgen.geometry import Geometry
from jaxflow.model.slot_params import IN_PROMPT, SlotParams, slot_values
from jaxflow.scheduler.state import Sequence as Seq


@dataclasses.dataclass(frozen=True)
class Block:
    """Sequences by batch and row; None: no sequence there, its row computes nothing that is read.

    token_ids: [batches, b, s] int32, padded. lengths: [batches, b] int32, 0 for empty rows. temperature:
    [batches, b] float32. seeds: [batches, b, 2] uint32.
    """

    sequences: tuple[tuple[Seq | None, ...], ...]
    token_ids: np.ndarray
    lengths: np.ndarray
    temperature: np.ndarray
    seeds: np.ndarray

    @property
    def batches(self) -> int:
        """Those that have a sequence; they come first."""
        return sum(any(seq is not None for seq in batch) for batch in self.sequences)

    def live(self, batch: int) -> np.ndarray:
        """bool [b]: the rows that have a sequence."""
        return self.lengths[batch] > 0

    def needs_full(self, batch: int) -> bool:
        """Whether a row of a batch needs the full sampler."""
        return any(
            seq is not None and needs_full_sampler(seq.request.sampling) for seq in self.sequences[batch]
        )


def make_block(g: Geometry, sequences: Sequence[Seq]) -> Block:
    """At most a block's sequences, in as few batches as hold them."""
    batches, b = g.policy.num_gpu_batches, g.batch
    assert len(sequences) <= batches * b
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
    """What the full sampler keeps of a batch's rows: which row has settings of its own, the settings [b], the
    counts [b, V'].

    A row that needs no such setting gets slot b, which draws as plain sampling does.
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
            counts[row, known] = IN_PROMPT  # no output is known yet
    stacked: Any = [
        np.stack([getattr(one, field.name) for one in values]) for field in dataclasses.fields(SlotParams)
    ]
    return slots, SlotParams(*stacked), counts
