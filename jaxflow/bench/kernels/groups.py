"""All groups of `bench kernels`, ordered by their kernels' share of the time per served token."""

from collections.abc import Iterable

from jaxflow.bench.kernels import attention, experts, gemm, latent, pointwise, sparse, step, wide
from jaxflow.bench.kernels.case import KernelGroup

_FIRST = (
    *("ceilings", "ceiling_gemm", "decode_attention", "dense_gemm"),
    *("fp8_gemm", "decode_attention_fp8", "chunk_attention", "flat_gemm"),
    *("fp8_flat_gemm", "decode_step_bf16", "decode_step_fp8", "layer_bf16"),
    *("layer_fp8", "chunk_attention_fp8", "rope_append", "add_norm"),
)


def _by_importance(groups: Iterable[KernelGroup]) -> tuple[KernelGroup, ...]:
    """Return the groups that dominate the time per served token, followed by
    the others in their given order.
    """
    return tuple(
        sorted(groups, key=lambda group: _FIRST.index(group.name) if group.name in _FIRST else len(_FIRST))
    )


GROUPS = _by_importance(
    (
        *pointwise.CEILINGS,
        *attention.GROUPS,
        *sparse.GROUPS,
        *latent.GROUPS,
        *wide.GROUPS,
        *gemm.GROUPS,
        *experts.GROUPS,
        *pointwise.GROUPS,
        *step.GROUPS,
    )
)
