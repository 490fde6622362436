"""Which implementation of each op a device uses: the one place that chooses.

`reference` everywhere for now, but for attention on Hopper. A kernel set is frozen data, so that a compiled step is
a function of it.
"""

import dataclasses
from collections.abc import Callable

from pallas_kernels import reference


@dataclasses.dataclass(frozen=True)
class KernelSet:
    """One function for each op, of the signature of its twin in `reference`."""

    name: str
    gemm: Callable = reference.gemm
    rms_norm: Callable = reference.rms_norm
    layer_norm: Callable = reference.layer_norm
    rope_append: Callable = reference.rope_append
    decode_attention: Callable = reference.decode_attention
    chunk_attention: Callable = reference.chunk_attention
    gate_mul: Callable = reference.gate_mul
    activate: Callable = reference.activate


REFERENCE = KernelSet("reference")
