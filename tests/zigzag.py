"""FlexGen's schedules as sequences of moves, and their I/O as Theorem 4.1 counts it.

A *square* is one batch at one layer for one token (Figure 2). `zigzag` is Algorithm 1: a block of batches
passes a layer together, and the layer's weights are loaded once. `row_by_row` finishes one batch before the
next batch, as other systems do.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Square(NamedTuple):
    """Where a computation stands: token 0 is the whole prompt."""

    token: int
    layer: int
    batch: int


def zigzag(batches: int, layers: int, tokens: int, block: int) -> Iterator[Square]:
    """Algorithm 1's order of all squares, in blocks of `block` batches."""
    for start in range(0, batches, block):
        for token, layer, batch in itertools.product(
            range(tokens), range(layers), range(start, min(start + block, batches))
        ):
            yield Square(token, layer, batch)


def row_by_row(batches: int, layers: int, tokens: int) -> Iterator[Square]:
    """One batch to its end, then the next."""
    return zigzag(batches, layers, tokens, block=1)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors of a square, in any unit.

    `kv`: one token of a batch at one layer; `activation`: one token of a batch.
    """

    weights: float
    kv: float
    activation: float
    prompt_tokens: int


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The transferred amounts between device and host, and the peak of KV on the host."""

    weight_loads: int
    weights: float
    kv: float
    activations: float
    peak_kv: float


def traffic(order: Iterable[Square], sizes: Sizes, layers: int, tokens: int) -> Traffic:
    """Walks a schedule with a device that keeps one layer's weights and one square's tensors.

    A square loads its layer's weights unless the last square used them, its activation, and its batch's KV of
    this layer; it stores its activation and the KV it made. A batch's KV is dropped after its last square
    (§4.1).

    Raises: ValueError if the order computes a square before the one to its left, twice, or stops early.
    """
    loads, kv, activations, held, peak = 0, 0.0, 0.0, 0.0, 0.0
    loaded: int | None = None
    done: dict[int, int] = {}
    for square in order:
        column = square.token * layers + square.layer
        if done.get(square.batch, 0) != column:
            raise ValueError(f"{square}: computed after {done.get(square.batch, 0)} squares of its row")
        done[square.batch] = column + 1
        if square.layer != loaded:
            loads, loaded = loads + 1, square.layer
        new = sizes.prompt_tokens if square.token == 0 else 1
        cached = 0 if square.token == 0 else sizes.prompt_tokens + square.token - 1
        kv += (cached + new) * sizes.kv
        activations += 2 * new * sizes.activation
        held += new * sizes.kv
        peak = max(peak, held)
        if column + 1 == layers * tokens:
            held -= layers * (sizes.prompt_tokens + tokens - 1) * sizes.kv
    unfinished = [batch for batch, columns in done.items() if columns != layers * tokens]
    if unfinished:
        raise ValueError(f"batches {unfinished}: {layers * tokens} squares each")
    return Traffic(loads, loads * sizes.weights, kv, activations, peak)


def least_weight_loads(batches: int, sizes: Sizes, layers: int, tokens: int, capacity: float) -> int:
    """Return the least number of loads of any schedule of these batches with KV limited to `capacity` (proof
    of Theorem A.3).

    Between two loads of a layer, all computed squares belong to different rows, and their KV is held at once.
    A square of token i keeps its row's KV of all layers. A layer is therefore loaded at least ⌈M / M'⌉ times;
    M is the sum over its squares.
    """
    together = sum(batches * layers * (sizes.prompt_tokens + token) * sizes.kv for token in range(tokens))
    return layers * math.ceil(together / capacity)


def largest_block(sizes: Sizes, layers: int, tokens: int, capacity: float) -> int:
    """Return the most batches of a zig-zag block with KV of at most `capacity` at the end."""
    return int(capacity / (layers * (sizes.prompt_tokens + tokens - 1) * sizes.kv))
