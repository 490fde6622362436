"""The limits of the kernel for both products of a mixture's experts."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.gemm.grouped.tiles import ALIGN
from pallas_kernels.quantized import BLOCK, Quantized

TALLEST = 32  # rows of a tile: one warpgroup multiplies
MOST_TOKENS = ALIGN  # of a routing that the kernel lists itself: a tile has a row for each of them
GATE_BLOCKS = (16, 32, 64)  # gates and ups that alternate


def supports(rows: int, w_up: Any, w_down: Any, gate_block: int | None) -> bool:
    """Return whether the kernel takes these weights with tiles of so many rows.

    w_up: [E, 2 F, K]. w_down: [E, D, F]. Both are in bfloat16, or both in e4m3 with scales of rows.
    """
    quantized = isinstance(w_up, Quantized) and isinstance(w_down, Quantized)
    plain = all(getattr(w, "dtype", None) == jnp.bfloat16 for w in (w_up, w_down))
    if not quantized and not plain:
        return False
    (_, n, k), (_, columns, width) = w_up.shape, w_down.shape
    even = n == 2 * width and width % BLOCK == 0 and k % BLOCK == 0 and columns % 64 == 0
    return even and gate_block in GATE_BLOCKS and 0 < rows <= TALLEST and rows % ALIGN == 0


def supports_few(tokens: int, w_up: Any, w_down: Any, gate_block: int | None) -> bool:
    """Return whether the kernel takes so many tokens that are not sorted, and these weights, in bfloat16."""
    plain = not isinstance(w_up, Quantized) and supports(ALIGN, w_up, w_down, gate_block)
    return plain and 0 < tokens <= MOST_TOKENS
