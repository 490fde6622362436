"""The heuristic dataflow's table (FlashDecoding++Next §4): for each weight's shape, which kernel is fastest
for how many rows.

`python -m pallas_kernels.tune` measures it and writes the JSON files in `tables/`, one a GPU. A rule holds
for one weight [N, K]; its choices go by rows, each good up to its own number: between them lie the paper's
inflection points.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

SCHEMA = 2
FOLDER = Path(__file__).parents[1] / "tables"
FARTHEST = 1.0  # octaves of N and K together that a rule is believed over
UNTUNED = (
    "the first kernel that takes a product runs it (python -m pallas_kernels.tune measures which is fastest)"
)
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A product's weight: [n, k] of `weights` (bfloat16, float8_e4m3fn, int4), and the block in which gates
    and ups alternate (0: none).

    scales: of the input, where it is quantised: "rows", one a row (or one for all), which multiply finished
    sums; "blocks", one for every 128 columns of a row, by which sums are moved on the way. Other kernels win
    for either.
    """

    n: int
    k: int
    weights: str = "bfloat16"
    gate_block: int = 0
    scales: str = ""

    def distance(self, other: "Shape") -> float:
        """How unlike two shapes are: octaves of N and K; infinite between kinds of weights or scales, and of
        gated products and bare.

        Bare products have no pass behind them that a kernel with an epilogue saves.
        """
        if (self.weights, self.scales, self.gate_block > 0) != (
            other.weights,
            other.scales,
            other.gate_block > 0,
        ):
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
    """choices: by rows, ascending; the last one also holds beyond, but for its tile, which was made for so
    many rows.
    """

    shape: Shape
    choices: tuple[Choice, ...]

    def choose(self, rows: int) -> Choice:
        return next(
            (choice for choice in self.choices if rows <= choice.rows),
            dataclasses.replace(self.choices[-1], tile=()),
        )


@dataclasses.dataclass(frozen=True)
class Table:
    """What was measured on one kind of GPU."""

    device: str
    rules: tuple[Rule, ...] = ()

    def choose(self, shape: Shape, rows: int) -> Choice | None:
        """The choice for a product, from the nearest rule (which then gives no tile); None without a near
        one. Either is said once.
        """
        nearest = min(self.rules, key=lambda rule: rule.shape.distance(shape), default=None)
        if nearest is None:
            _warn_once(f"no table of tuned products for {self.device or 'this device'}; {UNTUNED}")
            return None
        name = f"[{shape.n}, {shape.k}] {shape.weights} on {self.device}"
        if nearest.shape.distance(shape) > FARTHEST:
            _warn_once(f"no tuned rule near {name}; {UNTUNED}")
            return None
        choice = nearest.choose(rows)
        if nearest.shape == shape:
            return choice
        # Only N and K are told of the nearest: it is of the same kind (`Shape.distance`). What is fast for it
        # may be slow for this one.
        _warn_once(
            f"no tuned rule for {name}; the nearest is taken, of [{nearest.shape.n}, {nearest.shape.k}]"
        )
        return dataclasses.replace(choice, tile=())


@functools.cache
def _warn_once(line: str) -> None:
    log.warning("kernels: %s", line)


def file_of(device: str) -> Path:
    """Where the table of a device (JAX's `device_kind`) is kept."""
    return FOLDER / f"{device.lower().replace(' ', '-')}.json"


@functools.cache
def load(device: str) -> Table:
    """The shipped table of a device; an empty one where none is. Raises: ValueError, which names the file,
    for what is none.
    """
    path = file_of(device)
    if not path.exists():
        return Table(device)
    with named(path):
        return parse(json.loads(path.read_text("utf-8")))


@contextlib.contextmanager
def named(path: str | Path) -> Iterator[None]:
    """What reading a table's file raises where it is damaged or of another schema becomes a ValueError that
    names the file.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: no table that pallas_kernels.tune wrote ({type(error).__name__}: {error})"
        ) from error


def parse(data: Mapping[str, Any]) -> Table:
    """A table from its JSON. Raises: ValueError for another schema; that, AttributeError, KeyError or
    TypeError for what is none.
    """
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema={data.get('schema')!r} of a tuned table: {SCHEMA}")
    if not isinstance(data["device"], str):
        raise ValueError(f"device={data['device']!r} of a tuned table: JAX's device_kind")
    return Table(data["device"], tuple(_rule(rule) for rule in data["rules"]))


def _rule(data: Mapping[str, Any]) -> Rule:
    shape = Shape(**data["shape"])
    choices = tuple(
        Choice(c["rows"], c["kernel"], tuple(sorted(c.get("tile", {}).items()))) for c in data["choices"]
    )
    numbers = (shape.n, shape.k, *(choice.rows for choice in choices))
    if not choices or not all(
        isinstance(number, int) and number > 0 for number in (*numbers, shape.gate_block + 1)
    ):
        raise ValueError(
            f"rule of {data['shape']}, choices={data['choices']}: n, k and rows from 1, gate_block "
            f"from 0, and a choice or more"
        )
    return Rule(shape, choices)


def choices(best: Iterable[Choice]) -> tuple[Choice, ...]:
    """The best choice at each measured number of rows, ascending, with neighbours that agree merged into the
    larger.
    """
    merged: list[Choice] = []
    for choice in best:
        if merged and (merged[-1].kernel, merged[-1].tile) == (choice.kernel, choice.tile):
            merged[-1] = choice
        else:
            merged.append(choice)
    return tuple(merged)
