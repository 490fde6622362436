"""The limits of the kernel for both products of a mixture's experts."""

from typing import Any

from pallas_kernels.gemm.grouped.tiles import ALIGN
from pallas_kernels.quantized import BLOCK, Quantized

TALLEST = 32  # rows of a tile: one warpgroup multiplies
GATE_BLOCKS = (16, 32, 64)  # gates and ups that alternate


def supports(rows: int, w_up: Any, w_down: Any, gate_block: int | None) -> bool:
    """Return whether the kernel takes these weights with tiles of so many rows.

    w_up: [E, 2 F, K]. w_down: [E, D, F]. Only e4m3 with scales of rows is taken.
    """
    if not isinstance(w_up, Quantized) or not isinstance(w_down, Quantized):
        return False
    (_, n, k), (_, columns, width) = w_up.values.shape, w_down.values.shape
    even = n == 2 * width and width % BLOCK == 0 and k % BLOCK == 0 and columns % 64 == 0
    return even and gate_block in GATE_BLOCKS and 0 < rows <= TALLEST and rows % ALIGN == 0
