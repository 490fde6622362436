"""Pytrees of low-bit numbers with their scales, which stand in for plain arrays."""

from typing import NamedTuple

from jaxtyping import Array

BLOCK = 128  # columns of a row with one scale, where a producer computes only a tile of the row


class Quantized(NamedTuple):
    """An array of 8-bit numbers and scales: the true value is `values * scale`.

    values: float8_e4m3fn or int8. scale: float32 of shape [] (one for all), [rows] (one a row: a token of an
    activation, an output channel of a weight) or [rows, columns / 128] (one for each 128 columns of a row).
    """

    values: Array
    scale: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


GROUP = 64  # columns of an Int4 weight with one scale and one zero


class Int4(NamedTuple):
    """An array of 4-bit numbers in groups of columns: the true value is `nibble * scale + zero`.

    With zero points of int16 the true value is `(nibble - zero) * scale`, as in AWQ and GPTQ checkpoints.
    Weights [N, K] have groups of 64 columns (`pallas_kernels.gemm.int4.reference`).

    packed: uint8 [N, K / 2], 32 bytes a group. Byte 8·lane + 4·j + 2·odd + half of a group holds column
    32·j + 16·half + 2·lane + odd in the low nibble, and the 8th column after it in the high nibble. A
    thread of Hopper's tensor cores needs this order. scale: bfloat16 [N, K / group]. zero: bfloat16, the
    group's minimum, or int16, the nibble that stands for 0, from 0 to 16.
    """

    packed: Array
    scale: Array
    zero: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])


EXPERT_INT4_GROUPS = (64, 128)  # columns of an ExpertInt4 weight with one scale and one zero
MXFP4_GROUP = 32  # columns of an Mxfp4 weight with one scale


class Mxfp4(NamedTuple):
    """An array of 4-bit floats with a power of two for each 32 columns, as gpt-oss publishes its experts.

    The format is `pallas_kernels.gemm.grouped.mxfp4_format`. packed: uint8 [..., K / 2], two columns a byte
    with the first one in the low bits. scale: uint8 [..., K / 32], the exponent of the power of two plus 127.
    """

    packed: Array
    scale: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])


MXFP4_BLOCK = (16, 64)  # rows and columns of a block of an Mxfp4Blocks weight
MXFP4_WORDS = 136  # 32-bit words of a block: 128 with numbers, and 8 with scales


class Mxfp4Blocks(NamedTuple):
    """The numbers of an `Mxfp4` in blocks of 16 rows and 64 columns, as a warp's tensor cores take them.

    The format is `pallas_kernels.gemm.grouped.mxfp4_blocks`. words: int32 [E, N / 16, K / 64, 136].
    """

    words: Array

    @property
    def shape(self) -> tuple[int, ...]:
        *experts, rows, columns, _ = self.words.shape
        return (*experts, rows * MXFP4_BLOCK[0], columns * MXFP4_BLOCK[1])


class ExpertInt4(NamedTuple):
    """Weights of experts in 4 bits: the true value is `nibble * scale + zero`, or
    `(nibble - zero) * scale` with factors of int16.

    The format is `pallas_kernels.gemm.grouped.int4_format`. packed: uint8 [E, N, K / 2], each 64 columns in
    the order of `Int4`. factors: bfloat16 [E, K / group, N, 2], the scale and the zero of each group of 64 or
    128 columns. Or int16, the bits of the bfloat16 scale and a zero point as in `Int4`. The rows of a group
    follow each other, so that a kernel copies the factors of its columns alone.
    """

    packed: Array
    factors: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])

    @property
    def group(self) -> int:
        """Return the columns with one scale and one zero."""
        return 2 * self.packed.shape[-1] // self.factors.shape[1]


BLOCK_ROWS = 64  # rows of a BlockFp8 weight with one scale for each 128 columns


class BlockFp8(NamedTuple):
    """A weight in e4m3, or those of E experts, with a scale for each block: the true value is
    `values * scale` of its block.

    The format, and the order of the scales of gates and ups, is
    `pallas_kernels.gemm.block_fp8_format`.

    values: float8_e4m3fn [N, K] or [E, N, K]. scale: float32 [N / 64, K / 128] or [E, N / 64, K / 128].
    """

    values: Array
    scale: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


FORMATS = (Quantized, Int4, Mxfp4, Mxfp4Blocks, ExpertInt4, BlockFp8)
