"""Numbers of few bits with the scales that give them back. Pytrees: they stand where the plain array would."""

from typing import NamedTuple

from jaxtyping import Array

BLOCK = 128  # columns that share a scale where a producer sees only a tile of a row


class Quantized(NamedTuple):
    """`values * scale`, with `values` of one byte (float8_e4m3fn, int8).

    scale, float32, by its shape: `[]` one for all; `[rows]` one a row (an activation's token, a weight's output channel);
    `[rows, columns / 128]` one for each 128 columns of a row.
    """

    values: Array
    scale: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape
