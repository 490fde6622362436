"""The op `gemm` for GPUs before Hopper: a Triton kernel for small batches, XLA for all other products."""

import dataclasses

import jax

from pallas_kernels.gemm import reference
from pallas_kernels.gemm.api import Product, kernels_by_rows
from pallas_kernels.quantized import BlockFp8, Int4, Quantized


@dataclasses.dataclass(frozen=True)
class TritonGemm:
    """The op `gemm` before Hopper: Triton for up to 16 rows, XLA for all other products.

    At 64 rows XLA was faster. Up to 16 rows the time is the time to read the weight.
    """

    def choose(self, rows: int, activations: str, weights: str) -> str:
        """Return "triton" or "xla"."""
        return (
            "triton"
            if rows <= 16 and activations == weights and weights in ("bfloat16", "float16", "float32")
            else "xla"
        )

    def describe(self, p: Product) -> str:
        """Return the kernels of a weight by number of rows, for any number of rows of `p`."""
        return kernels_by_rows(lambda rows: self.choose(rows, p.activations, p.shape.weights))

    def __call__(self, x, w, bias=None, **settings) -> jax.Array | Quantized:
        if (
            isinstance(x, Quantized)
            or isinstance(w, Quantized | Int4 | BlockFp8)
            or self.choose(x.shape[0], x.dtype.name, w.dtype.name) == "xla"
        ):
            return reference.gemm(x, w, bias, **settings)
        from pallas_kernels.triton.flat_gemm import flat_gemm

        return flat_gemm(x, w, bias, **settings)
