"""The device memory of compiled programs, besides weights, KV cache and per-slot state.

XLA places the values of a program in buffers that it reuses; FlashDecoding++Next's three activation buffers
(§5) follow from this reuse, see benchmarks/notes/activation-memory.md. The programs of a device run one after
another on one stream. The temporary space of one is free for the next, so the largest counts, not the sum.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jax.extend.mlir import ir

SPARE = 0.02  # share of the usable memory that is left for fragmentation
IN_FLIGHT = 2  # results of two steps exist at once: one step runs while the next is enqueued


@dataclasses.dataclass(frozen=True)
class Need:
    """The memory of one program, in bytes of one device."""

    temporary: int  # used while the program runs
    results: int  # outputs, without those that reuse an input's memory

    @classmethod
    def of(cls, compiled: Any) -> "Need":
        """Return the memory that XLA states for a `jax.stages.Compiled`."""
        memory = compiled.memory_analysis()
        return cls(memory.temp_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes)


def together(needs: Iterable[Need]) -> int:
    """Return the bytes that programs need which run one after another, with
    the results of steps in flight.
    """
    needs = list(needs)
    return max(need.temporary for need in needs) + IN_FLIGHT * sum(need.results for need in needs)


def has_products(lowered: Any) -> bool:
    """Return True if a `jax.stages.Lowered` has products of XLA. A GPU compiles
    them by timing several kernels.

    The timing needs memory of the device, about 1 GB for the model's head.
    """
    found = False

    def visit(op: ir.Operation) -> ir.WalkResult:
        nonlocal found
        found = op.name == "stablehlo.dot_general"
        return ir.WalkResult.INTERRUPT if found else ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return found
