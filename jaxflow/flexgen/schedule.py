"""The order in which a block's squares are computed (FlexGen Algorithm 1).

A *square* is one batch at one layer for one token (Figure 2); token 0 is the whole prompt.
"""

import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

Schedule = Literal["zigzag", "row"]
SCHEDULES = ("zigzag", "row")


class Square(NamedTuple):
    token: int
    layer: int
    batch: int


def squares(batches: int, layers: int, tokens: int, schedule: Schedule = "zigzag") -> Iterator[Square]:
    """All squares of a block in order: all batches pass a layer together, or (row) one batch goes to its end
    before the next.
    """
    groups = (
        [range(batches)] if schedule == "zigzag" else [range(batch, batch + 1) for batch in range(batches)]
    )
    for group in groups:
        yield from itertools.starmap(Square, itertools.product(range(tokens), range(layers), group))
