"""The limits of the router's kernel."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.hopper.limits import SMEM_BYTES

MOST_TOKENS = 128  # 16 clusters
MOST_EXPERTS = 256  # rows of one copy
TOKENS = 8  # of a cluster
WIDEST = 16384  # columns of a sorted row: 128 numbers in a thread's registers
PARTS = 8  # CTAs of a cluster
DEPTH = 64  # columns of a copy
_OTHER_BYTES = 8192  # barriers, keys and alignment


def supports(tokens: int, w: Any, chosen: int) -> bool:
    """Return whether the kernel takes x [tokens, D] and the weight w [E, D] of a router, in bfloat16."""
    (experts, columns), steps = w.shape, -(-w.shape[1] // (DEPTH * PARTS))
    stages = steps * (-(-experts // 64) * 64 + TOKENS) * DEPTH * 2
    sums = TOKENS * -(-experts // 128) * 128 * 4
    few = 0 < tokens <= MOST_TOKENS and 0 < chosen <= experts <= MOST_EXPERTS and experts % 8 == 0
    even = columns % DEPTH == 0 and columns >= DEPTH * PARTS and w.dtype == jnp.bfloat16
    return few and even and stages + sums + _OTHER_BYTES <= SMEM_BYTES


def supports_sort(tokens: int, w: Any, chosen: int) -> bool:
    """Return whether the kernel also sorts the rows of x [tokens, D] by expert."""
    return supports(tokens, w, chosen) and tokens <= TOKENS and w.shape[1] <= WIDEST
