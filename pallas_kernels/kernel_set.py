"""Which implementation of each op a device uses: the one place that chooses.

The twins everywhere, but for attention on Hopper. A kernel set is frozen data, so that a compiled step is a function
of it.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

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

    def describe(self) -> str:
        """A line that says which kernel each op runs on."""
        ops = [field.name for field in dataclasses.fields(self) if field.name != "name"]
        places = (f"{op}: {_place(getattr(self, op))}" for op in ops)
        return f"kernels: {self.name} ({', '.join(places)})"


def _place(kernel: Callable) -> str:
    return "reference" if kernel.__module__.startswith(reference.__name__) else kernel.__module__.rpartition(".")[2]


REFERENCE = KernelSet("reference")


def kernel_set_for(
    platform: str, capability: str, *, head_dim: int, queries_per_kv_head: int, page_size: int, dtype, kv_dtype
) -> KernelSet:
    """The fastest kernels that exist for a device and these shapes; the twins where there are none.

    Args:
      platform: JAX's name of the backend, `gpu` or `cpu`.
      capability: CUDA's compute capability, as "9.0"; empty where there is none.
    """
    shapes = head_dim in (64, 128, 256) and page_size == 64 and queries_per_kv_head <= 16
    dtypes = jnp.dtype(dtype) == jnp.dtype(kv_dtype) == jnp.bfloat16
    if platform != "gpu" or capability != "9.0" or not (shapes and dtypes):
        return REFERENCE
    from pallas_kernels import chunk_attention, decode_attention  # Mosaic GPU takes a second to import, and CPU has no use for it

    return KernelSet(
        "mosaic-hopper",
        decode_attention=decode_attention.decode_attention,
        chunk_attention=chunk_attention.chunk_attention,
    )
