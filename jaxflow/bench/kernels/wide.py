"""Benchmark cases of attention with heads of 512 columns, as Gemma 4's layers without a window have them."""

import functools
from collections.abc import Callable

from jaxflow.bench.kernels.case import Implementation, KernelCase, KernelGroup
from pallas_kernels.attention import gpu_check_wide as wide


def _prepare(programs: Callable, amount: Callable, case: str) -> dict[str, Implementation]:
    """Prepare the kernel and XLA's products. The work of a call is its bytes or its FLOP."""
    return {
        name: Implementation(program, wide.CALLS, amount(case)) for name, program in programs(case).items()
    }


def _group(name: str, unit: str, cases, programs: Callable, amount: Callable) -> KernelGroup:
    made = tuple(KernelCase(case, functools.partial(_prepare, programs, amount, case)) for case in cases)
    return KernelGroup(name, unit, made, on_request=True)


GROUPS = (
    _group("decode_attention_512", "TB/s", wide.DECODES, wide.decode_programs, wide.read_bytes),
    _group("chunk_attention_512", "TFLOP/s", wide.CHUNKS, wide.chunk_programs, wide.flop),
)
