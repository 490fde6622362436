"""The heuristic dataflow's table (FlashDecoding++Next §4): for each weight's shape, which kernel is fastest for how many rows.

`python -m pallas_kernels.tune` measures it and writes the JSON files in `tables/`, one a GPU. A rule holds for one weight [N, K]; its
choices go by rows, each good up to its own number: between them lie the paper's inflection points.
"""

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SCHEMA = 2
FOLDER = Path(__file__).parent / "tables"
FARTHEST = 1.0  # octaves of N and K together that a rule is believed over
UNTUNED = "the first kernel that takes a product runs it (python -m pallas_kernels.tune measures which is fastest)"
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A product's weight: [n, k] of `weights` (bfloat16, float8_e4m3fn, int4), and the block in which gates and ups alternate (0: none).

    scales: of the input, where it is quantised: "rows", one a row (or one for all), which multiply finished sums; "blocks", one for every
    128 columns of a row, by which sums are moved on the way. Other kernels win for either.
    """

    n: int
    k: int
    weights: str = "bfloat16"
    gate_block: int = 0
    scales: str = ""

    def distance(self, other: "Shape") -> float:
        """How unlike two shapes are: octaves of N and K; infinite between kinds of weights or scales, and of gated products and bare.

        Bare products have no pass behind them that a kernel with an epilogue saves.
        """
        if (self.weights, self.scales, self.gate_block > 0) != (other.weights, other.scales, other.gate_block > 0):
            return math.inf
        return abs(math.log2(self.n / other.n)) + abs(math.log2(self.k / other.k))


@dataclasses.dataclass(frozen=True)
class Choice:
    """For products of up to `rows` rows: which kernel, and its tile's fields (none: the kernel's own choice)."""

    rows: int
    kernel: str
    tile: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Rule:
    """choices: by rows, ascending; the last one also holds beyond, but for its tile, which was made for so many rows."""

    shape: Shape
    choices: tuple[Choice, ...]

    def choose(self, rows: int) -> Choice:
        return next((choice for choice in self.choices if rows <= choice.rows), dataclasses.replace(self.choices[-1], tile=()))


@dataclasses.dataclass(frozen=True)
class Table:
    """What was measured on one kind of GPU."""

    device: str
    rules: tuple[Rule, ...] = ()

    def choose(self, shape: Shape, rows: int) -> Choice | None:
        """The choice for a product, from the nearest rule (which then gives no tile); None without a near one. Either is said once."""
        nearest = min(self.rules, key=lambda rule: rule.shape.distance(shape), default=None)
        if nearest is None:
            _say_once(f"no table of tuned products for {self.device or 'this device'}; {UNTUNED}")
            return None
        name = f"[{shape.n}, {shape.k}] {shape.weights} on {self.device}"
        if nearest.shape.distance(shape) > FARTHEST:
            _say_once(f"no tuned rule near {name}; {UNTUNED}")
            return None
        choice = nearest.choose(rows)
        if nearest.shape == shape:
            return choice
        # Only N and K are told of the nearest: it is of the same kind (`Shape.distance`). What is fast for it may be slow for this one.
        _say_once(f"no tuned rule for {name}; the nearest is taken, of [{nearest.shape.n}, {nearest.shape.k}]")
        return dataclasses.replace(choice, tile=())


@functools.cache
def _say_once(line: str) -> None:
    log.warning("kernels: %s", line)


def file_of(device: str) -> Path:
    """Where the table of a device (JAX's `device_kind`) is kept."""
    return FOLDER / f"{device.lower().replace(' ', '-')}.json"


@functools.cache
def load(device: str) -> Table:
    """The shipped table of a device; an empty one where none is. Raises: ValueError for a file of another schema."""
    path = file_of(device)
    return parse(json.loads(path.read_text("utf-8"))) if path.exists() else Table(device)


def parse(data: Mapping[str, Any]) -> Table:
    """A table from its JSON. Raises: ValueError for another schema."""
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema={data.get('schema')!r} of a tuned table: {SCHEMA}")
    rules = (
        Rule(
            Shape(**rule["shape"]),
            tuple(Choice(c["rows"], c["kernel"], tuple(sorted(c.get("tile", {}).items()))) for c in rule["choices"]),
        )
        for rule in data["rules"]
    )
    return Table(data["device"], tuple(rules))


def choices(best: Iterable[Choice]) -> tuple[Choice, ...]:
    """The best choice at each measured number of rows, ascending, with neighbours that agree merged into the larger."""
    merged: list[Choice] = []
    for choice in best:
        if merged and (merged[-1].kernel, merged[-1].tile) == (choice.kernel, choice.tile):
            merged[-1] = choice
        else:
            merged.append(choice)
    return tuple(merged)
