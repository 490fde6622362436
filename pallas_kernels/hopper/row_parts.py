"""Rows in a warpgroup's registers: the parts that the threads load with as many bytes at once as possible."""

import dataclasses

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LANES = 128  # threads of a warpgroup
_WIDEST = 8  # numbers of 16 bits in one load of 16 bytes
ALIGN = 64  # columns that a row of two parts has a multiple of


@dataclasses.dataclass(frozen=True)
class RowPart:
    """Columns of a row that each thread has equally many of.

    start, width: the columns. vector: numbers of one load. again: the first columns, which an earlier part
    has, too.
    """

    start: int
    width: int
    vector: int
    again: int = 0

    @property
    def columns(self):
        """Return the part's columns as an index of a row."""
        return pl.ds(self.start, self.width)

    @property
    def layout(self):
        """Return the layout of the part in registers."""
        return plgpu.Layout.WG_STRIDED((self.width,), self.vector)


def takes_row(columns: int) -> bool:
    """Return whether rows of so many columns have parts."""
    return columns % LANES == 0 < columns or (columns % ALIGN == 0 and columns > LANES)


def row_parts(columns: int) -> tuple[RowPart, ...]:
    """Return the parts of a row: one if the columns are a multiple of 128, else two.

    The second part ends with the row, and begins in the first one. Both parts compute the same numbers there.
    """
    if columns % LANES == 0:
        vector = next(v for v in (_WIDEST, 4, 2, 1) if columns % (LANES * v) == 0)
        return (RowPart(0, columns, vector),)
    vector = next(v for v in (_WIDEST, 4, 2, 1) if columns >= LANES * v)
    width = LANES * vector
    first = columns // width * width
    return RowPart(0, first, vector), RowPart(columns - width, width, vector, first + width - columns)
