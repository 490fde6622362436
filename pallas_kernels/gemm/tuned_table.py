"""The table of the heuristic dataflow (FlashDecoding++Next §4): the fastest kernel by weight shape and
number of rows.

`python -m pallas_kernels.tune` measures the table and writes tables/<device>.json. A rule covers one weight
[N, K]. Its choices are sorted by rows, and each holds up to its number of rows. These numbers are the
paper's inflection points.
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
FARTHEST = 1.0  # octaves of N and K together up to which a rule of another shape is used
UNTUNED = "the first eligible kernel runs (python -m pallas_kernels.tune measures the fastest)"
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The weight of a product: [n, k] of dtype `weights`, with alternating blocks of `gate_block` gates and
    ups (0: none).

    weights: bfloat16, float8_e4m3fn, float8_e4m3fn_blocks or int4. scales: form of the quantized input's
    scales. "rows" (one a row, or one for all) multiply finished sums. "blocks" (one for every 128 columns of
    a row) multiply partial sums, for which other kernels are fastest.
    """

    n: int
    k: int
    weights: str = "bfloat16"
    gate_block: int = 0
    scales: str = ""

    def distance(self, other: "Shape") -> float:
        """Return the distance of two shapes in octaves of N and K.

        The distance is infinite between kinds of weights or scales, and between products with and without
        gates: a kernel with an epilogue saves a pass only for products with gates.
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
    """The kernel for products of up to `rows` rows, and the fields of its
    tile (empty: the kernel chooses).
    """

    rows: int
    kernel: str
    tile: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Rule:
    """The choices of a shape, by ascending rows. The last choice also holds for more rows, without its
    tile.
    """

    shape: Shape
    choices: tuple[Choice, ...]

    def choose(self, rows: int) -> Choice:
        """Return the choice for a number of rows."""
        return next(
            (choice for choice in self.choices if rows <= choice.rows),
            dataclasses.replace(self.choices[-1], tile=()),
        )


@dataclasses.dataclass(frozen=True)
class Table:
    """The measured rules of one kind of GPU."""

    device: str
    rules: tuple[Rule, ...] = ()

    def choose(self, shape: Shape, rows: int) -> Choice | None:
        """Return the choice for a product, or None without a near rule.

        A rule for another shape gives no tile. Log a warning once for each shape without a rule of its own.
        """
        nearest = min(self.rules, key=lambda rule: rule.shape.distance(shape), default=None)
        if nearest is None:
            _warn_once(f"no tuned table for {self.device or 'this device'}; {UNTUNED}")
            return None
        name = f"[{shape.n}, {shape.k}] {shape.weights} on {self.device}"
        if nearest.shape.distance(shape) > FARTHEST:
            _warn_once(f"no tuned rule near {name}; {UNTUNED}")
            return None
        choice = nearest.choose(rows)
        if nearest.shape == shape:
            return choice
        # The message gives N and K only, because the nearest rule has the same kind (`Shape.distance`). Its
        # fastest tile may be slow for this shape.
        _warn_once(f"no tuned rule for {name}; using the rule of [{nearest.shape.n}, {nearest.shape.k}]")
        return dataclasses.replace(choice, tile=())


@functools.cache
def _warn_once(line: str) -> None:
    log.warning("kernels: %s", line)


def file_of(device: str) -> Path:
    """Return the path of a device's table (JAX's `device_kind`)."""
    return FOLDER / f"{device.lower().replace(' ', '-')}.json"


@functools.cache
def load(device: str) -> Table:
    """Return the shipped table of a device, or an empty table without a file.

    Raises: ValueError, which names the file, for a damaged file.
    """
    path = file_of(device)
    if not path.exists():
        return Table(device)
    with named(path):
        return parse(json.loads(path.read_text("utf-8")))


@contextlib.contextmanager
def named(path: str | Path) -> Iterator[None]:
    """Turn the errors of reading a damaged table, or a table of another schema, into a ValueError that
    names the file.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: not a table of pallas_kernels.tune ({type(error).__name__}: {error})"
        ) from error


def parse(data: Mapping[str, Any]) -> Table:
    """Return a table from its JSON.

    Raises: ValueError for another schema; ValueError, AttributeError, KeyError or TypeError for a damaged
    table.
    """
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema={data.get('schema')!r} of a tuned table: accepted is {SCHEMA}")
    if not isinstance(data["device"], str):
        raise ValueError(f"device={data['device']!r} of a tuned table: accepted is JAX's device_kind")
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
            f"rule of {data['shape']}, choices={data['choices']}: accepted are n, k and rows from 1, "
            "gate_block from 0, and at least one choice"
        )
    return Rule(shape, choices)


def choices(best: Iterable[Choice]) -> tuple[Choice, ...]:
    """Return the best choices by ascending rows, with equal neighbors merged into the larger number of
    rows.
    """
    merged: list[Choice] = []
    for choice in best:
        if merged and (merged[-1].kernel, merged[-1].tile) == (choice.kernel, choice.tile):
            merged[-1] = choice
        else:
            merged.append(choice)
    return tuple(merged)
