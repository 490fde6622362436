"""What one step computes: the scheduler's decision, as arrays for the layout and as sequences for who reads
the results.
"""

import dataclasses

import numpy as np

from jaxflow.scheduler.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` positions of a prompt (or of a pre-empted sequence's known tokens) from `start` on."""

    seq: Sequence
    slot: int
    start: int
    tokens: int
    samples: bool  # it reaches the sequence's end: the step samples a token after it

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [tokens], a view that is good until the next `schedule`."""
        return self.seq.token_ids[self.start : self.start + self.tokens]


@dataclasses.dataclass(frozen=True)
class StepWork:
    """One step. Its tokens are those of the decodes, one each, then those of the chunks, in order.

    Attributes:
      decodes: object [n], the sequences that decode.
      decode_slots: int32 [n].
      decode_positions: int32 [n], the position computed; its token is the one sampled last in that slot.
      chunks: in the order of their sequences' age, one a sequence.
      admitted: sequences that got their slot in this step; each has a chunk in it or in a later step.
      num_tokens: tokens computed.
      bucket: rows of the compiled step that runs it; the surplus is padding.
      page_appends: int32 [m, 4] of (group, slot, index, page): what changed in the page table since the last
      step.
    """

    decodes: np.ndarray
    decode_slots: np.ndarray
    decode_positions: np.ndarray
    chunks: tuple[Chunk, ...]
    admitted: tuple[Sequence, ...]
    num_tokens: int
    bucket: int
    page_appends: np.ndarray

    @property
    def mean_context_tokens(self) -> float:
        """Keys that a decode reads, its own included; the mean over the decodes, 0 without any."""
        return (
            1 + float(self.decode_positions.sum()) / len(self.decode_positions)
            if len(self.decode_positions)
            else 0.0
        )

    @property
    def slots(self) -> np.ndarray:
        """int32, of the decodes, then of the chunks."""
        return np.concatenate([self.decode_slots, np.array([chunk.slot for chunk in self.chunks], np.int32)])

    @property
    def sampled(self) -> list[Sequence]:
        """Who gets a token: the decodes, then the chunks that sample."""
        return [*self.decodes.tolist(), *(chunk.seq for chunk in self.chunks if chunk.samples)]
