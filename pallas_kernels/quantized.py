"""Numbers of few bits with the scales that give them back. Pytrees: they stand where the plain array would."""

from typing import NamedTuple

from jaxtyping import Array

BLOCK = 128  # columns that share a scale where a producer sees only a tile of a row


class Quantized(NamedTuple):
    """`values * scale`, with `values` of one byte (float8_e4m3fn, int8).

    scale, float32, by its shape: `[]` one for all; `[rows]` one a row (an activation's token, a weight's
    output channel);
    `[rows, columns / 128]` one for each 128 columns of a row.
    """

    values: Array
    scale: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


GROUP = 64  # columns of an Int4 weight that share a scale and a zero


class Int4(NamedTuple):
    """`nibble * scale + zero`: 4-bit numbers in groups of columns, 64 in a weight [N, K] (`reference.int4`
    makes and reads it).

    packed: uint8 [N, K / 2], 32 bytes a group of 64. Byte 8·lane + 4·j + 2·odd + half of a group holds the
    columns 32·j + 16·half + 2·lane + odd (low nibble) and the 8th after that (high nibble): the order in
    which a thread of Hopper's tensor cores needs them. scale, zero: bfloat16 [N, K / group]; the zero is the
    group's minimum.
    """

    packed: Array
    scale: Array
    zero: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])
