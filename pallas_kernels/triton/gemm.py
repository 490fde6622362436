"""The op `gemm` for GPUs before Hopper: a Triton kernel for small batches, XLA for all other products."""

import dataclasses

import jax

from pallas_kernels.gemm import reference
from pallas_kernels.gemm.api import Product, kernels_by_rows
from pallas_kernels.quantized import Int4, Quantized


@dataclasses.dataclass(frozen=True)
class TritonGemm:
    """`reference.gemm` before Hopper: up to 16 rows stream the weight through Triton, all else is XLA's,
    which was faster at 64.
    """

    def choose(self, rows: int, activations: str, weights: str) -> str:
        """triton or xla."""
        return (
            "triton"
            if rows <= 16 and activations == weights and weights in ("bfloat16", "float16", "float32")
            else "xla"
        )

    def describe(self, p: Product) -> str:
        """Which kernel a weight's products run on, by their rows, whatever those of `p`."""
        return kernels_by_rows(lambda rows: self.choose(rows, p.activations, p.shape.weights))

    def __call__(self, x, w, bias=None, **settings) -> jax.Array | Quantized:
        if (
            isinstance(x, Quantized)
            or isinstance(w, Quantized | Int4)
            or self.choose(x.shape[0], x.dtype.name, w.dtype.name) == "xla"
        ):
            return reference.gemm(x, w, bias, **settings)
        from pallas_kernels.triton.flat_gemm import flat_gemm

        return flat_gemm(x, w, bias, **settings)
