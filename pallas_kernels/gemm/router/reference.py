"""Reference implementation of a router: the product, the choice of experts and their weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gemm.grouped.groups import Groups
from pallas_kernels.gemm.reference import gemm
from pallas_kernels.gemm.sorted_rows.reference import sort_rows
from pallas_kernels.pointwise.top_k.reference import top_k
from pallas_kernels.quantized import Quantized

SMALLEST = 1e-20  # added to the sum that weights are divided by


def route(
    x: Float[Array, "T D"],
    w: Float[Array, "E D"],
    bias: Float[Array, " E"] | None = None,
    score_bias: Float[Array, " E"] | None = None,
    *,
    chosen: int,
    normalized: bool = True,
    scale: float = 1.0,
) -> tuple[Float[Array, "T e"], Int[Array, "T e"]]:
    """Return the weights and the numbers of each token's likeliest experts, the likeliest first.

    The logits are x · w + bias. Without `score_bias` the weights are a softmax over all experts. With it they
    are sigmoids of the logits, and `score_bias` is added to them for the choice only (DeepSeek-V3, §2.1.2).

    Args:
      normalized: the weights of a token have a sum of 1 before `scale`.
      scale: factor of the weights.
    """
    logits = gemm(x, w, bias, out_dtype=jnp.float32)
    assert not isinstance(logits, Quantized)  # float32 is asked for
    if score_bias is None:
        if normalized:  # equals the softmax over all experts, scaled to a sum of 1
            weights, experts = top_k(logits, chosen, softmax=True)
        else:
            weights, experts = top_k(jax.nn.softmax(logits, axis=-1), chosen)
        return weights * scale, experts
    scores = jax.nn.sigmoid(logits)
    _, experts = top_k(scores + score_bias, chosen)
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if normalized:
        weights = weights / (weights.sum(-1, keepdims=True) + SMALLEST)
    return weights * scale, experts


def route_and_sort(
    x: Float[Array, "T D"],
    w: Float[Array, "E D"],
    bias: Float[Array, " E"] | None = None,
    score_bias: Float[Array, " E"] | None = None,
    *,
    quantize: bool = False,
    used: Int[Array, ""] | None = None,
    **rule,
) -> tuple[Float[Array, "T e"], Int[Array, "T e"], Groups, Float[Array, "M D"] | Quantized]:
    """Return the results of `route`, and the groups and rows of `sort_rows` for these experts.

    rule: the other arguments of `route`.
    """
    weights, experts = route(x, w, bias, score_bias, **rule)
    return weights, experts, *sort_rows(x, experts, w.shape[0], quantize=quantize, used=used)
