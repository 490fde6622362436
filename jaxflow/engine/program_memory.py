"""The memory that compiled programs need beside weights, cache and per-slot state: what it is, and what is
reserved for it.

XLA assigns the values of a program to buffers that it reuses (FlashDecoding++Next §5's three activation
buffers are what comes of it, see docs/activation-memory.md). Programs of a device run one after another on
one stream, so the space of one is free for the next as soon as that is enqueued: the largest of them counts,
not their sum.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

SPARE = 0.02  # of the memory that may be used, left for fragmentation
IN_FLIGHT = 2  # steps whose results exist at once: one runs while the next is enqueued


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes of one device."""

    temporary: int  # while the program runs
    results: int  # that it makes, not written over what it was given

    @classmethod
    def of(cls, compiled: Any) -> "Need":
        """By XLA's own account of a `jax.stages.Compiled`."""
        memory = compiled.memory_analysis()
        return cls(memory.temp_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes)


def together(needs: Iterable[Need]) -> int:
    """Bytes that must be free for programs which run one after another, and for the results of steps in
    flight.
    """
    needs = list(needs)
    return max(need.temporary for need in needs) + IN_FLIGHT * sum(need.results for need in needs)
